"""Runs of models of transformers: peers end equal, and what they save is used like any model."""

import json
import math

import msgspec
import pytest
import torch
from worlds.card import CARD

from farflock.node.assembly.trial_step import fitting
from farflock.node.model.device import Device
from farflock.node.model.evaluation import losses
from farflock.node.model.export import export
from farflock.node.model.generate import GREEDY, generate
from farflock.node.model.hf_shape import canonical_text, hf_shape
from farflock.node.model.step_options import StepOptions
from farflock.node.run.evaluation_section import EvaluationSection
from farflock.node.run.terms import RunPlan
from farflock.node.simulate.segments import SegmentState
from farflock.node.simulate.simulation import Simulation, World, simulate
from farflock.node.state.checkpoint import CheckpointCorrupt, save
from farflock.node.state.saved_model import open_model
from farflock.node.state.weights_file import WeightsFolder, whole_model
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.node.use.gguf_file import GgufRefused, gguf_writer
from farflock.optimizers.catalog import options_of
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.schedule import Schedule
from farflock.optimizers.parts.state import state_hash
from farflock.swarm.sim.virtual_time import run_virtual

transformers = pytest.importorskip("transformers")

TEXT = torch.arange(40_000, dtype=torch.int64).mul_(7).remainder_(251).numpy()
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
GPT2 |= {"vocab_size": 256, "bos_token_id": 255, "eos_token_id": 255}
SHAPE = hf_shape(canonical_text(json.dumps(GPT2).encode()))


def plan_of(name, rate=1e-2, **terms):
    options = {"deadline_s": 8.0, "period": 4}
    options = {key: value for key, value in options.items() if key in options_of(name)}
    inner, schedule = InnerConfig(lr=rate, weight_decay=0.0), Schedule(rate, 1_500)
    return RunPlan(1, SHAPE, inner, schedule, name, options, batch=2, seq=32, **terms)


def ran(plan, weights=None):
    async def main():
        world = World(2, plan.schedule.total_tokens, view_s=3.0)
        story = SegmentState()
        run = Simulation(plan, world, TEXT, lambda share: None, story, {}, world.total_tokens)
        run.weights = weights
        return await run.run()

    return run_virtual(main())


@pytest.mark.parametrize("name", ["diloco", "ddp"])
def test_two_peers_end_equal_and_their_evaluations_agree(name):
    plan = plan_of(name, evaluation=EvaluationSection(every=4, sequences=4))
    world = World(2, 1_500, view_s=3.0)
    result = simulate(plan, world, TEXT, measured_on=TEXT[:2_000])
    assert len({state_hash(state) for state in result.states.values()}) == 1
    assert len(result.states) == 2
    assert result.losses[-1] < result.losses[0]
    assert result.evaluations
    assert all(math.isfinite(one.loss) for one in result.evaluations if one.loss is not None)


def saved(tmp_path):
    node = ran(plan_of("diloco"))[0]
    weights = {name: x.detach() for name, x in node.model.named_parameters()}
    files = {"config.json": msgspec.json.encode(node.model.config)}
    save(tmp_path / "checkpoints", 4, {"model": weights}, {"run": "x"}, files)
    return node, open_model(tmp_path)


def test_a_checkpoint_becomes_a_folder_that_transformers_loads(tmp_path):
    node, found = saved(tmp_path)
    assert found.config == SHAPE
    x = torch.from_numpy(TEXT[:32].reshape(1, 32))
    with torch.no_grad():
        wanted = node.model.eval()(x)
    assert torch.equal(found.model(x), wanted)
    export(tmp_path / "out", found.config, found.weights, found.tokenizer, "card")
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(other(x).logits, wanted)
    ours = generate(found.model, ByteTokenizer(), "a", 8, sampling=GREEDY)
    ids = other.generate(torch.tensor([[97]]), max_new_tokens=8, do_sample=False)
    assert ours == ByteTokenizer().decode(ids[0, 1:].tolist())
    with pytest.raises(GgufRefused, match="class of transformers"):
        gguf_writer(found.config, found.weights, ByteTokenizer(), "float32")


def test_a_checkpoint_with_another_configuration_is_refused(tmp_path):
    saved(tmp_path)
    fields = msgspec.to_builtins(SHAPE) | {"dim": 32}
    weights = {"transformer.wte.weight": torch.zeros(256, 16)}
    files = {"config.json": msgspec.json.encode(fields)}
    save(tmp_path / "other", 4, {"model": weights}, {"run": "x"}, files)
    with pytest.raises(CheckpointCorrupt, match="its hf says 16"):
        open_model(tmp_path / "other")


@pytest.mark.parametrize("cut", [None, "headless"])
def test_a_run_starts_from_what_transformers_saved(tmp_path, cut):
    torch.manual_seed(5)
    other = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)).eval()
    (other if cut is None else other.transformer).save_pretrained(tmp_path)
    weights = WeightsFolder(tmp_path, SHAPE)
    begun = whole_model(SHAPE, 0, weights)
    x = torch.from_numpy(TEXT[:33])
    with torch.no_grad():
        torch.testing.assert_close(begun.eval()(x[None, :32]), other(x[None, :32]).logits)
    nodes = ran(plan_of("diloco", rate=1e-12, start=weights.hash), weights)
    wanted = losses(begun, x[None, :32], x[None, 1:])
    for node in nodes.values():
        assert node.loop.step
        found = losses(node.model, x[None, :32], x[None, 1:])
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


@pytest.mark.ci_more
def test_a_trial_finds_what_a_device_computes_at_once(card):
    there = Device(card, "Double Card", "fp32")
    there.release()
    CARD.reset_counters()
    before = CARD.used_bytes
    assert fitting(plan_of("ddp"), there, StepOptions()) == StepOptions(micro_batch=2)
    assert CARD.used_bytes <= before
