"""Pipelines whose payloads go from server to server: nothing differs but the way, and whatever dies
or gets lost, each microbatch counts once at each stage, with the unsplit model's gradient."""

import asyncio

import pytest
import torch
from worlds.kills import POINTS, ScheduledKills
from worlds.pipeline_audit import TOKENS, Audit, pipeline, plan
from worlds.seeds import blocks, each
from worlds.waiting import until

from farflock.node.run.terms import TrainerTerms
from farflock.node.simulate.lives import identity_of
from farflock.node.simulate.pipeline import PipelineWorld, parts
from farflock.swarm.frame import unpack
from farflock.swarm.messages import Call
from farflock.swarm.peer import left as left_module
from farflock.swarm.sim.network import Faults, LinkModel

pytestmark = pytest.mark.usefixtures("quiet_log")

BATCH = 8  # microbatches
FOREVER = 10**9  # tokens of runs that a test ends
FEW_IN_FLIGHT = TrainerTerms(window=3, kept=64, forward_timeout_s=4.0, backward_timeout_s=6.0)


@pytest.fixture(autouse=True)
def _all_stay(monkeypatch):
    monkeypatch.setattr(left_module, "MIN_LEFT_BYTES", 1)


class Direct(Audit):
    """Counts the payloads that calls hand on to their holders."""

    handed_on = 0

    def watch(self, number, node):
        super().watch(number, node)
        self.sim.network.tap = self._tap

    def _tap(self, now_s, sender, to, packed):
        message = unpack(packed).message if b"call" in packed[:80] else None
        if isinstance(message, Call):
            self.handed_on += sum(map(bool, message.holders))
        return packed

    def check_finished(self, patience_s=60.0):
        super().check_finished(patience_s)
        assert self.handed_on > 20
        each = 2 * len(self.pipeline.stages)  # with what was made again
        for node in self.sim.nodes.values():
            most = 0 if node.trainer is None else each * node.trainer.kept
            assert node.peer.calls.left <= most, "what no microbatch needs is kept"
        return self


def direct(stages, servers, trainers=1, steps=None, seed=0, rate=None, world=None, **options):
    """Return an audit to run, for a number of steps or for as long as the test wants."""
    total = TOKENS * BATCH * steps if steps else FOREVER
    around = {"limit_s": 900.0, "view_s": 2.0, "away_s": (3.0, 8.0)} | (world or {})
    made = plan(seed, total) if rate is None else plan(seed, total, rate=rate)
    return Direct(
        made,
        pipeline(stages, BATCH, **options),
        PipelineWorld(parts(stages, servers, trainers), total, **around),
    )


def dropped(one):
    return [entry for entry in one.tale.events if entry[2] == "dropped"]


def test_the_weights_are_those_of_a_run_whose_payloads_go_through_the_trainer():
    def weights(passed_on):
        terms = TrainerTerms(window=1, kept=64, direct=passed_on)
        one = direct(3, servers=1, steps=3, rate=0.3, trainer=terms).run().check()
        assert bool(one.handed_on) is passed_on
        assert len(one.versions) >= 9, "some before and after two rounds of each stage"
        return one.versions

    through, straight = weights(passed_on=False), weights(passed_on=True)
    for place in through.keys() & straight.keys():
        (one,), (other,) = through[place], straight[place]
        assert all(torch.equal(x, other[name]) for name, x in one.items()), place


def test_gradients_through_random_paths_are_those_of_the_unsplit_model():
    one = direct(3, servers=2, trainers=2, steps=3).run().check().check_finished()
    assert not dropped(one)


def test_with_weights_that_move_each_gradient_is_that_of_the_weights_along_its_way():
    one = direct(3, servers=2, trainers=2, steps=4, rate=0.3).run().check().check_finished()
    assert one.mixed_versions > 0
    assert not dropped(one)


@pytest.mark.parametrize(
    ("seed", "points", "patience_s"),
    [
        pytest.param(0, POINTS[0::4], 20.0, id="0"),
        pytest.param(1, POINTS[3::4], 60.0, id="1", marks=pytest.mark.ci_more),
        pytest.param(2, POINTS[2::4], 60.0, id="2", marks=pytest.mark.long),
        pytest.param(1, POINTS[1::4], 60.0, id="3", marks=pytest.mark.long),
    ],
)
def test_a_server_that_dies_at_any_point_of_the_protocol_loses_and_doubles_nothing(
    seed, points, patience_s
):
    """What test_pipeline.py kills every day, this file kills among the long ones."""
    one = direct(stages=3, servers=2, seed=seed, trainer=FEW_IN_FLIGHT)
    kills = ScheduledKills(one, points)
    one.run(kills.until_all).check().check_finished(patience_s)
    assert one.tale.kills == len(kills.done)
    assert not kills.points
    assert len(one.finished()) > 20
    assert not dropped(one), "one death loses no payload that is needed"


@pytest.mark.long
def test_two_neighbours_that_die_at_once_cost_little_and_nothing_hangs():
    one = direct(stages=3, servers=3, rate=0.3)
    one.begun_anew = True  # a round that only the dead had dies with them

    async def kill_neighbours(sim):
        for first in (0, 1):
            await until(lambda: sim.settled and one.events["confirm answered"] >= 60)
            for number in (first, first + 1):
                sim.kill(number, 3.0)
            one.events.clear()
            await until(lambda: sim.settled and one.events["confirm answered"] >= 60)
        sim.end()

    one.run(kill_neighbours).check().check_finished()
    assert one.tale.kills == 4
    assert len({fields["number"] for _, _, _, fields in dropped(one)}) <= 2 * BATCH


def test_frames_that_are_lost_delayed_doubled_and_altered_change_nothing():
    one = direct(stages=3, servers=2, trainers=2, steps=5)

    async def spoil(sim):
        await until(lambda: sim.settled)
        sim.network.faults = Faults(
            loss=0.05, duplicate=0.1, reorder=0.1, corrupt=0.01, delay_s=1.5
        )

    one.run(spoil).check().check_finished()


def test_servers_that_cannot_reach_each_other_are_served_through_the_trainer():
    one = direct(stages=2, servers=1, steps=4)

    async def part(sim):
        await until(lambda: sim.settled)
        make_deaf(sim, identity_of(one.plan, 1).peer, identity_of(one.plan, 0).peer)
        await asyncio.sleep(0.0)

    def make_deaf(sim, one_peer, other):
        tap = sim.network.tap

        def lossy(now_s, sender, to, packed):
            bulk = b"piece" in packed[:80] and {sender, to} == {one_peer, other}
            return None if bulk else tap(now_s, sender, to, packed)

        sim.network.tap = lossy

    one.run(part).check().check_finished()
    assert len(one.finished()) >= 3 * BATCH


def swarm_of_24(seed, steps):
    """Five servers of each of four stages, and four trainers; servers die all the time,
    one line is bad."""
    world = {"churn_s": 4.0, "away_s": (3.0, 10.0)}
    one = direct(4, 5, trainers=4, steps=steps, seed=seed, world=world)

    async def bad_line(sim):
        bad = identity_of(one.plan, 1 + seed % 19).peer
        sim.network.set_link(bad, LinkModel(latency_s=0.08, jitter_s=0.03, loss=0.05))

    return one.run(bad_line).check().check_finished().check_memory()


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1])
def test_a_swarm_of_24_with_churn_hangs_never_and_loses_and_doubles_nothing(seed):
    one = swarm_of_24(seed, steps=5)
    assert one.tale.kills >= 1


@pytest.mark.long
@blocks(0, 50, size=10)
def test_fifty_seeds_of_a_swarm_of_24_with_churn(seeds):
    kills = each(seeds, lambda seed: swarm_of_24(seed, steps=8).tale.kills)
    assert sum(kills) > 0, "there was no churn: 17 deaths in ten seeds are usual"
