"""Chunks of a download stay on the disk until the node is a member, and never end it."""

import errno
from pathlib import Path

import pytest

from farflock.node.state.kept_chunks import DownloadFolder
from farflock.swarm.chunk_store import digest_of

CHUNKS = [b"first" * 100, b"", bytes(range(256))]
NAMES = [digest_of(chunk) for chunk in CHUNKS]


def found(kept):
    return [kept.get(name, len(chunk)) for name, chunk in zip(NAMES, CHUNKS, strict=True)]


@pytest.fixture
def folder(tmp_path):
    return DownloadFolder(tmp_path / "download")


def test_what_was_put_is_there_at_the_next_start(folder, tmp_path):
    for name, chunk in zip(NAMES, CHUNKS, strict=True):
        folder.of("state/3").put(name, memoryview(chunk))
    again = DownloadFolder(tmp_path / "download")
    assert found(again.of("state/3")) == CHUNKS
    assert again.of("state/2").get(NAMES[0], len(CHUNKS[0])) is None
    assert again.is_there
    again.clear()
    assert not again.is_there
    assert not (tmp_path / "download").exists()


def test_a_chunk_of_another_size_is_not_read(folder):
    folder.of("state").put(NAMES[0], memoryview(CHUNKS[0]))
    assert folder.of("state").get(NAMES[0], len(CHUNKS[0]) - 1) is None
    assert folder.of("state").get(NAMES[2], 256) is None


def test_chunks_of_an_older_state_go_and_those_of_another_stream_stay(folder):
    for stream in ("state/0", "state/1"):
        for name, chunk in zip(NAMES, CHUNKS, strict=True):
            folder.of(stream).put(name, memoryview(chunk))
    kept = folder.of("state/0")
    kept.keep_only(NAMES[:1])
    assert found(kept) == [CHUNKS[0], None, None]
    assert folder.of("state/1").get(NAMES[2], 256) == CHUNKS[2]
    folder.of("never").keep_only([])


def test_a_full_disk_is_said_once_and_ends_nothing(folder, monkeypatch, caplog):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    kept = folder.of("state")
    for name, chunk in zip(NAMES, CHUNKS, strict=True):
        kept.put(name, memoryview(chunk))
    assert caplog.text.count("not kept for another start") == 1
    assert "No space left on device" in caplog.text
    assert kept.get(NAMES[0], len(CHUNKS[0])) is None
