"""A cache has whole shards or none, keeps to its size, and serves several processes."""

import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.node.data.shard_cache import FRESH_S, CacheFull, ShardCache, ShardNeeds
from farflock.node.errors import Failure
from farflock.node.process.run_data import opened_cache
from farflock.swarm.chunk_store import digest_of

SHARDS = [bytes([number]) * 100 for number in range(10)]
NAMES = list(map(digest_of, SHARDS))


def needs(*numbers, mine=()):
    return ShardNeeds([NAMES[number] for number in numbers], [NAMES[number] for number in mine])


def path_of(cache, number):
    (path,) = cache.folder.rglob(NAMES[number].hex())
    return path


def held(folder):
    """A lock that another process has."""
    raise BlockingIOError


def aged(cache, *numbers):
    """Let shards have been used long ago, the first ones longest ago."""
    for place, number in enumerate(numbers):
        then = time.time() - 10 * FRESH_S + place
        os.utime(path_of(cache, number), (then, then))


@pytest.fixture
def cache(tmp_path):
    return ShardCache(tmp_path / "cache", 350)


def keep(cache, *numbers):
    for number in numbers:
        cache.keep(NAMES[number], SHARDS[number], needs(number))


def test_a_shard_is_there_for_every_process(cache):
    keep(cache, 1)
    other = ShardCache(cache.folder, 350)
    assert other.names == {NAMES[1]}
    assert other.read(NAMES[1]) == SHARDS[1]
    assert other.read(NAMES[2]) is None
    keep(other, 2)
    assert NAMES[2] not in cache.names
    assert cache.read(NAMES[2]) == SHARDS[2], "though it has not looked since"


def test_the_one_used_longest_ago_makes_room_but_none_that_is_needed(cache):
    keep(cache, 1, 2, 3)
    aged(cache, 1, 2, 3)
    cache.read(NAMES[1])
    cache.keep(NAMES[4], SHARDS[4], needs(4, 2))
    assert cache.names == {NAMES[1], NAMES[2], NAMES[4]}


def test_what_another_process_has_just_fetched_stays(cache):
    keep(cache, 1, 2, 3)
    with pytest.raises(CacheFull):
        cache.keep(NAMES[4], SHARDS[4], needs(mine=[4]))
    assert NAMES[4] not in cache.names
    keep(cache, 4)
    assert len(cache.names) == 4, "what is read next may exceed the room"


@pytest.mark.parametrize("content", [b"", SHARDS[1][:-1], SHARDS[1] + b"x", SHARDS[2]])
def test_a_file_that_is_not_what_its_name_says_is_absent_and_goes(cache, content):
    keep(cache, 1)
    path = path_of(cache, 1)
    path.write_bytes(content)
    assert cache.read(NAMES[1]) is None
    assert NAMES[1] not in cache.names
    assert not path.exists()


def test_what_was_never_finished_goes_after_a_while_and_other_files_are_left_alone(cache):
    keep(cache, 1)
    folder = path_of(cache, 1).parent
    old, new, alien = (folder / name for name in ("a.1.0.partial", "b.1.0.partial", "notes.txt"))
    for path in (old, new, alien):
        path.write_bytes(b"x")
    os.utime(old, (0, 0))
    os.utime(alien, (0, 0))
    cache.look()
    assert (old.exists(), new.exists(), alien.exists()) == (False, True, True)
    assert cache.names == {NAMES[1]}


def test_an_index_is_kept_under_its_hash(cache):
    name = digest_of(b"an index").hex()
    assert cache.index(name) is None
    cache.keep_index(name, b"an index")
    assert cache.index(name) == b"an index"


def test_a_failed_write_leaves_nothing(cache, monkeypatch):
    def fails(old, new):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fails)
    with pytest.raises(OSError, match="No space"):
        keep(cache, 1)
    assert not [path for path in cache.folder.rglob("*") if path.is_file()]


def denied(*_, **__):
    raise PermissionError(13, "Permission denied")


def test_a_cache_of_another_user_is_refused_in_a_sentence_only_where_it_is_needed(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.TemporaryFile", denied)
    assert not opened_cache(tmp_path / "cache", 350, fetches=False).names
    said = "the cache of data .*/cache cannot be used: permission denied; make the folder yours"
    with pytest.raises(Failure, match=said):
        opened_cache(tmp_path / "cache", 350, fetches=True)
    monkeypatch.setattr("os.scandir", denied)
    with pytest.raises(Failure, match=said):
        opened_cache(tmp_path / "cache", 350, fetches=False)


def test_a_process_that_holds_the_cache_for_good_is_named_and_training_goes_on(
    cache, tmp_path, monkeypatch
):
    for number in (1, 2, 3):
        keep(cache, number)
    monkeypatch.setattr("farflock.node.turns.locked", held)
    monkeypatch.setattr("farflock.node.turns.STUCK_S", 0.0)
    cache.keep(NAMES[4], SHARDS[4], needs(4))
    assert cache.read(NAMES[4]) == SHARDS[4], "what is read next is kept beyond the limit"
    with pytest.raises(CacheFull):
        cache.keep(NAMES[5], SHARDS[5], needs(4))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "in-use").write_text("4711\n")
    with pytest.raises(Failure, match="cannot be used: process 4711 has worked there"):
        opened_cache(tmp_path / "other", 350, fetches=True)


def test_a_cache_that_is_ones_own_is_used(tmp_path):
    cache = opened_cache(tmp_path / "cache", 350, fetches=True)
    keep(cache, 1)
    assert cache.read(NAMES[1]) == SHARDS[1]


def test_a_shard_of_another_user_counts_as_absent(cache, monkeypatch):
    keep(cache, 1)
    monkeypatch.setattr("pathlib.Path.open", denied)
    assert cache.read(NAMES[1]) is None
    assert NAMES[1] not in cache.names


@given(st.lists(st.integers(0, 9), max_size=30))
def test_whatever_is_kept_all_that_is_named_can_be_read(tmp_path_factory, numbers):
    cache = ShardCache(tmp_path_factory.mktemp("cache"), 350)
    for number in numbers:
        aged(cache, *(n for n in range(10) if NAMES[n] in cache.names))
        keep(cache, number)
        assert len(cache.names) <= 3
        assert all(cache.read(name) for name in set(cache.names))
