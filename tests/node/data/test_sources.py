"""What a user names becomes a list of files in a fixed order, or one sentence."""

import json
import os

import pytest

from farflock.node.data.sources import find_files, named_source
from farflock.node.errors import Usage


def names(found, folder):
    return [os.path.relpath(file.path, folder) for file in found.files]


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path):
    for name in ("b/2.txt", "b/10.md", "a.jsonl.gz", "B.rst", "c.txt.zst", "z.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    found = find_files([str(tmp_path)])
    assert names(found, tmp_path) == [
        "B.rst",
        "a.jsonl.gz",
        "b/10.md",
        "b/2.txt",
        "c.txt.zst",
        "z.parquet",
    ]
    assert [file.kind for file in found.files[:3]] == ["text", "lines", "text"]
    assert [file.packing for file in found.files] == ["", ".gz", "", "", ".zst", ""]


def test_hidden_files_links_that_lead_out_and_other_endings_are_left_alone(tmp_path):
    inside = tmp_path / "in"
    (inside / ".git").mkdir(parents=True)
    for name in ("in/.git/a.txt", "in/.b.txt", "in/c.png", "in/d", "out.txt", "in/e.txt"):
        (tmp_path / name).write_text("x")
    (inside / "leads-out.txt").symlink_to(tmp_path / "out.txt")
    (inside / "leads-in.txt").symlink_to(inside / "e.txt")
    (inside / "circle").symlink_to(inside)
    found = find_files([str(inside)])
    assert names(found, inside) == ["e.txt", "leads-in.txt"]
    assert found.ignored == {".png": 1, "no ending": 1}


def test_further_endings_can_be_text(tmp_path):
    (tmp_path / "a.PY").write_text("x")
    assert names(find_files([str(tmp_path)], [".py"]), tmp_path) == ["a.PY"]


def test_sources_with_one_name_are_one_in_the_order_in_which_they_were_named(tmp_path):
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text("x")
    found = find_files([f"web={tmp_path / 'b.txt'}", "shakespeare", f"web={tmp_path / 'a.txt'}"])
    assert [(file.source, file.kind) for file in found.files] == [
        ("web", "text"),
        ("text", "shipped"),
        ("web", "text"),
    ]


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("web=crawl", ("web", "crawl")),
        ("crawl", ("text", "crawl")),
        ("./a=b", ("text", "./a=b")),
        ("hf:a/b", ("text", "hf:a/b")),
        ("code=hf:a/b:c", ("code", "hf:a/b:c")),
    ],
)
def test_a_name_stands_before_the_path(argument, expected):
    assert named_source(argument) == expected


def test_a_path_that_is_there_may_have_a_sign_like_that_of_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b.txt").write_text("x")
    assert named_source("a=b.txt") == ("text", "a=b.txt")


@pytest.mark.parametrize(
    ("named", "sentence"),
    [
        ("missing.txt", "missing.txt: No such file or directory; check the path"),
        ("picture.png", "it has an unknown ending; name files that end in .jsonl, .ndjson"),
        ("empty", "there is no file to read; name files that end in"),
        ("Web=missing.txt", "the name 'Web' of a source: it may have 1 to 32"),
        ("pipe.txt", "it is neither a file nor a folder"),
    ],
)
def test_what_cannot_be_a_source_is_refused(tmp_path, monkeypatch, named, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "picture.png").write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(Usage, match=sentence):
        find_files([named])


def test_too_many_names_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(Usage, match="more than 64 different names"):
        find_files([f"s{place}={tmp_path}" for place in range(65)])


def test_a_saved_data_set_names_its_files_itself(tmp_path):
    saved = tmp_path / "test"
    saved.mkdir()
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (saved / "dataset_info.json").write_text("{}")
    listed = [{"filename": "b.arrow"}, {"filename": "a.arrow"}]
    (saved / "state.json").write_text(json.dumps({"_data_files": listed, "_split": "test"}))
    for name in ("a.arrow", "b.arrow", "c.arrow"):
        (saved / name).write_bytes(b"x")
    found = find_files([str(tmp_path)], split="test")
    assert names(found, saved) == ["b.arrow", "a.arrow"]
    with pytest.raises(Usage, match="no split 'other'; choose --split from train, test"):
        find_files([str(tmp_path)], split="other")


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ("{", "it has no usable state.json"),
        ('{"_data_files": [{"filename": "../../etc/passwd"}]}', "it names '../../etc/passwd'"),
    ],
)
def test_a_saved_data_set_that_makes_no_sense_is_refused(tmp_path, state, sentence):
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(Usage, match=sentence):
        find_files([str(tmp_path)])
