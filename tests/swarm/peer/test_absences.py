"""A member that is away: nobody waits for it, and it is counted again when it is back."""

import asyncio

import pytest
from worlds.herd import STREAM, in_virtual_time
from worlds.waiting import until

from farflock.swarm.frame import unpack
from farflock.swarm.messages import Away, Key
from farflock.swarm.peer.absences import AHEAD, REPEAT_S, REPEATS
from farflock.swarm.sim.network import Faults

KINDS = pytest.mark.parametrize("kind", ["mean", "gather"])
ROUND_S = 1.6  # for a step of a second and the exchange: far below the wait for a silent member


async def gone_quiet(node):
    """Let a node end its round, and begin no more."""
    node.quiet = True
    await until(lambda: not node.peer.waits(), 20, "the end of its own round")


def nexts(node):
    return [(STREAM, node.peer.rounds.newest(STREAM) + 1)]


async def passed(node, rounds, within_s):
    number = node.applied + rounds
    await until(lambda: node.applied >= number, within_s, "rounds at the members' own pace")


@KINDS
def test_others_go_on_at_their_pace_without_a_member_that_is_away_and_wait_for_it_later(kind):
    @in_virtual_time(3, kind=kind)
    async def main(herd):
        away, mate = herd.nodes[1], herd.nodes[0]
        await gone_quiet(away)
        away.peer.absences.leave(nexts(away))
        await passed(mate, 1, 10)
        start = mate.applied
        await passed(mate, 6, 6 * ROUND_S)
        during = [parts for number, (_, parts, _, _) in herd.results.items() if number > start]
        assert not any(away.id in participants for participants in during)
        assert away.peer.decided(STREAM, mate.applied - 1), "it has what others decided"
        away.applied, away.state, away.tokens = mate.applied, mate.state, mate.tokens
        away.peer.absences.come_back(nexts(away))
        away.quiet, mark = False, mate.applied
        await passed(mate, 5, 20)
        after = [parts for number, (_, parts, _, _) in herd.results.items() if number > mark + 2]
        assert after
        assert all(away.id in participants for participants in after), "it is waited for again"

    main()


@in_virtual_time(2, kind="gather", group=2)
async def test_a_pairs_partner_that_is_away_is_not_waited_for(herd):
    away, mate = herd.nodes[1], herd.nodes[0]
    await gone_quiet(away)
    away.peer.absences.leave([(STREAM, mate.applied + 1)])
    await passed(mate, 1, 20)
    await passed(mate, 6, 6 * ROUND_S)


@in_virtual_time(2)
async def test_a_lost_word_is_said_again(herd):
    away, mate = herd.nodes[1], herd.nodes[0]
    await gone_quiet(away)
    mate.quiet = True  # in rounds that are lost, the one that is away would fall behind for good
    herd.network.faults = Faults(loss=0.6)
    away.peer.absences.leave(nexts(away))
    heard = mate.peer.context.is_away
    key = Key(STREAM, mate.applied + 5)
    await until(lambda: heard(away.id, key), 30, "the word")
    away.peer.absences.come_back([(STREAM, key.round)])
    await until(lambda: not heard(away.id, key), 30, "the other word")


@in_virtual_time(2)
async def test_the_word_of_a_stranger_or_for_an_unknown_stream_takes_no_memory(herd):
    node, other = herd.nodes[0], herd.nodes[1]
    for place in range(100):
        node.peer.absences.receive(f"stranger{place}", 1, Away(Key(STREAM, 9)))
        node.peer.absences.receive(other.id, other.incarnation, Away(Key(f"x{place}", 9)))
        node.peer.absences.receive(other.id, other.incarnation - 1, Away(Key(STREAM, 9)))
    assert not node.peer.context.away
    assert node.peer.context.counters["dropped: absence of a stranger"] == 300


@in_virtual_time(2)
async def test_the_word_is_renewed_well_before_it_ends_and_not_with_each_round(herd):
    node, said = herd.nodes[0], []
    node.peer.context.links.send = lambda peer, frame: said.append(unpack(frame).message) or True
    for number in range(100, 100 + 4 * AHEAD):
        node.peer.absences.leave([(STREAM, number)])
        assert said[-1].key.round >= number + AHEAD // 2
    assert len(said) <= 10


@in_virtual_time(2)
async def test_what_is_said_of_one_stream_does_not_end_what_is_repeated_of_another(herd):
    node, said = herd.nodes[0], []
    node.peer.context.links.send = lambda peer, frame: said.append(unpack(frame).message) or True
    absences, now = node.peer.absences, node.peer.context.now
    absences.leave([("first", 1), ("second", 1)])
    absences.come_back([("second", 3)])
    ends_s = now() + 2 * REPEATS * REPEAT_S
    while now() < ends_s:  # in place of the peer's own ticks, which heartbeats would hide
        said.clear()
        absences.tick()
        await asyncio.sleep(REPEAT_S)
    last = [each.key for each in said if isinstance(each, Away)]
    assert last == [Key("first", 1 + AHEAD)], "one is still away, the other has been heard enough"
