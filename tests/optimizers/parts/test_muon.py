"""Muon compared with the equations in NumPy, its choice of parameters, and its appearance as a
single optimizer."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from farflock.node.model.llama import Llama, ModelConfig
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.muon import Muon, hidden_matrices

A, B, C = 3.4445, -4.7750, 2.0315


class Net(nn.Module):
    """An embedding, two hidden matrices of which one has the embedding's shape, a norm,
    a convolution and a head."""

    def __init__(self, tied=False):
        super().__init__()
        self.embed, self.wide, self.narrow = (
            nn.Embedding(12, 8),
            nn.Linear(8, 12),
            nn.Linear(12, 8, bias=False),
        )
        self.norm, self.filter = nn.LayerNorm(8), nn.Conv1d(8, 8, 3)
        self.head = nn.Linear(8, 12, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)


def names_of(module, parameters):
    found = {id(parameter) for parameter in parameters}
    return [name for name, parameter in module.named_parameters() if id(parameter) in found]


def newton_schulz(x):
    """Five steps of X <- aX + bXX'X + c(XX')²X from X/|X|, in float64."""
    x = x.astype(np.float64)
    turned = x.shape[0] > x.shape[1]
    x = (x.T if turned else x) / max(np.linalg.norm(x), 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = A * x + B * gram @ x + C * gram @ gram @ x
    return x.T if turned else x


def gradients(module, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("momentum", [None, 0.8, 0.0])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_hidden_matrices_move_as_the_equations_say(momentum, decay):
    module = Net()
    optimizer = InnerConfig("muon", lr=0.02, weight_decay=decay, momentum=momentum).build(module)
    mu = 0.95 if momentum is None else momentum
    theta = {
        name: module.get_parameter(name).detach().numpy().copy()
        for name in ("wide.weight", "narrow.weight")
    }
    buffers = {name: np.zeros_like(x) for name, x in theta.items()}
    for step in range(4):
        gradients(module, step)
        for name in theta:
            g = module.get_parameter(name).grad.numpy()
            buffers[name] = mu * buffers[name] + (1 - mu) * g
            o = newton_schulz((1 - mu) * g + mu * buffers[name])
            theta[name] = theta[name] * (1 - 0.02 * decay) - 0.02 * 0.2 * np.sqrt(max(g.shape)) * o
        optimizer.step()
    for name, x in theta.items():  # the library computes O in bf16
        np.testing.assert_allclose(
            module.get_parameter(name).detach().numpy(), x, atol=0.02 * 0.2 * 12**0.5 * 0.1
        )
        buffer = optimizer.state[module.get_parameter(name)]["momentum_buffer"].numpy()
        np.testing.assert_allclose(buffer, buffers[name], rtol=1e-5, atol=1e-6)


def test_an_update_has_singular_values_near_one_whatever_the_gradients_are():
    module = nn.Linear(16, 16, bias=False)
    optimizer = InnerConfig("muon", lr=1.0, weight_decay=0.0).build(module)
    before = module.weight.detach().clone()
    u, _, v = torch.linalg.svd(torch.randn(16, 16, generator=torch.Generator().manual_seed(1)))
    module.weight.grad = u @ torch.diag(torch.logspace(-1, 1, 16)) @ v  # two orders of magnitude
    optimizer.step()
    values = torch.linalg.svdvals((before - module.weight.detach()) / (0.2 * 16**0.5))
    assert 0.5 < float(values.min()) <= float(values.max()) < 1.3


def test_the_rest_moves_as_under_adamw():
    ours, theirs = Net(), Net()
    config = InnerConfig("muon", lr=0.02, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
    optimizers = [
        config.build(ours),
        InnerConfig("adamw", 0.02, (0.8, 0.9), 0.3, 1e-6).build(theirs),
    ]
    for step in range(3):
        gradients(ours, step), gradients(theirs, step)
        for optimizer in optimizers:
            optimizer.step()
    hidden = set(names_of(ours, hidden_matrices(ours)))
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, theirs.get_parameter(name)) == (name not in hidden)


@pytest.mark.parametrize("tied", [False, True])
def test_it_is_for_hidden_matrices_and_for_nothing_else(tied):
    module = Net(tied)
    assert names_of(module, hidden_matrices(module)) == ["wide.weight", "narrow.weight"]


def test_a_frozen_matrix_is_left_out():
    module = Net()
    module.wide.weight.requires_grad = False
    assert names_of(module, hidden_matrices(module)) == ["narrow.weight"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocabulary", [32, 50])
def test_of_our_model_all_matrices_inside_the_blocks_are_hidden(tied, vocabulary):
    """This also holds where the model is as wide as its vocabulary."""
    config = ModelConfig(
        vocab_size=vocabulary,
        dim=32,
        layers=2,
        heads=2,
        kv_heads=1,
        ffn_dim=50,
        context=16,
        tied=tied,
    )
    module = Llama(config)
    inside = [
        n
        for n, p in module.named_parameters()
        if p.dim() == 2 and "embed" not in n and "head" not in n
    ]
    assert names_of(module, hidden_matrices(module)) == inside
    assert len(inside) >= 2 * 7


@pytest.mark.parametrize(
    "module", [nn.LayerNorm(4), nn.Linear(4, 4, bias=False)], ids=["vectors", "matrix"]
)
def test_one_of_the_two_kinds_may_be_missing(module):
    optimizer = InnerConfig("muon", lr=0.1).build(module)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    gradients(module, 1)
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_a_scheduler_and_a_direct_change_of_the_rate_reach_both_kinds():
    module = Net()
    optimizer = InnerConfig("muon", lr=0.1, weight_decay=0.0).build(module)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [parameter.detach().clone() for parameter in module.parameters()]
    gradients(module, 1)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_it_goes_on_from_its_saved_state_as_if_it_had_never_stopped():
    module = Net()
    optimizer = InnerConfig("muon", lr=0.02).build(module)
    for step in range(2):
        gradients(module, step)
        optimizer.step()
    other = Net()
    other.load_state_dict(module.state_dict())
    again = InnerConfig("muon", lr=0.5).build(other)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for net, one in ((module, optimizer), (other, again)):
        gradients(net, 7)
        one.step()
    assert all(
        torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True)
    )
    assert {group["lr"] for group in again.param_groups} == {0.02}


def test_gradients_are_zeroed_and_a_closure_is_called_like_with_any_optimizer():
    module = Net()
    optimizer = InnerConfig("muon").build(module)
    gradients(module, 1)
    assert optimizer.step(lambda: 3.0) == 3.0
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in module.parameters())


def test_each_parameter_has_the_part_that_steps_it():
    module = Net()
    optimizer = InnerConfig("muon").build(module)
    assert isinstance(optimizer, Muon)
    assert isinstance(optimizer.optimizer_of(module.wide.weight), torch.optim.Muon)
    assert isinstance(optimizer.optimizer_of(module.wide.bias), torch.optim.AdamW)


def test_a_torch_that_has_no_muon_is_named(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ValueError, match=r"needs torch 2\.9"):
        InnerConfig("muon").build(Net())
