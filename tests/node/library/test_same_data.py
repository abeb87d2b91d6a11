"""Members that draw the same batches are told, once."""

import logging

import pytest
import torch
from worlds.virtual_optimizer import model_of, train_together

torch.set_num_threads(1)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def said(method, seed_of, caplog, scale=1.0, twins=None, **options):
    """The words that the members of such a swarm of three hear; `twins` gets each one's twin."""

    async def work(member):
        for step in range(6):
            chance = torch.Generator().manual_seed(100 * seed_of(member.rank) + step)
            x = torch.randn(16, 8, generator=chance)
            await member.step(
                lambda model: scale * (model(x) - x.sum(1, keepdim=True)).square().mean()  # noqa: B023
            )
        return member.here.peer.me, member.here.loop.client.twin

    with caplog.at_level(logging.WARNING, logger="farflock"):
        found = train_together(3, method, model_of, work, sgd, **options)
    if twins is not None:
        twins.extend(found)
    return [record.getMessage() for record in caplog.records if "the same" in record.getMessage()]


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("diloco", {"period": 2}),
        ("ddp", {}),
        ("sparseloco", {"period": 2}),
        ("noloco", {"period": 2}),
    ],
)
def test_each_member_is_told_once(method, options, caplog):
    lines = said(method, lambda rank: 0, caplog, **options)
    # Of three, one is in no pair of the first round, and its weights are others from then on.
    assert len(lines) == 3 or (method == "noloco" and len(lines) == 2)
    assert all("draw the same data in the same order" in line for line in lines)


def test_only_those_with_a_twin_are_told(caplog):
    twins = []
    assert len(said("diloco", lambda rank: min(rank, 1), caplog, twins=twins, period=2)) == 2
    (_, alone), (second, its), (third, theirs) = twins
    assert (alone, its, theirs) == ("", third, second)
    caplog.clear()
    assert not said("diloco", lambda rank: rank, caplog, period=2)


def test_equal_updates_of_zeros_are_no_sign_of_it(caplog):
    assert not said("diloco", lambda rank: 0, caplog, scale=0.0, period=2)
