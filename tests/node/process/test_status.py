"""A node's status file is always whole, has this node's own pace, and never ends the node."""

import asyncio
import errno
import logging
import os
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest

from farflock.node.model.device import Device
from farflock.node.process import status_writer
from farflock.node.process import status_writer as module
from farflock.node.process.status import Suspect, Waiting, read_status
from farflock.node.process.status_writer import PACE_SAMPLES, StatusWriter, status_of
from farflock.node.run.manifest import resolve
from farflock.swarm.accusations import Accusations
from farflock.swarm.context import Entrance
from farflock.swarm.protocol.views import Member, View
from farflock.swarm.sim.virtual_time import run_virtual
from farflock.swarm.statements import Orders
from farflock.swarm.tasks import cancel, kept_up


class Links:
    def __init__(self):
        self.counters = {"queue full": 2}
        self.detours = SimpleNamespace(relayed_bytes=30)

    def total_bytes(self):
        return 10, 20

    def life(self, peer):
        return "alive"

    def road(self, peer):
        return "direct"

    def rtt_s(self, peer):
        return 0.0125


DESCRIBED = resolve({"model": {"preset": "tiny"}})
NEWCOMER = "counts as a member from the next change of members (within 30 s)"


def node_in(
    folder,
    members=("me", "other"),
    awaited=0,
    is_member=True,
    role="replica",
    refused=None,
    waits_for_place=None,
    banned=(),
):
    """A node as far as its status is concerned."""
    port = SimpleNamespace(
        chain=SimpleNamespace(
            newest=View(3, bytes(32), 0, tuple(Member(peer, 1) for peer in members))
        ),
        counters={"x": 1},
        accusations=Accusations(),
        now=lambda: 100.0,
        gone=lambda view, peer: False,
        entrance=Entrance(orders=Orders(banned=frozenset(banned))),
    )
    what = SimpleNamespace(stream="delta", round=4)
    peer = SimpleNamespace(
        me="me",
        context=port,
        membership=SimpleNamespace(
            is_member=is_member,
            branch=None,
            admission=SimpleNamespace(
                own_refusal=refused,
                own_wait=waits_for_place,
                statements=SimpleNamespace(log=SimpleNamespace(said=("1: close",))),
            ),
        ),
        pairing=SimpleNamespace(unsure_rounds=0),
    )
    part = SimpleNamespace(
        evaluator=None,
        peer=peer,
        role=role,
        step=0,
        tokens=128,
        trained_tokens=0,
        last_loss=None,
        work={"microbatches": 7},
        stopping=False,
        waits=lambda: [SimpleNamespace(what=what, whom=("other",), left_s=2.0)],
    )
    return SimpleNamespace(
        machine=SimpleNamespace(folder=SimpleNamespace(path=folder), device=Device(), ranks=None),
        member=part,
        links=Links(),
        run="ab",
        invite=lambda: "farflock:x",
        manifest=SimpleNamespace(
            run=SimpleNamespace(total_tokens=1000),
            exchange=SimpleNamespace(view_s=30.0),
            model=DESCRIBED.model,
            plan=DESCRIBED.plan,
        ),
        journal=SimpleNamespace(rounds={"ok": 4}, last_round=3),
        awaited=lambda: awaited,
        supply=None,
    )


def test_a_status_can_be_read_back_and_names_the_peers_that_are_waited_for(tmp_path):
    node = node_in(tmp_path)
    StatusWriter(node).write()
    status = read_status(tmp_path / "status.json")
    assert status.waits == (Waiting("delta", 4, ("other",), 2.0),)
    assert status.partners[0].rtt_ms == 12.5
    assert status.dropped == {"x": 1, "queue full": 2}
    assert (status.sent_bytes, status.received_bytes, status.relayed_bytes) == (10, 20, 30)
    assert (status.rounds, status.last_round, status.doing) == ({"ok": 4}, 3, "trains")
    newest = node.member.peer.context.chain.newest
    assert (status.view, status.view_hash) == (newest.number, newest.hash.hex())
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    ("members", "learners", "gone", "said"),
    [
        (("me",), (), "", "1 of 3 votes: the run stops if me goes; invite more peers"),
        (("me", "b"), (), "", "2 of 3 votes: the run stops if me goes; invite more peers"),
        (("me", "b", "c"), (2,), "", "2 of 3 votes: the run stops if me goes; invite more peers"),
        (("me", "b", "c"), (), "", ""),
        (("me", "b", "c"), (), "c", "2 of 3 votes: the run stops if me or b goes; invite"),
        (("me", "b", "c"), (), "bc", "1 of 3 votes are alive: nothing is decided until more are"),
        (tuple("bcdefgh"), (), "bcde", "3 of 7 votes are alive: nothing is decided until more are"),
    ],
)
def test_it_says_whose_loss_would_stop_the_run_and_that_too_few_votes_are_left(
    tmp_path, members, learners, gone, said
):
    node = node_in(tmp_path, members=members)
    context = node.member.peer.context
    view = msgspec.structs.replace(context.chain.newest, learners=learners)
    context.chain.newest, context.gone = view, lambda view, peer: peer in gone
    status = StatusWriter(node).write()
    assert status.fragile.startswith(said)
    assert bool(status.fragile) is bool(said)
    assert len(status.voters) == len(members) - len(learners)


def test_a_peer_that_lied_is_in_it_with_the_times_in_unix_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(status_writer.time, "time", lambda: 5100.0)
    node = node_in(tmp_path)
    for at_s in (40.0, 60.0):
        node.member.peer.context.accusations.note("liar", "two values in one ballot", at_s)
    (suspect,) = StatusWriter(node).write().suspects
    assert suspect == Suspect("liar", "two values in one ballot", 2, 5040, 5060)


@pytest.mark.parametrize(
    ("fields", "doing"),
    [
        ({"awaited": 4}, "waits for members: 2 of 4 are here"),
        ({"awaited": 2}, "trains"),
        ({"is_member": False}, f"trains; {NEWCOMER}"),
        (
            {"is_member": False, "banned": ("me",)},
            "is banned by the run's founder: no member takes its work",
        ),
        (
            {"is_member": False, "refused": "its capability has expired"},
            "trains; is not let in: its capability has expired; ask for a new invite, and join"
            " with that",
        ),
        (
            {"is_member": False, "waits_for_place": "all 64 places are taken"},
            "trains; waits for a place: all 64 places are taken",
        ),
        ({"role": "trainer"}, "trains"),
        ({"role": "stage:2"}, "serves stage 2"),
        ({"role": "stage:2", "is_member": False}, f"serves stage 2; {NEWCOMER}"),
    ],
)
def test_it_says_what_the_node_does(tmp_path, fields, doing):
    node = node_in(tmp_path, **fields)
    assert StatusWriter(node).write().doing == doing
    assert StatusWriter(node).write("has ended").doing == "has ended"
    node.member.stopping = True
    assert StatusWriter(node).write().doing == "is leaving"


def test_a_newcomer_that_waits_for_its_data_says_so_before_it_knows_any_member(tmp_path):
    node = node_in(tmp_path)
    node.member.peer.context.chain = None
    status = StatusWriter(node).write()
    assert (status.members, status.partners, status.doing) == ((), (), "joins the run")
    node.supply = SimpleNamespace(awaited=lambda: "shards/0.bin")
    assert StatusWriter(node).write().doing == "waits for shards/0.bin"


@pytest.mark.parametrize(
    ("model", "weights"),
    [
        ({"preset": "tiny"}, 256 * 24 + 24 + 2 * (2 * 24 * 12 * 3 + 3 * 24 * 48 + 2 * 24)),
        # two of four experts compute a token, and the router
        (
            {"preset": "tiny", "experts": 4},
            256 * 24 + 24 + 2 * (2 * 24 * 12 * 3 + 4 * 24 + 2 * 3 * 24 * 48 + 2 * 24),
        ),
    ],
)
def test_operations_are_those_of_the_weights_that_compute_a_token(tmp_path, model, weights):
    node = node_in(tmp_path)
    described = resolve({"model": model, "train": {"seq": 32}})
    node.manifest.model, node.manifest.plan = described.model, described.plan
    status = status_of(node, tokens_per_s=10.0)
    assert status.flops_per_s == 10 * (6 * weights + 12 * 2 * 24 * 32)
    assert status.mfu is None  # of a CPU


def test_the_pace_is_that_of_the_last_seconds(tmp_path):
    node, shown = node_in(tmp_path), []

    async def main():
        writer = StatusWriter(node)
        writing = [asyncio.create_task(each) for each in (writer.run(), writer.show(shown.append))]
        for second in range(3 * PACE_SAMPLES):
            await asyncio.sleep(1.0)
            node.member.trained_tokens += 64 * (5 if second < 2 * PACE_SAMPLES else 10)
        await cancel(*writing)

    run_virtual(main())
    assert len(shown) == 3 * PACE_SAMPLES
    paces = [status.tokens_per_s for status in shown]
    assert paces[0] is None
    assert paces[2 * PACE_SAMPLES - 1] == pytest.approx(5 * 64)
    assert paces[-1] == pytest.approx(10 * 64, rel=0.1)


def test_a_full_disk_is_said_once_and_ends_nothing(tmp_path, monkeypatch, caplog):
    writer = StatusWriter(node_in(tmp_path))

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with caplog.at_level(logging.WARNING, logger="farflock"), monkeypatch.context() as patch:
        patch.setattr(module, "write_whole", full)
        for _ in range(3):
            assert writer.write().doing == "trains"
    assert caplog.text.count("No space left on device") == 1
    writer.write()
    assert read_status(tmp_path / "status.json").run == "ab"


def test_a_folder_that_raises_what_nobody_foresaw_delays_the_status_and_ends_nothing(
    tmp_path, monkeypatch, caplog
):
    whole, left = module.write_whole, [2]

    def odd(path, data, mode):
        if left[0]:
            left[0] -= 1
            raise RuntimeError("an odd folder")
        whole(path, data, mode)

    async def main():
        writer, shown = StatusWriter(node_in(tmp_path)), []
        helpers = [
            asyncio.create_task(kept_up("the status file", writer.run)),
            asyncio.create_task(kept_up("the live view", partial(writer.show, shown.append))),
        ]
        await asyncio.sleep(0.5)
        assert "the status file failed (RuntimeError: an odd folder)" in caplog.text
        assert not shown
        await asyncio.sleep(5.0)
        assert not any(helper.done() for helper in helpers)
        assert shown
        await cancel(*helpers)

    monkeypatch.setattr(module, "write_whole", odd)
    with caplog.at_level(logging.ERROR, logger="farflock"):
        run_virtual(main())
    assert read_status(tmp_path / "status.json").run == "ab"


def test_a_view_that_fails_takes_no_status_with_it(tmp_path, caplog):
    def broken(status):
        raise RuntimeError("no terminal")

    async def main():
        node = node_in(tmp_path)
        writer = StatusWriter(node)
        helpers = [
            asyncio.create_task(kept_up("the status file", writer.run)),
            asyncio.create_task(kept_up("the live view", partial(writer.show, broken))),
        ]
        for step in range(30):
            node.member.step = step
            await asyncio.sleep(1.0)
        assert read_status(tmp_path / "status.json").step >= 28
        await cancel(*helpers)

    with caplog.at_level(logging.ERROR, logger="farflock"):
        run_virtual(main())
    assert "the live view failed (RuntimeError: no terminal)" in caplog.text
    assert "the status file" not in caplog.text


def test_a_last_status_that_cannot_be_written_is_said_and_raises_nothing(
    tmp_path, monkeypatch, caplog
):
    def odd(*_):
        raise RuntimeError("an odd folder")

    monkeypatch.setattr(module, "write_whole", odd)
    with caplog.at_level(logging.ERROR, logger="farflock"):
        StatusWriter(node_in(tmp_path)).write_last()
    assert "an odd folder" in caplog.text


def test_a_peer_that_is_waited_for_is_called_by_its_known_name():
    wait = Waiting("delta", 4, ("12D3KooWabcdefgh", "12D3KooWother123"), 2.4)
    assert (
        wait.said({"12D3KooWother123": "peer 1"}) == "abcdefgh, peer 1 (delta, round 4, 2 s left)"
    )
