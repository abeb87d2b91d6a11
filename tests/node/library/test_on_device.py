"""A program's own model on a device: its swarm ends with one state, on whatever its ranks train."""

import pytest
import torch
from torch import nn
from worlds.card import CARD

import farflock
from farflock.node.errors import Usage

pytestmark = pytest.mark.net

STEPS = 8


def net():
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
    with torch.no_grad():
        for number, x in enumerate(model.parameters()):
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(number)))
    return model


def trained(optimizer, model, rank, steps=range(STEPS)):
    for step in steps:
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(100 * rank + step))
        x = x.to(next(model.parameters()).device)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("method", "options", "on_card", "outer"),
    [
        ("diloco", {"period": 4}, (0,), "device"),
        pytest.param("diloco", {"period": 4}, (0, 1), "host", marks=pytest.mark.ci_more),
        pytest.param("ddp", {}, (0,), "host", marks=pytest.mark.long),
        pytest.param("ddp", {}, (0, 1), "device", marks=pytest.mark.ci_more),
    ],
)
def test_ranks_on_the_card_end_with_the_state_of_the_others(
    accelerator, method, options, on_card, outer
):
    models = [net().to(accelerator) if rank in on_card else net() for rank in range(2)]

    def work(rank, optimize):
        kept = outer if rank in on_card else "host"
        optimizer = optimize(models[rank], inner="sgd", lr=0.1, outer_state=kept)
        optimizer.wait_for_members(2)
        trained(optimizer, models[rank], rank)
        return optimizer.eval_params()

    with farflock.local_swarm(2, method, **options) as swarm:
        first, second = swarm.train(work)
    assert first
    assert all(torch.equal(x.cpu(), second[name].cpu()) for name, x in first.items())
    for rank in on_card:
        assert all(x.device.type == accelerator.type for x in models[rank].parameters())
    if CARD.plugged:  # which counts
        assert 0 < CARD.largest_from_card_bytes <= 4 * 3 * 16


def test_an_outer_state_on_the_device_needs_one_of_the_model():
    with pytest.raises(Usage, match='outer_state="device": this peer trains on the CPU'):
        farflock.SwarmOptimizer(net(), outer_state="device")


def test_a_state_on_the_device_is_saved_on_the_cpu_and_restored_there(accelerator):
    kept = {"method": "diloco", "period": 3, "inner": "sgd", "lr": 0.1, "outer_state": "device"}
    one, other, plain = (net().to(accelerator) for _ in range(3))
    with farflock.SwarmOptimizer(one, **kept) as optimizer:
        trained(optimizer, one, 0)
        whole = optimizer.eval_params()
    with farflock.SwarmOptimizer(other, **kept) as optimizer:
        trained(optimizer, other, 0, range(4))
        saved, weights = optimizer.state_dict(), other.state_dict()
    assert all(x.is_cpu for x in saved["swarm"]["method"].values())
    plain.load_state_dict(weights)
    with farflock.SwarmOptimizer(plain, **kept) as optimizer:
        optimizer.load_state_dict(saved)
        trained(optimizer, plain, 0, range(4, STEPS))
        assert all(torch.equal(x, whole[name]) for name, x in optimizer.eval_params().items())
