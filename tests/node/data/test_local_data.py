"""Files of the data are used only if they are what the index lists, wherever they lie; the cache
keeps within its size."""

import os
import shutil
import tracemalloc

import numpy as np
import pytest
from worlds.prepared import encoded, prepared, write_shards

from farflock.node.data.index import PIECE_BYTES, BadIndex, read_index, read_page
from farflock.node.data.local_data import LENT_PIECES, CacheTooSmall, LocalData, partial_of
from farflock.swarm.chunk_store import digest_of


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    prepared(folder)
    return folder


@pytest.fixture
def index(texts):
    return read_index((texts / "index.json").read_bytes(), "it")


@pytest.fixture
def shards(texts, index):
    page = index.sources["text"].pages[0]
    return read_page((texts / page.name).read_bytes(), page, index)


def local_data(tmp_path, *folders, cache_bytes=None, root="ab" * 32):
    return LocalData(root, folders, tmp_path / "cache", cache_bytes)


def put(held, file, source):
    """Download a file from a folder."""
    arrival = held.arrival(file)
    content = (source / file.name).read_bytes()
    for place in list(arrival.missing):
        assert arrival.put(place, content[place * PIECE_BYTES : (place + 1) * PIECE_BYTES])
    held.arrived(file, arrival)


def test_files_of_a_named_folder_are_found_and_mapped(tmp_path, texts, index, shards):
    held = local_data(tmp_path, texts)
    for shard in shards:
        assert held.has(shard)
        tokens = held.opened(shard, index)
        assert tokens.dtype == "<u2"
        assert tokens.tobytes() == (texts / shard.name).read_bytes()
    assert not (tmp_path / "cache").exists()


def test_what_is_not_here_is_refused_in_words(tmp_path, index, shards):
    held = local_data(tmp_path)
    assert held.find(shards[0]) is None
    with pytest.raises(BadIndex, match="is not on this machine any more; start again"):
        held.opened(shards[0], index)
    with pytest.raises(BadIndex, match="download it first"):
        held.read(shards[0])


@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_a_damaged_file_of_a_folder_is_not_used_and_not_touched(
    tmp_path, texts, shards, caplog, damage
):
    mine = shutil.copytree(texts, tmp_path / "mine")
    path = mine / shards[0].name
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content if damage == "flipped" else content[:-2])
    held = local_data(tmp_path, mine)
    assert not held.has(shards[0])
    assert path.exists()
    assert ("is damaged" in caplog.text) == (damage == "flipped")  # a cut one is still copied
    good = local_data(tmp_path, mine, texts)
    assert good.has(shards[0])


def test_a_damaged_file_of_the_cache_goes(tmp_path, texts, shards):
    held = local_data(tmp_path)
    put(held, shards[0], texts)
    path = held.find(shards[0])
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    again = local_data(tmp_path)
    assert not again.has(shards[0])
    assert not path.exists()


def test_a_download_that_was_broken_off_goes_on(tmp_path):
    big = np.random.default_rng(1).integers(2**16, size=3 * PIECE_BYTES // 2 + 5, dtype="<u2")
    (shard,) = write_shards(tmp_path / "there", [big])
    content = (tmp_path / "there" / shard.name).read_bytes()
    held = local_data(tmp_path)
    first = held.arrival(shard)
    assert len(first.missing) == 4
    assert first.put(2, content[2 * PIECE_BYTES : 3 * PIECE_BYTES])
    assert not first.put(2, content[2 * PIECE_BYTES : 3 * PIECE_BYTES])  # it is there already
    assert not first.put(0, content[1 * PIECE_BYTES : 2 * PIECE_BYTES])  # another's piece
    assert not first.put(9, b"")
    first.close()
    assert held.find(shard) is None  # nothing half-written is taken for whole
    second = held.arrival(shard)
    assert sorted(second.missing) == [0, 1, 3]
    for place in (3, 0, 1):
        assert second.put(place, content[place * PIECE_BYTES : (place + 1) * PIECE_BYTES])
    held.arrived(shard, second)
    assert held.find(shard).read_bytes() == content
    assert list(held.cache.glob("**/.*")) == []


class Enough(Exception):
    """Ends a reading."""


@pytest.mark.parametrize("read", ["a file", "an earlier download"])
def test_the_reading_of_a_large_file_ends_between_two_pieces(tmp_path, read):
    big = np.random.default_rng(1).integers(2**16, size=3 * PIECE_BYTES // 2 + 5, dtype="<u2")
    (shard,) = write_shards(tmp_path / "there", [big])
    held = local_data(tmp_path, tmp_path / "there")
    path, seen = held.find(shard), []
    if read == "an earlier download":
        held.arrival(shard).close()
        path.rename(partial_of(held.cache / shard.name))
        held = local_data(tmp_path)

    def after(size):
        seen.append(size)
        if len(seen) == 2:
            raise Enough

    reading = held.has if read == "a file" else held.arrival
    with pytest.raises(Enough):
        reading(shard, after=after)
    assert seen == [PIECE_BYTES] * 2
    seen.clear()
    whole = reading(shard, after=lambda size: seen.append(size))
    assert sum(seen) == shard.size
    if read == "an earlier download":
        assert whole.here_bytes == shard.size
        whole.close()


def test_a_base_in_the_cache_neither_goes_nor_counts(tmp_path, texts, shards):
    base = tmp_path / "cache" / "bases" / ("cd" * 32)
    base.mkdir(parents=True)
    (base / "model.safetensors").write_bytes(bytes(10 * shards[0].size))
    held = local_data(tmp_path, cache_bytes=max(shard.size for shard in shards))
    for shard in shards[:3]:
        put(held, shard, texts)
    assert [path.stem for path in (held.cache / "shards").glob("*.bin")] == [shards[2].sha256]
    assert (base / "model.safetensors").stat().st_size == 10 * shards[0].size


def test_a_broken_file_in_the_place_of_a_download_is_not_trusted(tmp_path, texts, shards):
    held = local_data(tmp_path)
    partial = held.cache / "shards" / f".{shards[0].sha256}.bin.partial"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"x" * (shards[0].size + 100))
    put(held, shards[0], texts)
    assert held.find(shards[0]).read_bytes() == (texts / shards[0].name).read_bytes()


def test_the_cache_keeps_within_its_size_and_drops_what_was_used_longest_ago(
    tmp_path, texts, shards, index
):
    room = sum(shard.size for shard in shards[:3])
    held = local_data(tmp_path, cache_bytes=room)
    for age, shard in enumerate(shards[:3]):
        put(held, shard, texts)
        os.utime(held.find(shard), (1000 + age, 1000 + age))
    held.opened(shards[0], index)  # used now
    held.make_room(shards[1].size, keep=())
    assert held.find(shards[1]) is None
    assert held.find(shards[0])
    assert held.find(shards[2])


def test_what_the_next_steps_need_stays_and_a_cache_too_small_for_it_is_refused(
    tmp_path, texts, shards
):
    held = local_data(tmp_path, cache_bytes=shards[0].size + shards[1].size)
    put(held, shards[0], texts)
    put(held, shards[1], texts)
    needed = {shards[0].sha256, shards[1].sha256}
    with pytest.raises(CacheTooSmall, match="give it more with --data-cache"):
        held.arrival(shards[2], keep=needed)
    assert held.find(shards[0])
    assert held.find(shards[1])
    held.arrival(shards[2], keep={shards[0].sha256}).close()
    assert held.find(shards[1]) is None


def test_shards_of_other_runs_count_too(tmp_path, texts, shards):
    other = local_data(tmp_path, root="cd" * 32)
    put(other, shards[0], texts)
    held = local_data(tmp_path, cache_bytes=shards[0].size)
    held.make_room(shards[0].size)
    assert list(other.cache.glob("shards/*.bin")) == []


def test_pieces_are_lent_by_their_hash_and_only_if_intact(tmp_path, texts, index, shards):
    mine = shutil.copytree(texts, tmp_path / "mine")
    held = local_data(tmp_path, mine)
    digest, size = next(shards[0].chunks())
    assert held.lend(digest) is None  # nobody has looked for it
    held.note(shards)
    assert held.lend(digest) == (texts / shards[0].name).read_bytes()[:size]
    assert held.lend(bytes(32)) is None
    other, _ = next(shards[1].chunks())
    (mine / shards[1].name).write_bytes(bytes(shards[1].size))
    assert held.lend(other) is None
    (mine / shards[2].name).unlink()
    assert held.lend(next(shards[2].chunks())[0]) is None


def test_few_lent_pieces_are_in_memory(tmp_path):
    arrays = [np.full(50_000 + at, at, "<u2") for at in range(3 * LENT_PIECES)]
    shards = write_shards(tmp_path / "there", arrays)
    held = local_data(tmp_path, tmp_path / "there")
    held.note(shards)
    tracemalloc.start()
    assert all(held.lend(next(shard.chunks())[0]) for shard in shards)
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept_bytes < (LENT_PIECES + 1) * 100_100


def test_the_index_is_lent_by_the_root(tmp_path, texts):
    raw = (texts / "index.json").read_bytes()
    root = digest_of(raw).hex()
    held = local_data(tmp_path, texts, root=root)
    assert held.lend(bytes.fromhex(root)) is None
    assert held.index_bytes() == raw
    assert held.lend(bytes.fromhex(root)) == raw
    empty = local_data(tmp_path, root=root)
    assert empty.index_bytes() is None
    empty.keep_index(raw)
    assert local_data(tmp_path, root=root).index_bytes() == raw


def test_an_index_of_other_data_is_not_taken(tmp_path, texts):
    assert local_data(tmp_path, texts, root="ab" * 32).index_bytes() is None


def test_a_token_array_is_written_as_bytes():
    assert encoded(["ab"]).tolist() == [97, 98, 255]


def test_two_nodes_of_one_machine_may_fetch_the_same_file(tmp_path, texts, shards):
    one, two = local_data(tmp_path), local_data(tmp_path)
    content = (texts / shards[0].name).read_bytes()
    arrivals = [held.arrival(shards[0]) for held in (one, two)]
    for arrival in arrivals:
        assert arrival.put(0, content)
    for held, arrival in zip((one, two), arrivals, strict=True):
        held.arrived(shards[0], arrival)
        assert held.find(shards[0]).read_bytes() == content
