"""One update of a training loop on one screen: the files it enters between `due` and `apply`."""

import re

import pytest
import torch
from torch import nn

import farflock
from farflock.node.loop import Loop
from farflock.optimizers.diloco import DiLoCo
from farflock.swarm import compute
from farflock.swarm.peer import peer
from tests.tidy.trace import ROOT, Trace

pytestmark = pytest.mark.net

ROUND, PERIOD = 2, 2
TRIES = 5
# of node/ and swarm/peer; the protocol, the method with its replica, and the codec are read for
# themselves
MAX_FILES = 8
LISTED, APART = ("node/", "swarm/peer/"), ("node/model/",)
ROOMS = ("node", "swarm", "optimizers", "compression")


def traced_update(monkeypatch):
    """The trace of round `ROUND` of a DiLoCo run of three peers."""
    trace, open_updates = Trace(ROOMS, marked=False), set()
    due, apply, unpack, call = DiLoCo.due, Loop.apply, peer.unpack, compute.Worker.__call__

    def marked_due(self, replica, progress):
        exchanges = due(self, replica, progress)
        is_ours = any(exchange.key.round == ROUND for exchange in exchanges)
        if is_ours:
            open_updates.add(id(self))
        trace.mark.set(is_ours)
        trace.on = bool(open_updates)
        return exchanges

    async def marked_apply(self, action):
        if action.exchange.key.round == ROUND:
            open_updates.discard(id(self.driver.method))
        trace.on = bool(open_updates)
        trace.mark.set(False)
        await apply(self, action)

    def marked_unpack(packed):
        frame = unpack(packed)
        key = getattr(frame.message, "key", None)
        trace.mark.set(getattr(key, "round", None) == ROUND)
        return frame

    monkeypatch.setattr(DiLoCo, "due", marked_due)
    monkeypatch.setattr(Loop, "apply", marked_apply)
    monkeypatch.setattr(peer, "unpack", marked_unpack)
    monkeypatch.setattr(
        compute.Worker, "__call__", lambda self, work: call(self, trace.carried(work))
    )

    def work(rank, optimize):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = optimize(model, inner="sgd", lr=0.1)
        for _ in range((ROUND + 2) * PERIOD):
            model.zero_grad()
            model(torch.ones(2, 4) * (rank + 1)).square().mean().backward()
            optimizer.step()
        return optimizer.last_round

    with trace.watching(), farflock.local_swarm(3, method="diloco", period=PERIOD) as swarm:
        reports = swarm.train(work)
    assert all(report.number >= ROUND for report in reports)
    return trace


def test_one_update_enters_the_files_that_the_page_lists(monkeypatch):
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.partition("## One update, file by file")[2].partition("\n## ")[0]
    files = int(re.search(r"enters (\d+) files", section)[1])
    entered, listed = {}, []
    # a peer that is late catches up by another way, and a busy machine makes peers late
    for _ in range(TRIES):
        with monkeypatch.context() as patch:
            entered = traced_update(patch).entered
        listed = [name for name in entered if name.startswith(LISTED)]
        listed = [name for name in listed if not name.startswith(APART)]
        if len(listed) <= MAX_FILES and len(entered) <= files:
            break
    for name, functions in entered.items():
        print(f"{name}: {', '.join(functions)}")
    assert sorted(listed) == sorted(re.findall(r"^\| `(.+?\.py)`", section, re.MULTILINE))
    assert len(listed) <= MAX_FILES
    assert len(entered) <= files
