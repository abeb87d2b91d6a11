"""Names of parameters are those of the model, whatever wraps it."""

import torch
from torch import nn

from farflock.node.model.plain_names import plain_name, plain_parameters
from farflock.node.model.replica import PlainReplica


class Wrapped(nn.Module):
    """As DDP and DataParallel hold a model."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def stack():
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def test_the_parts_of_wrappers_are_dropped_at_each_level():
    assert plain_name("_orig_mod.0.weight") == "0.weight"
    assert plain_name("module._orig_mod.layers.0._orig_mod.weight") == "layers.0.weight"
    assert plain_name("submodule.weight") == "submodule.weight"
    assert plain_name("module") == "module"


def test_a_compiled_and_wrapped_model_has_the_plain_one_s_names_in_its_order():
    plain, inside = stack(), stack()
    inside[0] = torch.compile(inside[0], backend="eager")
    for model in (torch.compile(stack(), backend="eager"), Wrapped(stack()), Wrapped(inside)):
        assert list(plain_parameters(model)) == [name for name, _ in plain.named_parameters()]
        inner = torch.optim.SGD(model.parameters())
        assert PlainReplica(model, inner).names == tuple(plain_parameters(plain))


def test_names_that_would_become_equal_stay():
    model = Wrapped(nn.Linear(2, 1))
    model.weight = nn.Parameter(torch.zeros(1))
    assert list(plain_parameters(model)) == ["weight", "module.weight", "module.bias"]
