"""A node that is away from its rounds: others keep their pace, and it stays in step."""

import asyncio

import pytest
from worlds.evaluated_run import STEP_S, evaluated
from worlds.waiting import now, until

from farflock.node.train.absence import STALL_S, Absence
from farflock.node.train.exchange_client import HOPELESS_S
from farflock.swarm.tasks import cancel

AWAY_S = 60.0


def away_once(node, seconds, after_s=0.0):
    """Let a node be away after its present step, once; return the times of both ends."""
    times, absence = [], Absence(node.peer, node.loop)

    async def work():
        await asyncio.sleep(seconds)

    async def pause():
        if not times:
            times.append(now())
            await absence.during(work(), after_s)
            times.append(now())

    node.loop.pause = pause
    return times


async def rounds_in(node, seconds):
    """Return how many rounds a node applies in this time."""
    first = node.next
    await asyncio.sleep(seconds)
    return node.next - first


@pytest.mark.parametrize("method", ["diloco"])
def test_while_one_is_away_for_30_rounds_the_others_keep_their_pace_and_it_stays_in(method):
    @evaluated(3, method, every=10**6)
    async def main(run):
        mate, away = run.nodes[0], run.nodes[1]
        await rounds_in(mate, 10)
        before = await rounds_in(mate, AWAY_S)
        times = away_once(away, AWAY_S)
        await until(lambda: times, 10, "the absence")
        during = await rounds_in(mate, AWAY_S)
        assert before >= AWAY_S / (4 * STEP_S) * 0.8
        assert during >= 0.95 * before
        await until(lambda: len(times) == 2, 10, "its end")
        assert times[1] - times[0] < AWAY_S + 2 * 4 * STEP_S
        assert not [kind for _, kind, _ in away.events if kind == "adopt"], "it stays in"
        back = away.next
        assert back >= mate.next - 1, "it has applied what the others decided"
        await rounds_in(mate, 10)
        participants = {number: parts for number, parts in mate.rounds().items() if number > back}
        assert participants
        assert all(away.id in parts for parts in participants.values()), "it is counted again"
        assert away.id not in mate.rounds()[back - 3]

    main()


@evaluated(3, every=40)
async def test_while_one_evaluates_for_30_rounds_the_others_keep_their_pace_and_it_stays_in(run):
    await rounds_in(run.nodes[0], 10)
    before = await rounds_in(run.nodes[0], AWAY_S)
    copies = {node: node.meter.copies for node in run.nodes}
    for node in run.nodes:
        node.meter.seconds = AWAY_S
    await until(lambda: any(node.meter.copies > copies[node] for node in run.nodes), 60, "a turn")
    (drawn,) = (node for node in run.nodes if node.meter.copies > copies[node])
    mates = [node for node in run.nodes if node is not drawn]
    number = drawn.next
    assert await rounds_in(mates[0], AWAY_S) >= 0.95 * before
    await rounds_in(mates[0], 10)
    assert all((number, drawn.id) in node.known for node in run.nodes), "all know its value"
    assert not [kind for _, kind, _ in drawn.events if kind == "adopt"], "it stays in"
    counted = [at for at, parts in mates[0].rounds().items() if drawn.id in parts and at >= number]
    measured_until = min(at for at in counted)
    assert measured_until - number >= 0.95 * before, "it contributed nothing meanwhile"
    assert counted == list(range(measured_until, counted[-1] + 1)), "and to each round since"
    assert drawn.evaluations[-1]["by"] == drawn.id


@evaluated(3, every=10**6)
async def test_an_absence_that_ends_within_a_round_costs_no_contribution(run):
    mate, away = run.nodes[0], run.nodes[1]
    await rounds_in(mate, 5)
    times, first = away_once(away, 0.3), mate.next
    await rounds_in(mate, 12)
    assert times[1] - times[0] < 0.6
    assert all(away.id in parts for number, parts in mate.rounds().items() if number > first)


@evaluated(3, every=10**6)
async def test_a_short_pause_is_not_announced(run):
    mate, away, said = run.nodes[0], run.nodes[1], []
    await rounds_in(mate, 5)
    away.peer.absences.leave = lambda nexts: said.append(nexts)
    times = away_once(away, STALL_S / 2, STALL_S)
    await rounds_in(mate, 12)
    assert len(times) == 2
    assert not said


@evaluated(2, every=10**6)
async def test_the_last_two_members_away_at_once_both_come_back(run):
    await rounds_in(run.nodes[0], 5)
    times = [away_once(node, AWAY_S) for node in run.nodes]
    await until(lambda: all(len(each) == 2 for each in times), AWAY_S + 20, "both back")
    assert await rounds_in(run.nodes[0], 12) >= 4


@evaluated(2, every=10**6)
async def test_a_failure_of_the_work_is_raised(run):
    absence = Absence(run.nodes[0].peer, run.nodes[0].loop)

    async def work():
        await asyncio.sleep(0.2)
        raise ValueError("broken")

    run.nodes[0].loop.stop()
    await asyncio.sleep(3)
    with pytest.raises(ValueError, match="broken"):
        await absence.during(work())


@evaluated(2, every=10**6, deadline_s=60.0)
async def test_a_survivor_waits_seconds_and_no_deadline_for_a_round_that_nobody_can_decide(run):
    senior, survivor = run.nodes
    await rounds_in(survivor, 10)
    run.network.kill(senior.id)
    await cancel(run.tasks.pop(0))
    for pace in (30.0 - HOPELESS_S - 2.0, 30.0):
        before = survivor.loop.step
        await asyncio.sleep(30.0)
        assert survivor.loop.step - before >= 0.95 * pace / STEP_S
