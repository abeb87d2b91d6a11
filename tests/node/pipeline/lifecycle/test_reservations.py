"""Newcomers whose stage is left open spread over the stages, however many come at one moment."""

import asyncio
import collections
from types import SimpleNamespace

import pytest
from worlds.pipeline_audit import TEXT, pipeline, plan

from farflock.node.pipeline.lifecycle import reservations
from farflock.node.pipeline.lifecycle.reservations import HELD_S, MAX_RESERVED, Reservations
from farflock.node.pipeline.passes.requests import RESERVE, BadRequest, decode_reserved
from farflock.node.simulate.pipeline import PeerRole, PipelineSimulation, PipelineWorld
from farflock.swarm.sim.virtual_time import run_virtual

STAGES = 3


class Member:
    """A member's reservations: how many serve each stage, who is a member, what the time is."""

    def __init__(self, *servers):
        self.servers, self.members, self.now_s = servers, set(), 0.0
        passed = SimpleNamespace(admit=lambda caller, request, sizes: b"passed on")
        given = lambda: self.servers, self.members.__contains__, lambda: self.now_s
        self.reservations = Reservations(passed, *given)

    def sends(self, *newcomers):
        return [self.reservations.reserve(newcomer) for newcomer in newcomers]


def test_newcomers_are_counted_where_they_were_sent():
    assert sorted(Member(1, 0, 0).sends("a", "b")) == [1, 2]
    assert collections.Counter(Member(1, 0, 0).sends(*"abcdefgh")) == {0: 2, 1: 3, 2: 3}


def test_one_that_asks_again_is_counted_once():
    member = Member(0, 0, 9)
    assert len({*member.sends("a", "a", "a")}) == 1
    assert set(member.sends("a", "b")) == {0, 1}


def test_one_that_became_a_member_or_never_comes_is_counted_no_longer():
    member = Member(0, 5)
    assert member.sends("a", "b") == [0, 0]
    member.servers = (2, 5)
    member.members.update("ab")
    assert member.sends("c", "d", "e") == [0, 0, 0]
    member.now_s = HELD_S
    assert member.sends("f", "g", "h") == [0, 0, 0]


def test_few_are_remembered():
    member = Member(0)
    member.sends(*map(str, range(3 * MAX_RESERVED)))
    assert len(member.reservations) == MAX_RESERVED


def test_other_calls_are_passed_on():
    member = Member(0, 1)
    assert decode_reserved(member.reservations.admit("a", RESERVE, ())) == 0
    assert member.reservations.admit("a", b"else", ()) == b"passed on"


def test_a_stranger_is_told_a_stage_and_nothing_else():
    member = Member(0, 1)
    assert decode_reserved(member.reservations.greet("a", RESERVE)) == 0
    assert member.reservations.greet("a", b"else") is None


@pytest.mark.parametrize("raw", [b"", b"\x93", b"\x91\xa8reserved", b"\x92\xa8reserved\xff"])
def test_what_is_no_reservation_is_refused(raw):
    with pytest.raises(BadRequest):
        decode_reserved(raw)


def arrivals(seed, newcomers, within_s=2.0):
    """Return the stages that newcomers of one moment serve in a run that a server of the first
    stage has just begun, `within_s` seconds after they came."""

    async def main():
        roles = (PeerRole(0, trains=True), *[PeerRole(None)] * newcomers)
        world = PipelineWorld(roles, 10**9, apart_s=0.0, view_s=2.0)
        sim = PipelineSimulation(plan(seed), pipeline(STAGES), world, TEXT)
        running = asyncio.create_task(sim.run())
        await asyncio.sleep(within_s)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return [fields["stage"] for fields in sim.tale.fields("reserved")]

    return run_virtual(main())


@pytest.mark.parametrize("seed", range(20))
def test_two_of_one_moment_never_take_the_same_stage_while_another_has_no_server(seed):
    assert sorted(arrivals(seed, 2)) == [1, 2]


def test_many_of_one_moment_spread_evenly():
    stages = collections.Counter(arrivals(0, 8))
    assert stages == {0: 2, 1: 3, 2: 3}


def test_without_an_answer_newcomers_choose_for_themselves(monkeypatch):
    monkeypatch.setattr(reservations, "MAX_ASKED", 0)
    for seed in range(3):
        assert set(arrivals(seed, 2)) <= {1, 2}
