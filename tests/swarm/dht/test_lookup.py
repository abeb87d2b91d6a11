import asyncio

import pytest

from farflock.swarm.dht.item_store import StoredItem
from farflock.swarm.dht.lookup import MAX_ASKED, PARALLEL_CALLS, WIDTH, LookupReply, Walk
from farflock.swarm.sim.virtual_time import run_virtual

HIT = StoredItem(b"owner", b"value", 1.0)


class Table:
    """Peers that are numbers and their own node ids. Each knows some others; `stores` hold the
    item."""

    def __init__(self, knows, stores=(), silent=()):
        self.knows, self.stores, self.silent = knows, set(stores), set(silent)
        self.asked, self.running, self.most = [], 0, 0

    async def ask(self, peer):
        self.asked.append(peer)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        if peer in self.silent:
            return None
        return LookupReply(
            [HIT] if peer in self.stores else [],
            [(near, near) for near in self.knows.get(peer, ())],
        )


def walk(table, friends, target=0, me=-1):
    search = Walk(target, me, [(peer, peer) for peer in friends], table.ask)
    run_virtual(search.run())
    return search


def found(search):
    return [item for reply in search.replies for item in reply.items]


def test_the_walk_follows_those_that_others_know():
    table = Table({8: [4], 4: [2], 2: [1]}, stores=[1])
    search = walk(table, [8])
    assert found(search) == [HIT]
    assert search.nearest == [(1, 1), (2, 2), (4, 4), (8, 8)]


def test_no_peer_is_asked_twice_and_the_asking_one_never():
    table = Table({1: [2, 3, 99], 2: [1, 3, 99], 3: [1, 2, 99]})
    walk(table, [1, 2], me=99)
    assert sorted(table.asked) == [1, 2, 3]


def test_an_empty_table_ends_at_once():
    assert walk(Table({}), []).replies == []


def test_silent_peers_do_not_count_as_nearest():
    search = walk(Table({8: [1, 2, 3]}, silent=[1, 2]), [8])
    assert search.nearest == [(3, 3), (8, 8)]


def test_made_up_neighbours_close_to_the_key_hide_no_peer():
    liar, honest = 4096, range(5000, 5010)
    made_up = list(range(1, 1 + WIDTH))
    table = Table({liar: made_up}, stores=honest, silent=made_up)
    search = walk(table, [liar, *honest])
    assert len(found(search)) == len(honest)
    assert table.asked.index(5009) < table.asked.index(1), (
        "known peers are asked before those that a reply names"
    )


def test_one_reply_names_at_most_so_many_peers():
    table = Table({5000: range(1, 4000)})
    walk(table, [5000])
    assert len(table.asked) <= 1 + WIDTH


def test_a_chain_of_liars_is_bounded():
    endless = {peer: [peer - 1] for peer in range(10_000, 0, -1)}
    table = Table(endless)
    walk(table, [10_000])
    assert len(table.asked) == MAX_ASKED


def test_strangers_farther_than_the_nearest_that_answered_are_not_asked():
    table = Table({1: [5000]})
    walk(table, range(1, 1 + WIDTH))
    assert 5000 not in table.asked


def test_only_so_many_calls_run_at_once():
    table = Table({})
    walk(table, range(1, 20))
    assert table.most == PARALLEL_CALLS


def test_a_cancelled_walk_keeps_what_it_found_and_leaves_no_task():
    async def ask(peer):
        if peer == 1:
            return LookupReply([HIT], [])
        await asyncio.Event().wait()

    async def main():
        search = Walk(0, -1, [(1, 1), (2, 2)], ask)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await search.run()
        assert found(search) == [HIT]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(main())
