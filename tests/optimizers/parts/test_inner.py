"""The inner optimizers: which parameters decay, and what is refused."""

import pytest
import torch
from torch import nn

from farflock.optimizers.parts.inner import InnerConfig


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 5)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon", "nadam"])
def test_matrices_decay_and_vectors_do_not(name):
    module = Layers()
    optimizer = InnerConfig(name, weight_decay=0.3).build(module)
    decay = {
        id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    assert {n: decay[id(p)] for n, p in module.named_parameters()} == {
        "embed.weight": 0.3,
        "norm.weight": 0.0,
        "norm.bias": 0.0,
        "head.bias": 0.0,
    }


def test_a_tied_parameter_is_stepped_once():
    module = Layers()
    optimizer = InnerConfig("sgd", lr=0.5, weight_decay=0.0).build(module)
    before = module.embed.weight.detach().clone()
    module.embed.weight.grad = torch.ones_like(before)
    optimizer.step()
    torch.testing.assert_close(module.head.weight.detach(), before - 0.5)


def test_adamw_gets_the_betas_rate_and_eps_of_the_configuration():
    optimizer = InnerConfig(lr=0.01, betas=(0.8, 0.9), eps=1e-6).build(nn.Linear(2, 2))
    assert isinstance(optimizer, torch.optim.AdamW)
    assert all(
        (g["lr"], g["betas"], g["eps"]) == (0.01, (0.8, 0.9), 1e-6) for g in optimizer.param_groups
    )


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_gathers_momentum_as_its_equations_say(nesterov):
    """u <- mu·u + g;  theta <- theta - lr·(g + mu·u if nesterov else u)."""
    module = nn.Linear(2, 1, bias=False)
    optimizer = InnerConfig(
        "sgd", lr=0.5, weight_decay=0.0, momentum=0.25, nesterov=nesterov
    ).build(module)
    theta, u = module.weight.detach().clone(), torch.zeros(1, 2)
    for g in ([[1.0, 2.0]], [[-4.0, 8.0]], [[0.5, 0.0]]):
        module.weight.grad = torch.tensor(g)
        u = 0.25 * u + module.weight.grad
        theta = theta - 0.5 * (module.weight.grad + 0.25 * u if nesterov else u)
        optimizer.step()
        assert torch.equal(module.weight.detach(), theta)


def test_sgd_without_a_momentum_is_plain():
    (group,) = InnerConfig("sgd").build(nn.Linear(2, 2, bias=False)).param_groups
    assert (group["momentum"], group["nesterov"]) == (0.0, False)


def test_a_module_of_vectors_only_has_no_empty_group():
    groups = InnerConfig().build(nn.LayerNorm(4)).param_groups
    assert [group["weight_decay"] for group in groups] == [0.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "adam"}, "'adam' is not known; choose adamw, sgd, muon or nadam"),
        ({"lr": 0.0}, "rate of 0.0"),
        ({"lr": float("nan")}, "rate of nan"),
        ({"lr": float("inf")}, "rate of inf"),
        ({"betas": (0.9, 1.0)}, r"\(0.9, 1.0\)"),
        ({"betas": (0.9,)}, r"\(0.9,\)"),
        ({"weight_decay": -0.1}, "decay of -0.1"),
        ({"weight_decay": float("nan")}, "decay of nan"),
        ({"eps": 0.0}, "eps of 0.0"),
        ({"name": "adamw", "momentum": 0.9}, "adamw has no momentum of 0.9"),
        ({"name": "sgd", "momentum": 1.0}, "momentum of 1.0 is out of range"),
        ({"name": "muon", "momentum": -0.1}, "momentum of -0.1"),
        ({"name": "sgd", "momentum": float("nan")}, "momentum of nan"),
        ({"name": "sgd", "nesterov": True}, "nesterov is for sgd with momentum"),
        ({"name": "muon", "momentum": 0.9, "nesterov": True}, "not for muon"),
    ],
)
def test_a_value_that_cannot_train_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        InnerConfig(**options)


def test_nadam_is_torchs_own_with_decoupled_decay_of_matrices():
    ours, theirs = nn.Linear(3, 2), nn.Linear(3, 2)
    theirs.load_state_dict(ours.state_dict())
    groups = [
        {"params": [theirs.weight], "weight_decay": 0.2},
        {"params": [theirs.bias], "weight_decay": 0.0},
    ]
    oracle = torch.optim.NAdam(
        groups, 0.05, (0.9, 0.8), 1e-6, momentum_decay=4e-3, decoupled_weight_decay=True
    )
    inner = InnerConfig("nadam", 0.05, (0.9, 0.8), 0.2, 1e-6).build(ours)
    for seed in range(5):
        for module, optimizer in ((ours, inner), (theirs, oracle)):
            generator = torch.Generator().manual_seed(seed)
            for parameter in module.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.bias, theirs.bias)
