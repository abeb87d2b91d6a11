"""Weights that a program changes outside of a step are noticed, without a look at their values."""

import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import virtual_optimizer

import farflock
from farflock.node.errors import Usage
from farflock.node.library.jump_watch import VALUES, Jumps, JumpWatch
from farflock.node.library.swarm_optimizer import SwarmOptimizer

torch.set_num_threads(1)


def net(seed=0):
    chance = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    with torch.no_grad():
        for entry in model.parameters():
            entry.copy_(torch.randn(entry.shape, generator=chance) / 2)
    return model


def loss_of(model, seed):
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def moved(model, by):
    with torch.no_grad():
        for entry in model.parameters():
            entry.add_(by)


class AmongOthers:
    """A peer among others: what it does with a change, and whether it took their state over."""

    def __init__(self, model, on_jump=None):
        self.model, self.watch = model, JumpWatch(dict(model.named_parameters()))
        self._jumps, self.adopted = Jumps(on_jump), 0
        self._jumps.watch = self.watch
        self._here = SimpleNamespace(peer=SimpleNamespace(alone=False), loop=None)

    def answer(self, *, is_first=False):
        change = self.watch.change(has_all=True)
        return self._jumps.answer(change, self._here, is_first, self._adopt, nullcontext)

    def _adopt(self, work):
        self.adopted += 1

    def trained(self, rounds):
        """Let a whole round move the weights by 0.1 each time."""
        for number in range(rounds):
            moved(self.model, 0.1)
            self.watch.mark(number)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_jump_is_refused_in_words_that_name_it(is_first):
    peer = AmongOthers(net())
    peer.trained(0 if is_first else 2)
    peer.model.load_state_dict(net(seed=1).state_dict())
    with pytest.raises(Usage, match=r"parameter 0\.weight: .* outside of a step") as refused:
        peer.answer(is_first=is_first)
    assert 'on_jump="adopt"' in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not peer.adopted


def test_on_wish_the_run_s_weights_come_back_or_the_program_s_stay():
    peer = AmongOthers(net(), "adopt")
    moved(peer.model, 1.0)
    assert peer.answer(is_first=True)
    assert peer.adopted == 1
    peer = AmongOthers(net(), "keep")
    moved(peer.model, 1.0)
    with pytest.warns(UserWarning, match="rounds count that as work of this peer"):
        assert not peer.answer(is_first=True)
    assert not peer.adopted


def test_a_trainer_that_loads_a_checkpoint_takes_the_run_s_weights():
    peer = AmongOthers(net())
    moved(peer.model, 1.0)
    trainer = {"__name__": "transformers.trainer", "peer": peer}
    assert eval("peer.answer(is_first=True)", trainer)  # as if that module made the step
    assert peer.adopted == 1


def test_a_clamp_after_each_step_passes_with_one_line():
    peer = AmongOthers(net())
    peer.trained(2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(5):
            moved(peer.model, 0.01)
            assert not peer.answer()
            peer.watch.mark(1)
    (line,) = said
    assert "parameter 0.weight and perhaps others" in str(line.message)


def test_weights_that_are_swapped_for_an_evaluation_and_put_back_are_no_change():
    peer = AmongOthers(net())
    peer.trained(1)
    before = {name: x.clone() for name, x in peer.model.state_dict().items()}
    moved(peer.model, 3.0)
    peer.model.load_state_dict(before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not peer.answer()


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.copy_(x + 1),
        lambda x: setattr(x, "data", x.detach() + 1),
        lambda x: x.mul_(2),
    ],
)
def test_each_way_to_change_a_weight_is_seen(change):
    model = net()
    watch = JumpWatch(dict(model.named_parameters()))
    assert watch.changed() is None
    with torch.no_grad():
        change(model[2].weight)
    assert watch.changed() == "2.weight"
    assert watch.moved() > 0
    watch.mark()
    assert watch.changed() is None


class ReadValues(TorchDispatchMode):
    """Counts the values that operations make while it is entered, but for detached tensors."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = operation(*args, **(kwargs or {}))
        if operation.overloadpacket is not torch.ops.aten.detach:
            self.count += made.numel()
        return made


def test_it_reads_few_values():
    model = nn.ModuleList(nn.Linear(100, 100) for _ in range(3))
    watch = JumpWatch(dict(model.named_parameters()))
    with ReadValues() as read:
        assert watch.changed() is None
        watch.mark()
    assert 0 < read.count <= VALUES


def test_an_unknown_answer_is_refused():
    with pytest.raises(Usage, match="on_jump='adpot'"):
        virtual_optimizer.alone(net(), on_jump="adpot")


def test_a_peer_alone_begins_the_run_with_the_weights_that_were_loaded():
    late, early = net(), net(seed=1)
    one, other = (
        virtual_optimizer.alone(model, period=2, inner="sgd", lr=0.1) for model in (late, early)
    )
    late.load_state_dict(early.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            for model, optimizer in ((late, one), (early, other)):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
    assert all(
        torch.equal(a, b) for a, b in zip(late.parameters(), early.parameters(), strict=True)
    )
    one.close(patient=False)
    other.close(patient=False)


@pytest.mark.net
@pytest.mark.filterwarnings("ignore")
def test_an_old_checkpoint_of_one_peer_drags_nobody_back():
    def work(rank, optimize):
        model, old = net(), net(seed=9).state_dict()
        optimizer: SwarmOptimizer = optimize(model, lr=1e-2, on_jump="adopt")
        for step in range(12):
            if step == 7 and rank == 1:
                model.load_state_dict(old)
                far = model[0].weight.detach().clone()
            optimizer.zero_grad()
            loss_of(model, 100 * rank + step).backward()
            optimizer.step()
            if step == 7 and rank == 1:
                assert (model[0].weight - far).norm() > 1
        optimizer.finish()  # who adopted a state has begun its period anew
        return {name: x.detach().clone() for name, x in model.named_parameters()}

    with farflock.local_swarm(2, "diloco", period=3, view_s=1.0) as swarm:
        first, second = swarm.train(work)
    assert (first["0.weight"] - second["0.weight"]).norm() < 1
    assert (first["0.weight"] - net().state_dict()["0.weight"]).norm() < 1
