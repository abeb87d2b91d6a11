"""For a block the model holds what is to be evaluated, and then its own weights to the last bit."""

import pytest
import torch
from torch import nn
from worlds.virtual_optimizer import alone

from farflock.node.errors import Usage

torch.set_num_threads(1)


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype)


def train(optimizer, model, steps):
    for step in steps:
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(x.to(model[0].weight.dtype)) ** 2).mean().backward()
        optimizer.step()


def values(model):
    return [entry.detach().clone() for entry in model.parameters()]


@pytest.fixture
def make():
    made = []

    def one(model, **options):
        made.append(alone(model, inner="sgd", lr=0.1, period=4, **options))
        return made[-1]

    yield one
    for each in made:
        each.close(patient=False)


@pytest.mark.filterwarnings("ignore:parameter 0.weight is float64")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_block_holds_the_outer_parameters_and_leaves_the_program_s_own(make, dtype):
    model, twin = net(dtype), net(dtype)
    optimizer, other = make(model), make(twin)
    train(optimizer, model, range(6))
    own, tensors = values(model), [entry.data_ptr() for entry in model.parameters()]
    with optimizer.evaluating():
        expected = [x.to(dtype) for x in optimizer.eval_params().values()]
        assert all(map(torch.equal, values(model), expected))
        assert not torch.equal(model[0].weight, own[0])
    assert all(map(torch.equal, values(model), own))
    assert tensors == [entry.data_ptr() for entry in model.parameters()]
    train(optimizer, model, range(6, 9))
    train(other, twin, range(9))
    assert all(map(torch.equal, values(model), values(twin)))


def test_the_program_s_own_come_back_after_an_error_too(make):
    model = net()
    optimizer = make(model)
    train(optimizer, model, range(2))
    own = values(model)
    with pytest.raises(ZeroDivisionError), optimizer.evaluating():
        raise ZeroDivisionError
    assert all(map(torch.equal, values(model), own))


def test_no_step_is_made_inside_it(make):
    model = net()
    optimizer = make(model)
    with optimizer.evaluating(), pytest.raises(Usage, match=r"until evaluating\(\) is over"):
        train(optimizer, model, [0])
    train(optimizer, model, [0])


class Savable(nn.Sequential):
    """As a model of transformers."""

    def save_pretrained(self, folder, suffix=".pt"):
        torch.save(self.state_dict(), folder / f"model{suffix}")


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: torch.compile(model)])
def test_a_model_that_can_save_itself_saves_what_is_evaluated(make, tmp_path, wrap):
    model = Savable(*net())
    optimizer = make(wrap(model))
    train(optimizer, model, range(6))
    own = values(model)
    optimizer.save_pretrained(tmp_path, suffix=".bin")
    saved = torch.load(tmp_path / "model.bin", weights_only=True)
    assert all(torch.equal(x, saved[name]) for name, x in optimizer.eval_params().items())
    assert all(map(torch.equal, values(model), own))


def test_one_that_cannot_is_refused_in_words(make, tmp_path):
    with pytest.raises(Usage, match="a Sequential has no method of this name; save what eval_par"):
        make(net()).save_pretrained(tmp_path)
