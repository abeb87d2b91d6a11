"""Texts are found in files, folders and patterns, each once, and links in a circle end."""

import pytest

from farflock.node.data.sources import find_files
from farflock.node.errors import Usage


@pytest.fixture
def folder(tmp_path):
    for name in ("a.txt", "B.TXT", "more/c.md", "more/d.jsonl", "code.py", "Makefile", ".e.txt"):
        path = tmp_path / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "texts"


def found(*named):
    files = find_files([str(each) for each in named]).files
    return sorted((file.path.rpartition("/")[2], file.kind) for file in files)


def test_a_folder_is_its_texts_and_lines_and_what_else_it_has_is_counted(folder):
    assert found(folder) == [
        ("B.TXT", "text"),
        ("a.txt", "text"),
        ("c.md", "text"),
        ("d.jsonl", "lines"),
    ]
    assert find_files([str(folder)]).ignored == {".py": 1, "no ending": 1}


def test_a_file_is_read_whatever_its_ending_and_a_pattern_finds_any(folder):
    assert found(folder / "code.py") == [("code.py", "text")]
    assert found(f"{folder}/**/*.[pm]*") == [("c.md", "text"), ("code.py", "text")]


def test_a_file_that_is_named_twice_is_read_once(folder):
    assert len(found(folder, folder / "a.txt", f"{folder}/*.txt")) == 4


def test_links_are_followed_and_those_in_a_circle_end(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "f.txt").write_text("f")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "more" / "circle").symlink_to(folder)
    (folder / "nowhere.txt").symlink_to(tmp_path / "nothing")
    assert [name for name, _ in found(folder)] == ["B.TXT", "a.txt", "c.md", "d.jsonl", "f.txt"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("none", "No such file or directory; check the path of the source"),
        ("none*", "there is no text in it; name files, or a folder of .txt, .md, .jsonl"),
        ("empty", "there is no text in it"),
        ("pipe", "it is neither a file nor a folder"),
    ],
)
def test_what_names_no_text_is_refused(tmp_path, name, sentence):
    import os

    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Usage, match=sentence):
        find_files([str(tmp_path / name)])
