"""Shards under FSDP2 are watched as whole parameters are; the group of processes is a fake one."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from farflock.node.errors import Usage
from farflock.node.library.jump_watch import JumpWatch
from farflock.node.library.parameter_watch import ParameterWatch


@pytest.fixture(scope="module")
def group():
    """Rank 0 of two, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.fixture
def model(group):
    """A model in shards, which has made a pass."""
    made = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    fully_shard(made[0], mesh=group)
    fully_shard(made, mesh=group)
    return made


def passed(model):
    model(torch.ones(3, 4)).sum().backward()


def assigned(model):
    state = {name: x.detach().clone() for name, x in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def in_another_shape(model):
    model[2].weight = nn.Parameter(torch.zeros(3, 6))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (assigned, r"parameter 0\.weight: it was replaced"),
        (in_another_shape, r"parameter 2\.weight: it was replaced"),
        (lambda model: model[2].register_parameter("bias", None), r"2\.bias: it is no longer"),
        (lambda model: setattr(model, "more", nn.Linear(2, 2)), r"more\.weight: it was added"),
    ],
)
def test_a_replaced_shard_is_refused_in_words_that_name_it(model, change, says):
    watch = ParameterWatch(model)
    watch.check()
    change(model)
    with pytest.raises(Usage, match=says):
        watch.check()


def test_passes_that_show_whole_parameters_for_a_while_change_nothing(model):
    parameters, jumps = ParameterWatch(model), JumpWatch(dict(model.named_parameters()))
    passed(model)
    with torch.no_grad():
        model(torch.ones(3, 4))
    assert not any(hasattr(x, "to_local") for x in model[2].parameters())
    parameters.check()
    assert jumps.changed() is None
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    parameters.check()
    assert jumps.changed() is None


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.copy_(x + 1),
        lambda x: x.mul_(2),
        lambda x: x.to_local().add_(1),
    ],
)
def test_each_way_to_change_the_weights_of_a_shard_is_seen(model, change):
    watch = JumpWatch(dict(model.named_parameters()))
    passed(model)
    assert watch.changed() is None
    with torch.no_grad():
        change(model[2].weight)
    assert watch.changed() == "2.weight"
    assert watch.moved() > 0
    watch.mark()
    assert watch.changed() is None


def test_rows_of_other_ranks_are_theirs_to_watch(model):
    with torch.no_grad():
        for entry in model.parameters():
            entry.to_local().fill_(1.0)
    watch = JumpWatch(dict(model.named_parameters()))
    with torch.no_grad():
        model[0].weight.to_local()[:, 0] = 2.0
    assert watch.moved() == pytest.approx(3**0.5)  # 3 of its 6 rows are here
