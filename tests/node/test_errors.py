"""Errors become sentences with a remedy and an exit code; bugs do not."""

import errno
import importlib
import os
import socket

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflock.node.errors import (
    EXPLAINED,
    Failure,
    FarflockError,
    RefusedByRun,
    Usage,
    explained,
    nearest,
)


@pytest.mark.parametrize(("kind", "code"), [(Failure, 1), (Usage, 2), (RefusedByRun, 3)])
def test_an_error_is_one_sentence_with_cause_and_remedy_and_an_exit_code(kind, code):
    error = kind("the port", "4001 is taken", "choose another --port")
    assert str(error) == "the port: 4001 is taken; choose another --port"
    assert (error.what, error.why, error.remedy) == (
        "the port",
        "4001 is taken",
        "choose another --port",
    )
    assert kind.exit_code == code
    assert explained(error) is error


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        (("a", "", ""), "a"),
        (("a", "b", ""), "a: b"),
        (("", "b", ""), "b"),
        (("a", "", "c"), "a; c"),
    ],
)
def test_a_missing_part_leaves_no_punctuation_behind(parts, sentence):
    assert str(FarflockError(*parts)) == sentence


@pytest.mark.parametrize("name", sorted(EXPLAINED))
def test_every_error_in_the_table_exists_and_keeps_its_own_words(name):
    module, _, kind = name.rpartition(".")
    error = getattr(importlib.import_module(module), kind)(
        "the thing is wrong (7); do the other thing"
    )
    known = explained(error)
    assert str(known) == "the thing is wrong (7); do the other thing"
    assert type(known) is EXPLAINED[name]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "free some space"),
        (errno.EACCES, "permission"),
        (errno.EROFS, "permission"),
        (errno.EADDRINUSE, "--port"),
        (errno.EMFILE, "ulimit"),
        (errno.EFBIG, "free some space"),
        (errno.ENOTDIR, "a file stands where a folder should be"),
        (errno.EIO, "check the path or address"),
    ],
)
def test_what_the_system_says_gets_a_remedy(number, words):
    known = explained(OSError(number, os.strerror(number), "/some/file"))
    assert isinstance(known, Failure)
    assert str(known).startswith(f"/some/file: {os.strerror(number)}; ")
    assert words in known.remedy


@pytest.mark.net
def test_a_real_missing_file_and_a_real_taken_port_are_explained(tmp_path):
    with pytest.raises(OSError, match="missing") as missing:
        (tmp_path / "missing").read_bytes()
    assert (
        str(explained(missing.value))
        == f"{tmp_path / 'missing'}: No such file or directory; check the path"
    )
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(OSError, match="in use") as taken,
    ):
        socket.create_server(server.getsockname(), reuse_port=False)
    assert "choose another --port" in str(explained(taken.value))


def test_an_error_number_without_words_still_makes_a_sentence():
    assert "ENOSPC: free some space" not in str(explained(OSError(errno.ENOSPC, None)))
    assert "ENOSPC; free some space" in str(explained(OSError(errno.ENOSPC, None)))


def test_too_little_memory_is_explained():
    assert "smaller model" in str(explained(MemoryError()))


def test_a_device_without_room_is_explained():
    class OfADriver(torch.OutOfMemoryError):
        pass

    for kind in (torch.OutOfMemoryError, OfADriver):
        said = str(explained(kind("tried to allocate 2.00 GiB")))
        assert "the device is out of memory: tried to allocate 2.00 GiB; close programs" in said
        assert "--micro-batch" in said


def test_one_error_in_a_group_is_explained_and_several_are_not():
    refused = RefusedByRun("a", "b", "c")
    assert explained(ExceptionGroup("tasks", [ExceptionGroup("inner", [refused])])) is refused
    assert explained(ExceptionGroup("tasks", [refused, refused])) is None


@pytest.mark.parametrize(
    "error",
    [ValueError("x"), KeyError("x"), AssertionError("x"), OSError("no number"), RuntimeError()],
)
def test_a_bug_stays_a_bug(error):
    assert explained(error) is None


def test_a_class_that_only_shares_a_name_is_not_taken_for_ours():
    class BadIdentity(ValueError):
        pass

    assert explained(BadIdentity("x")) is None


METHODS = {"local": 1, "ddp": 2, "diloco": 3, "noloco": 4}


def test_a_misspelt_name_is_answered_by_the_nearest_one():
    assert nearest("dilico", METHODS) == "did you mean 'diloco'?"
    assert nearest("nolocco", list(METHODS)) == "did you mean 'noloco'?"


def test_a_strange_name_is_answered_by_all_there_are_in_order():
    assert nearest("adam", METHODS) == "choose from ddp, diloco, local, noloco"
    assert nearest("x", []) == "choose from none"


def test_of_a_very_long_name_only_the_beginning_is_looked_at():
    assert nearest("diloco" + "o" * 10**6, METHODS).startswith("choose from")


@given(st.text())
def test_there_is_always_an_answer(word):
    assert nearest(word, METHODS)
