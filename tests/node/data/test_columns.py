"""Tables give the texts of their column; tables that are damaged or have no such column are
refused."""

import importlib
import json
import sys
import types

import pytest

from farflock.node.data import columns
from farflock.node.data.documents import BadDocuments, ReadingOptions, read_documents
from farflock.node.data.sources import find_files
from farflock.node.errors import Failure

TEXTS = [f"text {n} " * (n % 7) for n in range(200)]


@pytest.fixture
def arrow():
    return pytest.importorskip("pyarrow", reason="parquet files are read by pyarrow")


def read(source, **options):
    found = find_files([str(source)])
    given = ReadingOptions(**options)
    return [part for file in found.files for part in read_documents(file, given)]


def texts(parts):
    return [part.content for part in parts]


def write_parquet(arrow, path, table, **options):
    importlib.import_module("pyarrow.parquet").write_table(arrow.table(table), path, **options)
    return path


def test_a_column_of_parquet_comes_back_row_by_row(arrow, tmp_path):
    table = {"id": list(range(200)), "text": TEXTS}
    path = write_parquet(arrow, tmp_path / "a.parquet", table, row_group_size=30)
    parts = read(path)
    assert texts(parts) == [text for text in TEXTS if text]
    places = [part.read_bytes for part in parts]
    assert places == sorted(places)
    assert 0 < places[0] < places[-1] <= path.stat().st_size


def test_columns_may_be_nested_large_or_dictionaries(arrow, tmp_path):
    table = {
        "a": arrow.array([{"b": text} for text in TEXTS]),
        "large": arrow.array(TEXTS, arrow.large_string()),
        "words": arrow.array(TEXTS).dictionary_encode(),
    }
    path = write_parquet(arrow, tmp_path / "a.parquet", table)
    for field in ("a.b", "large", "words"):
        assert texts(read(path, field=field)) == [text for text in TEXTS if text]


@pytest.mark.parametrize("field", ["body", "text.body", "a.c"])
def test_a_missing_column_is_refused_with_those_that_are_there(arrow, tmp_path, field):
    path = write_parquet(arrow, tmp_path / "a.parquet", {"text": ["x"], "a": [{"b": "x"}]})
    with pytest.raises(
        BadDocuments, match=f"a.parquet has no column '{field}'; name one with --field: text, a"
    ):
        read(path, field=field)


def test_a_row_without_a_text_is_refused_or_skipped(arrow, tmp_path):
    path = write_parquet(arrow, tmp_path / "a.parquet", {"text": ["one", None, "two"]})
    with pytest.raises(BadDocuments, match="row 2: the field 'text' is NoneType, no text; name"):
        read(path)
    assert texts(read(path, skip=True)) == ["one", None, "two"]


def test_a_row_that_is_not_utf_8_is_refused_or_skipped(arrow, tmp_path):
    bad = arrow.array([b"one", b"\xff"], arrow.binary()).view(arrow.string())
    path = write_parquet(arrow, tmp_path / "a.parquet", {"text": bad})
    with pytest.raises(BadDocuments, match="row 2: the field 'text' is not UTF-8"):
        read(path)
    assert texts(read(path, skip=True)) == ["one", None]


@pytest.mark.parametrize("kept", [0, 10, -30])
def test_a_parquet_file_that_was_cut_short_is_refused(arrow, tmp_path, kept):
    path = write_parquet(arrow, tmp_path / "a.parquet", {"text": TEXTS})
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(BadDocuments, match=r"a.parquet cannot be read as parquet \(.*; copy it"):
        read(path)


def test_a_folder_that_datasets_saved_comes_back(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    datasets = pytest.importorskip("datasets", reason="it writes the folders that are read here")
    rows = {"n": list(range(200)), "text": TEXTS}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "one", num_shards=2)
    assert texts(read(tmp_path / "one")) == [text for text in TEXTS if text]
    (last,) = sorted((tmp_path / "one").glob("*2.arrow"))[-1:]
    last.write_bytes(last.read_bytes()[:700])
    with pytest.raises(BadDocuments, match="cannot be read as arrow"):
        read(tmp_path / "one")


def test_datasets_streams_a_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    pytest.importorskip("datasets", reason="it streams")
    (tmp_path / "local").mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (tmp_path / "local" / "train.jsonl").write_text(lines)
    assert texts(read(f"hf:{tmp_path / 'local'}")) == [text for text in TEXTS if text]


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for `datasets`, whose hub has one data set."""
    info = types.SimpleNamespace(splits={"train": types.SimpleNamespace(num_bytes=123)})

    def load_dataset_builder(name, configuration):
        if name != "who/what":
            raise FileNotFoundError(f"no {name}\non the hub.")
        return types.SimpleNamespace(info=info)

    def load_dataset(name, configuration, *, split, streaming):
        assert (name, configuration, split, streaming) == ("who/what", "en", "train", True)
        yield from ({"text": text, "deep": {"er": text}} for text in TEXTS)
        raise ConnectionError("the line is dead")

    stand_in = types.SimpleNamespace(
        load_dataset_builder=load_dataset_builder, load_dataset=load_dataset
    )
    monkeypatch.setitem(sys.modules, "datasets", stand_in)


@pytest.mark.parametrize("field", ["text", "deep.er"])
def test_a_data_set_on_the_hub_is_streamed(hub, field):
    (file,) = find_files(["hf:who/what:en"]).files
    assert (file.kind, file.size) == ("hub", 123)
    rows, found = columns.read_columns(file, ReadingOptions(field=field)), []
    with pytest.raises(
        Failure, match="hf:who/what:en cannot be read: the line is dead; check the name"
    ):
        found.extend(row.content for row in rows)
    assert found == [text for text in TEXTS if text]


def test_an_unknown_name_on_the_hub_is_one_sentence(hub):
    with pytest.raises(Failure, match="hf:who/why cannot be read: no who/why on the hub; check"):
        find_files(["hf:who/why"])


def test_a_missing_package_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"x")
    with pytest.raises(Failure, match=r"package pyarrow is missing; pip install .farflock\[data\]"):
        read(tmp_path / "a.parquet")
