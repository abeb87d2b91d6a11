"""Runs that start from trained weights, which only their founder has."""

import pytest
import torch
from worlds.model_folder import QWEN3, SMALL, SPLIT, weights_of, write_model

from farflock.node.data.samples import text_in_memory
from farflock.node.model.evaluation import losses
from farflock.node.model.llama import build
from farflock.node.model.replica import PlainReplica
from farflock.node.model.weights_folder import WeightsFolder, initial
from farflock.node.run.split import even
from farflock.node.run.terms import PipelinePlan, RunPlan
from farflock.node.simulate.pipeline import PeerRole, PipelineSimulation, PipelineWorld
from farflock.node.simulate.segments import SegmentState
from farflock.node.simulate.simulation import Simulation, World, simulate
from farflock.optimizers.catalog import NAMES, method, options_of
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.schedule import Schedule
from farflock.optimizers.parts.state import state_hash
from farflock.swarm.roles import EVERY
from farflock.swarm.sim.virtual_time import run_virtual

STILL = 1e-12  # a rate with which weights stay as they began
TEXT = text_in_memory(torch.arange(40_000, dtype=torch.int64).mul_(7).remainder_(251).numpy())


@pytest.fixture
def weights(tmp_path):
    return WeightsFolder(write_model(tmp_path / "model"), SMALL)


def plan_of(name, rate, start, model=SMALL, total=1_500):
    options = {"deadline_s": 8.0, "period": 4}
    options = {key: value for key, value in options.items() if key in options_of(name)}
    inner, schedule = InnerConfig(lr=rate, weight_decay=0.0), Schedule(rate, total)
    return RunPlan(1, model, inner, schedule, name, options, batch=2, seq=32, weights=start)


def ran(plan, weights, peers=2):
    """Return the nodes of a run, and the losses of its steps in order."""
    story = SegmentState()
    world = World(peers, plan.schedule.total_tokens, view_s=3.0)

    async def main():
        run = Simulation(plan, world, TEXT, lambda share: None, story, {}, world.total_tokens)
        run.weights = weights
        return await run.run()

    return run_virtual(main()), [loss for _, loss in story.losses]


def evaluated(node):
    driver = node.loop.driver
    return driver.method.eval_params(driver.replica)


def close(found, wanted):
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-3, msg=name)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("diloco", "noloco", "ddp") else pytest.mark.ci_more)
        for name in NAMES
        if name != "local"
    ],
)
def test_all_peers_begin_with_the_founders_weights(weights, name):
    nodes, _ = ran(plan_of(name, STILL, weights.hash), weights)
    assert len(nodes) == 2
    for node in nodes.values():
        assert node.loop.step
        close(evaluated(node), weights_of(SMALL))


def test_a_joiner_without_the_folder_ends_with_the_founders_state(weights):
    result = simulate(
        plan_of("diloco", 1e-2, weights.hash), World(2, 1_500, view_s=3.0), TEXT, weights=weights
    )
    assert len({state_hash(state) for state in result.states.values()}) == 1
    assert len(result.states) == 2


def test_the_first_loss_is_that_of_the_checkpoint(weights):
    plan = plan_of("diloco", 1e-2, weights.hash)
    nodes, found = ran(plan, weights, peers=1)
    x, y = nodes[0].loop.training_task.batches.batch(0)
    trained = float(losses(initial(SMALL, plan.run_seed, weights), x, y).mean())
    fresh = float(losses(build(SMALL, plan.run_seed), x, y).mean())
    assert found[0] == pytest.approx(trained, abs=1e-4)
    assert abs(trained - fresh) > 1e-2


def staged(tmp_path, parts, rate=STILL, config=SPLIT, limit_s=600.0):
    """Return the nodes of a run of two stages, its events, and whether it came to its end."""
    weights = WeightsFolder(write_model(tmp_path / "model", config), config)
    plan = plan_of("ddp", rate, weights.hash, config, total=2_400)
    pipeline = PipelinePlan(even(config, 2), 2 * 2 * 32)
    world = PipelineWorld(parts, plan.schedule.total_tokens, limit_s=limit_s)

    async def main():
        simulation = PipelineSimulation(plan, pipeline, world, TEXT, weights=weights)
        try:
            await simulation.run()
        except TimeoutError:
            return simulation.nodes, simulation.tale, False
        return simulation.nodes, simulation.tale, True

    return run_virtual(main())


FOUNDERS = {
    "replica": (PeerRole(EVERY, trains=True), PeerRole(0), PeerRole(1), PeerRole(trains=True)),
    "stage": (PeerRole(0, trains=True), PeerRole(1), PeerRole(0), PeerRole(1)),
    "trainer": (PeerRole(trains=True), PeerRole(1), PeerRole(0)),
}


@pytest.mark.parametrize(
    ("founder", "config"),
    [("replica", SPLIT), ("stage", QWEN3), ("trainer", SPLIT)],
    ids=["replica", "stage", "trainer"],
)
def test_servers_of_stages_get_their_first_weights_from_the_founder(tmp_path, founder, config):
    nodes, tale, ended = staged(tmp_path, FOUNDERS[founder], config=config)
    assert ended
    begun = {(fields["stage"], fields["from"]) for fields in tale.fields("stage")}
    anew = {"replica": (), "stage": (1,), "trainer": (0, 1)}[founder]
    assert begun == {(stage, "first") for stage in anew}
    for node in nodes.values():
        for serving in node.servings:
            span = serving.model.span
            wanted = {name: x.detach() for name, x in build(config, 77, span).named_parameters()}
            close(evaluated(serving), wanted)
            assert serving.loop.step


def test_a_stage_without_its_first_weights_does_not_begin_with_others(tmp_path, monkeypatch):
    monkeypatch.setattr("farflock.node.pipeline.node.serve_first", lambda *known: None)
    monkeypatch.setattr("farflock.swarm.peer.snapshots.UNVERIFIED_S", 10.0)
    parts = PeerRole(0, trains=True), PeerRole(1)
    _, tale, ended = staged(tmp_path, parts, limit_s=60.0)
    assert not ended
    assert not tale.fields("stage")
    reasons = {str(fields["reason"]) for fields in tale.fields("over")}
    assert len(reasons) == 1
    assert reasons.pop().startswith("the first weights of stage 1 cannot be had: no snapshot of")


def test_a_method_restored_elsewhere_evaluates_the_same(weights):
    plan = plan_of("diloco", 1e-2, weights.hash)
    nodes, _ = ran(plan, weights)
    driver = nodes[1].loop.driver
    model = build(SMALL, plan.run_seed)
    replica, kept = PlainReplica(model, plan.inner_of(model)), method(plan.method, **plan.options)
    kept.restore(replica, driver.method.snapshot(driver.replica), "adopt")
    close(kept.eval_params(replica), evaluated(nodes[1]))
