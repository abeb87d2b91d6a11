"""Compiled layers compute the same; where compiling fails, a step is as if it had not been tried.

torch takes seconds to get ready for the first compilation of a process."""

import logging

import pytest
import torch

from farflock.node.model import loss
from farflock.node.model.compiled import CompiledLayers
from farflock.node.model.llama import PRESETS, build

pytestmark = pytest.mark.ci_more


def batch():
    return torch.randint(256, (2, 2, 32), generator=torch.Generator().manual_seed(4))


def step(model):
    found = model(*batch())
    found.backward()
    return [found.detach(), *(weight.grad for weight in model.parameters())]


def settled(backend, model):
    """Return the layers after their trial."""
    made = CompiledLayers(model, backend)
    made.settle(2, lambda: model(*batch()))
    return made


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_layers_compute_the_same_and_keep_their_names(backend, checkpointing):
    torch._dynamo.reset()
    plain, ours = build(PRESETS["tiny"], 1), build(PRESETS["tiny"], 1)
    ours.checkpointing = checkpointing
    calls = []

    def counted(graph, inputs):
        calls.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    settled(counted, ours)
    assert all(weight.grad is None for weight in ours.parameters())
    for x, y in zip(step(plain), step(ours), strict=True):
        torch.testing.assert_close(x, y)
    assert len(calls) == 1  # layers of one shape share it, and the step needed no other
    assert ours.state_dict().keys() == plain.state_dict().keys()


def test_the_loss_of_a_large_vocabulary_is_compiled_too(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(loss, "MAX_LOGITS", 256 * 20)  # of 64 tokens
    plain, ours = build(PRESETS["tiny"], 1), build(PRESETS["tiny"], 1)
    settled("aot_eager", ours)
    assert ours.chunk_loss is not loss.in_place
    for x, y in zip(step(plain), step(ours), strict=True):
        torch.testing.assert_close(x, y)


def fails_at_once(graph, inputs):
    raise FileNotFoundError("no compiler here\nand a long trace")


def fails_later(graph, inputs):
    def call(*args):
        raise RuntimeError("bad code")

    return call


def fails_backward(graph, inputs):
    from torch._dynamo.backends.common import aot_autograd

    def compile(graph, inputs):
        raise OSError("no space left for code")

    return aot_autograd(fw_compiler=lambda graph, inputs: graph, bw_compiler=compile)(graph, inputs)


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        (fails_at_once, "no compiler here"),
        (fails_later, "bad code"),
        (fails_backward, "no space left for code"),
        ("no such backend", "no such backend"),
    ],
)
def test_a_failure_is_told_in_one_line_and_the_step_is_that_of_plain_layers(
    backend, reason, caplog
):
    torch._dynamo.reset()
    plain, ours = build(PRESETS["tiny"], 1), build(PRESETS["tiny"], 1)
    step(plain), step(ours)  # gradients that the trial must not touch
    made = settled(backend, ours)
    [record] = [record for record in caplog.records if record.name == "farflock"]
    assert record.levelno == logging.WARNING
    assert reason in record.getMessage()
    assert "\n" not in record.getMessage()
    for x, y in zip(step(plain), step(ours), strict=True):
        assert torch.equal(x, y)
    made.settle(2, lambda: pytest.fail("it was tried again"))


def test_missing_memory_is_no_failure_of_the_compiler():
    model, tries = build(PRESETS["tiny"], 1), []

    def loss_of():
        tries.append(1)
        if len(tries) == 1:
            raise torch.OutOfMemoryError("full")
        return model(*batch())

    made = CompiledLayers(model, "eager")
    with pytest.raises(torch.OutOfMemoryError):
        made.settle(2, loss_of)
    made.settle(2, loss_of)
    made.settle(2, loss_of)
    assert len(tries) == 2


def test_another_number_of_sequences_is_tried_too_and_its_failure_caught(caplog):
    torch._dynamo.reset()
    plain, ours = build(PRESETS["tiny"], 1), build(PRESETS["tiny"], 1)

    def for_two(graph, inputs):
        if inputs[0].shape[0] != 2 and inputs[1].shape[0] != 2:
            raise FileNotFoundError("no room for more code")
        return graph

    made = settled(for_two, ours)
    assert "torch.compile failed" not in caplog.text
    x, y = batch()
    made.settle(1, lambda: ours(x[:1], y[:1]))
    assert "no room for more code" in caplog.text
    for one, other in zip(step(plain), step(ours), strict=True):
        assert torch.equal(one, other)


def test_a_failure_that_is_the_models_own_comes_again_in_the_step():
    model = build(PRESETS["tiny"], 1)
    x = torch.zeros(1, 65, dtype=torch.int64)  # beyond the context
    made = CompiledLayers(model, "eager")
    made.settle(2, lambda: model(x, x))
    with pytest.raises(ValueError, match="longer than the model's context"):
        model(x, x)
