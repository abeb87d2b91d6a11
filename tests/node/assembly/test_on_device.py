"""A node whose model is on an accelerator trains as one on the CPU does, and with one.

The accelerator is worlds/card.py. Its attention and norms are not the fused ones of the CPU, so
local steps differ by rounding; what peers agree on does not.
"""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from worlds.card import CARD, OutOfMemory, probabilities_bytes

from farflock.node.assembly.resume import checkpoint_state
from farflock.node.model.data import evaluation
from farflock.node.model.device import choose
from farflock.node.model.evaluation import losses
from farflock.node.model.generate import generate
from farflock.node.run.memory import StepChoices, needed_device_bytes
from farflock.node.state import checkpoint
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.optimizers.catalog import METHODS
from farflock.optimizers.method import Progress

STEP = 2 * 32  # tokens
TOKENS = 10 * STEP
# A choice of coefficients, or their sign, makes much of a rounding, so DeMo sends all as they are.
ALL = {"codec": "fp32", "sign": False}
OPTIONS = {
    "diloco": {"period": 5, "codec": "int8"},
    "ddp": {"codec": "bf16"},
    "demo": ALL,
    "flexdemo": ALL,
}
EVERY_DAY = ("ddp", "diloco", "local", "sparseloco")


def out_of_memory_in(step):
    """Return a change to a node: the device has no room in the first pass of this step."""

    def changed(node):
        task, begun = node.loop.training_task, []
        batch, forward = task.batches.batch, task.module.forward

        def noted(number):
            begun.append(number)
            return batch(number)

        def failing(x, y):
            if begun == list(range(step + 1)):
                raise OutOfMemory("card out of memory: tried to allocate 1 byte, 0 are free")
            return forward(x, y)

        task.batches = SimpleNamespace(
            batch=noted, batch_size=task.batches.batch_size, seq=task.batches.seq, begun=begun
        )
        task.module.forward = failing

    return changed


def state_of(node):
    """Return all that a checkpoint holds, on the CPU."""
    groups, _cursors = checkpoint_state(node)
    return {group: {name: x.clone() for name, x in held.items()} for group, held in groups.items()}


def close(one, other, rounding=1e-9):
    """Raise `AssertionError` unless two states are equal within rounding of a few steps."""
    assert one.keys() == other.keys()
    for group, held in one.items():
        assert held.keys() == other[group].keys()
        for name, x in held.items():
            away = (x.double() - other[group][name].double()).norm()
            least = rounding if group == "personal" else 1e-9
            assert away <= 1e-2 * other[group][name].double().norm() + least, f"{group} {name}"


@pytest.mark.parametrize(
    "method",
    [
        name if name in EVERY_DAY else pytest.param(name, marks=pytest.mark.long)
        for name in sorted(METHODS)
    ],
)
def test_a_lone_node_on_the_card_ends_where_one_on_the_cpu_does(bench, text, single, method):
    made = bench(text, method, total=TOKENS, **OPTIONS.get(method, {}))
    there, here = made.alone(device=single), made.alone()
    assert all(x.device.type != "cpu" for x in there.model.parameters())
    assert there.last_loss == pytest.approx(here.last_loss, rel=1e-4)
    # DeMo sends its momentum as it is here, so what is left of it is rounding itself.
    close(state_of(there), state_of(here), 1e-6 if OPTIONS.get(method) is ALL else 1e-9)


@pytest.mark.parametrize(
    "on_card",
    [(0,), *(pytest.param(on_card, marks=pytest.mark.ci_more) for on_card in ((1,), (0, 1)))],
)
def test_a_peer_on_the_card_and_one_on_the_cpu_end_with_one_state(bench, text, single, on_card):
    made = bench(text, peers=2, total=4 * TOKENS, period=5, codec="int8")
    devices = [single if number in on_card else None for number in range(2)]
    nodes = made.together(devices)
    first, second = (state_of(node)["method"] for node in nodes)
    assert nodes[0].loop.driver.position == nodes[1].loop.driver.position
    assert first.keys() == second.keys()
    assert all(torch.equal(x, second[name]) for name, x in first.items())


@pytest.mark.parametrize("from_card", [True, False])
def test_a_checkpoint_goes_on_wherever_it_was_written(bench, text, single, tmp_path, from_card):
    made = bench(text, total=TOKENS, period=5, codec="int8", feedback=0.9)
    first, second = (single, None) if from_card else (None, single)
    node = made.alone(TOKENS // 2, first)
    groups, cursors = checkpoint_state(node)
    saved = checkpoint.load(checkpoint.save(tmp_path, node.step, groups, {"node": cursors}))
    for group, held in state_of(node).items():
        assert all(torch.equal(x, saved.groups[group][name]) for name, x in held.items()), group
    resumed = made.alone(device=second, saved=saved)
    assert resumed.last_loss == pytest.approx(made.alone().last_loss, rel=1e-3)


def copies_of_a_step(node):
    """Take a step; return the bytes that went to the card, and those that came back."""
    CARD.reset_counters()
    float(node.loop.train_one(Progress(node.step, node.step, node.tokens)))  # reads the loss
    return CARD.to_card_bytes, CARD.from_card_bytes


STEP_COPIES = 2 * 2 * 32 * 8, 4  # inputs and targets, int64; the loss


def test_a_step_copies_tokens_there_and_one_number_back(bench, text, card):
    node = bench(text, "local").alone(STEP, choose())
    assert copies_of_a_step(node) == STEP_COPIES


@pytest.mark.parametrize(
    "detour", [lambda x: x.cpu().to(x.device), lambda x: x + float(x.detach().sum()) * 0]
)
def test_a_detour_over_the_cpu_would_be_found(bench, text, card, detour):
    node = bench(text, "local").alone(STEP, choose())
    layer = node.model.blocks()[0]
    compute = layer.forward
    layer.forward = lambda x, *angles: compute(detour(x), *angles)
    assert copies_of_a_step(node) != STEP_COPIES


def test_a_mixture_of_devices_would_be_found(bench, text, card):
    node = bench(text, "local").alone(STEP, choose())
    layer = node.model.blocks()[0]
    compute = layer.forward
    layer.forward = lambda x, *angles: compute(x + torch.zeros(x.shape), *angles)
    with pytest.raises(RuntimeError, match="on the same device"):
        copies_of_a_step(node)


def test_a_round_copies_the_weights_twice_and_never_all_at_once(bench, text, single, card):
    made = bench(text, total=TOKENS, period=5)
    CARD.reset_counters()
    weights = 4 * sum(x.numel() for x in made.alone(device=single).model.parameters())
    rounds = TOKENS // STEP // 5
    assert CARD.from_card_bytes <= (2 * rounds + 2) * weights
    assert CARD.largest_from_card_bytes < weights / 2


def test_losses_and_text_are_those_of_the_cpu(bench, text, accelerator):
    here = bench(text, "local", total=TOKENS).alone().model
    there = copy.deepcopy(here).to(accelerator)
    x, y = evaluation(text.sources[0].read(0), 32, 4)
    torch.testing.assert_close(losses(there, x, y), losses(here, x, y))
    said = [generate(model, ByteTokenizer(), "To be", 20) for model in (there, here)]
    assert said[0] == said[1]


def test_in_lower_precision_it_still_trains(bench, text, accelerator):
    node = bench(text, "local", total=8 * TOKENS).alone(2 * TOKENS, choose())
    assert node.loop.training_task.device.precision == "bf16"
    assert node.last_loss < 5.0  # of 5.5 without training
    assert all(x.dtype == torch.float32 for x in node.model.parameters())


@pytest.mark.parametrize("method", ["ddp", pytest.param("diloco", marks=pytest.mark.ci_more)])
def test_out_of_memory_in_step_7_loses_no_sample_and_counts_no_step_twice(
    bench, text, single, method, card
):
    made = bench(text, method, total=TOKENS, **OPTIONS[method])
    whole = made.alone(device=single)
    found = made.alone(device=single, change=out_of_memory_in(7))
    assert found.loop.training_task.micro_batches.at_once == 1
    assert found.loop.training_task.batches.begun == [*range(8), 7, 8, 9]
    assert (found.step, found.tokens) == (whole.step, whole.tokens) == (10, 640)
    assert found.last_loss == pytest.approx(whole.last_loss, rel=1e-5)
    close(state_of(found), state_of(whole))


def test_a_run_in_parts_that_fit_a_small_card_ends_with_the_loss_of_whole_batches(
    bench, text, single, card
):
    made = bench(text, total=6 * 256, period=3)
    made.plan = replace(made.plan, batch=8)
    whole = made.alone(6 * 256, single)
    state = state_of(whole)
    loss = whole.last_loss
    del whole
    single.release()
    CARD.reset_counters()
    room = needed_device_bytes(made.plan, StepChoices(2, on_device=True, is_lower=False))
    CARD.leave_free(room + probabilities_bytes(made.plan, 2))
    found = made.alone(6 * 256, single)
    assert found.loop.training_task.micro_batches.at_once == 2
    assert CARD.peak_bytes <= CARD.capacity_bytes
    assert found.last_loss == pytest.approx(loss, rel=1e-5)
    close(state_of(found), state)


@pytest.mark.ci_more
def test_two_peers_of_which_one_has_no_bf16_end_with_one_state(bench, text, card):
    CARD.has_bf16 = False
    made = bench(text, peers=2, total=6 * TOKENS, period=5, codec="int8")
    nodes = made.together((choose(), None))
    assert nodes[0].loop.training_task.device.precision == "fp16"
    first, second = (state_of(node)["method"] for node in nodes)
    assert nodes[0].loop.driver.position == nodes[1].loop.driver.position
    assert all(torch.equal(x, second[name]) for name, x in first.items())
