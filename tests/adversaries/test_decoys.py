"""A newcomer lands in the run that its invite names, whatever strangers answer, and however many
of them are asked first."""

import asyncio
import contextlib

import msgspec
import pytest
from adversaries.decoys import ANSWERS, Eclipse, crowd, line_of_its_own
from worlds.herd import Herd, grown, identity
from worlds.waiting import now, until

from farflock.swarm.frame import Frame
from farflock.swarm.messages import Lineage
from farflock.swarm.peer.peer import Peer, RunTerms
from farflock.swarm.protocol.backbone import cut
from farflock.swarm.protocol.branches import branch_of, trail
from farflock.swarm.protocol.views import Certified, branch_domain, encode
from farflock.swarm.record import Record, seal
from farflock.swarm.sim.virtual_time import run_virtual

ON_TIME_S = 15.0  # a newcomer without decoys takes 4 to 8 s


class Besieged(Herd):
    """A herd whose newcomers are told of decoys first, and of the members last."""

    decoys = ()

    def records(self, but):
        return [decoy.record for decoy in self.decoys] + super().records(but)


def besieged(members, make):
    """Run a test `main(herd)` with this many members, and the decoys that `make` returns."""

    def decorate(main):
        def test():
            async def whole():
                herd = Besieged()
                await grown(herd, members)
                herd.decoys = make(herd)
                try:
                    await main(herd)
                finally:
                    for decoy in herd.decoys:
                        decoy.task.cancel()
                await herd.end()
                herd.check_tokens()

            run_virtual(whole())

        return test

    return decorate


async def lands(herd, number):
    """Start a newcomer; return the seconds until it has been admitted and has trained with all."""
    begun_s = now()
    node = herd.start(number)
    honest = {identity(each).peer for each in herd.nodes}
    await until(lambda: node.peer.context.chain is not None, ON_TIME_S, "its first views")
    assert node.peer.context.views.past.first.view.members[0].peer == herd.founder
    await until(lambda: node.members == honest, ON_TIME_S, "its admission")
    await until(node.served, ON_TIME_S, "a round of its own")
    return now() - begun_s


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.__name__)
def test_a_newcomer_among_twelve_decoys_lands_in_the_run_on_time(answer):
    @besieged(3, lambda herd: crowd(herd, 12, (answer,)))
    async def main(herd):
        assert await lands(herd, 3) < ON_TIME_S
        assert any(decoy.asked for decoy in herd.decoys)

    main()


def test_a_newcomer_among_a_hundred_decoys_of_all_kinds_lands_in_the_run_on_time():
    """More than a newcomer asks at a time: in turn, it asks everybody."""

    @besieged(3, lambda herd: crowd(herd, 100, ANSWERS))
    async def main(herd):
        assert await lands(herd, 3) < ON_TIME_S

    main()


def test_two_newcomers_are_not_drawn_into_runs_that_strangers_founded_under_the_same_id():
    @besieged(2, lambda herd: [Eclipse(herd, number) for number in range(12)])
    async def main(herd):
        for number in (2, 3):
            assert await lands(herd, number) < ON_TIME_S
        for decoy in herd.decoys:
            assert decoy.peer.context.views.newest.peers == (decoy.me,), "it let nobody in"
        before = herd.nodes[0].applied
        await asyncio.sleep(10)
        assert herd.nodes[0].applied > before + 5, "the run waits for nobody"

    main()


@besieged(3, lambda herd: crowd(herd, 12, (line_of_its_own,)))
async def test_a_false_founding_is_held_against_its_sender_and_against_nobody_else(herd):
    await lands(herd, 3)
    accused = {each.peer for each in herd.nodes[3].peer.context.accusations}
    assert accused
    assert accused <= {decoy.me for decoy in herd.decoys}
    for number in range(3):
        assert not list(herd.nodes[number].peer.context.accusations)


@besieged(4, lambda herd: ())
async def test_a_member_with_a_branch_of_its_own_draws_no_newcomer_off_a_line_with_its_quorum(herd):
    """A newcomer sees no quorum by itself, so it asks the members of its own line."""
    liar, chain = herd.nodes[3], herd.nodes[0].peer.context.views
    me = chain.newest.peers.index(liar.id)
    lone = branch_of(chain.newest, {me}, herd.nodes[0].applied + 5)
    proof = identity(3).sign(branch_domain("run"), encode(lone))
    own = cut(chain, chain.newest.number)
    assert own.extend(Certified(lone, proofs=((me, proof),)))
    lure = Lineage(2**61, lone.number, trail(own), (encode(own.views[-1]),), True)
    async with watcher(herd, 5) as peer:
        for _ in range(20):
            for message in (msgspec.structs.replace(lure, views=()), lure):
                peer.router.deliver(liar.id, Frame(liar.incarnation, message))
            await asyncio.sleep(1)
            assert peer.membership.branch is None
        assert peer.context.counters["dropped: branch of a line that has its quorum"] > 3


@contextlib.asynccontextmanager
async def watcher(herd, number):
    """A peer that has met the run and has not asked to be let in."""
    mine = identity(number)
    blob = seal(mine, Record("run", mine.peer, 1, 1, bytes(32)))
    links, terms = herd.network.links(mine.peer), RunTerms("run", 7, herd.founder)
    peer = Peer(terms, mine, links, None, incarnation=1, record=lambda: blob)
    async with peer.running():
        await peer.meet(herd.records(but=None), ON_TIME_S)
        yield peer
