"""A node computes its steps as its machine chose, and the run goes the same way."""

import pytest
import torch
from operators import Operators
from worlds.card import CARD

from farflock.node.assembly.resume import checkpoint_state
from farflock.node.model.device import Device, choose
from farflock.node.model.step_options import StepOptions
from farflock.node.state import checkpoint
from farflock.optimizers.method import Progress

TOKENS = 640
SMALL = ("bf16", "int8")


def weights_of(node):
    return {name: x.detach().cpu() for name, x in node.model.named_parameters()}


def same(one, other):
    return all(torch.equal(x, other[name]) for name, x in one.items())


def test_checkpointing_changes_no_bit_of_a_run(bench, text):
    made = bench(text, total=TOKENS, period=5, codec="int8")
    plain, ours = made.alone(), made.alone(step_options=StepOptions(checkpointing="on"))
    assert ours.model.checkpointing
    assert ours.last_loss == plain.last_loss
    assert same(weights_of(ours), weights_of(plain))


@pytest.mark.parametrize("method", ["diloco", "lean"])
def test_with_small_moments_a_node_learns_as_much(bench, text, method):
    made = bench(text, method, total=4 * TOKENS)
    start, plain = (made.alone(tokens).last_loss for tokens in (64, 4 * TOKENS))
    for moments in SMALL:
        ours = made.alone(4 * TOKENS, step_options=StepOptions(moments=moments)).last_loss
        assert start - ours == pytest.approx(start - plain, rel=0.05)
        assert ours != plain


@pytest.mark.parametrize("moments", SMALL)
def test_a_node_with_small_moments_resumes_as_if_it_had_not_stopped(bench, text, tmp_path, moments):
    made, choice = bench(text, total=TOKENS, period=5), StepOptions(moments=moments)
    half = made.alone(TOKENS // 2, step_options=choice)
    parts, cursors = checkpoint_state(half)
    assert all(x.dtype == torch.float32 for x in parts["inner"].values())
    saved = checkpoint.load(checkpoint.save(tmp_path, half.step, parts, {"node": cursors}))
    resumed = made.alone(saved=saved, step_options=choice)
    assert same(weights_of(resumed), weights_of(made.alone(step_options=choice)))
    other = made.alone(saved=saved)  # with moments in float32
    assert other.last_loss == pytest.approx(resumed.last_loss, rel=1e-2)


def operators_of_a_step(node):
    with Operators() as operators:
        node.loop.train_one(Progress(node.step, node.step, node.tokens))
    return operators.called


def test_a_device_takes_fused_steps_unless_all_replicas_take_the_same(bench, text, card):
    single = Device(card, "Double Card", "fp32")
    made = bench(text, total=256, period=2)
    node, plain = made.alone(256, device=single), made.alone(256)
    assert "_fused_adamw_" in operators_of_a_step(node)
    assert "_fused_adamw_" not in operators_of_a_step(plain)
    for name, x in weights_of(plain).items():
        assert (weights_of(node)[name] - x).norm() <= 1e-2 * x.norm()
    shared = bench(text, "ddp", total=64, codec="bf16")
    assert "_fused_adamw_" not in operators_of_a_step(shared.alone(64, device=single))


@pytest.mark.parametrize("moments", ["fp32", *SMALL])
def test_on_a_device_moments_stay_there(bench, text, card, moments):
    choice = StepOptions(checkpointing="on", moments=moments)
    node = bench(text, "local").alone(128, device=choose(), step_options=choice)
    CARD.reset_counters()
    float(node.loop.train_one(Progress(node.step, node.step, node.tokens)))  # reads the loss
    assert CARD.to_card_bytes == 2 * 2 * 32 * 8  # tokens and targets
    assert CARD.from_card_bytes == 4  # the loss
    assert CARD.waits == 0
