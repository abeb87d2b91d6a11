"""Complex, double and unused parameters, programs with a default device of their own, and closures
that zero no gradients."""

import contextlib
import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from worlds import virtual_optimizer
from worlds.virtual_optimizer import train_together

import farflock
from farflock.node.library.own_defaults import own_defaults
from farflock.node.library.step_gradients import Held
from farflock.node.model.replica import PlainReplica, flat_range
from farflock.optimizers.catalog import METHODS

torch.set_num_threads(1)
FITTING = {
    "demo": {"sign": False},
    "flexdemo": {"sign": False},
    "streaming": {"fragments": 1},
}
PERIODS = {"diloco": 2, "noloco": 2, "desloc": 2}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


class Wave(nn.Module):
    """One complex weight."""

    def __init__(self, seed=0):
        super().__init__()
        chance = torch.Generator().manual_seed(seed)
        self.w = nn.Parameter(torch.randn(8, 8, dtype=torch.cfloat, generator=chance))

    def forward(self, x):
        return (x.to(torch.cfloat) @ self.w).abs()


class Twin(nn.Module):
    """The same weight, as a real one."""

    def __init__(self, seed=0):
        super().__init__()
        self.w = nn.Parameter(torch.view_as_real(Wave(seed).w.detach()).clone())

    def forward(self, x):
        return (x.to(torch.cfloat) @ torch.view_as_complex(self.w)).abs()


def loss_of(model, seed):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))
    return (model(x) - 1).square().mean()


def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


@pytest.mark.parametrize("name", METHODS)
def test_a_complex_parameter_trains_as_its_two_parts_do(name):
    trained = []
    for model in (Wave(), Twin()):
        options = {**FITTING.get(name, {}), **({"period": 2} if name in PERIODS else {})}
        optimizer = virtual_optimizer.alone(model, name, inner=adamw, **options)
        train(model, optimizer, range(5))
        trained.append((model, optimizer.eval_params()["w"]))
        optimizer.close(patient=False)
    (wave, agreed), (twin, parts) = trained
    assert torch.equal(torch.view_as_real(wave.w.detach()), twin.w.detach())
    assert agreed.is_complex()
    assert torch.equal(torch.view_as_real(agreed), parts)


@pytest.mark.parametrize("name", ["diloco", "ddp"])
def test_peers_agree_on_both_parts_of_complex_parameters(name):
    async def work(member):
        first = member.model.w.detach().clone()
        for step in range(4):
            await member.step(lambda model: loss_of(model, 10 * member.rank + step))  # noqa: B023
        return first, member.model.w.detach().clone(), member.rounds[-1]["status"]

    options = {"period": 2} if name in PERIODS else {}
    (a, b, status), (c, d, _) = train_together(2, name, Wave, work, adamw, **options)
    assert status == "ok"
    assert torch.equal(a, c)  # a joiner takes over the founder's
    assert torch.equal(b, d)
    assert (b.imag != 0).all()
    assert not torch.equal(a.imag, b.imag)


def test_a_state_dict_of_a_complex_model_continues_it():
    whole, first, second = Wave(), Wave(), Wave(seed=9)
    optimizers = [virtual_optimizer.alone(whole, inner=adamw, period=3)]
    train(whole, optimizers[0], range(8))
    optimizers.append(virtual_optimizer.alone(first, inner=adamw, period=3))
    train(first, optimizers[1], range(4))
    saved = copy.deepcopy((first.state_dict(), optimizers[1].state_dict()))
    second.load_state_dict(saved[0])
    optimizers.append(virtual_optimizer.alone(second, inner=adamw, period=3))
    optimizers[2].load_state_dict(saved[1])
    train(second, optimizers[2], range(4, 8))
    assert torch.equal(whole.w, second.w)
    for each in optimizers:
        each.close(patient=False)


def test_a_double_parameter_stays_one_and_its_rounding_is_said_once():
    model = nn.Linear(8, 1, dtype=torch.float64)
    with pytest.warns(UserWarning, match="weight is float64: .* in float32") as said:
        optimizer = virtual_optimizer.alone(model, inner="sgd", lr=0.1, period=2)
    assert [each.filename for each in said] == [virtual_optimizer.__file__]
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 8, dtype=torch.float64)).sum().backward()
        optimizer.step()
    assert optimizer.last_round is not None
    assert model.weight.dtype == torch.float64
    optimizer.close(patient=False)


# a layer that no loss reaches


class Unused(nn.Module):
    def __init__(self, rank=0):
        super().__init__()
        chance = torch.random.get_rng_state()
        torch.manual_seed(0)
        self.body, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)
        torch.random.set_rng_state(chance)

    def forward(self, x):
        return self.body(x)


@pytest.mark.parametrize(
    ("name", "options"),
    [("ddp", {}), ("demo", {"sign": False}), ("flexdemo", {"sign": False}), ("diloco", {})],
)
def test_a_layer_that_nobody_uses_keeps_its_bits(name, options):
    async def work(member):
        before = copy.deepcopy(member.model.state_dict())
        for step in range(6):
            await member.step(lambda model: loss_of(model, 10 * member.rank + step))  # noqa: B023
        after = member.model.state_dict()
        return {place for place in before if not torch.equal(before[place], after[place])}

    moved, *others = train_together(2, name, Unused, work, adamw, **options)
    assert {"body.weight"} <= moved <= {"body.weight", "body.bias"}
    assert others == [moved]


def test_a_layer_that_one_peer_uses_moves_alike_on_both():
    async def work(member):
        for step in range(3):
            await member.step(
                lambda model: (
                    loss_of(model, step)  # noqa: B023
                    + (model.unused.weight.sum() if member.rank else 0.0)
                )
            )
        return member.model.unused.weight.detach().clone()

    one, other = train_together(2, "ddp", Unused, work, adamw)
    assert torch.equal(one, other)
    assert not torch.equal(one, Unused().unused.weight)


# a default device


def test_work_of_ours_is_on_the_cpu_and_a_closure_follows_the_program():
    made = []
    with torch.device("meta"):
        with own_defaults(lambda: torch.ones(1)) as closure:
            made = [torch.ones(1), closure(), torch.ones(1)]
        assert torch.ones(1).is_meta
    assert [x.is_meta for x in made] == [False, True, False]
    with own_defaults(None) as closure:
        assert closure is None


@pytest.mark.net
def test_programs_with_a_default_device_train():
    def work(rank, optimize):
        model = nn.Linear(8, 1, device="cpu")
        chance = torch.Generator().manual_seed(rank)
        if rank:
            torch.set_default_device("meta")  # of this thread, which ends with the test
        block = contextlib.nullcontext() if rank else torch.device("meta")
        with block, optimize(model, lr=1e-2) as optimizer:
            for _ in range(4):
                x = torch.randn(16, 8, device="cpu", generator=chance)
                optimizer.zero_grad()
                (model(x) - 1).square().mean().backward()
                optimizer.step()
            places = {x.device.type for x in optimizer.eval_params().values()}
            return optimizer.last_round.status, places

    with farflock.local_swarm(2, "diloco", period=2, view_s=1.0) as swarm:
        assert swarm.train(work) == [("ok", {"cpu"})] * 2


# another order in memory


@pytest.mark.parametrize("shape", [(3, 5), (1, 4, 6), (2, 3, 4, 5), (7,), (2, 0), (4, 1)])
def test_a_range_of_a_tensor_in_another_order_has_the_same_values(shape):
    plain = torch.arange(math.prod(shape)).reshape(shape)
    for order in (range(len(shape)), reversed(range(len(shape)))):
        back = list(order)
        x = plain.permute(back).contiguous().permute([back.index(at) for at in range(len(back))])
        assert torch.equal(x, plain)
        for start in range(plain.numel() + 1):
            for stop in range(start, plain.numel() + 1):
                assert flat_range(x, start, stop).tolist() == list(range(start, stop))


class Reordered(nn.Module):
    """A transposed and a channels-last weight, or contiguous ones with the same values."""

    def __init__(self, is_plain):
        super().__init__()
        chance = torch.Generator().manual_seed(0)
        w = torch.randn(300, 280, generator=chance).t()
        image = torch.randn(8, 280, 3, 3, generator=chance).to(memory_format=torch.channels_last)
        self.w = nn.Parameter(w.contiguous() if is_plain else w)
        self.image = nn.Parameter(image.contiguous() if is_plain else image)


@pytest.mark.parametrize("name", ["diloco", "ddp", "sparseloco"])
def test_parameters_in_another_order_train_to_the_same_bits_and_keep_their_strides(name):
    trained = []
    for is_plain in (True, False):
        model = Reordered(is_plain)
        options = {"period": 2} if name != "ddp" else {}
        optimizer = virtual_optimizer.alone(model, name, inner=sgd, **options)
        strides = model.w.stride(), model.image.stride()
        for step in range(4):
            for entry in model.parameters():  # torch's own sums would depend on the order
                entry.grad = entry.detach() * (0.5 + step)
            optimizer.step()
        assert (model.w.stride(), model.image.stride()) == strides
        trained.append([x.detach() for x in model.parameters()])
        optimizer.close(patient=False)
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


@pytest.mark.parametrize("zeroes", [True, False])
def test_what_is_held_is_added_once_to_the_gradients_of_a_closure(zeroes):
    model = nn.Linear(2, 1, bias=False)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    held = Held(PlainReplica(model, inner, None))
    model.weight.grad = torch.full((1, 2), 5.0)  # of a round that failed

    def closure():
        if zeroes:
            inner.zero_grad()
        model(torch.ones(2)).sum().backward()

    held.apart_from(closure, SimpleNamespace(keeps_gradients=True))()
    assert model.weight.grad.tolist() == [[6.0, 6.0]]
    assert held.gradients == {}
