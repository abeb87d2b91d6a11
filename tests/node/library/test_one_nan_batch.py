"""A batch that gives NaN costs its peer the round, and nobody else anything."""

import asyncio
import math

import pytest
import torch
from worlds.virtual_optimizer import model_of, train_together

from farflock.compression.codec import UnencodableTensor

torch.set_num_threads(1)
DEADLINE_S = 30.0
PERIOD = 3
STEP_S = 0.3  # so that the run is not over before the peer has the others' state


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def loss_of(rank, step, spoiled):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * rank + step))

    def loss(model):
        made = (model(x) - x.sum(1, keepdim=True)).square().mean()
        return made * math.nan if spoiled else made

    return loss


@pytest.mark.parametrize(
    ("method", "step_s", "options"),
    [
        ("diloco", STEP_S, {"period": PERIOD}),
        # whose partner each peer is depends on the run's name
        *(("noloco", STEP_S, {"period": PERIOD, "name": name}) for name in ("a", "g", "l")),
        # the state is of a later round than the one in which a partner waits
        ("noloco", 0.0, {"period": PERIOD, "name": "s"}),
        ("sparseloco", STEP_S, {"period": PERIOD}),
        ("ddp", STEP_S, {}),
    ],
)
def test_the_others_rounds_close_at_once_and_the_peer_takes_over_their_state(
    method, step_s, options
):
    async def work(member):
        clock = asyncio.get_running_loop().time
        began_s = clock()
        for step in range(4 * PERIOD):
            spoiled = member.rank == 1 and step == PERIOD + 1
            await asyncio.sleep(step_s)
            await member.step(loss_of(member.rank, step, spoiled))
        took_s = clock() - began_s - 4 * PERIOD * step_s
        reasons = [fields["reason"] for kind, fields in member.reports if kind == "adopt"]
        finite = all(x.isfinite().all() for x in member.model.parameters())
        return took_s, reasons, finite, member.rounds[-1]

    lives = train_together(3, method, model_of, work, adamw, **options)
    assert all(finite for _, _, finite, _ in lives)
    assert all(took_s < DEADLINE_S / 10 for took_s, *_ in lives)
    assert [len(reasons) for _, reasons, _, _ in lives] == [0, 1, 0]
    assert "had NaN or infinity" in lives[1][1][0]
    status = {last["status"] for *_, last in lives}
    assert status <= {"ok", "alone"} if method == "noloco" else status == {"ok"}


def test_after_three_such_rounds_in_a_row_the_peer_ends_with_one_sentence():
    async def work(member):
        for step in range(8 * PERIOD):
            try:
                await member.step(loss_of(member.rank, step, spoiled=member.rank == 1))
            except UnencodableTensor as error:
                return str(error), step
        return member.rounds[-1]["status"], None

    lives = train_together(3, "diloco", model_of, work, adamw, period=PERIOD)
    said, step = lives[1]
    assert "in 3 rounds in a row; lower the learning rate" in said
    assert "\n" not in said
    assert step == 3 * PERIOD - 1
    assert lives[0] == lives[2]
