"""Pipelines with stages on accelerators: unequal peers, lower precision, full replicas, memory.

The accelerator is worlds/card.py, or a real one. Scenarios that are checked on the CPU too take the
device as a parameter (`anywhere`)."""

import asyncio
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from msgspec import structs
from worlds import pipeline_audit
from worlds.card import CARD, is_on_device
from worlds.pipeline_audit import MODEL, TEXT, TOKENS

from farflock.node.assembly.resume import checkpoint_state
from farflock.node.model.device import Device, choose
from farflock.node.pipeline.passes.stage import Stage
from farflock.node.run.memory import needed_stage_device_bytes
from farflock.node.run.split import even
from farflock.node.run.terms import Asynchronous, ServerTerms
from farflock.node.simulate.pipeline import PeerRole, PipelineSimulation, PipelineWorld
from farflock.node.train.task import NoRoom
from farflock.optimizers.parts.inner import InnerConfig
from farflock.swarm.roles import EVERY
from farflock.swarm.sim.virtual_time import run_virtual

pytestmark = pytest.mark.usefixtures("quiet_log")
BATCH = 4


def trained(
    who, steps, codec="raw", model=MODEL, stages=2, inner=None, during=None, terms=None, **options
):
    """Return the simulation of a run in float32 once these steps are done, and its terms."""
    total = steps * BATCH * TOKENS
    plan = pipeline_audit.plan(0, total, rate=0.3, **options)
    plan = replace(plan, dtype=torch.float32, model=model, inner=inner or plan.inner)
    pipeline = replace(
        pipeline_audit.pipeline(stages, BATCH, codec, **(terms or {})),
        stages=tuple(even(model, stages)),
    )

    async def main():
        sim = PipelineSimulation(plan, pipeline, PipelineWorld(who, total, view_s=2.0), TEXT)
        beside = asyncio.create_task(during(sim)) if during is not None else None
        await sim.run()
        if beside is not None:
            await beside
        return sim, plan, pipeline

    return run_virtual(main())


def state_of(node):
    """Return its stage's state that is agreed on, as a checkpoint holds it."""
    return checkpoint_state(node.serving)[0]["method"]


@pytest.mark.parametrize("codec", ["int8", pytest.param("subspace:4", marks=pytest.mark.ci_more)])
def test_servers_of_a_stage_on_unequal_devices_keep_one_state(single, codec):
    in_bf16 = choose()
    who = (
        PeerRole(0, device=single),
        PeerRole(1, device=in_bf16),
        PeerRole(1),
        PeerRole(trains=True),
    )
    sim, *_ = trained(who, 4, codec, method="diloco", options={"period": 2})
    nodes = sim.nodes
    on_card = [all(map(is_on_device, nodes[n].serving.model.parameters())) for n in range(3)]
    assert on_card == [True, True, False]
    first, other = (state_of(nodes[number]) for number in (1, 2))
    assert nodes[1].serving.state_sync.applied_round >= 1
    assert all(torch.equal(x, other[name]) for name, x in first.items())
    assert nodes[3].servings == ()
    assert nodes[3].last_loss < 1.1 * math.log(MODEL.vocab_size)


@pytest.mark.ci_more
@pytest.mark.parametrize("asynchronous", [None, Asynchronous(4)])
def test_a_run_whose_stages_run_ahead_ends_like_others(monkeypatch, asynchronous):
    who = (*(PeerRole(stage) for stage in (0, 1, 1)), PeerRole(trains=True))
    terms = {"asynchronous": asynchronous, "server": ServerTerms(lease_s=8.0, staleness=3)}
    ended = []
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch, "Event", lambda device: event)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    for ahead in (False, True):
        monkeypatch.setattr(Stage, "runs_ahead", property(lambda stage, ahead=ahead: ahead))
        sim, *_ = trained(who, 6, terms=terms)
        ended.append(sim.nodes)
    here, there = ended
    assert there[3].last_loss == pytest.approx(here[3].last_loss, rel=0.05)
    assert there[3].step >= 6 * BATCH
    one, other = (state_of(there[number]) for number in (1, 2))
    assert all(torch.equal(x, other[name]) for name, x in one.items())


@pytest.mark.ci_more
def test_a_full_replica_on_a_device_ends_where_one_on_the_cpu_does(single):
    ended = []
    for device in (single, Device()):
        sim, *_ = trained((PeerRole(EVERY, trains=True, device=device),), 4)
        ended.append(sim.nodes[0])
    there, here = ended
    assert all(is_on_device(x) for each in there.servings for x in each.model.parameters())
    assert there.last_loss == pytest.approx(here.last_loss, rel=1e-4)
    for one, other in zip(there.servings, here.servings, strict=True):
        for name, x in one.model.named_parameters():
            torch.testing.assert_close(x.detach().cpu(), other.model.get_parameter(name).detach())


@pytest.mark.ci_more
def test_a_stage_takes_no_more_of_a_device_than_is_reckoned(single, card):
    model = structs.replace(MODEL, dim=64, ffn_dim=256)
    CARD.reset_counters()
    who = (PeerRole(0), PeerRole(1, device=single), PeerRole(trains=True))
    _, plan, pipeline = trained(who, 2, model=model, inner=InnerConfig(lr=1e-3))
    reckoned = needed_stage_device_bytes(plan, pipeline, 1)
    assert CARD.peak_bytes <= reckoned <= 2 * CARD.peak_bytes


@pytest.mark.ci_more
def test_a_newcomer_makes_a_lost_stage_from_its_neighbours_on_other_devices(single):
    who = (
        PeerRole(0),
        PeerRole(1, device=single),
        PeerRole(2, device=choose()),
        PeerRole(trains=True),
    )

    async def die_out(sim):
        while not sim.settled or sim.nodes[1].serving.state_sync.applied_round < 1:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        sim.kill(1, 2.0)

    model = structs.replace(MODEL, layers=6)  # stages that can be made from each other
    sim, *_ = trained(who, 8, model=model, stages=3, during=die_out)
    begun = [fields["from"] for fields in sim.tale.fields("stage") if fields["round"] >= 0]
    assert begun == ["mean"]
    serving = sim.nodes[1].serving
    assert all(map(is_on_device, serving.model.parameters()))
    assert serving.server.served["merged"] >= BATCH


@pytest.mark.ci_more
def test_a_stage_without_room_for_one_microbatch_ends_its_node_whose_state_can_be_saved(
    single, card
):
    who = (PeerRole(0), PeerRole(1, device=single), PeerRole(trains=True))
    lost = []

    async def fill(sim):
        while not sim.settled or sim.nodes[1].serving.state_sync.applied_round < 1:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        lost.append(sim.nodes[1])
        CARD.capacity_bytes = 0  # as if another program had taken the rest

    with pytest.raises(NoRoom, match="no room for one microbatch of a stage") as raised:
        trained(who, 50, during=fill)
    assert "--device cpu" in raised.value.remedy
    parts, _cursors = checkpoint_state(lost[0].serving)  # what the process writes before it leaves
    assert all(bool(x.cpu().isfinite().all()) for held in parts.values() for x in held.values())
