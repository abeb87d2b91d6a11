"""Buffers of floats are averaged on wish, with each round of the method."""

from functools import partial

import pytest
import torch
from torch import nn
from worlds.virtual_optimizer import alone, train_together

from farflock.node.errors import RefusedByRun, Usage
from farflock.node.library.averaged_buffers import AveragedBuffers, WithBuffers
from farflock.node.model.replica import PlainReplica
from farflock.node.run.user_terms import fingerprint, founded, require_agreed, wish
from farflock.optimizers.catalog import method as build
from farflock.optimizers.parts.state import WrongState

torch.set_num_threads(1)
adamw = partial(torch.optim.AdamW, lr=1e-2)


def net(rank=0):
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    with torch.no_grad():
        for number, entry in enumerate(model.parameters()):
            entry.copy_(torch.linspace(-1, 1 + number, entry.numel()).view_as(entry))
    return model


def loss_of(rank, step):
    """The ranks see values around other means."""
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * rank + step)) + rank
    return lambda model: (model(x) - x.sum(1, keepdim=True)).square().mean()


async def work(member, steps=6):
    for step in range(steps):
        await member.step(loss_of(member.rank, step))
    norm = member.model[1]
    counted = int(norm.num_batches_tracked)
    return norm.running_mean.clone(), norm.running_var.clone(), counted, member.rounds


@pytest.mark.parametrize(("method", "options"), [("diloco", {"period": 3}), ("ddp", {})])
def test_after_a_round_all_peers_have_the_same_ones(method, options):
    lives = train_together(3, method, net, work, adamw, buffers="average", **options)
    for mean, spread, counted, rounds in lives:
        assert torch.equal(mean, lives[0][0])
        assert torch.equal(spread, lives[0][1])
        assert counted == 6
        assert {each["status"] for each in rounds} == {"ok"}


def test_they_are_the_mean_of_what_the_peers_have_seen():
    one_round = partial(work, steps=3)
    own = train_together(2, "diloco", net, one_round, adamw, period=3)
    averaged = train_together(2, "diloco", net, one_round, adamw, period=3, buffers="average")
    assert not torch.allclose(own[0][0], own[1][0])
    expected = (own[0][0] + own[1][0]) / 2
    torch.testing.assert_close(averaged[0][0], expected)
    assert torch.equal(averaged[0][0], averaged[1][0])


def test_one_peer_alone_keeps_its_own_and_goes_on_from_its_state_dict():
    whole, first, second = net(), net(), net()

    def train(model, steps, saved=None):
        optimizer = alone(model, inner=adamw, period=2, buffers="average")
        if saved is not None:
            optimizer.load_state_dict(saved)
        for step in steps:
            optimizer.zero_grad()
            loss_of(0, step)(model).backward()
            optimizer.step()
        assert optimizer.last_round.stream == "delta"
        state = optimizer.state_dict()
        optimizer.close(patient=False)
        return state

    train(whole, range(7))
    saved = train(first, range(3))
    second.load_state_dict(first.state_dict())
    train(second, range(3, 7), saved)
    kept = [list(model.state_dict().values()) for model in (whole, second)]
    assert all(map(torch.equal, *kept))


def test_a_snapshot_of_other_buffers_is_refused_before_anything_changes():
    model, diloco = net(), build("diloco")
    replica = PlainReplica(model, adamw(model.parameters()), None)
    made = WithBuffers(diloco, AveragedBuffers(model))
    state = made.snapshot(replica)
    for bad in (torch.zeros(5), torch.full((4,), torch.nan), torch.zeros(4, dtype=torch.int64)):
        with pytest.raises(WrongState):
            made.restore(replica, {**state, "buffer.1.running_mean": bad}, "adopt")
    made.restore(replica, {**state, "buffer.1.running_mean": torch.ones(4)}, "adopt")
    assert torch.equal(model[1].running_mean, torch.ones(4))


def masked(values):
    model = nn.Linear(8, 1)
    model.register_buffer("mask", values)
    return model


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        (net(), {"method": "noloco"}, "noloco has no rounds among all peers"),
        (net(), {"method": "sparta"}, "sparta has no rounds among all peers"),
        (net(), {"method": "local"}, "local has no rounds among all peers"),
        (net(), {"buffers": "mean"}, "buffers='mean'"),
        (nn.Linear(8, 1), {}, "no buffers of floats"),
        (masked(torch.full((3,), -torch.inf)), {}, "buffer mask has values that are not finite"),
        (masked(torch.zeros(3, dtype=torch.int64)), {}, "no buffers of floats"),
    ],
)
def test_a_wish_that_cannot_be_met_is_refused_in_words(model, options, says):
    with pytest.raises(Usage, match=says):
        alone(model, inner=adamw, **{"buffers": "average", **options})


def test_all_peers_say_so_or_none():
    model = net()
    print_ = fingerprint(model, adamw(model.parameters()))
    ours, theirs = (wish(print_, "diloco", {}, {"buffers": each}) for each in ("average", None))
    assert b"buffers" not in founded(theirs).canonical()
    with pytest.raises(RefusedByRun, match="buffers: it is None here and 'average' in the run"):
        require_agreed(founded(ours), theirs)
