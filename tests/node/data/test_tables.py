"""Columns of tables are read as documents, a batch of rows at a time, whatever is in them."""

import re
import sys

import msgspec
import pytest
from worlds.prepared import prepared

from farflock.node.data import tables
from farflock.node.data.documents import read_documents
from farflock.node.data.sources import find_files
from farflock.node.errors import Usage

TEXTS = ["the first", "", None, "the second", "a long one " * 200_000, *map(str, range(150))]


@pytest.fixture
def arrow():
    return pytest.importorskip("pyarrow", reason="pyarrow is not here; `make compat` installs it")


@pytest.fixture
def table(arrow):
    texts = arrow.array(TEXTS)
    meta = arrow.array([{"lang": text and text[:2]} for text in TEXTS])
    short = arrow.array([text and text[:3] for text in TEXTS]).dictionary_encode()
    return arrow.table({"id": range(len(TEXTS)), "text": texts, "meta": meta, "short": short})


def saved(table, path):
    """A table as the ending of a path says; `.arrow` as `datasets` does, and `.file.arrow`."""
    from pyarrow import ipc, parquet

    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=60)
        return path
    opened = ipc.new_file if ".file" in path.suffixes else ipc.new_stream
    with opened(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=60)
    return path


def read(path, field="text"):
    [file] = find_files([str(path)]).files
    parts = list(read_documents(file, field))
    assert all(0 < part.read_bytes <= file.size for part in parts)
    return parts


NAMES = ["a.parquet", "a.arrow", "a.file.arrow"]


@pytest.mark.parametrize("name", NAMES)
def test_each_row_is_a_document_and_a_long_one_is_cut(table, tmp_path, name):
    parts = read(saved(table, tmp_path / name))
    long = [
        part for part in parts if part.raw.startswith((b"a long", b" a long", b" one", b" long"))
    ]
    assert len(long) == 3
    assert b"".join(part.raw for part in long) == TEXTS[4].encode()
    others = [part.raw.decode() for part in parts if part.raw and part not in long]
    assert others == [text for text in TEXTS if text and len(text) < 99]
    [fault] = [part.fault for part in parts if part.fault]
    assert fault == f"{tmp_path / name}, row 3: it has no text; correct the row"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("field", "first"), [("meta.lang", b"th"), ("short", b"the")])
def test_a_nested_column_and_one_with_a_dictionary_are_read(table, tmp_path, name, field, first):
    assert read(saved(table, tmp_path / name), field)[0].raw == first


@pytest.mark.parametrize(
    ("field", "sentence"),
    [
        ("body", r"it has no column 'body' \(it has id, text, meta, short\); name one with"),
        ("text.body", r"it has no column 'text.body'"),
        ("meta", "its column 'meta' is struct<lang: string>, no text; name another with --field"),
        ("id", "its column 'id' is int64, no text"),
    ],
)
def test_a_column_that_is_none_is_named(table, tmp_path, field, sentence):
    [part] = read(saved(table, tmp_path / "a.parquet"), field)
    assert not part.raw
    assert re.search(sentence, part.fault), part.fault


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_file_is_said_with_the_row(table, tmp_path, name):
    path = saved(table, tmp_path / name)
    path.write_bytes(path.read_bytes()[:-200])
    *_, last = read(path)
    assert "it is cut or damaged after row" in last.fault
    path.write_bytes(b"?" * 5000)
    [only] = read(path)
    assert "it is cut or damaged after row 0" in only.fault


def test_what_is_no_utf_8_is_a_fault_of_its_row(arrow, tmp_path):
    raw = arrow.array([b"good", b"\xff\xfe", b"fine"])
    text = arrow.Array.from_buffers(arrow.string(), 3, raw.buffers())
    parts = read(saved(arrow.table({"text": text}), tmp_path / "a.arrow"))
    assert [part.raw for part in parts] == [b"good", b"", b"fine"]
    assert "row 2: its text is no UTF-8" in parts[1].fault


@pytest.mark.parametrize("name", NAMES)
def test_a_text_that_is_too_long_is_a_fault_of_its_row(arrow, tmp_path, name, monkeypatch):
    monkeypatch.setattr(tables, "MAX_CELL_BYTES", 1 << 20)
    parts = read(saved(arrow.table({"text": ["a", "b" * (1 << 21), "c"]}), tmp_path / name))
    assert [part.raw for part in parts] == [b"a", b"", b"c"]
    assert "row 2: its text is longer than 1 MiB; cut the document" in parts[1].fault


def test_long_texts_of_a_column_are_read_a_few_at_a_time(arrow, tmp_path, monkeypatch):
    from pyarrow.parquet import ParquetFile

    texts = [f"{number} " * 4000 for number in range(10, 50)]
    path = saved(arrow.table({"id": range(40), "text": texts}), tmp_path / "a.parquet")
    monkeypatch.setattr(tables, "BATCH_BYTES", 25_000)
    with ParquetFile(path) as table:
        assert tables.rows_at_once(table, "id") == tables.BATCH_ROWS
        assert tables.rows_at_once(table, "text") == 2
    assert len(read(path)) == 40


def test_the_root_is_that_of_the_same_texts_in_lines(table, tmp_path):
    rows = [text for text in TEXTS if text]
    lines = b"\n".join(msgspec.json.encode({"text": text}) for text in rows)
    (tmp_path / "a.jsonl").write_bytes(lines)
    saved(table, tmp_path / "a.parquet")
    roots = {
        prepared(tmp_path / name, tmp_path / f"out-{name}").content.root
        for name in ("a.jsonl", "a.parquet")
    }
    assert len(roots) == 1


def test_without_a_reader_tables_are_refused_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(Usage, match="the package pyarrow is not installed; run `pip"):
        prepared(tmp_path / "a.parquet", tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()
