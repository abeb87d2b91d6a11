"""Pipelines with AQ-SGD on the simulated network: samples come again and travel as differences,
and whatever dies, is lost or forgotten, each gradient that counts is that of the activations which
the forward passes had.

The expected gradient is that of the unsplit model whose activations are, between stages,
replaced by those that the stage behind decoded, with derivatives straight through.
That these are always the same for a microbatch, forward and back, at any server,
is checked where they are decoded; and that they are close to what was computed.
"""

import asyncio
import collections
import dataclasses

import pytest
import torch
from worlds.kills import POINTS, ScheduledKills
from worlds.pipeline_audit import STILL, Audit, pipeline, plan
from worlds.waiting import until

from farflock.compression.aqsgd import DIFFERENCE, FULL, HELD, KEPT
from farflock.node.pipeline.contrib.sample_memory import ServerMemory, _names
from farflock.node.pipeline.passes.requests import Forward, Lacks, Visit
from farflock.node.pipeline.server.edge_ends import NotHeld
from farflock.node.run.terms import Asynchronous, ServerTerms
from farflock.node.simulate.lives import identity_of
from farflock.node.simulate.pipeline import PipelineWorld, parts
from farflock.swarm.sim.network import Faults

# contrib: its simulations run in `make test-long` (node/pipeline/contrib)
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("quiet_log")]

BATCH, TOKENS = 8, 64  # microbatches and tokens of a step
FOREVER = 10**9
SINGLE = {"rtol": 1e-5, "atol": 1e-6}  # gradients travel in fp32
HALF = 2.0**-10  # of a value: twice what fp16 rounds it by
SAMPLES = 16


class Remembered(Audit):
    """An audit of decoded activations. `sent` counts the kinds in which samples came in,
    forward and back; `farthest` is the greatest distance of one that came in from what was
    computed, of the greatest value there."""

    lossy, close = True, SINGLE

    def __init__(self, plan, pipeline, world):
        super().__init__(plan, pipeline, world)
        self.decoded, self.sent, self.lacks, self.farthest = {}, collections.Counter(), 0, 0.0
        self.memory_bytes = 0

    def input_of(self, job):
        if job.request.source < 0:
            return super().input_of(job)
        place = 1  # behind the tokens
        return self._named(job, job.request.source, job.payloads[place])

    def output_of(self, job, reply):
        return self._named(job, job.request.stage, reply)

    def gradient_named(self, job, payload):
        return job.caller, job.request.number, payload

    def _named(self, job, source, payload):
        """By the tags of what the samples are after it: equal for a difference, the whole,
        and a tag alone."""
        batch = self.plan.batch
        tags = tuple(bytes(payload[at + 8 : at + 16]) for at in range(batch, 17 * batch, 16))
        return job.caller, job.request.number, source, tags

    def arrived(self, named, value):
        found = self.decoded[named]
        self.farthest = max(self.farthest, float((found - value).abs().amax() / value.abs().amax()))
        return found

    def watch_passes(self, life):
        super().watch_passes(life)
        passes = life.serving.server.passes
        read = passes.read

        def reading(job):
            found = read(job)
            self.lacks += isinstance(found, Lacks)
            self.memory_bytes = max(self.memory_bytes, passes.ends.held_bytes)
            if isinstance(found, tuple) and job.request.source >= 0:
                self._note(job, found[1])
            return found

        passes.read = reading

    def _note(self, job, x):
        way = "forward" if isinstance(job.request, Forward) else "back"
        self.sent.update((way, kind) for kind in job.payloads[1][: self.plan.batch])
        known = self.decoded.setdefault(self.input_of(job), x.clone())
        assert torch.equal(known, x), "one microbatch's activation was decoded in two ways"

    def share(self, way, *kinds):
        """Of the samples that came in this way, how many did so in these kinds."""
        return sum(self.sent[way, kind] for kind in kinds) / sum(
            self.sent[way, kind] for kind in range(4)
        )


def audit(
    stages,
    servers,
    trainers=1,
    steps=None,
    seed=0,
    rate=STILL,
    codec="aqsgd4,fp32",
    world=None,
    **options,
):
    """Return an audit to run, for a number of steps or for as long as the test wants."""
    total = TOKENS * steps if steps else FOREVER
    around = {"limit_s": 900.0, "view_s": 2.0, "away_s": (3.0, 8.0)} | (world or {})
    cut = {
        "policy": "fixed",
        **{
            name: options.pop(name)
            for name in ("cache_bytes", "asynchronous", "server")
            if name in options
        },
    }
    replicas = options.pop("replicas", 0)
    made = dataclasses.replace(plan(seed, total, rate), **({"samples": SAMPLES} | options))
    surroundings = PipelineWorld(
        parts(stages, servers, trainers, replicas=replicas), total, **around
    )
    return Remembered(made, pipeline(stages, BATCH, codec, **cut), surroundings)


# gradients


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_gradients_are_those_of_the_decoded_activations_and_later_visits_are_differences(stages):
    one = audit(stages, servers=1, trainers=2, steps=12, seed=stages).run().check().check_finished()
    assert one.farthest <= HALF
    assert one.lacks < 10
    assert one.share("back", HELD) > (0.0 if stages == 2 else 0.4), (
        "the last stage has no forward pass of its own"
    )
    if stages > 2:
        assert one.share("forward", DIFFERENCE) > 0.5


@pytest.mark.usefixtures("anywhere")
def test_with_weights_that_move_each_gradient_is_that_of_the_activations_along_its_way():
    one = audit(stages=3, servers=1, trainers=2, steps=12, rate=0.3).run().check().check_finished()
    assert one.mixed_versions > 0, "no microbatch was on its way while weights changed"
    assert HALF < one.farthest < 1 / 7, (
        "as far as four bits of a difference twice as large as the greatest value"
    )
    assert one.share("forward", DIFFERENCE) > 0.5


def test_in_eight_bits_and_with_two_sequences_a_microbatch():
    one = (
        audit(stages=3, servers=1, steps=6, codec="aqsgd8,fp32", batch=2, seq=4)
        .run()
        .check()
        .check_finished()
    )
    assert one.farthest <= HALF
    assert one.share("forward", DIFFERENCE, HELD) > 0.7, (
        "with weights that stay a tag alone often says it all"
    )


def test_a_cache_for_half_of_the_samples_saves_less_and_harms_nothing():
    each = TOKENS // BATCH * 8 * 2  # of a sample: 8 tokens of width 8
    one = (
        audit(stages=3, servers=1, steps=12, cache_bytes=SAMPLES // 2 * each)
        .run()
        .check()
        .check_finished()
    )
    assert 0.2 < one.share("forward", DIFFERENCE) < 0.6
    assert one.share("forward", FULL) > 0.3
    assert 0 < one.memory_bytes <= 2 * (SAMPLES // 2) * each


def test_a_full_replica_serves_a_trainer_and_takes_its_own_samples_through_all_stages():
    one = audit(stages=3, servers=1, replicas=1, steps=10, seed=1).run().check().check_finished()
    replica = identity_of(one.plan, 4).peer
    assert {key[0] for key in one.finished()} == {replica, identity_of(one.plan, 3).peer}
    assert one.share("forward", DIFFERENCE) > 0.3


def test_backward_passes_at_kept_versions_use_the_activations_of_their_forward_passes():
    terms = {"asynchronous": Asynchronous(3), "server": ServerTerms(lease_s=8.0, staleness=2)}
    one = audit(stages=3, servers=1, trainers=2, steps=8, rate=0.1, **terms).run().check()
    assert one.mixed_versions > 0
    assert one.share("forward", DIFFERENCE) > 0.3


# what goes wrong


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_server_that_dies_at_any_point_leads_to_whole_samples_and_loses_nothing(
    seed,
):
    one = audit(stages=3, servers=2, seed=seed)
    kills = ScheduledKills(one, POINTS[seed::2])
    one.run(kills.until_all).check().check_finished()
    assert one.tale.kills == len(kills.done)
    assert not kills.points
    assert one.farthest <= HALF
    assert one.share("forward", KEPT) > 2 * SAMPLES / (3 * len(one.finished())), (
        "its successors got what they lacked whole"
    )


def test_under_churn_with_weights_that_move_each_gradient_is_that_of_one_activation():
    one = audit(stages=3, servers=3, trainers=2, steps=10, seed=3, rate=0.1, world={"churn_s": 5.0})
    one.run().check().check_finished()
    assert one.tale.kills > 1
    assert one.sent["forward", DIFFERENCE] > 10


def test_frames_that_are_lost_doubled_late_or_altered_cost_bytes_alone():
    one = audit(stages=3, servers=1, steps=6, seed=5)

    async def hinder(sim):
        await until(lambda: sim.settled, every_s=0.1)
        sim.network.faults = Faults(
            loss=0.03, duplicate=0.1, reorder=0.1, corrupt=0.01, delay_s=1.0
        )

    one.run(hinder).check().check_finished(patience_s=120.0)
    assert one.sent["forward", DIFFERENCE] > 10


def test_ends_that_forget_all_at_any_time_get_it_whole():
    """As a server would that is short of memory; a trainer that forgets says so in its next
    request."""
    one = audit(stages=3, servers=1, steps=12, rate=0.1)

    async def forget(sim):
        for turn in range(1000):
            await asyncio.sleep(4.0)
            nodes = [
                node for node in sim.nodes.values() if (node.trainer is not None) == (turn % 3 == 0)
            ]
            for node in nodes[turn % 2 : turn % 2 + 1]:
                if node.trainer is not None:
                    node.trainer.inputs.memory.caches.clear()
                else:
                    node.serving.server.passes.ends = ServerMemory(node.edges)

    one.run(forget).check().check_finished()
    assert one.lacks > 3
    assert one.sent["forward", DIFFERENCE] > 5


def test_a_trainer_that_comes_back_finds_its_samples_where_it_left_them_and_is_sent_them_whole():
    one = audit(stages=2, servers=1, trainers=2, seed=2)
    me = identity_of(one.plan, 3).peer
    lives = []

    async def kill_one(sim):
        await until(lambda: one.events["confirm answered"] >= 80, every_s=0.1)
        lives.append(sim.nodes[3].trainer)
        sim.kill(3, 3.0)
        await until(
            lambda: sum(key[0] == me for keys in one.named[0].values() for key in keys) >= 60,
            every_s=0.1,
        )
        lives.append(sim.nodes[3].trainer)
        sim.end()

    one.run(kill_one).check()
    before, after = (trainer.inputs.memory for trainer in lives)
    assert set(before.caches[0]) == set(after.caches[0]) == set(range(SAMPLES)), "the same ids"
    assert after.counts["whole samples"] >= SAMPLES


def test_a_server_that_takes_what_it_has_for_what_was_meant_is_found_out(monkeypatch):
    """The audit can fail: a server that ignores tags computes a backward pass with another visit's
    activation."""
    honest = ServerMemory.input

    def careless(self, caller, payload, request, tokens_BL):
        try:
            return honest(self, caller, payload, request, tokens_BL)
        except NotHeld:
            (sample,) = request.visit.samples
            (name,) = _names(caller, request.source, Visit((sample,)))
            entry = self.received.cache.get(name)
            if entry is None:
                raise
            return entry.values.double()[None]

    monkeypatch.setattr(ServerMemory, "input", careless)
    with pytest.raises(AssertionError, match="in two ways"):
        audit(stages=3, servers=1, steps=12, rate=0.1, samples=7).run().check()
