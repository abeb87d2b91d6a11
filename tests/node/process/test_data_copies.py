"""Members keep copies of shards without a word, and know when the founder may go."""

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.chunk_net import LentWorld, MemoryLender, data_of
from worlds.prepared import prepared
from worlds.waiting import until

from farflock.node.cli import words
from farflock.node.data.coming_shards import FetchedShards
from farflock.node.data.local_shards import LocalShards, table_of
from farflock.node.data.shard_cache import ShardCache
from farflock.node.process.data_copies import Copies, keepers, min_copies
from farflock.node.process.data_supply import DataSupply
from farflock.swarm.chunk_store import digest_of
from farflock.swarm.sim.virtual_time import run_virtual
from farflock.swarm.tasks import cancel

DIGESTS = [digest_of(data_of(10, seed)) for seed in range(300)]
members = st.lists(st.sampled_from([f"peer {n}" for n in range(12)]), min_size=3, unique=True)


@given(members)
def test_a_member_that_goes_moves_only_its_own_shards(peers):
    gone, *left = peers
    for digest in DIGESTS[:50]:
        before, after = keepers(digest, peers, 2), keepers(digest, left, 2)
        assert len(before) == len(after) == 2
        assert before == after or gone in before
        assert set(before) - {gone} <= set(after)


def test_each_member_keeps_about_its_share():
    peers = [f"peer {n}" for n in range(6)]
    own = [sum(peer in keepers(digest, peers, 2) for digest in DIGESTS) for peer in peers]
    assert all(60 < count < 140 for count in own), own


@given(st.lists(st.integers(0, 2**20 - 1), max_size=6), st.integers(1, 20), st.integers(0, 4))
def test_the_fewest_holders_of_any_shard_are_counted(bitmaps, count, most):
    plain = min(sum(bits >> n & 1 for bits in bitmaps) for n in range(count))
    assert min_copies(bitmaps, count, most) == min(plain, most)


@pytest.fixture
def content(small, texts, tmp_path):
    return prepared(texts, tmp_path / "out", held_out=0.1).content


class Member:
    """A peer that keeps copies; `room` is that of its cache."""

    def __init__(self, world, name, content, folder, room=10**9, founder=False, copies=2):
        self.local = LocalShards(
            table_of(content), ShardCache(folder / name, room), content if founder else None
        )
        self.holders, self.all = world.peer(name, self.local), []
        source = FetchedShards(self.local)

        async def inline(work):
            return work()

        others = lambda: [peer for peer in self.all if peer != name]  # noqa: E731
        beside = lambda: [peer for peer in others() if peer != "founder"]  # noqa: E731
        self.supply = DataSupply([source], self.holders, others, inline)
        self.copies = Copies(
            self.supply, self.holders, beside, None if founder else name, copies, inline
        )


def together(content, folder, main, **rooms):
    async def whole():
        world = LentWorld()
        names = ["founder", "a", "b", "c"]
        peers = {
            name: Member(world, name, content, folder, rooms.get(name, 10**9), name == "founder")
            for name in names
        }
        for peer in peers.values():
            peer.all = list(names)
        tasks = [asyncio.create_task(peer.copies.run()) for peer in peers.values()]
        try:
            await main(SimpleNamespace(**peers), world)
        finally:
            await cancel(*tasks)
            await world.close()

    run_virtual(whole())


def said(member):
    found = SimpleNamespace(copies=member.copies.fewest, wanted=2)
    return words.copies(found)


def test_once_each_shard_has_two_holders_beside_the_founder_all_know_that_it_may_go(
    content, tmp_path
):
    async def main(peers, world):
        for member in (peers.founder, peers.a, peers.b, peers.c):
            await until(lambda member=member: member.copies.fewest == 2)
            assert said(member) == "every shard has 2 holders beside the founder: it may go"
        table = peers.a.local.table
        for number in range(len(table)):
            own = keepers(table.digest(number), ["a", "b", "c"], 2)
            here = [n for n in "abc" if getattr(peers, n).local.has(number)]
            assert here == sorted(own), "its own and no others"
        for peer in (peers.a, peers.b, peers.c):
            peer.all.remove("c")
        await until(lambda: peers.a.local.count == len(table))
        await until(lambda: peers.b.local.count == len(table))

    together(content, tmp_path, main)


def test_a_member_without_room_keeps_what_fits_and_the_founder_has_to_stay(content, tmp_path):
    async def main(peers, world):
        await until(lambda: peers.a.copies.is_full)
        await asyncio.sleep(100)
        assert peers.a.local.cache.used_bytes <= 3000
        assert peers.a.local.count > 0
        assert peers.founder.copies.fewest < 2
        assert said(peers.founder) == "some shards have 1 holder beside the founder"

    together(content, tmp_path, main, a=3000)


def test_without_copies_none_are_fetched(content, tmp_path):
    async def main():
        world = LentWorld()
        lender = MemoryLender([], index=content.index_raw)
        world.peer("founder", lender)
        member = Member(world, "a", content, tmp_path, copies=0)
        member.all = ["founder", "a"]
        task = asyncio.create_task(member.copies.run())
        await asyncio.sleep(30)
        await cancel(task)
        assert not member.local.count
        assert member.copies.fewest == 0
        await world.close()

    run_virtual(main())
