"""A server moves after a second look, one server at a time, and for load only now and then."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from farflock.node.pipeline.lifecycle.rebalancer import RESCUE_EVERY, LifeOver, Rebalancer, due_move
from farflock.node.run.terms import EMERGENCY_S, RebalanceTerms
from farflock.swarm.messages import Load
from farflock.swarm.protocol.rebalance import LoadSnapshot, ServerLoad
from farflock.swarm.sim.virtual_time import run_virtual

MERGED_AFTER_S = 2.0


def server(peer, queue=1.0, resident_s=1000.0):
    return ServerLoad(peer, queue, 1.0, 1000, resident_s)


def snapshot(number, *stages):
    return LoadSnapshot(
        number, tuple(tuple(server(peer) for peer in stage) for stage in stages), (1,) * len(stages)
    )


def test_a_stage_that_lost_its_servers_gets_one_after_two_looks_and_then_not_another_at_once():
    balance = RebalanceTerms(every_s=0.0)
    first = RESCUE_EVERY * 5
    moves = []
    for number in range(first - 2, first + RESCUE_EVERY + 1):
        before = snapshot(number - 1, ["a", "b"], []) if number > first - 2 else None
        moves.append(due_move(balance, snapshot(number, ["a", "b"], []), before))
    assert [move.number for move in moves if move] == [first, first + RESCUE_EVERY]
    assert {(move.peer, move.target) for move in moves if move} == {("a", 1)}


def test_a_stage_that_is_empty_for_the_first_time_may_be_waiting_for_its_first_server():
    balance, number = RebalanceTerms(), RESCUE_EVERY * 3
    assert (
        due_move(balance, snapshot(number, ["a", "b"], []), snapshot(number - 1, ["a", "b"], ["c"]))
        is None
    )
    assert (
        due_move(balance, snapshot(number, ["a", "b"], []), snapshot(number - 2, ["a", "b"], []))
        is None
    )
    assert due_move(balance, snapshot(number, ["a", "b"], []), None) is None


def test_a_stage_that_a_full_replica_holds_is_not_lost():
    balance, number = RebalanceTerms(every_s=0.0), RESCUE_EVERY * 3
    held = replace(snapshot(number, ["a", "b"], []), replicas=1)
    assert due_move(balance, held, replace(held, number=number - 1)) is None
    gone = snapshot(number + RESCUE_EVERY, ["a", "b"], [])
    assert due_move(balance, gone, replace(held, number=gone.number - 1)) is None, (
        "it may be back, or servers may come"
    )
    assert due_move(balance, gone, replace(gone, number=gone.number - 1)).target == 1


def test_for_load_a_server_moves_only_once_in_n_periods():
    balance = RebalanceTerms(every_s=300.0)
    loaded = [
        LoadSnapshot(
            number,
            ((server("a", 0.0), server("b", 0.0), server("c", 0.0)), (server("d", 90.0),)),
            (1, 1),
        )
        for number in range(61)
    ]
    assert [entry.number for entry in loaded if due_move(balance, entry, None)] == [0, 30, 60]
    assert not any(due_move(RebalanceTerms(every_s=0.0), entry, None) for entry in loaded)


@pytest.mark.parametrize("every_s", [-1.0, 3.0, float("nan")])
def test_periods_that_are_none_are_refused(every_s):
    with pytest.raises(ValueError, match="usually 300"):
        RebalanceTerms(every_s=every_s)


def test_the_mover_ends_its_life_with_where_to_go_and_no_other_does():
    async def life(me, snapshots):
        now = asyncio.get_running_loop().time
        said = []
        loads = SimpleNamespace(say=said.append, snapshot=lambda number, needs: snapshots(number))
        peer = SimpleNamespace(me=me, run_s=now, loads=loads)

        def load(number):
            return Load(number, 0.0, 1.0, 1, 0.0)

        rebalancer = Rebalancer(
            peer, RebalanceTerms(), (1, 1), load, lambda: asyncio.sleep(MERGED_AFTER_S)
        )
        try:
            async with asyncio.timeout(20 * EMERGENCY_S):
                await rebalancer.run()
        except LifeOver as over:
            return over.stage, now(), [load.number for load in said]
        except TimeoutError:
            return None, now(), [load.number for load in said]

    def lost(number):
        return (
            snapshot(number, ["a", "b"], []) if number >= 3 else snapshot(number, ["a", "b"], ["c"])
        )

    stage, at_s, said = run_virtual(life("a", lost))
    assert stage == 1
    assert at_s == pytest.approx((RESCUE_EVERY + 0.5) * EMERGENCY_S + MERGED_AFTER_S)
    assert said == list(range(RESCUE_EVERY + 1))
    assert run_virtual(life("b", lost))[0] is None
    assert run_virtual(life("a", lambda number: None))[0] is None, (
        "a snapshot that is not whole moves no server"
    )
