"""Simulated peers are in one life after another: they find each other, are killed and come back."""

import asyncio
import itertools
import random

import pytest
from worlds.peers import identity
from worlds.waiting import now, until

from farflock.node.simulate.lives import Lives, SimPeers
from farflock.swarm.peer.peer import RunTerms
from farflock.swarm.record import unseal
from farflock.swarm.sim.directory import DirectoryFaults
from farflock.swarm.sim.network import SimNetwork
from farflock.swarm.sim.virtual_time import run_virtual

PEERS, AWAY_S = 3, (2.0, 4.0)


class Hamlet:
    """Peers without nodes; `begun` has the time, number and incarnation of each life."""

    def __init__(self, churn_s=None, mortal=(), seed=1, lost=0.0):
        terms, identities = RunTerms("run", 1, view_s=1.0), [identity(n) for n in range(PEERS)]
        self.peers = SimPeers(terms, SimNetwork(1), identities, DirectoryFaults(lost=lost))
        self.lives = Lives(self.peers, self.live, random.Random(seed), churn_s, AWAY_S, mortal)
        self.begun = []

    async def live(self, number):
        peer = self.peers.born(number)
        self.begun.append((now(), number, peer.context.incarnation))
        async with peer.running():
            if peer.context.incarnation == 1:
                peer.found()
            else:
                await peer.join(await self.peers.introduced(number), 30.0)
            await asyncio.sleep(1e6)


def lived(main, **options):
    """The hamlet after `main(hamlet)`, which begins when all first lives have begun."""

    async def whole():
        hamlet = Hamlet(**options)
        async with hamlet.lives.running(lambda: 0.5):
            await main(hamlet)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return hamlet

    return run_virtual(whole())


async def settled(hamlet):
    await until(lambda: hamlet.peers.settled, 30.0, "all as members")


def test_a_killed_peer_comes_back_in_another_life_and_is_a_member_again():
    async def main(hamlet):
        await settled(hamlet)
        hamlet.lives.nodes[1], killed_s = "a node", now()
        hamlet.lives.kill(1, 3.0)
        assert not hamlet.lives.nodes
        assert not hamlet.peers.settled
        await settled(hamlet)
        assert hamlet.begun[PEERS:] == [(pytest.approx(killed_s + 3.0), 1, PEERS + 1)]

    assert lived(main).lives.kills == 1


def test_a_peer_that_is_killed_for_good_stays_away():
    async def main(hamlet):
        hamlet.lives.kill(2, None)
        while await hamlet.lives.watch(30.0) and not hamlet.lives.tasks[2].done():
            pass
        await asyncio.sleep(AWAY_S[1])

    assert lived(main).peers.births == PEERS


def test_churn_kills_mortals_one_at_a_time_and_draws_from_its_seed():
    async def main(hamlet):
        await settled(hamlet)
        await asyncio.sleep(40.0)

    one = lived(main, churn_s=0.5, mortal=(1, 2))
    again = one.begun[PEERS:]
    assert {number for _, number, _ in again} == {1, 2}
    apart_s = [after[0] - before[0] for before, after in itertools.pairwise(again)]
    assert min(apart_s) > AWAY_S[0], "the killed peer was a member again before the next kill"
    assert lived(main, churn_s=0.5, mortal=(1, 2)).begun == one.begun
    assert lived(main, churn_s=0.5, mortal=(1, 2), seed=2).begun != one.begun
    assert lived(main, churn_s=0.5).lives.kills == 0


def test_whoever_watches_gets_the_error_of_a_life():
    async def main(hamlet):
        while await hamlet.lives.watch(600.0):
            pass

    with pytest.raises(TimeoutError):
        lived(main, lost=1.0)  # a directory that nobody is in introduces nobody


def test_peers_are_introduced_to_others_only():
    async def main(hamlet):
        shown = await hamlet.peers.introduced(0)
        owners = {unseal(blob, hamlet.peers.terms.run).peer for blob in shown}
        assert owners == {each.peer for each in hamlet.peers.identities[1:]}

    lived(main)
