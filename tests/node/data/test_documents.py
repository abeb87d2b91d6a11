"""Files of any content become documents in bounded pieces, or are named with what is wrong."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.node.data import documents
from farflock.node.data.documents import BadDocuments, cut_passages, read_documents
from farflock.node.data.sources import find_files


def read(path, field="text"):
    """The texts of a file, and what is said of those that cannot be read."""
    (file,) = find_files([str(path)]).files
    passages = list(read_documents(file, field))
    faults = [passage.fault for passage in passages if passage.fault]
    return [passage.raw for passage in passages if not passage.fault], faults


def rows(table):
    return [pytest.param(*row, id=name) for name, *row in table]


@given(
    text=st.text(alphabet="ab \né한😀", max_size=60),
    passage=st.integers(4, 12),
    cuts=st.lists(st.integers(0, 200), max_size=4),
)
def test_a_text_is_cut_before_white_space_and_nothing_is_lost(text, passage, cuts):
    raw = text.encode()
    places = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    blocks = [raw[start:end] for start, end in pairwise(places)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PASSAGE_BYTES", passage)
        passages = list(cut_passages(blocks))
        assert passages == list(cut_passages([raw])), "blocks do not matter"
    assert b"".join(passages) == raw
    assert all(0 < len(each) <= passage for each in passages)
    assert all(each.decode() is not None for each in passages), "no character is cut"
    for before, after in pairwise(passages):
        assert after[:1].isspace() or not any(b in b" \n" for b in before[1:])


# Hostile texts: a name, the bytes, the documents, and a word of what is said of the others.
TEXTS = [
    ("a mark in front", b"\xef\xbb\xbfone", [b"one"], None),
    ("UTF-16, little end first", "zwei ß".encode("utf-16"), ["zwei ß".encode()], None),
    ("UTF-16, big end first", b"\xfe\xff" + "drei".encode("utf-16-be"), [b"drei"], None),
    ("UTF-32", "vier".encode("utf-32"), [b"vier"], None),
    ("carriage returns alone", b"one\rtwo\r", [b"one\rtwo\r"], None),
    ("lines as Windows ends them", b"one\r\ntwo", [b"one\r\ntwo"], None),
    ("no line break", b"x" * 5000, [b"x" * 5000], None),
    ("NUL bytes", b"a\0b\0", [b"a\0b\0"], None),
    ("nothing", b"", [], None),
    ("a mark alone", b"\xef\xbb\xbf", [], None),
    ("broken UTF-8", b"good \xff bad", [], "is not UTF-8"),
    ("UTF-8 that is cut short", "é".encode()[:1], [], "is not UTF-8"),
    ("UTF-16 that is cut short", "ab".encode("utf-16")[:-1], [], "is not UTF-8"),
    ("half a pair in UTF-16", b"\xff\xfe\x00\xd8a\x00", [], "is not UTF-8"),
    ("Latin-1", "Café".encode("latin-1"), [], "convert it"),
]


@pytest.mark.parametrize(("raw", "texts", "fault"), rows(TEXTS))
def test_a_hostile_text_is_read_or_named(tmp_path, raw, texts, fault):
    path = tmp_path / "a.txt"
    path.write_bytes(raw)
    found, faults = read(path)
    assert found == texts
    assert len(faults) == (fault is not None)
    assert all(fault in said and str(path) in said for said in faults)


ONE, TWO = b'{"text": "one"}', b'{"text": "two"}'
BOTH = [b"one", b"two"]
LONG = b'{"text": "' + b"x" * 300
LINES = [
    ("lines", ONE + b'\n{"text": "two", "more": [1]}\n', BOTH, None),
    ("the last without an end", ONE + b"\n" + TWO, BOTH, None),
    ("lines as Windows ends them", ONE + b"\r\n\r\n" + TWO + b"\r\n", BOTH, None),
    ("carriage returns alone", ONE + b"\r" + TWO + b"\r", BOTH, None),
    ("a mark in front", b"\xef\xbb\xbf" + ONE, [b"one"], None),
    ("UTF-16", '{"text": "é"}\n{"text": "b"}\n'.encode("utf-16"), ["é".encode(), b"b"], None),
    ("blank lines", b"\n \n" + ONE + b"\n\n", [b"one"], None),
    ("an empty text", b'{"text": ""}\n' + ONE, [b"one"], None),
    ("NUL in a text", b'{"text": "a\\u0000b"}', [b"a\0b"], None),
    ("a line that is no JSON", ONE + b'\n{"text"\n' + TWO, BOTH, "line 2: it is not JSON"),
    ("two objects in a line", ONE + TWO, [], "line 1: it is not JSON"),
    ("no such field", b'{"txt": "one"}', [], "name another with --field"),
    ("a field that is no text", b'{"text": 3}', [], "no text in the field 'text'"),
    ("broken UTF-8", b'{"text": "\xff"}\n' + TWO, [b"two"], "line 1: it is not JSON"),
    ("half a pair", b'{"text": "\\ud800"}\n' + TWO, [b"two"], "line 1: it is not JSON"),
    ("deep nesting", b'{"a": ' + b"[" * 9000 + b"\n" + TWO, [b"two"], "line 1: it is not JSON"),
    ("a line beyond the limit", LONG + b'"}\n' + TWO, [b"two"], "line 1: it is longer than"),
    ("a last line like that", ONE + b"\n" + LONG, [b"one"], "line 2: it is longer than"),
    ("UTF-16 that is cut", "{}".encode("utf-16")[:-1], [], "cut or damaged after line 0"),
]


@pytest.mark.parametrize(("raw", "texts", "fault"), rows(LINES))
@pytest.mark.parametrize("block", [7, 1 << 20])
def test_hostile_lines_are_read_or_named(tmp_path, monkeypatch, raw, texts, fault, block):
    monkeypatch.setattr(documents, "_READ_BYTES", block)
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 200 if LONG in raw else 1 << 20)
    path = tmp_path / "a.jsonl"
    path.write_bytes(raw)
    found, faults = read(path)
    assert found == texts
    assert len(faults) == (fault is not None)
    assert all(fault in said and str(path) in said for said in faults)


def test_a_nested_field_is_named_with_dots(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": {"b": "deep"}, "text": "other"}')
    assert read(tmp_path / "a.jsonl", "a.b") == ([b"deep"], [])


def test_a_long_text_is_checked_whole_before_a_part_of_it_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_READ_BYTES", 64)
    monkeypatch.setattr(documents, "PASSAGE_BYTES", 64)
    (tmp_path / "good.txt").write_bytes(b"word " * 100)
    (tmp_path / "bad.txt").write_bytes(b"word " * 100 + b"\xff")
    texts, faults = read(tmp_path / "good.txt")
    assert (b"".join(texts), faults) == (b"word " * 100, [])
    assert max(map(len, texts)) <= 64
    texts, faults = read(tmp_path / "bad.txt")
    assert not texts
    assert len(faults) == 1


def test_parts_are_numbered_and_say_how_far_the_file_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PASSAGE_BYTES", 8)
    (tmp_path / "a.jsonl").write_text('{"text": "one two three"}\n{"text": "four"}\n')
    (file,) = find_files([str(tmp_path / "a.jsonl")]).files
    passages = list(read_documents(file, "text"))
    assert [(passage.raw, passage.number) for passage in passages] == [
        (b"one two", 0),
        (b" three", 1),
        (b"four", 0),
    ]
    assert passages[-1].read_bytes == file.size


def test_a_file_that_is_written_to_meanwhile_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    (file,) = find_files([str(path)]).files
    path.write_text("one more")
    with pytest.raises(BadDocuments, match="was changed while it was read"):
        list(read_documents(file, "text"))
