"""A member makes up what rounds have decided: nobody believes it, and the rounds go on."""

import asyncio
import hashlib

import msgspec
import pytest
from worlds.decisions import votes
from worlds.herd import SHARDS, STREAM, identity, in_virtual_time
from worlds.waiting import until

from farflock.swarm.frame import Frame
from farflock.swarm.messages import Decided, Key
from farflock.swarm.protocol.exchange.availability import RoundItem, mask_of
from farflock.swarm.protocol.exchange.close_list import CloseList

MEMBERS, LIAR = 4, 3
WHY = "a decision that no quorum has signed"


def made_up(view, tokens=10, previous=b""):
    """The list of a round in which all members are, with content that nobody has."""
    everybody = range(len(view.members))
    items = tuple(
        RoundItem(shard, hashlib.sha256(bytes([shard])).digest(), 5, mask_of(everybody))
        for shard in range(SHARDS)
    )
    return msgspec.msgpack.encode(
        CloseList(items, tuple((member, 1.0) for member in everybody), tokens, b"", previous)
    )


def unsigned(herd, key, view, value):
    return tuple((member, b"") for member in range(MEMBERS))


def signed_by_itself(herd, key, view, value):
    """The liar's true signature under each member's index."""
    liar = identity(LIAR)
    return votes(dict.fromkeys(range(MEMBERS), liar), "run", key, view.hash, (0, 0), value)


def its_own_thrice(herd, key, view, value):
    me = view.peers.index(identity(LIAR).peer)
    return votes({me: identity(LIAR)}, "run", key, view.hash, (0, 0), value) * 3


def repeated(herd, key, view, value):
    """The votes of an earlier round of the same view."""
    log = herd.nodes[0].peer.rounds.streams[STREAM].log
    return log[max(log)].decided.proofs


def of_another_run(herd, key, view, value):
    everybody = {view.peers.index(identity(n).peer): identity(n) for n in range(MEMBERS)}
    return votes(everybody, "another run", key, view.hash, (0, 0), value)


def of_another_view(herd, key, view, value):
    everybody = {view.peers.index(identity(n).peer): identity(n) for n in range(MEMBERS)}
    return votes(everybody, "run", key, bytes(32), (0, 0), value)


FORGERIES = [
    unsigned,
    signed_by_itself,
    its_own_thrice,
    repeated,
    of_another_run,
    of_another_view,
]


@pytest.mark.parametrize("forged", FORGERIES, ids=lambda forged: forged.__name__)
@pytest.mark.parametrize("begun", [False, True], ids=["before it begins", "while it is open"])
def test_a_decision_that_one_member_makes_up_is_believed_by_nobody(forged, begun):
    @in_virtual_time(MEMBERS)
    async def main(herd):
        await until(lambda: min(node.applied for node in herd.nodes.values()) >= 2, 30, "rounds")
        liar, honest = herd.nodes[LIAR], [herd.nodes[number] for number in range(LIAR)]
        for node in herd.nodes.values():
            node.quiet = True
        await asyncio.sleep(3)
        start = max(node.applied for node in honest)
        if begun:
            for node in herd.nodes.values():
                node.quiet = False
            await until(lambda: honest[0].peer.rounds.machines, 5, "an open round")
        for node in honest:
            key, view = Key(STREAM, node.applied + 1), node.view
            value = made_up(view)
            lie = Decided(key, view.hash, value, (0, 0), forged(herd, key, view, value))
            node.peer.router.deliver(liar.id, Frame(liar.incarnation, lie))
            assert node.peer.context.counters[f"refused: {WHY}"] == 1
            accused = [(each.peer, each.what) for each in node.peer.context.accusations]
            assert accused == [(liar.id, WHY)]
        for node in herd.nodes.values():
            node.quiet = False
        await until(lambda: min(node.applied for node in honest) > start + 3, 15, "the next rounds")

    main()


@in_virtual_time(MEMBERS)
async def test_one_that_a_quorum_has_signed_is_believed(herd):
    """So the forgeries are refused for want of signatures, not for anything else in them."""
    node, liar = herd.nodes[0], herd.nodes[LIAR]
    await until(lambda: min(each.applied for each in herd.nodes.values()) >= 2, 30, "rounds")
    for each in herd.nodes.values():
        each.quiet = True
    await asyncio.sleep(3)
    key, view = Key(STREAM, node.applied + 1), node.view
    value = made_up(view, previous=node.peer.rounds.streams[STREAM].precedent.hash)
    three = {view.peers.index(identity(n).peer): identity(n) for n in (1, 2, LIAR)}
    proofs = votes(three, "run", key, view.hash, (0, 0), value)
    lie = Decided(key, view.hash, value, (0, 0), proofs)
    node.peer.router.deliver(liar.id, Frame(liar.incarnation, lie))
    assert node.peer.rounds.newest(STREAM) == key.round
