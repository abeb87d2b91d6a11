"""A voter helps two others, which cannot hear each other, to decide a round differently. Once they
meet, it is convicted, and all honest members have one state again."""

import asyncio
import hashlib

import msgspec
import pytest
from worlds.herd import STREAM, Divided, grown
from worlds.waiting import now, until

from farflock.node.simulate.liars.ballots import TwoFaced
from farflock.swarm.messages import Decided
from farflock.swarm.peer.views.conviction_sync import CONTRADICTS
from farflock.swarm.protocol import views
from farflock.swarm.protocol.agreement.certificates import signed_text
from farflock.swarm.protocol.agreement.justified import vote_domain
from farflock.swarm.protocol.exchange.close_list import CloseList
from farflock.swarm.sim.virtual_time import run_virtual

MEMBERS, LIAR = 3, 2
APART_S = 15.0  # time enough for views, and rounds in them, on both sides
WITHIN_S = 30.0  # of the meeting, honest members are equal again


def rivals(herd, node, real):
    """A list of the same round as a real one, as a voter and the liar could have decided it."""
    state = node.peer.rounds.streams[STREAM]
    prior, peers = state.precedent, node.view.peers
    follows = prior.hash or b"", prior.idle_after(peers, ()), prior.counted_after(peers, ())
    value = msgspec.msgpack.encode(CloseList((), (), prior.tokens, b"", *follows))
    text = signed_text(real.key, real.view, real.ballot, value)
    signers = sorted((peers.index(each.id), each) for each in (node, herd.nodes[LIAR]))
    domain = vote_domain("run")
    proofs = tuple((index, each.identity.sign(domain, text)) for index, each in signers)
    return Decided(real.key, real.view, value, real.ballot, proofs)


async def divide(herd, rounds):
    """Let one honest member decide with the liar, and the other one with it, too; heal."""
    one, other, liar = (herd.nodes[number] for number in range(MEMBERS))
    herd.network.partition({one.id, liar.id}, {other.id})
    number = other.applied + 1
    await until(lambda: one.applied >= number, 30, "a round of the first two")
    real = one.peer.rounds.streams[STREAM].log[number].decided
    false = rivals(herd, other, real)
    other.peer.rounds.receive(liar.id, liar.incarnation, false)
    await until(lambda: other.applied >= number, 30, "another list of the round")
    assert one.state != other.state
    await until(lambda: one.applied >= number + rounds - 1, 30, "further rounds of the first two")
    herd.network.heal()
    return real, false


class Divides(TwoFaced):
    """Votes for whatever each side proposes, and tells neither what the other one has decided."""

    replaced = (b"decided", b"views")

    def instead(self, message):
        return ()


def are_one(*nodes):
    """True if these members have one state, and a view of their own."""
    states = {(node.applied, node.state) for node in nodes}
    members = {node.id for node in nodes}
    return len(states) == 1 and all(node.members == members for node in nodes)


@pytest.mark.parametrize("seed", range(6))
def test_a_voter_that_helps_two_sides_apart_to_decisions_is_convicted_by_both_and_they_are_one(
    seed,
):
    async def main():
        herd = Divided(seed)
        await grown(herd, MEMBERS)
        one, other, liar = (herd.nodes[number] for number in range(MEMBERS))
        async with Divides(liar.peer, liar.identity).lying():
            herd.network.cut(one.id, other.id)
            await asyncio.sleep(APART_S)
            herd.network.heal()
            await until(lambda: are_one(one, other), WITHIN_S, "one line")
            # One of them gave up views in which it had voted, and the next round is one of theirs.
            known = one.applied
            await until(lambda: min(one.applied, other.applied) > known + 2, 15, "their rounds")
        for node in (one, other):
            said = {(each.peer, each.what) for each in node.peer.context.accusations}
            assert said == {(liar.id, CONTRADICTS)}
        await herd.end()

    run_virtual(main())


def kept(decided):
    return decided.ballot, hashlib.sha256(decided.value).digest()


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_members_on_two_sides_of_a_fork_convict_the_voter_that_made_it_and_are_equal(seed, rounds):
    async def main():
        herd = Divided(seed)
        await grown(herd, MEMBERS)
        one, other, liar = (herd.nodes[number] for number in range(MEMBERS))
        real, false = await divide(herd, rounds)
        met_s, before = now(), one.view

        await until(lambda: are_one(one, other), WITHIN_S, "one state")
        assert now() - met_s < WITHIN_S
        for node in (one, other):
            said = {(each.peer, each.what) for each in node.peer.context.accusations}
            assert said == {(liar.id, CONTRADICTS)}
            assert node.view.refoundings == 1
        loser = other if kept(real) < kept(false) else one
        assert [status for _, _, status in loser.events].count("adopted") > 0
        assert loser.peer.context.my_index(before) is None, "it may vote beside votes it forgot"
        start = one.applied
        await until(lambda: min(one.applied, other.applied) > start + 5, 30, "rounds")
        assert one.state == other.state or one.applied != other.applied
        await herd.end()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(main())


def test_the_side_that_lost_lets_nobody_take_back_more_than_the_fork():
    async def main():
        herd = Divided(1)
        await grown(herd, MEMBERS)
        real, false = await divide(herd, 1)
        loser = herd.nodes[1 if kept(real) < kept(false) else 0]
        await until(lambda: loser.peer.rounds.forks.found, 10, "the fork")
        refounding, newest = loser.peer.membership.next_view.refounding, loser.view
        for first in (real.key.round - 1, real.key.round + 1000):
            assert refounding.unjustified(views.refounded(newest, newest.members, first))
        good = views.refounded(newest, newest.members, real.key.round + 1)
        assert refounding.unjustified(good) is None
        await herd.end()

    run_virtual(main())


def test_a_state_in_place_of_one_that_lost_is_asked_of_those_that_kept_the_list():
    async def main():
        herd = Divided(1)
        await grown(herd, MEMBERS)
        one, other, liar = (herd.nodes[number] for number in range(MEMBERS))
        askable = other.peer._askable
        assert set(askable(None)) == {one.id, liar.id}
        other.peer.branching.drift.begin(0, sources=frozenset({one.id}))
        assert askable(None) == [one.id]
        other.open()
        assert set(askable(None)) == {one.id, liar.id}, "it has a state again"
        other.peer.branching.drift.begin(0, sources=frozenset({one.id}))
        herd.kill(0)
        await until(lambda: one.id not in askable(None), 30, "a death")
        assert askable(None) == [liar.id], "it would wait for a dead one"
        await herd.end()

    run_virtual(main())
