"""The end of a run of an exact method for a node, and the peers that it then waits for."""

import asyncio
import collections
from types import SimpleNamespace

import pytest

from farflock.node.train.end_barrier import (
    CUT_OFF_S,
    END_S,
    FRUITLESS_ROUNDS,
    LOOK_EVERY_S,
    EndBarrier,
)
from farflock.swarm.messages import Key
from farflock.swarm.peer.tallies import TallyReport
from farflock.swarm.sim.virtual_time import run_virtual

TOTAL = 100
PATIENCE_S = 7.0


class Here:
    """A peer, a driver and a state sync in one; `said` has others' last words by stream, peer."""

    def __init__(self, members=2):
        self.time_s, self.alone, self.agreed, self.estimate = 0.0, False, 0, 0
        self.newest = SimpleNamespace(members=[None] * members)
        self.context = self.views = self.rounds = self.tallies = self
        self.pending, self.next_rounds = (), {"delta": 4}
        self.streams = [SimpleNamespace(deadline_s=PATIENCE_S)]
        self.said = {"delta": {"mate": TallyReport(True, 4)}}
        self.ended, self.heard, self.open_rounds = {}, collections.Counter(), set()

    def now(self):
        return self.time_s

    @property
    def position(self):
        return SimpleNamespace(agreed_tokens=self.agreed)

    @property
    def tokens(self):
        return self.estimate

    def end(self, name, stage, number):
        assert stage is None
        self.ended[name] = number

    def reports(self, name):
        # a peer that has told nothing has no book
        return {
            "me": TallyReport(True, self.ended[name]),
            **self.said[name],
        }

    def called(self, name):
        return name in self.open_rounds

    def heard_of(self, name, number):
        self.heard[name] = max(self.heard[name], number)


@pytest.fixture
def here():
    return Here()


def due(together, here, agreed, estimate, time_s=0.0):
    here.agreed, here.estimate, here.time_s = agreed, estimate, time_s
    return together.is_due(TOTAL)


def test_the_run_is_over_with_its_agreed_tokens_whatever_a_node_has_done_since(here):
    together = EndBarrier(here, here, here)
    assert not due(together, here, 99, 99)
    assert not due(together, here, 99, 150)
    assert due(together, here, 100, 150)
    assert due(EndBarrier(here, here, here), here, 130, 130), (
        "also for a peer that comes in only then"
    )


def test_a_peer_that_heard_no_other_for_long_goes_by_its_estimate(here):
    together, here.alone = EndBarrier(here, here, here), True
    assert not due(together, here, 50, 120, 1.0)
    assert not due(together, here, 50, 120, 0.9 + CUT_OFF_S)
    assert due(together, here, 50, 120, 1.0 + CUT_OFF_S)
    assert not due(together, here, 50, 99, 1.0 + CUT_OFF_S), "which says that it is not over"


def test_a_peer_that_was_slow_to_answer_is_not_gone(here):
    together = EndBarrier(here, here, here)
    for time_s, alone in (
        (0.0, True),
        (CUT_OFF_S - 1, False),
        (CUT_OFF_S + 1, True),
        (2 * CUT_OFF_S, True),
    ):
        here.alone = alone
        assert not due(together, here, 50, 120, time_s), time_s
    assert due(together, here, 50, 120, 2 * CUT_OFF_S + 1)


def test_a_run_of_one_member_is_not_cut_off():
    here = Here(members=1)
    together, here.alone = EndBarrier(here, here, here), True
    assert not due(together, here, 50, 120, 0.0)
    assert not due(together, here, 50, 120, 10 * CUT_OFF_S)


def test_where_nothing_is_ever_agreed_upon_a_run_ends_when_it_could_have_been_trained_again(here):
    together, long_s = EndBarrier(here, here, here), FRUITLESS_ROUNDS * PATIENCE_S
    assert not due(together, here, 0, 10)
    assert not due(together, here, 40, 60, 1.0)
    assert not due(together, here, 40, 159, 1.0 + long_s)
    assert not due(together, here, 40, 160, 0.9 + long_s), "a round may be under way"
    assert due(together, here, 40, 160, 1.0 + long_s)
    assert not due(together, here, 45, 165, 1.0 + long_s), (
        "something was agreed upon: from here on it counts anew"
    )
    assert due(together, here, 45, 265, 1.0 + 2 * long_s)


def ended_after_s(here, changes=(), stopping=lambda: False):
    """The time that it waits, and the named wait just before each change."""
    together, taken, waits = EndBarrier(here, here, here), [], []

    async def main():
        loop = asyncio.get_running_loop()
        here.now = loop.time

        async def take_in():
            taken.append(loop.time())

        def change(what):
            waits.append(together.waits())
            what()

        for at_s, what in changes:
            loop.call_later(at_s, change, what)
        await together.end(take_in, stopping)
        assert together.waits() == []
        assert len(taken) >= loop.time() / LOOK_EVERY_S
        return loop.time()

    return run_virtual(main()), waits


def test_it_goes_at_once_where_all_have_ended_with_its_rounds(here):
    assert ended_after_s(here) == (0.0, [])
    assert here.ended == {"delta": 4}


def test_before_it_has_told_anything_it_waits_for_no_peer(here):
    together, seen = EndBarrier(here, here, here), []

    async def take_in():
        seen.append(together.waits())

    run_virtual(together.end(take_in, lambda: False))
    assert seen == [[]]


def test_it_waits_for_a_peer_that_has_not_ended(here):
    here.said["delta"]["mate"] = TallyReport(False, 4)
    took_s, ((wait,),) = ended_after_s(
        here, [(3.02, lambda: here.said["delta"].update(mate=TallyReport(True, 4)))]
    )
    assert took_s == pytest.approx(3.05)
    assert (wait.what, wait.whom) == (Key("delta", 4), ("mate",))
    assert wait.left_s == pytest.approx(PATIENCE_S + END_S - 3.02)


def test_it_tells_nothing_while_an_exchange_of_its_own_is_open(here):
    here.pending = ("an exchange",)

    def answer():
        assert here.ended == {}
        here.pending = ()

    took_s, (waits,) = ended_after_s(here, [(2.02, answer)])
    assert took_s == pytest.approx(2.05)
    assert waits == []


def test_it_asks_for_a_round_that_only_another_has_and_goes_once_that_is_in_its_state(
    here,
):
    here.said["delta"]["mate"] = TallyReport(True, 5)

    def apply():
        assert here.heard["delta"] == 5
        here.next_rounds = {"delta": 5}

    assert ended_after_s(here, [(1.02, apply)])[0] == pytest.approx(1.05)
    assert here.ended == {"delta": 5}


def test_all_streams_must_agree_and_none_be_open(here):
    here.next_rounds = {"delta": 4, "mask": 9}
    here.said["mask"] = {"mate": TallyReport(True, 8)}
    here.open_rounds = {"delta"}
    changes = [
        (1.02, lambda: here.said["mask"].update(mate=TallyReport(True, 9))),
        (2.02, here.open_rounds.clear),
    ]
    assert ended_after_s(here, changes)[0] == pytest.approx(2.05)


def test_it_waits_no_longer_than_a_round_and_a_little_and_not_at_all_for_the_user(here):
    here.said["delta"]["mate"] = TallyReport(False, 4)
    assert ended_after_s(here)[0] == pytest.approx(PATIENCE_S + END_S, abs=2 * LOOK_EVERY_S)
    assert ended_after_s(here, stopping=lambda: True)[0] == 0.0
