"""Local training, and DDP with a single peer: both are the inner optimizer, bit for bit."""

import pytest
import torch

from farflock.node.model.replica import PlainReplica
from farflock.optimizers.method import Progress, Result
from farflock.optimizers.parts.inner import InnerConfig


def train(made, steps, inner):
    """Return the parameters after some steps of a small model with the method `made`, or in a bare
    PyTorch loop if that is None."""
    module = torch.nn.Linear(3, 2)
    with torch.no_grad():
        module.weight.copy_(torch.arange(6.0).reshape(2, 3) / 7)
        module.bias.zero_()
    optimizer = InnerConfig(inner, lr=0.05).build(module)
    replica = PlainReplica(module, optimizer, clip_norm=0.5)
    for step in range(steps):
        x = torch.linspace(-1, 1, 12).reshape(4, 3) + step / 10
        (module(x) ** 2).mean().backward()
        if made is None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            continue
        made.local_step(replica, Progress(step))
        for exchange in made.due(replica, Progress(step + 1)):
            sent = exchange.tensors
            taken = {name: [(0, tensor.numel())] for name, tensor in sent.items()}
            made.apply(
                replica,
                exchange,
                Result("alone", step + 1, ("me",), (1.0,), sent, None, sent, taken),
            )
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


@pytest.mark.parametrize("inner", ["adamw", "sgd"])
@pytest.mark.parametrize("name", ["local", "ddp"])
def test_with_one_peer_it_is_the_inner_optimizer_bit_for_bit(quick, name, inner):
    assert torch.equal(train(quick(name), 5, inner), train(None, 5, inner))


def test_local_asks_for_nothing_and_opens_nothing(quick, vectors):
    replica, made = vectors(x=torch.zeros(2)), quick("local")
    assert made.streams(replica) == []
    for step in range(50):
        made.local_step(replica, Progress(step))
        assert made.due(replica, Progress(step + 1)) == []
    assert replica.stepped == 50


def test_a_result_for_local_is_a_bug_and_says_so(quick, vectors):
    with pytest.raises(AssertionError, match="asked for no exchange"):
        quick("local").apply(vectors(x=torch.zeros(1)), None, Result("ok", 1))
