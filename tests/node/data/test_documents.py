"""Files give back the documents that were written into them; what is damaged is named."""

import gzip
import json
import os

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.node.data import documents
from farflock.node.data.documents import BadDocuments, ReadingOptions, read_documents, text_parts
from farflock.node.data.sources import find_files

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=60)
PACK = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}


def written(folder, name, raw):
    path = folder / name
    path.write_bytes(raw)
    return path


def read(path, **options):
    (file,) = find_files([str(path)]).files
    return list(read_documents(file, ReadingOptions(**options)))


def whole(parts):
    """The documents that parts make up."""
    found, before = [], ""
    for part in parts:
        before += part.content
        if part.last:
            found.append(before)
            before = ""
    assert before == ""
    return found


def lines(texts, field="text"):
    return "".join(json.dumps({"id": [1, {}], field: text}) + "\n" for text in texts).encode()


@settings(max_examples=60)
@given(st.lists(TEXTS, max_size=8), st.sampled_from(sorted(PACK)))
def test_lines_of_json_give_back_their_texts(tmp_path_factory, texts, ending):
    path = written(tmp_path_factory.mktemp("lines"), f"a.jsonl{ending}", PACK[ending](lines(texts)))
    assert whole(read(path)) == [text for text in texts if text]


@settings(max_examples=60)
@given(TEXTS, st.sampled_from(sorted(PACK)))
def test_a_file_of_text_is_one_document(tmp_path_factory, text, ending):
    text = text.removeprefix("\ufeff")
    raw = PACK[ending](text.encode())
    path = written(tmp_path_factory.mktemp("text"), f"a.txt{ending}", raw)
    assert whole(read(path)) == ([text] if text else [])


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from(["a", "é", "한", "😀", "\n"]), max_size=120).map("".join),
    st.integers(4, 20),
)
def test_a_long_text_comes_in_parts_that_lose_nothing(tmp_path_factory, text, part):
    path = written(tmp_path_factory.mktemp("long"), "a.txt", text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PART_CHARS", part)
        parts, loaded = read(path), list(text_parts(text, 7))
    assert whole(parts) == whole(loaded) == ([text] if text else [])
    assert all(len(each.content.encode()) <= 2 * part for each in parts)
    assert all(len(each.content) <= part for each in loaded)


def test_a_text_without_end_becomes_several_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PART_CHARS", 10)
    monkeypatch.setattr(documents, "MAX_DOCUMENT_CHARS", 30)
    text = "".join(f"line {n:02}\n" for n in range(20))
    found = whole(read(written(tmp_path, "a.txt", text.encode())))
    assert "".join(found) == text
    assert len(found) > 4
    assert all(each.endswith("\n") and len(each) <= 30 for each in found)


def test_parts_say_how_far_their_file_was_read(tmp_path):
    path = written(tmp_path, "a.jsonl", lines(["one", "two", "three"]))
    places = [part.read_bytes for part in read(path)]
    assert places == sorted(places)
    assert places[-1] == path.stat().st_size


def test_nested_fields_have_dots_between_their_names(tmp_path):
    path = written(tmp_path, "a.jsonl", b'{"a": {"b": "x", "c": 1}, "b": "no"}\n')
    assert whole(read(path, field="a.b")) == ["x"]


def test_a_mark_of_the_byte_order_is_no_text(tmp_path):
    assert whole(read(written(tmp_path, "a.txt", b"\xef\xbb\xbfx"))) == ["x"]
    assert whole(read(written(tmp_path, "a.jsonl", b'\xef\xbb\xbf{"text": "x"}'))) == ["x"]


BAD_LINES = {
    b"{": "line 2: it is not JSON",
    b'{"text": "\xff"}': "line 2: it is not JSON",
    b'{"text": "\\ud800"}': "line 2: it is not JSON",
    b'{"text": "x", "a": NaN}': "line 2: it is not JSON",
    b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}": "line 2: it is not JSON",
    b'{"other": "x"}': "line 2: it has no text in the field 'text' .*missing required field",
    b'{"text": null}': "line 2: it has no text in the field 'text' .*got `null`",
    b'["text"]': "line 2: it has no text in the field 'text' .*got `array`",
    b'{"text": "' + b"x" * 5000 + b'"}': "line 2: it is longer than 0 MiB",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:12])
def test_a_line_without_a_text_is_refused_or_skipped(tmp_path, monkeypatch, line):
    path = written(tmp_path, "a.jsonl", lines(["one"]) + line + b"\n" + lines(["two"]))
    limit = 4000 if line.startswith(b'{"text": "xx') else 1 << 20
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", limit)
    with pytest.raises(BadDocuments, match=f"a.jsonl, {BAD_LINES[line]}.*--errors skip"):
        read(path)
    assert [part.content for part in read(path, skip=True)] == ["one", None, "two"]


def test_a_file_that_is_not_utf_8_is_refused_with_the_place_or_skipped_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PART_CHARS", 100)
    path = written(tmp_path, "a.txt", b"0123456\n" * 100 + b"\xff")
    with pytest.raises(BadDocuments, match=r"a.txt is not UTF-8 at byte 800; convert it, or leave"):
        read(path)
    assert [part.content for part in read(path, skip=True)] == [None]


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["short", "wrong"])
def test_a_packed_file_that_is_damaged_is_never_taken_for_whole(tmp_path, ending, damage):
    raw = bytearray(PACK[ending](os.urandom(9000).hex().encode()))
    if damage == "short":
        del raw[-20:]
    else:
        raw[0] ^= 1
    with pytest.raises(BadDocuments, match=r"cannot be unpacked .*; copy or pack it again"):
        read(written(tmp_path, f"a.txt{ending}", bytes(raw)), skip=True)


def test_several_frames_are_one_file(tmp_path):
    raw = b"".join(PACK[".zst"](part) for part in (b"one ", b"", b"two"))
    assert whole(read(written(tmp_path, "a.txt.zst", raw))) == ["one two"]


def test_the_shipped_plays_say_themselves_what_is_held_out():
    (file,) = find_files(["shakespeare"]).files
    parts = list(read_documents(file, ReadingOptions()))
    from farflock.node.model.corpus import load_corpus

    corpus = load_corpus("shakespeare")
    for held_out, text in ((False, corpus.train), (True, corpus.held_out)):
        mine = [part for part in parts if part.held_out is held_out]
        assert "".join(part.content for part in mine) == text
        assert sum(part.last for part in mine) > 1
