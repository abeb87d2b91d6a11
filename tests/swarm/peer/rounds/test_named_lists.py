"""A peer that follows no stream yet learns the certified list of a round, and no other."""

import asyncio

import msgspec
from worlds.herd import STREAM, identity, in_virtual_time
from worlds.waiting import now, until

from farflock.swarm.frame import Frame
from farflock.swarm.messages import Decided, Key
from farflock.swarm.protocol.exchange.close_list import CloseList

MEMBERS, WAIT_S = 3, 3.0


async def quiet(herd, rounds):
    await until(lambda: min(node.applied for node in herd.nodes.values()) >= rounds, 60, "rounds")
    for node in herd.nodes.values():
        node.quiet = True
    await asyncio.sleep(3)
    return herd.nodes[0].peer


@in_virtual_time(MEMBERS)
async def test_the_list_of_a_round_comes_from_the_log_of_any_member(herd):
    peer = await quiet(herd, 3)
    number = peer.rounds.newest(STREAM)
    told = peer.rounds.streams[STREAM].log[number].close
    peer.rounds.close(STREAM)
    assert await peer.rounds.lists.fetch(STREAM, number, WAIT_S) == told


@in_virtual_time(MEMBERS)
async def test_of_a_round_that_is_not_decided_there_is_none_in_time(herd):
    peer = await quiet(herd, 3)
    begun_s = now()
    assert await peer.rounds.lists.fetch(STREAM, peer.rounds.newest(STREAM) + 1, WAIT_S) is None
    assert WAIT_S <= now() - begun_s < WAIT_S + 1


@in_virtual_time(MEMBERS)
async def test_a_list_that_no_quorum_has_signed_is_none(herd):
    peer = await quiet(herd, 3)
    key = Key(STREAM, peer.rounds.newest(STREAM) + 1)
    asking = asyncio.create_task(peer.rounds.lists.fetch(key.stream, key.round, WAIT_S))
    await asyncio.sleep(0.1)
    value = msgspec.msgpack.encode(CloseList((), (), 10, b"a lie"))
    view = herd.nodes[0].view
    lie = Decided(key, view.hash, value, (0, 0), tuple((member, b"") for member in range(MEMBERS)))
    peer.router.deliver(identity(1).peer, Frame(herd.nodes[1].incarnation, lie))
    assert await asking is None
