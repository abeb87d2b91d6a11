"""Pipelines on the simulated network: whatever dies or gets lost, each microbatch counts once at
each stage, with the gradient that the unsplit model has for it; nothing hangs, no peer's memory
grows, and unequal servers are all kept busy."""

import asyncio
import collections
from dataclasses import replace

import pytest
from worlds import pipeline_audit
from worlds.kills import POINTS, ScheduledKills
from worlds.pipeline_audit import TEXT, Audit, pipeline, plan
from worlds.seeds import blocks, each
from worlds.waiting import until

from farflock.node.model.llama import build
from farflock.node.pipeline.passes.stage import Stage
from farflock.node.pipeline.server.server import BACKWARD_COST
from farflock.node.run.terms import ServerTerms, TrainerTerms
from farflock.node.simulate.lives import identity_of
from farflock.node.simulate.pipeline import PeerRole, PipelineSimulation, PipelineWorld, parts
from farflock.swarm.paths.policy import NUMBERS
from farflock.swarm.sim.network import Faults, LinkModel
from farflock.swarm.sim.virtual_time import run_virtual

pytestmark = pytest.mark.usefixtures("quiet_log")

BATCH = 4  # microbatches
LARGE_BATCH = 8
TOKENS = 8 * BATCH
FOREVER = 10**9  # tokens of runs that a test ends
FEW_IN_FLIGHT = TrainerTerms(window=3, kept=64, forward_timeout_s=4.0, backward_timeout_s=6.0)


def audit(
    stages, servers, trainers=1, steps=None, seed=0, rate=None, world=None, batch=BATCH, **options
):
    """Return an audit to run, for a number of steps or for as long as the test wants."""
    total = pipeline_audit.TOKENS * batch * steps if steps else FOREVER
    around = {"limit_s": 900.0, "view_s": 2.0, "away_s": (3.0, 8.0)} | (world or {})
    made = plan(seed, total) if rate is None else plan(seed, total, rate=rate)
    return Audit(
        made,
        pipeline(stages, batch, **options),
        PipelineWorld(parts(stages, servers, trainers), total, **around),
    )


# paths


@pytest.mark.parametrize(
    "stages", [1, 4, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3))]
)
def test_gradients_through_random_paths_are_those_of_the_unsplit_model(stages):
    one = audit(stages, servers=3, trainers=2, steps=3, seed=stages, batch=LARGE_BATCH)
    one.run().check().check_finished()
    assert all(len(rounds) >= 3 for rounds in one.named.values())
    served = collections.Counter(life.stage for life, _, keys in one.taken if keys)
    assert all(served[stage] > 3 for stage in range(stages)), "every stage's work was one server's"


def test_with_weights_that_move_each_gradient_is_that_of_the_weights_along_its_way():
    one = audit(stages=3, servers=2, trainers=2, steps=4, rate=0.3).run().check().check_finished()
    assert one.mixed_versions > 0, "no microbatch was on its way while weights changed"


@pytest.mark.parametrize("rate", [0.3, pytest.param(None, marks=pytest.mark.ci_more)])
def test_where_paths_leave_stages_out_each_gradient_is_that_of_the_stages_on_its_path(rate):
    one = audit(
        4,
        servers=2,
        trainers=2,
        steps=6,
        seed=3,
        rate=rate,
        policy="skip:3",
        world={"churn_s": 15.0},
    )
    one.run().check().check_finished()
    orders = {one.order(key) for key in one.finished()}
    assert orders == {(0, 1, 3), (0, 2, 3)}
    for stage, rounds in one.named.items():
        assert {stage in one.order(key) for keys in rounds.values() for key in keys} == {True}
        share = len([key for keys in rounds.values() for key in keys]) / (BATCH * len(rounds))
        assert share == pytest.approx(1.0 if stage in (0, 3) else 0.5, rel=0.4), (
            "a stage's own batch"
        )
    newest = [max(rounds) for rounds in one.named.values()]
    assert max(newest) - min(newest) <= 2, "rounds keep step"
    assert min(newest) >= 4


def test_a_trainer_that_waits_for_each_round_trains_the_unsplit_model():
    terms = TrainerTerms(window=BATCH, kept=BATCH, forward_timeout_s=4.0, backward_timeout_s=6.0)
    one = audit(stages=3, servers=2, steps=5, rate=0.3, trainer=terms)
    one.in_lockstep().run().check().check_finished()
    me = identity_of(one.plan, 6).peer
    first = min(number for _, number in one.named[0][0])
    model = build(one.plan.model, one.plan.run_seed).double()
    optimizer, whole = one.plan.inner.build(model), Stage(model)
    for number in range(5):
        keys = [(me, first + number * BATCH + at) for at in range(BATCH)]
        assert all(rounds[number] == keys for rounds in one.named.values())
        one.train_unsplit(number, keys, model, optimizer, whole)
    assert {number for _, number in one.versions} >= {-1, 0, 1, 2, 3}


# deaths


@pytest.mark.parametrize(
    ("seed", "points", "patience_s"),
    [
        pytest.param(0, POINTS[2::4], 20.0, id="0"),
        pytest.param(1, POINTS[1::4], 60.0, id="1", marks=pytest.mark.ci_more),
        pytest.param(2, POINTS[0::4], 60.0, id="2", marks=pytest.mark.long),
        pytest.param(1, POINTS[3::4], 60.0, id="3", marks=pytest.mark.long),
    ],
)
def test_a_server_that_dies_at_any_point_of_the_protocol_loses_and_doubles_nothing(
    seed, points, patience_s
):
    """What test_pipeline_direct.py kills every day, this file kills among the long ones."""
    one = audit(stages=2, servers=2, seed=seed, trainer=FEW_IN_FLIGHT)
    kills = ScheduledKills(one, points)
    one.run(kills.until_all).check().check_finished(patience_s)
    assert one.tale.kills == len(kills.done)
    assert not kills.points
    assert len(one.finished()) > 20


def test_a_stage_that_dies_out_is_taken_up_again_by_returning_servers():
    one = audit(stages=3, servers=2, steps=6, rate=0.3)
    one.begun_anew = True

    async def die_out(sim):
        await until(lambda: sim.settled and len(one.named[1]) >= 3)
        counted = len(one.finished())
        for number, part in enumerate(one.world.parts):
            if part.stage == 1:
                sim.kill(number, 4.0 + number)
        await asyncio.sleep(3.0)
        assert len(one.finished()) <= counted + one.pipeline.trainer.kept

    one.run(die_out).check().check_finished()
    assert one.tale.kills == 2
    assert len(one.named[1]) >= 6


def test_a_trainer_that_dies_leaves_nothing_behind_and_others_go_on_also_its_next_life():
    terms = {"server": ServerTerms(lease_s=2.0), "trainer": FEW_IN_FLIGHT}
    one = audit(stages=2, servers=2, trainers=3, **terms)
    dead, back = (identity_of(one.plan, number).peer for number in (5, 6))

    async def kill_one(sim):
        await until(lambda: sim.settled and one.events["confirm answered"] >= 20)
        sim.kill(5, None)
        sim.kill(6, 3.0)
        before = len(one.finished())
        await asyncio.sleep(2 * one.pipeline.server.lease_s)
        for node in sim.nodes.values():
            if node.serving is not None:
                server = node.serving.server
                assert all(
                    trainer != dead
                    for trainer, _ in [*server.pending.gradients, *server.pending.replies]
                )
        assert len(one.finished()) > before + 5
        sim.end()

    one.run(kill_one).check().check_finished()
    named = [key for keys in one.named[0].values() for key in keys]
    assert any(trainer == dead for trainer, _ in named)
    assert len({number // NUMBERS for trainer, number in named if trainer == back}) == 2, (
        "only one of its lives counts"
    )


# late and lost


def test_a_backward_pass_that_comes_after_its_time_out_counts_once_and_its_copy_is_thrown_away():
    one = audit(stages=2, servers=2, steps=5)
    late = []

    def with_slow_ones(number, node):
        look(number, node)
        if node.serving is None or node.serving.index or late:
            return
        late.append(node.serving.server)
        run_pass = late[0].computing.run_pass

        async def slow_pass(work, cost):
            found = await run_pass(work, cost)
            if cost == BACKWARD_COST and late[0].served["backward"] in (2, 5):
                await asyncio.sleep(one.pipeline.trainer.backward_timeout_s + 1.0)
            return found

        late[0].computing = replace(late[0].computing, run_pass=slow_pass)

    look, one.watch = one.watch, with_slow_ones
    one.run().check().check_finished()
    asked = collections.Counter(
        key for life in one.lives if life.stage == 0 for key in life.computed
    )
    counted = collections.Counter(
        key for life in one.lives if life.stage == 0 for key in life.merged
    )
    assert max(asked.values()) == 2, "nothing was done twice"
    assert max(counted.values()) == 1
    assert late[0].served["backward"] > late[0].served["merged"]
    assert not [key for key in late[0].pending.gradients if asked[key] > 1]


def test_frames_that_are_lost_delayed_doubled_and_altered_change_nothing():
    one = audit(stages=2, servers=2, trainers=2, steps=5)

    async def spoil(sim):
        await until(lambda: sim.settled)
        sim.network.faults = Faults(
            loss=0.05, duplicate=0.1, reorder=0.1, corrupt=0.03, delay_s=1.5
        )

    one.run(spoil).check().check_finished()
    assert all(
        one.sim.network.fired[fault] > 20 for fault in ("loss", "duplicate", "reorder", "corrupt")
    )


# many


def swarm_of_24(seed, steps):
    """Five servers of each of four stages, and four trainers; servers die all the time,
    one line is bad."""
    world = {"churn_s": 4.0, "away_s": (3.0, 10.0)}
    one = audit(4, 5, trainers=4, steps=steps, seed=seed, world=world, batch=LARGE_BATCH)

    async def bad_line(sim):
        bad = identity_of(one.plan, 1 + seed % 19).peer
        sim.network.set_link(bad, LinkModel(latency_s=0.08, jitter_s=0.03, loss=0.05))

    one.run(bad_line).check().check_finished().check_memory()
    return one


@pytest.mark.parametrize(
    "seed",
    [pytest.param(0, marks=pytest.mark.ci_more), pytest.param(1, marks=pytest.mark.long)],
)
def test_a_swarm_of_24_with_churn_hangs_never_and_loses_and_doubles_nothing(seed):
    one = swarm_of_24(seed, steps=5)
    assert one.tale.kills >= 1


@pytest.mark.long
@blocks(0, 200, size=10)
def test_two_hundred_seeds_of_a_swarm_of_24_with_churn(seeds):
    kills = each(seeds, lambda seed: swarm_of_24(seed, steps=8).tale.kills)
    assert sum(kills) > 0, "there was no churn: 17 deaths in ten seeds are usual"


# throughput

SPEEDS = (1, 2, 4)
FORWARD_S = 0.4  # of the slowest
WARM_S = 30.0


def pace(policy, measured_s, seed=0):
    """Microbatches per second that come all the way back, of three unequal servers a stage."""
    serving = tuple(
        PeerRole(stage, forward_s=FORWARD_S / speed) for speed in SPEEDS for stage in range(3)
    )
    world = PipelineWorld((*serving, *([PeerRole(trains=True)] * 3)), FOREVER, limit_s=600.0)
    terms = {"server": ServerTerms(), "trainer": TrainerTerms()}
    rounds = []

    def with_lanes(number, node):
        if node.trainer is not None:
            # As lucky as can be: each has its own line of servers, where the policy has lines.
            node.trainer.source.lane = number

    async def main():
        sim = PipelineSimulation(
            plan(seed, FOREVER), pipeline(3, 48, policy=policy, **terms), world, TEXT, with_lanes
        )
        slow = LinkModel(1e5, 1e5, latency_s=0.15, jitter_s=0.02)
        sim.network.set_link(identity_of(plan(seed), 4).peer, slow)
        running = asyncio.create_task(sim.run())
        await asyncio.sleep(WARM_S)
        before = came_back(sim)
        await asyncio.sleep(measured_s)
        after = came_back(sim)
        rounds.append(min(node.stage_directory.epoch for node in sim.nodes.values()))
        sim.end()
        await running
        return (after - before) / measured_s

    def came_back(sim):
        servers = [node.serving for node in sim.nodes.values() if node.serving is not None]
        return sum(entry.server.served["merged"] for entry in servers if entry.index == 0)

    found = run_virtual(main())
    assert rounds[0] >= 0, "what is measured is to have rounds in it"
    return found


@pytest.mark.long
def test_unequal_servers_are_kept_busy_and_a_fixed_pipeline_does_not():
    # passes' worth of a microbatch at each stage
    forward = [
        1 + BACKWARD_COST,
        1 + BACKWARD_COST,
        BACKWARD_COST,
    ]
    ideal = min(sum(speed / FORWARD_S / cost for speed in SPEEDS) for cost in forward)
    swarm, fixed = pace("swarm", measured_s=100.0), pace("fixed", measured_s=15.0)
    assert 0.95 * ideal <= swarm <= 1.01 * ideal
    assert swarm > fixed
