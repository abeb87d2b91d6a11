"""`status` says in words who is there, what was agreed and sent, and whom a peer waits for."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from worlds import virtual_optimizer
from worlds.virtual_optimizer import model_of, train_together

from farflock.node.library.loop_measures import RoundReport
from farflock.node.library.swarm_status import SwarmStatus, status_of


def test_a_status_is_one_sentence():
    me, other, third = "12D3KooWaaaaaaaaaaaa1111", "12D3KooWbbbb22222222", "12D3KooWcccc33333333"
    status = SwarmStatus(
        me, (me, other), RoundReport("delta", 4, "ok", 2), 1_234_567, 999, (other,)
    )
    assert str(status) == (
        "2 members (this peer, …22222222); last round: delta 4, ok, 2 peers; "
        "1.23 MB sent, 999 B received; waits for …22222222"
    )
    status = SwarmStatus(me, (me,), RoundReport("delta", 0, "alone", 1), 0, 999_600, (other, third))
    assert str(status) == (
        "1 member (this peer); last round: delta 0, alone, 1 peer; "
        "0 B sent, 1 MB received; waits for …22222222, …33333333"
    )
    status = SwarmStatus(me, (me, other, third), None, 0, 0, (), (third,))
    assert str(status).endswith("; waits for nobody; nothing is heard of …33333333")


def test_an_optimizer_tells_its_status_while_it_trains_and_once_it_is_closed():
    model = torch.nn.Linear(2, 1)
    optimizer = virtual_optimizer.alone(model, period=1)
    fresh = "1 member (this peer); no round yet; 0 B sent, 0 B received; waits for nobody"
    assert str(optimizer.status()) == fresh
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    status = optimizer.status()
    assert status.last_round == ("delta", 0, "alone", 1)
    assert status.members == (status.peer,) == (optimizer.peer,)
    optimizer.close()
    assert optimizer.status() == status


def test_a_status_names_those_from_whom_a_peer_waits():
    """Rank 1 begins late, while rank 0 already waits for the round of its first step."""

    async def work(member):
        here = member.here

        async def steps():
            for _ in range(2):
                await member.step(lambda model: model(torch.ones(4, 8)).square().mean())

        await asyncio.sleep(5.0 * member.rank)
        training = asyncio.create_task(steps())
        await asyncio.sleep(2.0)
        status = status_of(here.peer, here.peer.context.views.newest.peers, None, here.waits())
        await training
        return here.peer.me, status

    (me, early), (other, late) = train_together(
        2, "diloco", model_of, work, lambda each: torch.optim.SGD(each, lr=1e-3), period=1
    )
    assert early.waits_for == (other,)
    assert str(early).endswith(f"waits for …{other[-8:]}")
    assert set(early.members) == {me, other}
    assert late.waits_for == ()
    assert late.sent_bytes > 0
    assert early.unheard == late.unheard == ()


@pytest.mark.parametrize(
    ("life", "unheard"),
    [("alive", ()), ("suspect", ("other",)), ("dead", ("other",)), ("unknown", ())],
)
def test_a_member_that_is_silent_is_named_as_long_as_it_is_listed(life, unheard):
    links = SimpleNamespace(total_bytes=lambda: (0, 0))
    peer = SimpleNamespace(me="me", context=SimpleNamespace(links=links, life=lambda peer: life))
    last = RoundReport("delta", 4, "ok", 2)
    assert status_of(peer, ("me", "other"), last, []).unheard == unheard
