"""Members that bring nothing cost the others little time, and are waited for again once they do."""

import asyncio

import pytest
from worlds.herd import STREAM, in_virtual_time, stream
from worlds.waiting import until

from farflock.node.simulate.liars.claims import Withholds
from farflock.swarm.messages import Decided, Key
from farflock.swarm.peer.rounds.round_log import (
    LOG_ROUNDS,
    MISSED,
    PROBATION,
    LoggedRound,
    StreamState,
    is_probation,
    laggards,
)
from farflock.swarm.protocol.exchange.close_list import CloseList

IDLE, DEADLINE_S = 3, 8.0


def those_waited_for(herd, number):
    node = herd.nodes[0]
    state, peers = node.peer.rounds.streams[STREAM], node.view.peers
    late = () if is_probation(state.stream, number) else laggards(state, peers)
    return {peer for index, peer in enumerate(peers) if index not in late}


async def pace(herd, lasts_s, number=0):
    """The rounds of one node in this time, by second."""
    begun = herd.nodes[number].applied
    await asyncio.sleep(lasts_s)
    return (herd.nodes[number].applied - begun) / lasts_s


def plain(herd):
    """A round to come in which a laggard is not waited for in full."""
    number = herd.nodes[0].applied + 1
    return number if number % PROBATION else number + 1


@in_virtual_time(4, deadline_s=DEADLINE_S)
async def test_a_member_that_brings_nothing_costs_little_after_three_rounds(herd):
    usual = await pace(herd, 40)
    herd.nodes[IDLE].quiet = True
    await asyncio.sleep((MISSED + 1) * DEADLINE_S / 2 + 2)
    assert herd.nodes[IDLE].id not in those_waited_for(herd, plain(herd))
    assert herd.nodes[0].id in those_waited_for(herd, plain(herd))
    assert await pace(herd, 80) > max(0.6 * usual, 1.5 * 2 / DEADLINE_S)
    herd.nodes[IDLE].quiet = False
    await until(
        lambda: herd.nodes[IDLE].id in those_waited_for(herd, plain(herd)), 20, "its return"
    )


@pytest.mark.parametrize("number", range(4))
def test_a_member_that_keeps_what_it_reduces_costs_little_after_three_rounds(number):
    @in_virtual_time(4, deadline_s=DEADLINE_S)
    async def main(herd):
        node, watched = herd.nodes[number], (number + 1) % 4
        usual = await pace(herd, 40, watched)
        async with Withholds(node.peer, node.identity).lying():
            await asyncio.sleep((MISSED + 1) * DEADLINE_S)
            assert await pace(herd, 80, watched) > 0.6 * usual

    main()


def state_of(*rounds, group="abcd"):
    """A stream whose rounds counted these members."""
    state = StreamState(stream())
    for number, counted in enumerate(rounds):
        members = tuple((group.index(peer), 1.0) for peer in counted)
        key = Key(STREAM, number)
        decided = Decided(key, bytes(32), b"", (0, 0), ())
        close = CloseList((), members, 0)
        state.log[number] = LoggedRound(close, tuple(group), len(group), decided, ())
        state.newest = number
    return state


def late(state, peers="abcd"):
    return "".join(peers[index] for index in sorted(laggards(state, tuple(peers))))


def test_a_laggard_has_missed_the_newest_round_and_three_in_all():
    assert late(state_of("abc", "abc")) == ""
    assert late(state_of("abc", "abc", "abc")) == "d"
    assert late(state_of("abc", "abcd", "abc", "abd", "abc")) == "d"
    assert late(state_of("abc", "abc", "abc", "abcd")) == ""
    assert late(state_of("ab", "ab", "ab"), "dcbae") == "dc", "a newcomer has missed none"


def test_in_each_eighth_round_all_are_waited_for():
    found = [is_probation(stream(first=0, stride=2), 2 * number) for number in range(PROBATION + 1)]
    assert found == [True, *[False] * (PROBATION - 1), True]


def test_rounds_that_counted_nobody_say_nothing_of_anybody():
    assert late(state_of("", "", "", "")) == ""
    assert late(state_of("abc", "", "abc", "", "abc", "")) == "d"


def test_the_log_has_more_rounds_than_a_member_may_miss():
    assert MISSED < PROBATION <= LOG_ROUNDS
