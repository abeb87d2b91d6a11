"""A compiled model and a plain one are one model to their run."""

import pytest
import torch
from torch import nn
from worlds.virtual_optimizer import alone, model_of, train_together

from farflock.node.errors import RefusedByRun

torch.set_num_threads(1)


def compiled(rank):
    """The model of each other rank is compiled."""
    return torch.compile(model_of(rank), backend="eager") if rank % 2 else model_of(rank)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def loss_of(rank, step):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * rank + step))
    return lambda model: (model(x) - x.sum(1, keepdim=True)).square().mean()


def test_compiled_and_plain_peers_end_equal():
    async def work(member):
        for step in range(6):
            await member.step(loss_of(member.rank, step))
        return member.rounds[-1]["status"], [x.detach().clone() for x in member.model.parameters()]

    (status, ours), (_, theirs) = train_together(2, "diloco", compiled, work, adamw, period=3)
    assert status == "ok"
    assert all(map(torch.equal, ours, theirs))


def test_what_is_evaluated_and_watched_has_plain_names():
    model = torch.compile(model_of(0), backend="eager")
    optimizer = alone(model, inner=adamw, period=2)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(0, step)(model).backward()
        optimizer.step()
    assert list(optimizer.eval_params()) == ["weight", "bias"]
    optimizer.close(patient=False)


def test_a_joiner_with_another_model_is_told_the_tensor():
    async def work(member):
        raise AssertionError("it is in")

    def other(rank):
        return nn.Linear(8, 1 + rank)

    with pytest.raises(RefusedByRun, match=r"parameter weight has the shape \(2, 8\) here"):
        train_together(2, "diloco", other, work, adamw)
