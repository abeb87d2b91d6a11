"""The law of `Replica` on the plain one, and what only it has."""

import importlib.util
import inspect
from pathlib import Path

import pytest
import torch

from farflock.node.replica import PlainReplica, blend


def load_law():
    spec = importlib.util.spec_from_file_location("replica_law", Path(__file__).with_name("replica_law.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


law = load_law()


@pytest.mark.parametrize("rule", law.LAW, ids=lambda rule: rule.__name__)
def test_law(rule):
    rule(law.World())


@pytest.mark.parametrize("rule", law.SGD_LAW, ids=lambda rule: rule.__name__)
def test_law_under_sgd(rule):
    rule(law.World("sgd"))


def test_every_rule_of_the_law_is_in_its_list():
    rules = {
        name
        for name, value in vars(law).items()
        if inspect.isfunction(value) and [*inspect.signature(value).parameters] == ["world"]
    }
    assert rules == {rule.__name__ for rule in (*law.LAW, *law.SGD_LAW)}


def test_momentum_of_sgd_is_a_moment_like_any_other():
    module = torch.nn.Linear(2, 2)
    replica = PlainReplica(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), None)
    buffers = {name: torch.full(shape, 2.0) for name, shape in replica.shapes.items()}
    replica.write(buffers, "momentum_buffer")
    before = replica.read(replica.names, "param")
    replica.write({name: torch.zeros(shape) for name, shape in replica.shapes.items()}, "grad")
    replica.inner_step()
    for name, x in replica.read(replica.names, "param").items():
        torch.testing.assert_close(x, before[name] - 0.1 * 0.9 * 2.0)


def test_a_clip_norm_of_none_leaves_gradients_as_they_are():
    module = torch.nn.Linear(1, 1, bias=False)
    replica = PlainReplica(module, torch.optim.SGD(module.parameters(), lr=1.0), None)
    before = float(module.weight.detach())
    replica.write({"weight": torch.tensor([[1000.0]])}, "grad")
    replica.inner_step()
    assert float(module.weight.detach()) == pytest.approx(before - 1000)


def test_clipping_bounds_the_norm_over_all_parameters_together():
    module = torch.nn.Linear(1, 1)
    replica = PlainReplica(module, torch.optim.SGD(module.parameters(), lr=1.0), 1.0)
    before = replica.read(replica.names, "param")
    replica.write({"weight": torch.tensor([[3.0]]), "bias": torch.tensor([4.0])}, "grad")
    replica.inner_step()
    moved = {name: float(before[name] - x) for name, x in replica.read(replica.names, "param").items()}
    assert moved == pytest.approx({"weight": 0.6, "bias": 0.8}, rel=1e-4)


def test_buffers_are_none_of_a_methods_business():
    module = torch.nn.BatchNorm1d(3)
    replica = PlainReplica(module, torch.optim.SGD(module.parameters(), lr=1.0))
    assert replica.names == ("weight", "bias")


def test_a_model_in_bf16_is_read_and_written_in_float32():
    module = torch.nn.Linear(2, 2, bias=False).to(torch.bfloat16)
    replica = PlainReplica(module, torch.optim.SGD(module.parameters(), lr=1.0))
    replica.write({"weight": torch.tensor([[1.0, 2.0], [3.0, 1 / 3]])}, "param")
    read = replica.read(["weight"], "param")["weight"]
    assert read.dtype == torch.float32
    assert read[1, 1].item() == pytest.approx(1 / 3, rel=1 / 256)


def test_an_unused_parameter_is_not_stepped_until_it_gets_a_gradient():
    module = torch.nn.Linear(2, 2)
    replica = PlainReplica(module, torch.optim.AdamW(module.parameters(), lr=0.1))
    before = replica.read(replica.names, "param")
    module(torch.ones(1, 2)).sum().backward()
    module.bias.grad = None
    replica.inner_step()
    after = replica.read(replica.names, "param")
    assert torch.equal(after["bias"], before["bias"])
    assert not torch.equal(after["weight"], before["weight"])


def test_blend_of_one_copies_even_over_values_that_are_not_numbers():
    target = torch.tensor([float("nan"), float("inf")])
    blend(target, torch.tensor([1.0, 2.0]), 1.0)
    assert target.tolist() == [1.0, 2.0]
