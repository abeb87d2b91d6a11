"""Bundles in the chunk store: put, fetched shard by shard, checked, reduced; with liars."""

import functools
from types import SimpleNamespace

import pytest

from farflock.swarm.bundle_store import BundleStore
from farflock.swarm.chunk_store import Store, digest_of
from farflock.swarm.compute import inline
from farflock.swarm.protocol.exchange.bundles import BadBundle, BundleCut, encode_list
from farflock.swarm.protocol.exchange.close_list import RoundTerms
from farflock.swarm.protocol.exchange.streams import Reduction, Stream
from farflock.swarm.sim.virtual_time import run_virtual

MAX_SHARD_BYTES = 100


def stream(shards, bundles, kind="mean", reduce=None, check=lambda *_: True):
    terms = RoundTerms(kind, shards)
    object.__setattr__(terms, "cut", BundleCut(shards, bundles))
    return Stream("weights", terms, MAX_SHARD_BYTES, reduce or joined, check)


def in_virtual_time(main):
    @functools.wraps(main)
    def run(*arguments, **options):
        return run_virtual(main(*arguments, **options))

    return run


def joined(round_number, shard, inputs):
    """The inputs' bytes one after the other; those that begin with ! are rejected."""
    rejected = tuple(peer for peer, _, data in inputs if data.startswith(b"!"))
    good = [data for peer, _, data in inputs if peer not in rejected]
    return Reduction(b"".join(good) if good else None, rejected)


class Fetcher:
    """Chunks that another peer has; some cannot be had."""

    def __init__(self, store, others):
        self.store, self.others, self.asked = store, others, []

    async def fetch_batch(self, entries, holders, pin, timeout_s):
        return entries  # none comes together

    async def fetch(self, digest, size, holders, pin, timeout_s, final=False):
        self.asked.append(digest)
        data = self.others.get(digest)
        if data is None or len(data) != size:
            return False
        self.store.put(data, pin)
        return True


@pytest.fixture
def here():
    store = Store(0)
    chunks = Fetcher(store, {})
    return SimpleNamespace(store=store, chunks=chunks, bundles=BundleStore(store, chunks, inline))


def offered(here, cut, shards):
    """The bundles of these shards, at another peer."""
    there = Store(10**6)
    entries = BundleStore(there, None, inline).put(cut, shards, "offer")
    here.chunks.others = {digest: there.get(digest) for digest in there.pinned("offer")}
    return entries


def test_a_bundle_of_one_shard_is_that_shard(here):
    cut = BundleCut(2, 2)
    assert here.bundles.put(cut, [b"one", b"other"], "pin") == (
        (digest_of(b"one"), 3),
        (digest_of(b"other"), 5),
    )
    assert len(here.store) == 2


def test_a_bundle_of_several_shards_is_their_list_and_all_of_it_stays_as_long_as_its_pin(here):
    cut, weights = BundleCut(3, 1), stream(3, 1)
    ((digest, size),) = here.bundles.put(cut, [b"a", b"bb", b"ccc"], "pin")
    listed = [(digest_of(b"a"), 1), (digest_of(b"bb"), 2), (digest_of(b"ccc"), 3)]
    assert digest == digest_of(encode_list(listed))
    assert size == 3 * 36
    assert list(here.bundles.shards(weights, 0, digest)) == [b"a", b"bb", b"ccc"]
    here.bundles.pin(weights, 0, digest, "result")
    here.store.release("pin")
    assert here.bundles.pin_held(weights, 0, digest, "again")
    here.store.release("result")
    here.store.release("again")
    assert len(here.store) == 0


@in_virtual_time
async def test_a_bundle_is_fetched_list_first_and_then_shard_by_shard(here):
    shards = [b"%d" % number for number in range(50)]
    ((digest, size),) = offered(here, BundleCut(50, 1), shards)
    weights = stream(50, 1)
    assert not here.bundles.pin_held(weights, 0, digest, "pin")
    assert await here.bundles.fetch(weights, 0, (digest, size), list, "pin", 1.0)
    assert here.chunks.asked == [digest, *map(digest_of, shards)]
    assert list(here.bundles.shards(weights, 0, digest)) == shards
    assert here.bundles.pin_held(weights, 0, digest, "pin")


@in_virtual_time
async def test_a_shard_that_is_not_to_be_had_ends_the_fetch_and_the_rest_stays_for_the_next(here):
    shards = [b"%d" % number for number in range(50)]
    ((digest, size),) = offered(here, BundleCut(50, 1), shards)
    lost = here.chunks.others.pop(digest_of(b"20"))
    weights = stream(50, 1)
    assert not await here.bundles.fetch(weights, 0, (digest, size), list, "pin", 1.0)
    assert len(here.chunks.asked) < 40
    assert not here.bundles.pin_held(weights, 0, digest, "pin")
    assert digest_of(b"0") in here.store
    here.chunks.others[digest_of(lost)] = lost
    assert await here.bundles.fetch(weights, 0, (digest, size), list, "pin", 1.0)


@pytest.mark.parametrize(
    "listed", [b"x" * 71, bytes(36) * 3, encode_list([(bytes(32), 1), (bytes(32), 101)])]
)
@in_virtual_time
async def test_a_list_that_lies_is_refused_and_pins_nothing_but_itself(here, listed):
    here.chunks.others = {digest_of(listed): listed}
    entry = digest_of(listed), len(listed)
    with pytest.raises(BadBundle):
        await here.bundles.fetch(stream(2, 1), 0, entry, list, "pin", 1.0)
    here.bundles.pin(stream(2, 1), 0, entry[0], "result")
    assert here.store.pinned("result") == (entry[0],)


def test_only_sizes_that_a_correct_member_could_announce_fit(here):
    fits = here.bundles.fits
    assert fits(stream(2, 2), 0, MAX_SHARD_BYTES)
    assert not fits(stream(2, 2), 0, MAX_SHARD_BYTES + 1)
    assert fits(stream(200, 1), 0, 200 * 36)
    assert not fits(stream(200, 1), 0, 200 * 36 - 1)


@in_virtual_time
async def test_each_shard_of_a_bundle_is_reduced_with_its_own_inputs(here):
    cut, weights = BundleCut(4, 2), stream(4, 2)
    inputs = [
        (peer, 1.0, here.bundles.put(cut, [name + b"%d" % shard for shard in range(4)], "in")[1][0])
        for peer, name in (("p", b"p"), ("q", b"q"))
    ]
    (digest, _), rejected = await here.bundles.reduce(weights, 7, 1, inputs, "out")
    assert list(here.bundles.shards(weights, 1, digest)) == [b"p2q2", b"p3q3"]
    assert rejected == ()


@pytest.mark.parametrize("place", [0, 1, 2])
@in_virtual_time
async def test_a_contribution_with_one_corrupt_shard_is_left_out_of_the_whole_bundle(here, place):
    cut, weights = BundleCut(3, 1), stream(3, 1)
    bad = [b"!" if shard == place else b"q" for shard in range(3)]
    inputs = [
        ("p", 1.0, here.bundles.put(cut, [b"p0", b"p1", b"p2"], "in")[0][0]),
        ("q", 1.0, here.bundles.put(cut, bad, "in")[0][0]),
    ]
    (digest, _), rejected = await here.bundles.reduce(weights, 7, 0, inputs, "out")
    assert list(here.bundles.shards(weights, 0, digest)) == [b"p0", b"p1", b"p2"]
    assert rejected == ("q",)


@in_virtual_time
async def test_with_a_corrupt_shard_in_each_contribution_there_is_no_reduction(here):
    cut, weights = BundleCut(2, 1), stream(2, 1)
    inputs = [
        ("p", 1.0, here.bundles.put(cut, [b"!", b"p"], "in")[0][0]),
        ("q", 1.0, here.bundles.put(cut, [b"q", b"!"], "in")[0][0]),
    ]
    entry, rejected = await here.bundles.reduce(weights, 7, 0, inputs, "out")
    assert entry is None
    assert sorted(rejected) == ["p", "q"]


@in_virtual_time
async def test_every_shard_of_a_gathered_bundle_is_checked_under_its_own_number(here):
    seen = []

    def check(round_number, shard, payload):
        seen.append((round_number, shard, payload))
        return payload != b"bad"

    weights = stream(4, 2, "gather", check=check)
    first, second = here.bundles.put(BundleCut(4, 2), [b"a", b"b", b"c", b"bad"], "in")
    assert await here.bundles.check(weights, 5, 0, first[0])
    assert not await here.bundles.check(weights, 5, 1, second[0])
    assert seen == [(5, 0, b"a"), (5, 1, b"b"), (5, 2, b"c"), (5, 3, b"bad")]
