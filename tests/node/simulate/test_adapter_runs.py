"""Runs that train adapters beside a frozen model, which peers may hold in unequal precision."""

from dataclasses import replace

import pytest
import torch
from worlds.folders.model_folder import SMALL, weights_of, write_model

from farflock.node.model.data import evaluation
from farflock.node.model.lora import LoraTerms, adapter_shapes
from farflock.node.run.evaluation_section import EvaluationSection
from farflock.node.run.terms import RunPlan
from farflock.node.simulate.segments import SegmentState
from farflock.node.simulate.simulation import Simulation, World, held_out, simulate
from farflock.node.state.weights_file import WeightsFolder
from farflock.node.train.evaluator import UNEQUAL_BASES
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.schedule import Schedule
from farflock.optimizers.parts.state import state_hash
from farflock.swarm.sim.virtual_time import run_virtual

TEXT = torch.arange(40_000, dtype=torch.int64).mul_(7).remainder_(251).numpy()
LORA = LoraTerms(r=4, alpha=8.0, targets=("q_proj", "v_proj", "down_proj"))


@pytest.fixture
def weights(tmp_path):
    return WeightsFolder(write_model(tmp_path / "model"), SMALL)


def plan_of(name="diloco", total=6_000, **options):
    inner, schedule = InnerConfig(lr=0.02), Schedule(0.02, total)
    options = {"deadline_s": 8.0, "period": 4} | options
    terms = 1, SMALL, inner, schedule, name, options
    evaluated = EvaluationSection(every=2, sequences=8)
    return RunPlan(*terms, batch=2, seq=32, start="0" * 64, lora=LORA, evaluation=evaluated)


def ran(plan, weights, bases, peers=2):
    """Return the nodes of a run whose peers hold the base in these precisions."""
    story, world = SegmentState(), World(peers, plan.schedule.total_tokens, view_s=3.0)

    async def main():
        run = Simulation(plan, world, TEXT, lambda share: None, story, {}, world.total_tokens)
        run.weights, run.bases, run.held_out = weights, bases, TEXT[:2_000]
        return await run.run()

    return run_virtual(main()), story


def state_of(node):
    return node.loop.driver.method.snapshot(node.loop.driver.replica)


def loss_of(plan, states, weights):
    x, y = evaluation(TEXT[:2_000], plan.seq, 8)
    return held_out(plan, states, x, y, weights=weights).mean


def test_peers_with_unequal_bases_end_with_equal_adapters_that_lower_the_loss(weights):
    plan = plan_of()
    nodes, _ = ran(plan, weights, ("fp32", "int8"))
    first, second = nodes.values()
    kinds = [
        node.model.get_parameter("model.layers.0.self_attn.q_proj.weight").dtype
        for node in (first, second)
    ]
    assert set(kinds) == {torch.float32, torch.int8}
    for node in (first, second):
        # what two bases measure differs by more than rounding, and nobody lies
        assert node.evaluator.newest.outcome == "ok"
        assert (node.evaluator.tolerance, node.evaluator.difference) == (UNEQUAL_BASES, "")
    states = [state_of(node) for node in (first, second)]
    assert state_hash(states[0]) == state_hash(states[1])
    assert set(first.loop.driver.replica.names) == adapter_shapes(SMALL, LORA).keys()
    new, _ = ran(plan_of(total=64), weights, ("fp32",), peers=1)
    begun = [state_of(node) for node in new.values()]
    before, after = (loss_of(plan, each, weights) for each in (begun, states[:1]))
    assert after < before - 0.2


def test_the_base_is_the_same_after_training(weights):
    nodes, _ = ran(plan_of(total=1_000), weights, ("fp32",))
    kept = weights_of(SMALL)
    for node in nodes.values():
        found = dict(node.model.named_parameters())
        assert all(torch.equal(found[name], weight) for name, weight in kept.items())


def test_only_adapters_travel(weights):
    plan = plan_of(total=2_000)
    _, adapters = ran(plan, weights, ("fp32",))
    _, whole = ran(replace(plan, lora=None), weights, ("fp32",))
    assert 4 * plan.trained_values < SMALL.parameters()
    assert adapters.sent_bytes < whole.sent_bytes / 2  # messages of agreement are the same


def test_a_simulated_run_of_adapters_is_measured_with_its_base(weights):
    plan = plan_of(total=1_000)
    result = simulate(plan, World(2, 1_000, view_s=3.0), TEXT, weights=weights)
    assert loss_of(plan, result.states.values(), weights) < 6
