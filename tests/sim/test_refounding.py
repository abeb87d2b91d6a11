"""Voters that restart go on with the run, whichever lives its newest view lists."""

import asyncio
import collections
import functools
import random

import msgspec
from worlds.decisions import AT_ONCE
from worlds.herd import STREAM, Herd, grown
from worlds.waiting import now, until

from farflock.node.simulate.liars.ballots import ProposingLiar
from farflock.swarm.protocol import views
from farflock.swarm.protocol.votes import EARNED, VoteTerms
from farflock.swarm.sim.virtual_time import run_virtual
from farflock.swarm.stable.storage import MemoryStorage

SOON_S = 60.0


class Survivors(Herd):
    """A herd whose nodes keep their votes. A round may be decided anew in a re-founded view."""

    def __init__(self, **options):
        super().__init__(**options)
        self.disks = collections.defaultdict(MemoryStorage)
        self.by_view = {}

    def agreed(self, node, outcome, contents, name):
        number = outcome.key.round
        place = node.peer.context.views.at(number).hash, number
        result = (contents, outcome.participants, outcome.tokens, node.state)
        assert self.by_view.setdefault(place, result) == result, f"two results of round {number}"

    def check_tokens(self):
        """Each line has its own."""

    def restart(self, *numbers):
        for number in numbers:
            self.start(number)

    def are_one(self, *numbers):
        nodes = [self.nodes[number] for number in numbers]
        chains = [node.peer.context.chain for node in nodes]
        if None in chains or len({chain.newest.hash for chain in chains}) > 1:
            return False
        return all(node.peer.membership.is_member for node in nodes)

    async def goes_on(self, *numbers, within_s=SOON_S):
        """Wait until these nodes have rounds with all of them, and check that they are on one line
        without a branch."""
        moment_s = now()
        await until(lambda: self.are_one(*numbers), within_s, "one view of all")
        for number in numbers:
            await until(
                lambda number=number: any(
                    at_s > moment_s and status == "ok"
                    for at_s, _, status in self.nodes[number].events
                ),
                within_s - (now() - moment_s),
                f"a round with peer {number}",
            )
        chains = [self.nodes[number].peer.context.views for number in numbers]
        assert {chain.newest.branches for chain in chains} == {0}


def survivors(count, **options):
    """Run a test with a herd of `count` nodes that keep their votes, in virtual time."""

    def decorate(main):
        @functools.wraps(main)
        def test():
            async def whole():
                herd = Survivors()
                for name, value in options.items():
                    setattr(herd, name, value)
                await grown(herd, count)
                await asyncio.sleep(12)  # votes are earned
                await main(herd)
                await herd.end()

            run_virtual(whole())

        del test.__wrapped__
        return test

    return decorate


FOUNDER_ALONE = VoteTerms(after_rounds=10**6, at_once_below=1)


@survivors(3, votes=FOUNDER_ALONE)
async def test_a_run_goes_on_once_its_only_voter_is_back(herd):
    assert [node.view.learners for node in herd.nodes.values()] == [(1, 2)] * 3
    herd.kill(0)
    await asyncio.sleep(5)
    herd.restart(0)
    await herd.goes_on(0, 1, 2)
    assert herd.nodes[0].view.refoundings == 1
    assert "lost" not in {status for node in herd.nodes.values() for _, _, status in node.events}


@survivors(3, votes=AT_ONCE)
async def test_two_of_three_voters_that_restart_at_once_stop_the_run_for_less_than_a_minute(herd):
    for number in (1, 2):
        herd.kill(number)
    await asyncio.sleep(1)
    herd.restart(1, 2)
    await herd.goes_on(0, 1, 2)
    assert herd.nodes[0].view.refoundings == 1


@survivors(3, votes=AT_ONCE, has_checkpoints=True)
async def test_all_voters_restart_at_once_and_go_on(herd):
    """As after a power cut: nobody is left that knows the views, except from its disk."""
    number = herd.nodes[0].view.number
    for each in range(3):
        herd.kill(each)
    await asyncio.sleep(1)
    herd.restart(0, 1, 2)
    await herd.goes_on(0, 1, 2)
    assert herd.nodes[0].view.number > number


@survivors(4, votes=AT_ONCE, has_checkpoints=True)
async def test_a_rolling_restart_of_all_stops_nothing_for_long(herd):
    for number in range(4):
        herd.kill(number)
        await asyncio.sleep(2)
        herd.restart(number)
        await asyncio.sleep(4)
    await herd.goes_on(0, 1, 2, 3)


def test_whatever_restarts_when_the_run_goes_on_on_one_line():
    for seed in range(40):
        run_virtual(_restarted_at_random(seed))


async def _restarted_at_random(seed):
    draw = random.Random(f"restarts/{seed}")
    herd = Survivors(seed=seed)
    herd.votes, herd.has_checkpoints = draw.choice([AT_ONCE, FOUNDER_ALONE, EARNED]), True
    count = draw.randint(2, 5)
    await grown(herd, count)
    await asyncio.sleep(draw.uniform(0, 15))
    for _ in range(draw.randint(1, 4)):
        hit = draw.sample(range(count), draw.randint(1, count))
        for number in hit:
            herd.kill(number)
        await asyncio.sleep(draw.uniform(0, 12))
        for number in hit:
            herd.restart(number)
            await asyncio.sleep(draw.uniform(0, 3))
        await asyncio.sleep(draw.uniform(0, 25))
    try:
        await herd.goes_on(*range(count), within_s=2 * SOON_S)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    await herd.end()


def refounding(herd, number, first_round):
    """A liar proposes the newest view re-founded by all its keys, from this round on."""
    node = herd.nodes[number]

    def value_of(liar, key):
        members = tuple(
            msgspec.structs.replace(each, incarnation=herd_life(herd, each.peer))
            for each in liar.view.members
        )
        view = views.refounded(liar.view, members, first_round(node.applied))
        return views.encode(msgspec.structs.replace(view, ballot=1))

    class Refounds(ProposingLiar):
        proposals, of_views = (value_of,), True

    return Refounds(node.peer, node.identity).lying()


def herd_life(herd, peer):
    return next(each.incarnation for each in herd.nodes.values() if each.id == peer)


def test_nobody_signs_a_re_founding_of_a_view_that_can_go_on():
    """A liar would have the run forget rounds, or break off the one that is open."""
    for first_round in (lambda applied: applied - 2, lambda applied: applied + 1):
        run_virtual(_nobody_signs(first_round))


async def _nobody_signs(first_round):
    herd = Survivors()
    herd.votes = AT_ONCE
    await grown(herd, 4)
    async with refounding(herd, 3, first_round):
        for _ in range(3):
            await herd.goes_on(0, 1, 2)
            await asyncio.sleep(5)
    assert {herd.nodes[number].view.refoundings for number in (0, 1, 2)} == {0}
    await herd.end()


def test_voters_that_are_back_begin_where_their_state_ends_whatever_another_proposes():
    for first_round in (lambda applied: applied + 1000, lambda applied: max(0, applied - 6)):
        run_virtual(_begun_by_a_liar(first_round))


async def _begun_by_a_liar(first_round):
    herd = Survivors()
    herd.votes = AT_ONCE
    await grown(herd, 3)
    await asyncio.sleep(12)
    async with refounding(herd, 0, first_round):
        for number in (1, 2):
            herd.kill(number)
        applied = herd.nodes[0].applied
        await asyncio.sleep(1)
        herd.restart(1, 2)
        await until(lambda: herd.are_one(1, 2), SOON_S, "one view of both")
        newest = herd.nodes[1].peer.context.views
        assert newest.newest.refoundings == 1
        assert applied <= newest.refounded_at <= applied + 3
    await herd.end()


@survivors(3, votes=AT_ONCE)
async def test_a_voter_that_has_lost_its_disk_waits_for_the_others(herd):
    """It may have promised anything."""
    number = herd.nodes[0].view.number
    for each in (1, 2):
        herd.kill(each)
        herd.disks[each] = MemoryStorage()
    await asyncio.sleep(1)
    herd.restart(1, 2)
    await asyncio.sleep(SOON_S)
    assert herd.nodes[0].view.number == number


class FullDisk(MemoryStorage):
    """A disk without any room."""

    def write(self, name, content):
        raise OSError(28, "No space left on device")


@survivors(2, votes=AT_ONCE)
async def test_a_voter_tells_nobody_what_its_disk_does_not_keep(herd):
    herd.disks[2] = FullDisk()
    node = herd.start(2)
    await herd.goes_on(0, 1, 2)
    await until(lambda: len(node.view.electorate.voters) == 3, 30, "three voters")
    newest = node.view
    herd.start(3)
    await herd.goes_on(0, 1, 2, 3)
    chain = node.peer.context.views
    later = [entry for entry in chain.views if entry.view.number > newest.number]
    assert later
    signers = {index for entry in later[:1] for index, _ in entry.proofs}
    assert newest.peers.index(node.id) not in signers


@survivors(3, votes=AT_ONCE)
async def test_a_founder_goes_on_alone_with_its_views_where_its_vote_alone_decides(herd):
    node = herd.nodes[0]
    for number in (1, 2):
        herd.nodes[number].peer.leave()
        await until(lambda number=number: herd.nodes[number].id not in node.members, 30, "a view")
        herd.kill(number)
    chain = node.peer.context.views
    herd.kill(0)
    herd.nodes = {}
    back = herd.start(0)
    await until(lambda: len(back.served()) > 1, 30, "rounds")
    assert back.view.refoundings == 1
    assert back.peer.context.views.by_hash(chain.newest.hash) is not None


@survivors(3, votes=AT_ONCE)
async def test_a_founder_whose_vote_is_not_enough_begins_the_run_again(herd):
    for number in range(3):
        herd.kill(number)
    herd.nodes = {}
    back = herd.start(0)
    await until(lambda: len(back.served()) > 1, 30, "rounds")
    assert back.peer.context.views.views[0].view.number == 0
    assert back.peer.context.views.views[0].view.members[0].incarnation == back.incarnation


@survivors(3, votes=AT_ONCE)
async def test_a_voter_that_is_back_accepts_no_view_that_leaves_its_old_rounds_open(herd):
    """What voters in their old lives have decided may be gone. It repeats what it has accepted."""
    for number in (1, 2):
        herd.kill(number)
    await asyncio.sleep(1)
    node = herd.start(1)
    next_view = node.peer.membership.next_view
    await until(lambda: next_view.refounding.is_back, 30, "the voter's return")
    ordinary = views.successor(node.view, (*node.view.members[:1], node.view.members[2]))
    value = views.encode(msgspec.structs.replace(ordinary, first_round=node.applied + 3))
    decision = next_view.open_decision()
    assert decision.rules.refuses(value)
    decision.accepted = (1, 0), value
    assert not decision.rules.refuses(value)


@survivors(5, votes=AT_ONCE)
async def test_a_decided_round_whose_content_is_gone_is_abandoned_and_decided_again(herd):
    """Its holders died one after the other, so that a quorum of each view was alive."""
    survivors = {herd.nodes[number].id for number in (3, 4)}
    herd.network.tap = lambda when_s, sender, to, packed: (
        None if to in survivors and b"piece" in packed else packed
    )
    states = [herd.nodes[number].peer.rounds.streams[STREAM] for number in (3, 4)]
    await until(
        lambda: all(any(not entry.complete for entry in state.log.values()) for state in states),
        30,
        "a decision without content",
    )
    number, served = states[0].whole + 1, len(herd.nodes[3].served())
    for holder in (0, 1, 2):
        herd.kill(holder)
        there = 4 - holder
        await until(lambda there=there: len(herd.nodes[3].members) == there, 30, "a view")
    herd.network.tap = None
    await herd.goes_on(3, 4)
    chain = herd.nodes[3].peer.context.views
    assert (chain.newest.refoundings, chain.refounded_at) == (1, number)
    assert len(herd.nodes[3].served()) > served
    assert "lost" not in {status for at in (3, 4) for _, _, status in herd.nodes[at].events}


@survivors(5, votes=AT_ONCE)
async def test_no_round_is_abandoned_while_a_holder_of_its_content_is_there(herd):
    """However slow the line of the other is: its vote alone would be enough."""
    slow = herd.nodes[0].id
    herd.network.tap = lambda when_s, sender, to, packed: (
        None if to == slow and b"piece" in packed else packed
    )
    node = herd.nodes[0]
    state = node.peer.rounds.streams[STREAM]
    await until(lambda: any(not each.complete for each in state.log.values()), 30, "a decision")
    number = state.whole + 1
    for other in (1, 2, 3):
        herd.kill(other)
        there = 5 - other
        await until(lambda there=there: len(node.members) == there, 30, "a view")
    assert herd.nodes[4].peer.rounds.floor() > number == node.peer.rounds.floor()
    await asyncio.sleep(15)
    herd.network.tap = None
    await herd.goes_on(0, 4)
    assert herd.nodes[0].peer.context.views.refounded_at > number
    assert "lost" not in {status for at in (0, 4) for _, _, status in herd.nodes[at].events}


@survivors(3, votes=AT_ONCE)
async def test_a_voter_that_is_back_signs_only_what_begins_where_its_state_ends(herd):
    for number in (1, 2):
        herd.kill(number)
    await asyncio.sleep(1)
    node = herd.start(1)
    refounding_here = node.peer.membership.next_view.refounding
    await until(lambda: refounding_here.is_back, 30, "the voter's return")
    await until(lambda: refounding_here.is_stuck, 30, "the end of the wait for the other")
    reached, lead = refounding_here.reached(), node.peer.context.lead
    assert reached == node.applied + 1

    def why(first_round):
        newest = node.view
        return refounding_here.unjustified(views.refounded(newest, newest.members, first_round))

    assert [why(reached), why(reached + lead)] == [None, None]
    assert f"this peer's next one is {reached}" in why(reached - 1)
    assert f"this peer's next one is {reached}" in why(reached + lead + 1)
