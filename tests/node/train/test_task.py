"""A step on a device: computed in parts that fit, and taken again where memory or fp16 fail."""

import copy
import itertools
import logging
import math

import pytest
import torch
from worlds.card import CARD, OutOfMemory

from farflock.node.assembly.node import task_of
from farflock.node.data.shard_order import SampleStream
from farflock.node.model.data import Batches
from farflock.node.model.device import Device
from farflock.node.model.llama import ModelConfig, build
from farflock.node.model.step_options import StepOptions
from farflock.node.run.terms import RunPlan
from farflock.node.train.task import StepImpossible
from farflock.optimizers.method import Progress
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.schedule import Schedule

SHAPE = ModelConfig(dim=16, layers=1, heads=2, kv_heads=1, ffn_dim=32, context=32)
TINY = build(SHAPE, 3)
BATCH, SEQ = 8, 32


def task(text, device=None, micro_batch=None, accumulate=1, batch=BATCH):
    """A task of the tiny model; a step does nothing but compute the gradient."""
    device = device or Device()
    plan = RunPlan(
        *(3, SHAPE, InnerConfig(lr=1e-2), Schedule(1e-2, 10**6), "local"),
        batch=batch,
        seq=SEQ,
        accumulate=accumulate,
    )
    model = copy.deepcopy(TINY).to(device.place)
    options = StepOptions(micro_batch=micro_batch)
    return task_of(plan, model, Batches(text, SampleStream(3, "peer"), batch, SEQ), device, options)


def passes(made, step=0):
    """The loss of a step and its gradients, on the CPU."""
    loss = float(made.forward_backward(step, Progress(step)))
    return loss, gradients(made)


def gradients(made):
    held = {name: one.grad for name, one in made.module.named_parameters()}
    return {name: None if x is None else x.to("cpu", copy=True) for name, x in held.items()}


def assert_close(one, other):
    """Equal within the rounding of float32 sums."""
    assert one[0] == pytest.approx(other[0], rel=1e-6)
    for name, x in one[1].items():
        torch.testing.assert_close(x, other[1][name], rtol=1e-4, atol=1e-7)


def assert_equal(one, other):
    assert one[0] == other[0]
    assert all(torch.equal(x, other[1][name]) for name, x in one[1].items())


def failing(made, calls):
    """Let the model's passes of these numbers, counted from 1, find no room."""
    compute, numbers = made.module.forward, itertools.count(1)

    def forward(x, y):
        if next(numbers) in calls:
            raise OutOfMemory("card out of memory: tried to allocate 1 byte, 0 are free")
        return compute(x, y)

    made.module.forward = forward


def sometimes(*given):
    """Values of a test for which CI has time, and a developer has not."""
    return pytest.param(*given, marks=pytest.mark.ci_more)


@pytest.mark.parametrize(
    ("micro_batch", "accumulate"),
    [(3, 2), (2, 1), *(sometimes(size, many) for size in (1, 5, 7) for many in (1, 2))],
)
def test_parts_of_any_size_give_the_loss_and_gradient_of_the_whole(text, micro_batch, accumulate):
    parts = passes(task(text, micro_batch=micro_batch, accumulate=accumulate))
    assert_close(parts, passes(task(text, accumulate=accumulate)))


@pytest.mark.parametrize("micro_batch", [None, BATCH, 100])
def test_a_batch_in_one_part_is_computed_as_a_whole_bit_for_bit(text, micro_batch):
    made = task(text, accumulate=2)
    whole = [torch.tensor(0.0)] * 0
    for part in range(2):
        x, y = made.batches.batch(part)
        logits = made.module(x)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()) / 2
        loss.backward()
        whole.append(loss.detach())
    expected = sum(torch.stack(whole).tolist(), 0.0), gradients(made)
    assert_equal(passes(task(text, micro_batch=micro_batch, accumulate=2)), expected)


def test_a_device_computes_parts_as_the_cpu_does(text, single):
    assert_close(passes(task(text, single, 3)), passes(task(text)))


def peak_bytes(made):
    """The card's memory at the peak of a step."""
    CARD.reset_counters()
    made.forward_backward(0, Progress(0))
    return CARD.peak_bytes


def test_a_batch_that_does_not_fit_is_computed_in_halves(text, single, caplog, card):
    CARD.capacity_bytes = peak_bytes(task(text, single)) - 1
    made = task(text, single)
    CARD.reset_counters()
    with caplog.at_level(logging.WARNING):
        there = passes(made)
    assert made.micro_batches.at_once == 4
    assert CARD.peak_bytes <= CARD.capacity_bytes
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == (
        "Single ran out of memory with 8 sequences at once: step 0 is taken again with 4"
    )
    assert_close(there, passes(task(text)))


@pytest.mark.parametrize("place", [0.8, *map(sometimes, (0.0, 0.3, 0.999))])
def test_a_failure_anywhere_in_a_step_loses_and_doubles_nothing(
    text, single, monkeypatch, place, card
):
    made, expected, whole = task(text, single, 4), task(text, single, 2), task(text, single, 4)
    store, tensors, fails_at = CARD.store, 0, math.inf

    def counted(*given):
        nonlocal tensors
        tensors += 1
        if tensors == fails_at:
            raise OutOfMemory("card out of memory: tried to allocate 1 byte, 0 are free")
        store(*given)

    monkeypatch.setattr(CARD, "store", counted)
    whole.forward_backward(7, Progress(7))
    fails_at, tensors = 1 + int(place * tensors), 0
    found = passes(made, 7)
    assert made.micro_batches.at_once == 2
    fails_at = math.inf
    assert_equal(found, passes(expected, 7))


def test_gradients_of_earlier_steps_survive_a_failure_and_are_added_once(text, single):
    made, expected = task(text, single, 2), task(text, single, 1)
    for each in (made, expected):
        each.micro_batches.size = 2
        passes(each, 0)
    expected.micro_batches.size = 1
    failing(made, calls={3})
    assert_equal(passes(made, 1), passes(expected, 1))


def test_one_sequence_without_room_is_refused_and_leaves_the_gradients_of_before(text, single):
    made = task(text, single, 2)
    _, before = passes(made, 0)
    failing(made, calls=range(1, 99))
    with pytest.raises(StepImpossible, match="no room for a step with one sequence at a time"):
        made.forward_backward(1, Progress(1))
    assert all(torch.equal(x, before[name]) for name, x in gradients(made).items())


def test_a_failed_attempt_holds_no_memory_when_the_next_one_begins(text, single):
    made = task(text, single)
    single.release()
    taken, seen = single.begin_peak(), []
    failing(made, calls={1})
    batch_of = made.batches.batch

    class Watched:
        batch_size, seq = BATCH, SEQ

        def batch(self, step):
            seen.append(single.begin_peak())
            return batch_of(step)

    made.batches = Watched()
    made.forward_backward(0, Progress(0))
    assert seen == [taken, taken]


def test_another_error_is_not_taken_for_a_lack_of_memory(text, single):
    made = task(text, single)
    made.module.forward = lambda x, y: torch.zeros(3) @ torch.zeros(4)
    with pytest.raises(RuntimeError, match="size"):
        made.forward_backward(0, Progress(0))
    assert made.micro_batches.at_once == BATCH


# fp16


@pytest.fixture
def half(accelerator):
    """A device that has no bf16."""
    return Device(accelerator, "Half", "fp16")


def test_fp16_gives_the_gradient_of_float32_within_its_rounding(text, half):
    (loss, here), (_, there) = passes(task(text)), passes(task(text, half))
    assert loss == pytest.approx(passes(task(text, half))[0], rel=1e-3)
    for name, x in here.items():
        assert (x - there[name]).norm() <= 0.02 * x.norm(), name


def test_small_gradients_survive_only_by_the_scale(text, half):
    made = task(text, half)
    with torch.no_grad():
        made.module.model.embed_tokens.weight.mul_(1e-3)  # so that most gradients are tiny
    scaled = passes(made)[1]
    made.loss_scale.value = 1.0
    for one in made.module.parameters():
        one.grad = None
    plain = passes(made)[1]
    kept = [sum(int(x.count_nonzero()) for x in each.values()) for each in (scaled, plain)]
    assert kept[1] < kept[0]


def test_an_overflow_takes_the_same_step_again_at_half_the_scale(text, half):
    made, expected = task(text, half), task(text, half)
    made.loss_scale.value = 2.0**24
    found = passes(made, 5)
    assert 1.0 < made.loss_scale.value < 2.0**24
    assert made.loss_scale.good_steps == 1
    expected.loss_scale.value = made.loss_scale.value
    assert_equal(found, passes(expected, 5))


def test_gradients_of_earlier_steps_are_not_scaled_again(text, half):
    made, alone = task(text, half), task(text, half)
    first = passes(made, 0)[1]
    both, second = passes(made, 1)[1], passes(alone, 1)[1]
    for name, x in both.items():
        assert torch.equal(x, first[name] + second[name])


def test_gradients_that_overflow_without_a_scale_end_the_step(text, half):
    made = task(text, half)
    with torch.no_grad():
        made.module.model.embed_tokens.weight.mul_(1e20)
    with pytest.raises(StepImpossible, match="they overflow even without loss scaling"):
        made.forward_backward(0, Progress(0))
    assert made.loss_scale.value == 1.0


def test_a_step_in_fp16_waits_once(text, half, card):
    made = task(text, half, 4)
    passes(made)
    CARD.reset_counters()
    made.forward_backward(1, Progress(1))
    assert CARD.from_card_bytes == 3 * 4  # two losses and a flag, in one copy
    assert CARD.waits == 0


@pytest.mark.ci_more
def test_a_model_that_fits_at_two_sequences_has_the_loss_of_eight(text, single, card):
    shape = {"dim": 64, "layers": 16, "heads": 4, "kv_heads": 4, "ffn_dim": 192}
    model = build(ModelConfig(**shape, context=256), 3)
    plan = RunPlan(
        *(3, model.config, InnerConfig(), Schedule(1e-3, 10**6), "local"), batch=8, seq=256
    )
    batches = Batches(text, SampleStream(3, "peer"), 8, 256)
    CARD.capacity_bytes = 2**27
    there, here = (
        task_of(plan, copy.deepcopy(model).to(device.place), batches, device, StepOptions())
        for device in (single, Device())
    )
    found = passes(there)
    assert there.micro_batches.at_once == 2
    assert CARD.peak_bytes <= CARD.capacity_bytes
    loss = passes(here)
    assert found[0] == pytest.approx(loss[0], rel=1e-6)
    for name, x in found[1].items():
        assert (x - loss[1][name]).norm() <= 1e-4 * loss[1][name].norm() + 1e-9, name
