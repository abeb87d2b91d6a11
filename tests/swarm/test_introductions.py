"""A newcomer hears the run's head and records from any member that its invite names."""

import asyncio

import pytest
from worlds.peers import end, identity, peer_in, record_of
from worlds.waiting import now

from farflock.swarm.frame import Frame, pack, unpack
from farflock.swarm.messages import Terms, TermsQuery
from farflock.swarm.peer.bootstrap import ask_terms
from farflock.swarm.peer.peer import RunTerms
from farflock.swarm.record import unseal
from farflock.swarm.sim.network import Faults, LinkModel, SimNetwork
from farflock.swarm.sim.virtual_time import run_virtual

TERMS = RunTerms("run", 1, view_s=1.0)
FOUNDER, MEMBER, STRANGER = map(identity, range(3))
ASK_S = 5.0


def anything(sender, terms):
    return True


def swarm(main, *, members=1, loss=0.0):
    """Run `main` beside members, the founder first, and a newcomer's links."""

    async def whole():
        network = SimNetwork(1, LinkModel())
        peers = [peer_in(network, identity(number), TERMS) for number in range(members)]
        tasks = [asyncio.create_task(_run(peer)) for peer in peers]
        await asyncio.sleep(0)
        peers[0].found()
        peers[0].membership.introductions.head = b"head"
        for peer in peers[1:]:
            await peer.join([record_of(FOUNDER)], 10.0)
            while not peer.membership.is_member:  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(0.1)
        network.faults = Faults(loss=loss)
        result = await main(network, network.links(STRANGER.peer), peers)
        await end(*tasks)
        return result

    return run_virtual(whole())


async def _run(peer):
    async with peer.running():
        await asyncio.Event().wait()


def test_a_member_tells_the_head_and_the_records_of_those_who_are_here():
    async def main(network, newcomer, peers):
        told = await ask_terms(newcomer, "run", [FOUNDER.peer], anything, ASK_S)
        assert told is not None
        sender, terms = told
        assert (sender, terms.head) == (FOUNDER.peer, b"head")
        owners = [unseal(blob, "run").peer for blob in terms.records]
        assert owners == [FOUNDER.peer, MEMBER.peer]
        network.kill(MEMBER.peer)
        await asyncio.sleep(10.0)
        _, terms = await ask_terms(newcomer, "run", [FOUNDER.peer], anything, ASK_S)
        assert [unseal(blob, "run").peer for blob in terms.records] == [FOUNDER.peer]

    swarm(main, members=2)


def test_a_lost_question_is_asked_again():
    async def main(network, newcomer, peers):
        assert await ask_terms(newcomer, "run", [FOUNDER.peer], anything, 60.0) is not None

    swarm(main, loss=0.5)


def test_a_peer_without_a_part_in_the_run_introduces_nobody():
    async def main(network, newcomer, peers):
        peers[0].membership.introductions.head = b""
        began_s = now()
        assert await ask_terms(newcomer, "run", [FOUNDER.peer], anything, ASK_S) is None
        assert now() - began_s == pytest.approx(ASK_S, abs=0.1)

    swarm(main)


def test_an_answer_counts_only_if_it_fits_and_was_asked_for():
    async def main(network, newcomer, peers):
        liar = network.links(identity(5).peer)
        for _ in range(40):  # more than wait to be read
            liar.send(newcomer.me, pack(Frame(1, Terms(b"false", (b"",)))))
        heard = []

        def fits(sender, terms):
            heard.append((sender, terms.head))
            return len(heard) > 1

        sender, terms = await ask_terms(newcomer, "run", [FOUNDER.peer], fits, ASK_S)
        assert heard == [(FOUNDER.peer, b"head")] * 2
        assert (sender, terms.head) == heard[0]

    swarm(main)


def test_a_stranger_that_asks_without_end_is_not_answered_without_end():
    async def main(network, newcomer, peers):
        for _ in range(1000):
            newcomer.send(FOUNDER.peer, pack(Frame(1, TermsQuery())))
        answers = 0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                while True:
                    _, packed = await newcomer.receive()
                    answers += isinstance(unpack(packed).message, Terms)
        assert 100 < answers < 600
        assert peers[0].context.counters["dropped: question about the terms"] > 400

    swarm(main)


def test_terms_that_nobody_asked_for_are_dropped():
    async def main(network, newcomer, peers):
        newcomer.send(FOUNDER.peer, pack(Frame(1, Terms(b"head", (record_of(STRANGER),)))))
        await asyncio.sleep(1.0)
        assert peers[0].context.counters["dropped: terms that nobody asked for"] == 1
        assert STRANGER.peer not in peers[0].membership.records

    swarm(main)
