"""Chunks in files: the same bytes, no names, and memory again where the disk has no room."""

import tempfile

from farflock.node.state.shelf import Shelf
from farflock.swarm.chunk_store import Store
from farflock.swarm.compute import inline
from farflock.swarm.sim.virtual_time import run_virtual

CHUNKS = [b"first", b"", bytes(range(256)) * 20]


def shelved(folder, chunks):
    return run_virtual(Shelf(folder, inline)(chunks))


def test_chunks_are_views_of_one_file_that_has_no_name(tmp_path):
    moved = shelved(tmp_path / "rounds", CHUNKS)
    assert [bytes(chunk) for chunk in moved] == CHUNKS
    assert all(chunk.readonly for chunk in moved)
    assert not list((tmp_path / "rounds").iterdir())


def test_chunks_stay_in_memory_where_the_disk_has_no_room(tmp_path, monkeypatch, caplog):
    def full(**options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", full)
    assert shelved(tmp_path, CHUNKS) == CHUNKS
    assert "stays in memory: [Errno 28] No space left on device" in caplog.text


def test_a_store_moves_the_chunks_of_one_user_and_none_that_it_dropped_meanwhile(tmp_path):
    store, shelf = Store(0), Shelf(tmp_path, inline)
    kept, dropped = (store.put(data, "round") for data in (b"kept", b"dropped"))
    other = store.put(b"other", "another round")

    async def shelve(chunks):
        store.keep_only([kept], "round")
        return await shelf(chunks)

    run_virtual(store.move("nobody", shelve))
    assert store.pinned("round") == (kept, dropped)
    run_virtual(store.move("round", shelve))
    assert (store.get(kept), store.get(dropped), store.get(other)) == (b"kept", None, b"other")
    assert [isinstance(store.view(name).obj, bytes) for name in (kept, other)] == [False, True]
    assert store.size_bytes == len(b"kept" + b"other")
