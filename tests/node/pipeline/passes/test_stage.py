"""Stages: whatever the split and each pass's replica, the gradients are the unsplit model's."""

import random

import msgspec
import pytest
import torch

from farflock.node.model.llama import PRESETS, build, next_token_loss
from farflock.node.pipeline.passes.stage import (
    GradientAccumulator,
    MicrobatchGradient,
    Stage,
    backward_through,
)
from farflock.node.run.split import BadSplit, even, split

CONFIG = msgspec.structs.replace(PRESETS["tiny"], layers=5, tied=False, vocab_size=50)
SPLITS = [[5], [2, 3], [1, 3, 1], [1, 1, 1, 1, 1], [4, 1]]
REPLICAS = 3


def microbatches(count, seed=0):
    """Of unequal sizes: what is divided is a number of tokens."""
    chance = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        tokens = torch.randint(0, CONFIG.vocab_size, (1 + number % 3, 9), generator=chance)
        made.append((tokens[:, :-1], tokens[:, 1:]))
    return made


def through(path, x, targets):
    """One microbatch there and back; `path` names by stage the replicas of both of its passes."""
    inputs = []
    for forward, _ in path:
        inputs.append(x)
        x = forward[0].forward(x) if forward is not path[-1][0] else x
    gradient, loss = targets, None
    for (_, backward), inside in zip(reversed(path), reversed(inputs), strict=True):
        stage, accumulator = backward
        done = stage.backward(inside, gradient)
        accumulator.add(done.staged)
        gradient, loss = done.input_gradient, done.loss_sum if done.loss_sum is not None else loss
    assert gradient is None
    return loss


def reference(batches):
    """The unsplit model's gradient of the mean loss over all tokens, and that loss."""
    model = build(CONFIG, 7).double()
    tokens = sum(x.numel() for x, _ in batches)
    loss = sum(next_token_loss_64(model(x), y) for x, y in batches) / tokens
    loss.backward()
    return {name: x.grad for name, x in model.named_parameters()}, float(loss.detach())


def next_token_loss_64(logits, targets):
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum"
    )


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_gradients_are_those_of_the_unsplit_model_through_random_paths(sizes, seed):
    """E1: fp64, three replicas a stage, another one for each backward pass."""
    chance, batches = random.Random(seed), microbatches(7, seed)
    spans = split(CONFIG, sizes)
    stages = [
        [(Stage(build(CONFIG, 7, span).double()), GradientAccumulator()) for _ in range(REPLICAS)]
        for span in spans
    ]
    losses = 0.0
    for x, targets in chance.sample(batches, len(batches)):
        path = [(chance.choice(replicas), chance.choice(replicas)) for replicas in stages]
        losses += through(path, x, targets)
    expected, loss = reference(batches)
    tokens = sum(x.numel() for x, _ in batches)
    assert losses / tokens == pytest.approx(loss, rel=1e-12)
    seen = set()
    for replicas in stages:
        taken = [accumulator.take() for _, accumulator in replicas]
        assert sum(staged.tokens for staged in taken) == tokens
        for name in replicas[0][0].model.state_dict():
            total = sum(staged.gradients[name] for staged in taken if staged.tokens)
            torch.testing.assert_close(total / tokens, expected[name], rtol=1e-12, atol=1e-15)
            seen.add(name)
    assert seen == expected.keys()


def test_what_is_lost_at_one_stage_is_divided_by_what_that_stage_has():
    """N_s: a microbatch that never reached the first stage does not shrink that one's gradient."""
    batches = microbatches(3)
    first, last = (Stage(build(CONFIG, 7, span).double()) for span in split(CONFIG, [2, 3]))
    sums = GradientAccumulator(), GradientAccumulator()
    for number, (x, targets) in enumerate(batches):
        done = last.backward(first.forward(x), targets)
        sums[1].add(done.staged)
        if number != 1:
            sums[0].add(first.backward(x, done.input_gradient).staged)
    kept, _ = reference([batches[0], batches[2]])
    every, _ = reference(batches)
    for accumulator, expected in zip(sums, (kept, every), strict=True):
        taken = accumulator.take()
        for name, total in taken.gradients.items():
            torch.testing.assert_close(total / taken.tokens, expected[name], rtol=1e-12, atol=1e-15)


def test_a_backward_pass_leaves_no_trace_in_the_stage():
    stage = Stage(build(CONFIG, 7, range(2, 5)).double())
    x, targets = (
        torch.randn(2, 8, CONFIG.dim, dtype=torch.float64),
        torch.zeros(2, 8, dtype=torch.int64),
    )
    once, again = stage.backward(x, targets), stage.backward(x, targets)
    assert all(weight.grad is None for weight in stage.model.parameters())
    assert not x.requires_grad
    assert torch.equal(once.input_gradient, again.input_gradient)
    for name, gradient in once.staged.gradients.items():
        assert torch.equal(gradient, again.staged.gradients[name])
    assert once.loss_sum == pytest.approx(stage.loss_sum(x, targets), rel=1e-12)


def test_a_whole_model_is_one_stage_and_agrees_with_the_training_loss():
    model = build(CONFIG, 3)
    ((x, targets),) = microbatches(1)
    done = Stage(model).backward(x, targets)
    assert done.input_gradient is None
    assert done.loss_sum / done.staged.tokens == pytest.approx(
        float(next_token_loss(model(x), targets).detach()), rel=1e-5
    )


def test_what_was_taken_and_did_not_count_goes_back():
    accumulator = GradientAccumulator()
    accumulator.add(MicrobatchGradient({"w": torch.ones(2)}, 5))
    taken = accumulator.take()
    assert (accumulator.sums, accumulator.tokens) == ({}, 0)
    accumulator.add(MicrobatchGradient({"w": torch.full((2,), 3.0)}, 7))
    accumulator.add(taken)
    assert accumulator.tokens == 12
    assert accumulator.take().gradients["w"].tolist() == [4, 4]
    assert taken.gradients["w"].tolist() == [1, 1]  # its holder sees it unchanged


def test_an_even_split_gives_the_middle_more():
    lengths = [len(span) for span in even(msgspec.structs.replace(CONFIG, layers=11), 4)]
    assert lengths == [3, 3, 3, 2]
    assert [len(span) for span in even(CONFIG, 3)] == [2, 2, 1]
    assert [len(span) for span in even(msgspec.structs.replace(CONFIG, layers=6), 4)] == [
        1,
        2,
        2,
        1,
    ]


@pytest.mark.parametrize(
    ("config", "sizes", "reason"),
    [
        (CONFIG, [], "each stage needs one layer or more"),
        (CONFIG, [5, 0], "each stage needs one layer or more"),
        (CONFIG, [2, 2], "have 4 in total, the model has 5"),
        (PRESETS["demo"], [2, 2], "set model.tied to false"),
    ],
)
def test_what_is_no_split_is_refused(config, sizes, reason):
    with pytest.raises(BadSplit, match=reason):
        split(config, sizes)


@pytest.mark.parametrize("stages", [0, 6])
def test_more_stages_than_layers_are_refused(stages):
    with pytest.raises(BadSplit, match="5 layers can be cut into 1 to 5 stages"):
        even(CONFIG, stages)


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_through_all_stages_at_once_each_has_what_it_has_pass_by_pass(sizes, dtype):
    stages = [Stage(build(CONFIG, 7, span).to(dtype)) for span in split(CONFIG, sizes)]
    for x, targets in microbatches(3):
        sums = [GradientAccumulator() for _ in stages]
        path = [((stage, total), (stage, total)) for stage, total in zip(stages, sums, strict=True)]
        loss = through(path, x, targets)
        staged, loss_sum = backward_through(stages, x, targets)
        assert loss_sum == loss
        for one, total in zip(staged, sums, strict=True):
            taken = total.take()
            assert one.tokens == taken.tokens == x.numel()
            assert one.gradients.keys() == taken.gradients.keys()
            assert all(
                torch.equal(one.gradients[name], taken.gradients[name]) for name in taken.gradients
            )
    assert all(weight.grad is None for stage in stages for weight in stage.model.parameters())


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_a_sum_has_the_bits_of_additions_in_order_and_leaves_what_it_was_given_as_it_is(count):
    chance = torch.Generator().manual_seed(count)
    given = [torch.randn(50, generator=chance) for _ in range(count)]
    staged = [MicrobatchGradient({"x": x.clone()}, number) for number, x in enumerate(given)]
    accumulator = GradientAccumulator()
    for _ in range(2):
        for each in staged:
            accumulator.add(each)
        taken = accumulator.take()
        assert taken.tokens == sum(range(count))
        if count:
            assert torch.equal(taken.gradients["x"], sum(given[1:], given[0]))
    assert all(torch.equal(each.gradients["x"], x) for each, x in zip(staged, given, strict=True))
