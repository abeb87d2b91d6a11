"""The sources of a stage's state when no peer has it, in order, and the limits on strangers."""

import logging
import math
import struct
from dataclasses import replace
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from msgspec import structs

from farflock.node.model.llama import ModelConfig, build
from farflock.node.model.replica import PlainReplica
from farflock.node.pipeline.lifecycle.first_weights import FIRST
from farflock.node.pipeline.lifecycle.rebalancer import LifeOver
from farflock.node.pipeline.lifecycle.state import (
    SCALE,
    begin_anew,
    living,
    round_of,
    scale_snapshot,
)
from farflock.node.pipeline.recovery.policy import MAX_AGE_ROUNDS
from farflock.node.pipeline.recovery.rebuild import GradientScale
from farflock.node.run.terms import PipelinePlan, RunPlan
from farflock.node.state.spool import CHUNK_BYTES
from farflock.node.train.driver import Driver
from farflock.node.train.state_sync import MARK, NEXT, STATE, max_state_bytes
from farflock.optimizers.catalog import method
from farflock.optimizers.method import Progress
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.schedule import Schedule
from farflock.optimizers.parts.state import state_hash
from farflock.swarm.peer.snapshots import Snapshot, SnapshotUnavailable
from farflock.swarm.protocol.views import Certified, Chain, Member, View
from farflock.swarm.roles import EVERY, NOTHING
from farflock.swarm.sim.virtual_time import run_virtual

MODEL = ModelConfig(
    vocab_size=16, dim=8, layers=3, heads=2, kv_heads=1, ffn_dim=16, context=8, tied=False
)
STAGES = (range(1), range(1, 2), range(2, 3))
METHODS = {
    "ddp": {},
    "diloco": {"period": 2},
    "noloco": {"period": 2},
    "sparseloco": {"period": 2},
    "streaming": {"period": 2, "fragments": 1},
}


def plan_of(name="ddp", model=MODEL):
    return RunPlan(7, model, InnerConfig(), Schedule(1e-2, 1000), name, METHODS[name])


class Swarm:
    """A peer that sees these members, and is given what a test serves."""

    def __init__(self, *stages, gone=(), me="nobody"):
        self.me, self.departed, self.served, self.asked = me, gone, {}, []
        members = tuple(Member(f"m{number}", 1, stage) for number, stage in enumerate(stages))
        self.views = Chain("run", [Certified(View(1, bytes(32), 0, members))])
        self.context = self.snapshots = self

    def gone(self, view, peer):
        return peer in self.departed

    async def fetch(self, name, timeout_s, *, max_bytes, stage=None):
        self.asked.append((name, stage))
        if name not in self.served or sum(map(len, self.served[name].chunks)) > max_bytes:
            raise SnapshotUnavailable(f"no snapshot of {name}")
        return self.served[name]


def trained(plan, span, seed):
    """A stage's replica and method some steps after the start, far from the initial weights."""
    model = build(plan.model, plan.run_seed, span)
    driver = Driver(
        method(plan.method, **plan.options), PlainReplica(model, plan.inner.build(model))
    )
    generator = torch.Generator().manual_seed(seed)
    for step in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        driver.method.local_step(driver.replica, Progress(step, step * 8, float(step)))
        driver.replica.inner_step()
    return driver


def state_of(driver, round_number=9):
    """As a server serves it: with its streams' rounds and its marks."""
    state = dict(driver.method.snapshot(driver.replica))
    for entry in driver.method.streams(driver.replica):
        state[NEXT + entry.key.stream] = torch.tensor(round_number + 1)
    return state | {MARK + "bumped": torch.tensor(3)}


def snapshot_of(state, digest=None):
    encoded = safetensors.torch.save(state)
    chunks = tuple(encoded[at : at + CHUNK_BYTES] for at in range(0, len(encoded), CHUNK_BYTES))
    return Snapshot(9, digest or state_hash(state), 800, chunks)


def scaled(squared):
    return scale_snapshot(9, GradientScale(squared))


def beside(plan, weights=(1.0, 3.0), stages=STAGES):
    """A swarm whose middle stage is lost, and the drivers of its neighbours."""
    swarm, drivers = (
        Swarm(0, 2, NOTHING),
        {stage: trained(plan, stages[stage], stage) for stage in (0, 2)},
    )
    for (stage, driver), weight in zip(drivers.items(), weights, strict=True):
        swarm.served[f"{STATE}/{stage}"] = snapshot_of(state_of(driver))
        swarm.served[f"{SCALE}/{stage}"] = scaled(weight)
    return swarm, drivers


def saved_at(*rounds):
    place = {"rounds": {f"stream {number}": at for number, at in enumerate(rounds)}}
    return SimpleNamespace(meta={"node": {"place": place}})


def begun(swarm, plan, index=1, after=9, saved=None, stages=STAGES):
    return run_virtual(begin_anew(swarm, plan, PipelinePlan(tuple(stages), 1), index, after, saved))


def layer(driver, stage):
    """The parameters that it would evaluate, by the names within a layer."""
    mine = f"model.layers.{stage}."
    return {
        name.removeprefix(mine): x
        for name, x in driver.method.eval_params(driver.replica).items()
        if mine in name
    }


# the peers that are there


def test_the_other_servers_of_a_stage_that_are_not_known_to_be_gone_are_counted():
    swarm = Swarm(0, 0, 1, 2, 2, NOTHING, EVERY, gone=("m1",), me="m3")
    assert living(swarm, 3) == (2, 2, 2)  # the whole replica has a part in each
    assert living(Swarm(0, 2), 3) == (1, 0, 1)


# the ladder


def test_where_the_run_begins_a_stage_has_its_initial_weights_or_its_checkpoints():
    swarm = Swarm(0, 2)
    assert begun(swarm, plan_of(), after=-1).kind == "initial"
    found = begun(swarm, plan_of(), after=-1, saved=saved_at(4))
    assert (found.kind, found.tensors) == ("snapshot", None)
    assert "round 4" in found.reason
    assert not swarm.asked


@pytest.mark.parametrize(("after", "why"), [(-1, "the run begins"), (9, "stage 2 is lost too")])
def test_a_run_of_trained_weights_begins_a_stage_with_those_and_never_with_the_seeds(after, why):
    plan, swarm = replace(plan_of(), weights="0" * 64), Swarm(0)
    with pytest.raises(LifeOver, match="the first weights of stage 1 cannot be had"):
        begun(swarm, plan, after=after)
    weights = {name: x.detach() for name, x in build(MODEL, 5, STAGES[1]).named_parameters()}
    swarm.served[f"{FIRST}/1"] = snapshot_of(weights)
    found = begun(swarm, plan, after=after)
    assert found.kind == "first"
    assert why in found.reason
    assert all(torch.equal(found.tensors[name], weight) for name, weight in weights.items())
    assert swarm.asked == [(f"{FIRST}/1", None)] * 2


@pytest.mark.parametrize(
    ("age", "kind"), [(0, "snapshot"), (MAX_AGE_ROUNDS - 1, "snapshot"), (MAX_AGE_ROUNDS, "mean")]
)
def test_a_checkpoint_is_taken_while_it_is_fresh_and_the_neighbours_mean_after_that(age, kind):
    plan = plan_of()
    swarm, _ = beside(plan)
    found = begun(swarm, plan, after=200, saved=saved_at(200 - age))
    assert found.kind == kind
    assert bool(swarm.asked) == (kind == "mean")
    assert f"{age} rounds old" in found.reason


@pytest.mark.parametrize(
    ("index", "members", "why"),
    [
        (0, (1, 2), "no peer has an exact copy of its embedding"),
        (2, (0, 1), "no peer has an exact copy of its head"),
        (1, (0,), "stage 2 is lost too"),
        (1, (), "stage 0 is lost too"),
    ],
)
def test_what_cannot_be_made_begins_with_initial_weights_and_says_why(index, members, why, caplog):
    swarm = Swarm(*members, NOTHING)
    with caplog.at_level(logging.WARNING, logger="farflock"):
        found = begun(swarm, plan_of(), index)
    assert (found.kind, found.tensors) == ("initial", None)
    assert why in found.reason
    assert f"stage {index} starts again from initial weights" in caplog.text
    assert not swarm.asked


def test_of_unequal_stages_none_is_made_from_the_others():
    model, stages = structs.replace(MODEL, layers=4), (range(1), range(1, 3), range(3, 4))
    found = begun(Swarm(0, 2), plan_of(model=model), stages=stages)
    assert found.kind == "initial"
    assert "unequal" in found.reason


def test_neighbours_that_are_only_listed_are_not_asked():
    swarm, _ = beside(plan_of())
    swarm.departed = ("m1",)
    found = begun(swarm, plan_of())
    assert found.kind == "initial"
    assert not swarm.asked


# from the neighbouring stages


@pytest.mark.parametrize("name", METHODS)
def test_it_is_the_weighted_mean_of_what_its_neighbours_would_evaluate_whatever_the_method_keeps(
    name,
):
    plan = plan_of(name)
    swarm, drivers = beside(plan, (1.0, 3.0))
    found = begun(swarm, plan)
    assert found.kind == "mean", found.reason
    assert swarm.asked == [
        (f"{STATE}/0", 0),
        (f"{SCALE}/0", 0),
        (f"{STATE}/2", 2),
        (f"{SCALE}/2", 2),
    ]
    first, last = layer(drivers[0], 0), layer(drivers[2], 2)
    assert set(found.tensors) == {f"model.layers.1.{within}" for within in first}
    for within in first:
        mean = (first[within].double() + 3 * last[within].double()) / 4
        torch.testing.assert_close(
            found.tensors[f"model.layers.1.{within}"], mean.float(), rtol=1e-6, atol=1e-7
        )


def test_neighbours_of_unknown_scale_weigh_alike_and_one_that_never_trained_nothing():
    plan = plan_of()
    for tell, share in ((None, 0.5), ("2", 0.0)):
        swarm, drivers = beside(plan)
        swarm.served = {
            name: served
            for name, served in swarm.served.items()
            if name in (f"{SCALE}/{tell}",) or STATE in name
        }
        found, first, last = begun(swarm, plan), layer(drivers[0], 0), layer(drivers[2], 2)
        for within in first:
            mean = share * first[within].double() + (1 - share) * last[within].double()
            torch.testing.assert_close(
                found.tensors[f"model.layers.1.{within}"], mean.float(), rtol=1e-6, atol=1e-7
            )


@pytest.mark.parametrize("squared", [0.0, 1e-300, 2.5, 1e300])
def test_a_scale_comes_as_it_was_sent(squared):
    snapshot = scaled(squared)
    assert struct.unpack("<d", b"".join(snapshot.chunks)) == (squared,)
    assert snapshot.round == 9
    assert scale_snapshot(-7, GradientScale()).round == -1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        b"123456789",
        *(struct.pack("<d", x) for x in (math.nan, math.inf, -math.inf, -1.0)),
    ],
)
def test_a_scale_that_is_none_is_taken_for_that_of_a_stage_that_never_trained(content):
    plan = plan_of()
    swarm, drivers = beside(plan)
    swarm.served[f"{SCALE}/0"] = Snapshot(9, bytes(32), 0, (content,))
    found, last = begun(swarm, plan), layer(drivers[2], 2)
    assert found.kind == "mean"
    assert all(
        torch.equal(found.tensors[f"model.layers.1.{within}"], x) for within, x in last.items()
    )


# what is no state


def wrong_hash(plan, state):
    return snapshot_of(state, digest=bytes(32))


def cut_short(plan, state):
    whole = snapshot_of(state)
    return replace(whole, chunks=(whole.chunks[0][:-1],))


def nothing(plan, state):
    return Snapshot(9, state_hash({}), 0, ())


def no_tensors(plan, state):
    return snapshot_of({})


def noise(plan, state):
    return Snapshot(9, bytes(32), 0, (bytes(range(256)) * 9,))


def not_finite(plan, state):
    name = next(name for name, x in state.items() if x.dim() == 2)
    return snapshot_of(state | {name: torch.full_like(state[name], math.nan)})


def of_halves(plan, state):
    return snapshot_of(
        {name: x.half() if x.is_floating_point() else x for name, x in state.items()}
    )


def of_another_stage(plan, state):
    return snapshot_of(state_of(trained(plan, STAGES[1], 1)))


def of_a_larger_model(plan, state):
    larger = replace(plan, model=structs.replace(MODEL, dim=16))
    return snapshot_of(state_of(trained(larger, STAGES[0], 1)))


def of_another_method(plan, state):
    other = plan_of("diloco" if plan.method == "ddp" else "ddp")
    return snapshot_of(state_of(trained(other, STAGES[0], 1)))


def without_its_counters(plan, state):
    return snapshot_of(
        {name: x for name, x in state.items() if x.dim() or name.startswith((NEXT, MARK))}
    )


def counting_backwards(plan, state):
    return snapshot_of({name: -x - 1 if x.dtype == torch.int64 else x for name, x in state.items()})


HOSTILE = (
    wrong_hash,
    cut_short,
    nothing,
    no_tensors,
    noise,
    not_finite,
    of_halves,
    of_another_stage,
    of_a_larger_model,
    of_another_method,
    without_its_counters,
    counting_backwards,
)


@pytest.mark.parametrize("spoilt", HOSTILE)
@pytest.mark.parametrize("name", ["ddp", "diloco", "noloco"])
def test_a_neighbours_state_that_is_not_one_is_refused_and_the_stage_begins_without_it(
    name, spoilt
):
    plan = plan_of(name)
    swarm, drivers = beside(plan)
    swarm.served[f"{STATE}/0"] = spoilt(plan, state_of(drivers[0]))
    found = begun(swarm, plan)
    assert (found.kind, found.tensors) == ("initial", None)
    assert "the state of stage 0 cannot be used" in found.reason


def test_a_neighbours_state_that_is_larger_than_any_is_not_downloaded():
    plan = plan_of()
    swarm, drivers = beside(plan)
    state = state_of(drivers[0])
    swarm.served[f"{STATE}/0"] = snapshot_of(
        state | {"more": torch.zeros(max_state_bytes(drivers[0].replica.shapes) // 4)}
    )
    found = begun(swarm, plan)
    assert (found.kind, found.tensors) == ("initial", None)
    assert "no snapshot" in found.reason


def test_a_neighbour_that_dies_before_it_gave_its_state_leaves_initial_weights():
    plan = plan_of()
    swarm, _ = beside(plan)
    del swarm.served[f"{STATE}/2"]
    found = begun(swarm, plan)
    assert found.kind == "initial"
    assert f"no snapshot of {STATE}/2" in found.reason


# checkpoints


@pytest.mark.parametrize(("rounds", "last"), [((), None), ((4,), 4), ((7, 3, 5), 3)])
def test_a_checkpoints_round_is_that_of_its_stream_that_is_farthest_behind(rounds, last):
    assert round_of(saved_at(*rounds)) == last
    assert round_of(None) is None
