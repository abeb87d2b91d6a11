"""An invite is given as itself, as a file or on standard input, so that `ps` need not show it."""

import io
import os

import pytest

from farflock.node.cli.commands.invites import read_invite
from farflock.node.errors import Usage

WORD = "farflock:k5cBx"


def test_the_word_itself_is_an_invite():
    assert read_invite(WORD) == WORD
    assert read_invite(f" {WORD}\n").strip() == WORD


@pytest.mark.parametrize("content", [WORD, f"{WORD}\n", f"  {WORD}\r\n", f"{WORD}\nmore\n"])
def test_the_first_line_of_a_file_is_one(tmp_path, content):
    (tmp_path / "invite.txt").write_text(content)
    assert read_invite(str(tmp_path / "invite.txt")) == WORD


def test_so_is_the_first_line_of_standard_input_and_the_rest_stays(monkeypatch):
    given = io.StringIO(f"{WORD}\nmore\n")
    monkeypatch.setattr("sys.stdin", given)
    assert read_invite("-") == WORD
    assert given.read() == "more\n"


def test_a_pipe_that_a_shell_makes_is_a_file_too(tmp_path):
    reading, writing = os.pipe()
    os.write(writing, f"{WORD}\n".encode())
    os.close(writing)
    assert read_invite(f"/dev/fd/{reading}") == WORD
    os.close(reading)


def test_no_more_of_a_file_is_read_than_an_invite_can_have(tmp_path):
    (tmp_path / "large").write_bytes(b"\xff" * 10**6)
    assert len(read_invite(str(tmp_path / "large"))) < 5000


@pytest.mark.parametrize("word", ["hello", "no/such/file", "", "a\0b", "x" * 5000])
def test_a_word_that_is_neither_is_refused(word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Usage, match=r"cannot be read|this is not an invite"):
        read_invite(word)


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(Usage, match=r"the invite cannot be read from .*: is a directory"):
        read_invite(str(tmp_path))


def test_under_torchrun_standard_input_is_refused(monkeypatch):
    places = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    for name, value in places.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Usage, match=r"torchrun starts several processes.*put it into a file"):
        read_invite("-")
