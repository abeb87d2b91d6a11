"""Planned paths on the simulated network: microbatches go where the plan says,
each gradient is that of the stages on its path in their order, and where a planned server dies its
stage mates take over."""

import collections

import pytest
from worlds.pipeline_audit import STILL, Audit, pipeline, plan

from farflock.node.run.planned_paths import HostTerms, plan_of_texts, planned, require_plan
from farflock.node.run.policies import PLANNED, lane_of
from farflock.node.simulate.lives import identity_of
from farflock.node.simulate.pipeline import PipelineWorld, parts
from farflock.swarm.paths.policy import Microbatch

pytestmark = pytest.mark.usefixtures("quiet_log")

BATCH = 8  # microbatches
TOKENS = 8 * BATCH
LAYERS = (1, 1, 1, 1)

SKIPPING = [["0:0 1:1 3:0", "0:1 2:0 3:1", "0:1 1:0 3:1", "0:0 2:1 3:0"]]
SWAPPING = [["0:0 2:1 1:0 3:0", "0:1 1:1 2:0 3:1"], ["0:1 1:0 2:1 3:1", "0:0 2:0 1:1 3:0"]]


class Followed(Audit):
    """An audit that also sees which server trainers ask first for each microbatch and stage."""

    def __init__(self, *given):
        super().__init__(*given)
        self.asked = {}

    def watch(self, number, node):
        super().watch(number, node)
        if node.trainer is None:
            return
        trainer, me = node.trainer, node.peer.me
        next_hop = trainer.client.next_hop

        async def asking(flight, stage, *given):
            server = await next_hop(flight, stage, *given)
            places = node.stage_directory.serving().seniority[stage]
            self.asked.setdefault((me, flight.number, stage), (places, server.peer))
            return server

        trainer.client.next_hop = asking


def audit(lanes, steps=6, rate=0.3, trainers=2, servers=2, seed=0, **world):
    paths = plan_of_texts(lanes)
    require_plan(paths, [servers] * 4, LAYERS, BATCH)
    total = TOKENS * steps
    around = PipelineWorld(parts(4, servers, trainers), total, limit_s=900.0, view_s=2.0, **world)
    return Followed(
        plan(seed, total, rate=rate), pipeline(4, BATCH, policy=PLANNED, paths=paths), around
    )


def of_plan(one, key):
    """The stages and places that the plan has for a microbatch."""
    path = one.pipeline.paths.path(Microbatch(key[1], 0, lane_of(key[0])))
    return [(stop.stage, int(stop.peer.partition(":")[2])) for stop in path]


def require_keeping_step(one):
    """Require rounds that keep step, with batches of each stage's share."""
    newest = [max(rounds) for rounds in one.named.values()]
    assert max(newest) - min(newest) <= 2
    assert min(newest) >= 4
    for stage, rounds in one.named.items():
        share = sum(map(len, rounds.values())) / (BATCH * len(rounds))
        assert share == pytest.approx(1.0 if stage in (0, 3) else 0.5, rel=0.4)


@pytest.mark.parametrize(
    ("lanes", "rate"),
    [
        pytest.param(SKIPPING, 0.3, id="skips", marks=pytest.mark.long),
        pytest.param(SWAPPING, STILL, id="swaps"),
        pytest.param(SWAPPING, 0.3, id="swaps-0.3", marks=pytest.mark.long),
    ],
)
def test_each_microbatch_has_the_gradient_of_the_stages_on_its_path_in_their_order(lanes, rate):
    """Where stages are skipped, they also keep step."""
    one = audit(lanes, rate=rate).run().check().check_finished()
    if lanes is SKIPPING:
        require_keeping_step(one)
    keys = one.finished()
    assert len(keys) >= 4 * BATCH
    assert {one.order(key) for key in keys} == {
        tuple(stage for stage, _ in of_plan(one, key)) for key in keys
    }
    assert len({one.order(key) for key in keys}) == 2
    there = 0
    for key in keys:
        for stage, place in of_plan(one, key):
            places, asked = one.asked[*key, stage]
            if place < len(places):  # else no server has it yet
                assert asked == places[place]
                there += place > 0
    assert there > BATCH


def test_where_a_planned_server_dies_its_mates_do_its_work_and_nothing_is_lost_or_doubled():
    one, dead = audit(SKIPPING, steps=10, servers=2), []

    def die(what, number):
        """Between a forward pass and its backward pass, and then one that has put a gradient
        aside."""
        stage = one.world.parts[number].stage
        wanted = {"forward answered": 1, "backward computed": 3}.get(what)
        if (
            stage == wanted
            and one.named[stage]
            and stage not in [one.world.parts[x].stage for x in dead]
        ):
            dead.append(number)
            one.sim.kill(number, None)

    one.on_event = die
    one.run().check().check_finished()
    assert sorted(one.world.parts[number].stage for number in dead) == [1, 3]
    (lost,) = (
        identity_of(one.plan, number).peer for number in dead if one.world.parts[number].stage == 1
    )
    place = next(places.index(lost) for places, asked in one.asked.values() if asked == lost)
    its = [one.asked[*key, 1] for key in one.finished() if (1, place) in of_plan(one, key)]
    asked = collections.Counter((lost in places, peer == lost) for places, peer in its)
    assert asked[True, True] > 0, "it was asked while it was there"
    assert asked[True, False] > 0, "its mate was asked before the view knew"
    assert asked[False, False] > 0, "and when others had moved up"


def test_what_the_planner_makes_of_measured_hosts_is_followed():
    """One host of stage 1 is ten times slower than all others: it is hardly on any path."""
    slow = [[0.05, 0.05], [0.05, 0.5], [0.05, 0.05], [0.05, 0.05]]
    hosts = HostTerms(visited=3, forward_s=slow, line_s=[[0.02, 0.02]] * 4, swaps=True)
    paths = planned(hosts, LAYERS, seed=1)
    counts = collections.Counter(stop.peer for path in paths.paths for stop in path)
    assert counts["1:1"] < counts["1:0"]
    require_plan(paths, [2] * 4, LAYERS, BATCH)
    total = TOKENS * 4
    one = Followed(
        plan(0, total, rate=0.3),
        pipeline(4, BATCH, policy=PLANNED, paths=paths),
        PipelineWorld(parts(4, 2, 1), total, limit_s=900.0, view_s=2.0),
    )
    one.run().check().check_finished()
    assert len(one.finished()) >= 2 * BATCH
