"""A torch optimizer in every respect, and a peer: alone it equals its inner one to the last bit."""

import asyncio
import contextlib
import copy
import gc
import signal
import threading
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from worlds import virtual_optimizer
from worlds.virtual_optimizer import train_together

import farflock
from farflock.node.errors import Failure, RefusedByRun, Usage
from farflock.node.library.local_swarm import _LocalDoor
from farflock.node.library.swarm_optimizer import SwarmOptimizer

torch.set_num_threads(1)
METHODS = {"local": {}, "diloco": {"period": 4}, "noloco": {"period": 4}, "ddp": {}}


ONE_AT_A_TIME = threading.Lock()  # torch's own generator is everybody's


def net(seed=0):
    with ONE_AT_A_TIME:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def batch(step):
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True)


def loss_of(model, step):
    x, y = batch(step)
    return (model(x) - y).square().mean()


def train(optimizer, model, steps, schedule=None):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()


def weights(model):
    return [entry.detach().clone() for entry in model.parameters()]


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def life_of(optimizer):
    """The optimizer's context in the background; its value is the node."""
    return optimizer._life


@pytest.fixture
def alone():
    """Optimizers of peers without others, in virtual time."""
    made = []

    def make(model, method="diloco", **options):
        made.append(virtual_optimizer.alone(model, method, **options))
        return made[-1]

    yield make
    for each in made:
        each.close(patient=False)


@pytest.fixture
def in_background():
    """The optimizer of a peer without others, whose peer is in a thread of its own."""
    with farflock.local_swarm(1) as swarm:
        yield lambda model, **options: SwarmOptimizer(
            model, "diloco", _LocalDoor(swarm, 0), **options
        )


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


# torch's optimizer


def test_alone_and_local_it_takes_the_very_steps_of_its_inner_optimizer_under_a_scheduler(alone):
    ours, theirs = net(), net()
    optimizer, plain = alone(ours, "local", inner=adamw), adamw(theirs.parameters())
    assert isinstance(optimizer, torch.optim.Optimizer)
    train(optimizer, ours, range(12), torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5))
    train(plain, theirs, range(12), torch.optim.lr_scheduler.StepLR(plain, 3, 0.5))
    assert equal(weights(ours), weights(theirs))
    assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"] < 0.01


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
    ],
)
def test_torch_s_schedulers_turn_it_without_a_warning(alone, schedule):
    model = net()
    optimizer = alone(model, inner=adamw, period=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = schedule(optimizer)
        train(optimizer, model, range(5), made)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(made.get_last_lr()[0])


def test_a_closure_makes_the_gradients_and_its_loss_comes_back(alone):
    ours, theirs = net(), net()
    optimizer, plain = alone(ours, "local", inner=adamw), adamw(theirs.parameters())

    def closure():
        optimizer.zero_grad()
        loss = loss_of(ours, 1)
        loss.backward()
        return loss

    returned = optimizer.step(closure)
    train(plain, theirs, [1])
    assert returned.item() == loss_of(net(), 1).item()
    assert equal(weights(ours), weights(theirs))
    assert optimizer.step() is None


def test_a_closure_that_zeroes_nothing_adds_to_the_gradients_that_are_there(alone):
    ours, theirs = net(), net()
    optimizer, plain = alone(ours, "local", inner=adamw), adamw(theirs.parameters())
    for model, one in ((ours, optimizer), (theirs, plain)):
        loss_of(model, 0).backward()
        for step in (1, 2):
            one.step(lambda model=model, step=step: loss_of(model, step).backward())
    assert equal(weights(ours), weights(theirs))


def test_gradients_of_several_backwards_add_up_and_zero_grad_drops_them(alone):
    ours, theirs = net(), net()
    optimizer, plain = alone(ours, "local", inner=adamw), adamw(theirs.parameters())
    for model, one in ((ours, optimizer), (theirs, plain)):
        loss_of(model, 0).backward()
        one.zero_grad()
        loss_of(model, 1).backward()
        loss_of(model, 2).backward()
        one.step()
    assert equal(weights(ours), weights(theirs))
    optimizer.zero_grad()
    assert all(entry.grad is None for entry in ours.parameters())


def test_hooks_and_names_of_inner_optimizers_work(alone):
    model, seen = net(), []
    optimizer = alone(model, "local", inner="sgd", lr=0.5)
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train(optimizer, model, [0])
    assert seen == ["after"]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
    assert "lr: 0.5" in repr(optimizer)


def test_a_program_s_own_optimizer_makes_the_inner_steps_and_its_scheduler_goes_on(alone):
    ours, theirs = net(), net()
    mine, plain = adamw(ours.parameters()), adamw(theirs.parameters())
    schedules = [torch.optim.lr_scheduler.StepLR(one, 3, 0.5) for one in (mine, plain)]
    train(alone(ours, "local", inner=mine), ours, range(8), schedules[0])
    train(plain, theirs, range(8), schedules[1])
    assert equal(weights(ours), weights(theirs))
    assert mine.param_groups[0]["lr"] == plain.param_groups[0]["lr"] < 0.01


def test_parameters_cannot_be_added_later(alone):
    with pytest.raises(Usage, match="new optimizer"):
        alone(net()).add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_frozen_parameters_stay_and_are_not_sent(alone):
    model = net()
    model[0].requires_grad_(False)
    before = weights(model[0])
    optimizer = alone(model, period=2)
    train(optimizer, model, range(6))
    assert equal(before, weights(model[0]))
    assert set(optimizer.eval_params()) == {"2.weight", "2.bias"}


# stopping and going on


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stop", [3, 4, 6])
def test_a_peer_alone_goes_on_from_its_state_dict_bit_by_bit(alone, method, stop):
    whole, first, second = net(), net(), net(seed=9)
    optimizer = alone(whole, method, inner=adamw, **METHODS[method])
    train(optimizer, whole, range(11))
    early = alone(first, method, inner=adamw, **METHODS[method])
    train(early, first, range(stop))
    saved = copy.deepcopy((first.state_dict(), early.state_dict()))
    second.load_state_dict(saved[0])
    late = alone(second, method, inner=adamw, **METHODS[method])
    late.load_state_dict(saved[1])
    train(late, second, range(stop, 11))
    assert equal(weights(whole), weights(second))
    assert equal(optimizer.eval_params().values(), late.eval_params().values())
    assert late.last_round == optimizer.last_round
    assert late.tokens == optimizer.tokens == 11


def test_a_state_dict_is_plain_data_that_torch_loads_safely(alone, tmp_path):
    model = net()
    optimizer = alone(model, period=3)
    train(optimizer, model, range(4))
    torch.save(optimizer.state_dict(), tmp_path / "state")
    again = net()
    again.load_state_dict(model.state_dict())
    other = alone(again, period=3)
    other.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert other.state_dict()["swarm"]["step"] == 4


def test_a_state_dict_of_a_plain_optimizer_gives_its_moments(alone):
    model = net()
    plain = adamw(model.parameters())
    train(plain, model, range(3))
    optimizer = alone(model, inner=adamw)
    optimizer.load_state_dict(plain.state_dict())
    assert equal(
        [plain.state[p]["exp_avg"] for p in model.parameters()],
        [s["exp_avg"] for s in optimizer.state.values()],
    )
    train(optimizer, model, range(3, 5))
    assert {int(entry["step"]) for entry in optimizer.state.values()} == {5}


def test_a_state_is_loaded_before_the_first_step_or_not_at_all(alone):
    model = net()
    optimizer = alone(model)
    train(optimizer, model, [0])
    with pytest.raises(Usage, match="before the first"):
        optimizer.load_state_dict(optimizer.state_dict())


def test_a_state_of_another_method_is_refused(alone):
    saved = alone(net(), "noloco").state_dict()
    with pytest.raises(Usage, match="does not fit"):
        alone(net(), "diloco").load_state_dict(saved)


# together


def two(work_of_rank, method, **options):
    with farflock.local_swarm(2, method, view_s=1.0, **options) as swarm:
        return swarm.train(work_of_rank)


@pytest.mark.net
def test_a_joiner_takes_over_the_founder_s_weights_whatever_its_own():
    def work(rank, optimize):
        model = net(seed=rank)
        optimize(model)
        return weights(model)

    founder, joiner = two(work, "diloco")
    assert equal(founder, joiner)
    assert equal(founder, weights(net(seed=0)))


def test_a_step_does_not_wait_for_a_rank_that_thinks_and_that_rank_catches_up():
    go_on = asyncio.Event()

    async def work(member):
        if member.rank == 1:
            await go_on.wait()
        await steps(member, range(2))  # for half of the deadline the first one waits
        if member.rank == 0:
            assert ended(member.rounds[0]) == (0, "partial", 1)
            go_on.set()
            await steps(member, range(2, 4))
        return [ended(entry) for entry in member.rounds], weights(member.model)

    async def steps(member, numbers):
        for number in numbers:
            await asyncio.sleep(0.5)
            await member.step(lambda model, number=number: loss_of(model, number + member.rank))

    def ended(fields):
        return fields["round"], fields["status"], fields["peers"]

    # the second round waits as long for the rank that has begun to train
    terms = {"period": 2, "deadline_s": 16.0}
    (first, ours), (second, theirs) = train_together(
        2, "diloco", lambda rank: net(), work, adamw, **terms
    )
    assert first[-1] == second[-1] == (1, "ok", 2)
    assert equal(ours, theirs)


def by_backward(optimizer, model, clear):
    clear()
    loss_of(model, 1).backward()
    optimizer.step()


def by_closure(optimizer, model, clear):
    def closure():
        clear()
        loss_of(model, 1).backward()

    optimizer.step(closure)


def by_scaler(optimizer, model, clear):
    clear()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss_of(model, 1)).backward()
    scaler.step(optimizer)


@pytest.mark.parametrize("step", [by_backward, by_closure, by_scaler])
@pytest.mark.parametrize("by_model", [True, False])
def test_ddp_sends_a_gradient_of_a_failed_round_in_the_next(alone, monkeypatch, step, by_model):
    ours, theirs = net(), net()
    fp32 = {"codec": "fp32", "return_codec": "fp32"}
    optimizer = alone(ours, "ddp", inner=partial(torch.optim.SGD, lr=0.5), **fp32)
    method = type(optimizer._here.loop.driver.method)
    apply = method.apply

    def failed(self, replica, exchange, result):
        return apply(self, replica, exchange, replace(result, status="failed"))

    with monkeypatch.context() as patch:
        patch.setattr(method, "apply", failed)
        train(optimizer, ours, [0])
    assert equal(weights(ours), weights(theirs))

    step(optimizer, ours, (ours if by_model else optimizer).zero_grad)
    plain = torch.optim.SGD(theirs.parameters(), lr=0.25)  # the mean of two gradients
    (loss_of(theirs, 0) + loss_of(theirs, 1)).backward()
    plain.step()
    for ours_now, theirs_now in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(ours_now, theirs_now, atol=1e-6)


@pytest.mark.net
def test_among_others_a_state_dict_gives_moments_and_no_weights():
    saved = {}

    def work(rank, optimize):
        model = net()
        optimizer = optimize(model, inner=adamw)
        train(optimizer, model, range(3))
        before = weights(model)
        saved[rank] = optimizer.state_dict()
        optimizer.load_state_dict(saved[rank])
        return equal(before, weights(model)), {
            int(entry["step"]) for entry in optimizer.state.values()
        }

    assert two(work, "diloco", period=10) == [(True, {3})] * 2


@pytest.mark.net
def test_what_a_step_counts_for_moves_the_run():
    def work(rank, optimize):
        model = net()
        optimizer = optimize(model, tokens_per_step=100)
        train(optimizer, model, range(4))
        optimizer.tokens_per_step = 10
        train(optimizer, model, range(4, 6))
        return optimizer.tokens

    assert two(work, "diloco", period=50) == [2 * 420] * 2


@pytest.mark.net
def test_a_contribution_may_weigh_as_many_as_its_tokens():
    pulls = 1.0, 5.0

    def work(rank, optimize):
        model = nn.Linear(3, 1, bias=False)
        nn.init.zeros_(model.weight)
        tokens = (100, 300)[rank]
        inner = partial(torch.optim.SGD, lr=0.5)
        optimizer = optimize(model, inner=inner, tokens_per_step=tokens)
        optimizer.wait_for_members(2)
        for _ in range(2):
            optimizer.zero_grad()
            (-pulls[rank] * model.weight.sum()).backward()
            optimizer.step()
        return optimizer.eval_params()["weight"]

    plain = {"outer": {"name": "sgd", "lr": 1.0}, "codec": "fp32", "return_codec": "fp32"}
    for outer in two(work, "diloco", period=2, weights="tokens", **plain):
        # two steps of half each pull; the second peer counts three times
        torch.testing.assert_close(outer, torch.full((1, 3), (pulls[0] + 3 * pulls[1]) / 4))


# what goes wrong


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"method": "dilocko"}, "did you mean 'diloco'|diloco"),
        ({"perod": 5}, "period"),
        ({"inner": "adamax"}, "adamw, sgd, muon or nadam"),
        ({"inner": adamw, "lr": 0.1}, "leave lr out"),
        ({"inner": lambda parameters: torch.optim.LBFGS(parameters)}, "first-order"),
        (
            {"inner": lambda parameters: torch.optim.SGD([nn.Parameter(torch.zeros(1))])},
            "not the model's",
        ),
        ({"lr": -1.0}, "learning rate"),
        ({"inner": torch.optim.SGD([nn.Parameter(torch.zeros(1))])}, "not the model's"),
        ({"inner": torch.optim.LBFGS([nn.Parameter(torch.zeros(1))])}, "first-order"),
        ({"inner": adamw([nn.Parameter(torch.zeros(1))]), "lr": 0.1}, "leave lr out"),
        (
            {"method": "ddp", "inner": lambda parameters: torch.optim.RMSprop(parameters)},
            "moments of RMSprop",
        ),
    ],
)
def test_what_cannot_work_is_one_sentence(alone, options, says):
    with pytest.raises(Usage, match=says) as caught:
        alone(net(), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("invite", "says"), [("hello", "not an invite"), ("farflock:AAAA", "damaged")]
)
def test_a_word_that_is_no_invite_is_refused_before_anything_starts(invite, says):
    with pytest.raises(Usage, match=says):
        SwarmOptimizer(net(), invite=invite)
    assert not [thread for thread in threading.enumerate() if thread.name == "farflock"]


@pytest.mark.parametrize("host", ["203.0.113.5", "eth 0"])
def test_a_host_that_is_not_this_machine_is_refused_before_anything_starts(host):
    with pytest.raises(Usage, match=f"^host: .*{host}"):
        SwarmOptimizer(net(), host=host)
    assert not [thread for thread in threading.enumerate() if thread.name == "farflock"]


@pytest.mark.net
def test_an_error_of_the_peer_surfaces_in_step_with_its_cause(in_background):
    model = net()
    optimizer = in_background(model, period=2)
    train(optimizer, model, range(3))
    life = life_of(optimizer)

    async def break_down():
        await asyncio.sleep(0)
        raise OSError(28, "no space left")

    async def plant():
        life.value.peer.context.spawn(break_down())

    with contextlib.suppress(Failure):
        life.call(plant)
    with pytest.raises(Failure, match="no space left") as caught:
        train(optimizer, model, range(3, 30))
    assert isinstance(caught.value.__cause__, OSError)
    optimizer.close()


def test_an_error_in_the_program_s_closure_is_its_own(alone):
    model = net()
    optimizer = alone(model, "local")

    def closure():
        raise ZeroDivisionError("theirs")

    with pytest.raises(ZeroDivisionError, match="theirs"):
        optimizer.step(closure)
    train(optimizer, model, [0])


@pytest.mark.net
def test_ctrl_c_leaves_a_step_that_waits_and_the_next_one_goes_on(in_background):
    model = net()
    optimizer = in_background(model, period=1)
    life = life_of(optimizer)
    client, done = life.value.loop.client, asyncio.Event()
    exchange, loops = client.exchange, []

    async def slowly(offer):
        if not done.is_set():
            loops.append(asyncio.get_running_loop())
            loops[0].call_later(
                0.3, signal.pthread_kill, threading.main_thread().ident, signal.SIGINT
            )
            await done.wait()
        return await exchange(offer)

    client.exchange = slowly
    with pytest.raises(KeyboardInterrupt):
        train(optimizer, model, [0])
    assert optimizer.last_round is None
    loops[0].call_soon_threadsafe(done.set)
    train(optimizer, model, [1])
    assert optimizer.last_round.number == 1


def test_closed_it_says_so_and_closing_twice_is_harmless(alone):
    model = net()
    with alone(model) as optimizer:
        train(optimizer, model, [0])
    optimizer.close()
    with pytest.raises(Failure, match="closed"):
        train(optimizer, model, [1])


@pytest.mark.net
def test_an_optimizer_that_is_forgotten_leaves_its_run():
    swarm = farflock.local_swarm(1)
    optimizer = SwarmOptimizer(net(), "diloco", _LocalDoor(swarm, 0))
    life = life_of(optimizer)
    train(optimizer, net(), [0])
    del optimizer
    gc.collect()
    assert life.ended
    swarm.close()


def test_waiting_for_members_that_do_not_come_ends(alone):
    optimizer = alone(net())
    assert optimizer.members == (optimizer.peer,)
    with pytest.raises(TimeoutError, match="1 of 2 members"):
        optimizer.wait_for_members(2, timeout_s=0.2)


@pytest.mark.net
def test_ranks_with_other_models_are_told_apart():
    def work(rank, optimize):
        optimize(nn.Linear(3, 1 + rank))

    with pytest.raises(RefusedByRun, match=r"model\.numbers: it is"):
        two(work, "diloco")


@pytest.mark.net
def test_the_outer_state_can_be_on_the_disk(tmp_path):
    options = {"method": "diloco", "period": 2, "inner": "sgd", "lr": 0.1}
    model, plain = nn.Linear(600, 600), nn.Linear(600, 600)
    plain.load_state_dict(model.state_dict())
    with (
        SwarmOptimizer(model, folder=tmp_path / "disk", outer_state="disk", **options) as one,
        SwarmOptimizer(plain, folder=tmp_path / "host", **options) as other,
    ):
        for step in range(4):
            for each, optimizer in ((model, one), (plain, other)):
                optimizer.zero_grad()
                x = torch.randn(2, 600, generator=torch.Generator().manual_seed(step))
                each(x).square().mean().backward()
                optimizer.step()
        maps = Path("/proc/self/maps")
        if maps.exists():
            assert f"{tmp_path / 'disk' / 'outer'}" in maps.read_text()
            assert f"{tmp_path / 'host' / 'outer'}" not in maps.read_text()
        assert equal(weights(model), weights(plain))


def test_an_outer_state_on_the_disk_needs_a_folder():
    with pytest.raises(Usage, match='outer_state="disk": no folder is named; give `folder`'):
        SwarmOptimizer(net(), outer_state="disk")
    with pytest.raises(Usage, match="outer_state='dsik': no such place is known"):
        SwarmOptimizer(net(), outer_state="dsik")
