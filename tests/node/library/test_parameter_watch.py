"""Parameters that are not those of the optimizer any more end a step in words; others do not."""

import pytest
import torch
from torch import nn
from worlds import virtual_optimizer

from farflock.node.errors import Usage


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)
        self.head.bias.requires_grad_(False)

    def forward(self, x):
        return self.head(self.emb(x))


def step(model, optimizer):
    x = torch.arange(5)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), x).backward()
    optimizer.step()


@pytest.fixture
def alone():
    """A function that makes a model and the optimizer of a peer alone, which has made a step."""
    made = []

    def make(model=None, **options):
        model = model or Net()
        made.append(virtual_optimizer.alone(model, "diloco", period=2, **options))
        return model, made[-1]

    yield make
    for each in made:
        each.close(patient=False)


def larger(model):
    model.emb = nn.Embedding(12, 8)


def assigned(model):
    state = {name: torch.randn_like(x) for name, x in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def tied(model):
    model.head.weight = model.emb.weight


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (larger, "parameter emb.weight: it was replaced"),
        (assigned, "parameter emb.weight: it was replaced"),
        (tied, "parameter head.weight: it is no longer in the model"),
        (lambda model: setattr(model, "more", nn.Linear(2, 2)), "more.weight: it was added"),
        (lambda model: model.head.bias.requires_grad_(True), "head.bias: it was frozen when"),
        (lambda model: model.emb.to(torch.float16), "emb.weight: its type was changed from"),
        (
            lambda model: setattr(model.emb.weight, "data", torch.zeros(11, 8)),
            r"emb.weight: its shape was changed from \(10, 8\) to \(11, 8\)",
        ),
    ],
)
def test_a_changed_parameter_ends_the_next_step_and_nothing_was_trained(alone, change, says):
    model, optimizer = alone()
    step(model, optimizer)
    change(model)
    with pytest.raises(Usage, match=says) as refused:
        optimizer.step()
    assert "\n" not in str(refused.value)
    assert optimizer.tokens == 1


def test_a_listed_parameter_is_frozen_and_unfrozen_as_one_likes(alone):
    model, optimizer = alone()
    model.emb.weight.requires_grad_(False)
    before = model.emb.weight.detach().clone()
    step(model, optimizer)
    assert torch.equal(model.emb.weight, before)
    model.emb.weight.requires_grad_(True)
    step(model, optimizer)
    assert not torch.equal(model.emb.weight, before)
    assert optimizer.last_round is not None


def test_what_is_not_trained_may_come_go_and_change(alone):
    model, optimizer = alone()
    model.adapter = nn.Linear(2, 2).requires_grad_(False)
    step(model, optimizer)
    del model.adapter
    model.head.bias = nn.Parameter(torch.ones(10), requires_grad=False)
    step(model, optimizer)


def test_a_sparse_gradient_is_named_at_the_first_step_with_or_without_a_closure(alone):
    model, optimizer = alone()
    model.emb.sparse = True
    with pytest.raises(Usage, match="its gradients are sparse"):
        step(model, optimizer)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.arange(5)).sum()
        loss.backward()
        return loss

    optimizer.zero_grad()
    with pytest.raises(Usage, match="its gradients are sparse"):
        optimizer.step(closure)
    assert optimizer.tokens == 0
