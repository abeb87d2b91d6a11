"""A node's status file is always whole, has this node's own pace, and never ends the node."""

import asyncio
import contextlib
import errno
import logging
import os
from types import SimpleNamespace

import msgspec
import pytest

from farflock.node.process.host import Shares
from farflock.node.process.status import DownloadStatus, Waiting, awaited_state, read_status
from farflock.node.process.status_writer import FULL, PACE_SAMPLES, StatusWriter
from farflock.swarm.messages import Evaluation
from farflock.swarm.peer.state_download import StateProgress
from farflock.swarm.protocol.views import Member, View
from farflock.swarm.sim.virtual_time import run_virtual
from farflock.swarm.zmq.partner import Traffic


class Links:
    def __init__(self):
        self.counters = {"queue full": 2}

    def total_bytes(self):
        return 10, 20

    def life(self, peer):
        return "alive"

    def road(self, peer):
        return "direct"

    def traffic(self, peer):
        return {"direct": Traffic(3_000_000, 5), "forwarded": Traffic(400_000, 6)}

    def relayed_bytes(self, peer):
        return 1_000_000

    def rtt_s(self, peer):
        return 0.0125


NEWCOMER = "counts as a member from the next change of members (within 30 s)"


def node_in(folder, members=("me", "other"), awaited=0, is_member=True, role="replica", watch=None):
    """A node as far as its status is concerned."""
    port = SimpleNamespace(
        views=SimpleNamespace(
            newest=View(3, bytes(32), 0, tuple(Member(peer, 1) for peer in members))
        ),
        counters={"x": 1},
    )
    what = SimpleNamespace(stream="delta", round=4)
    peer = SimpleNamespace(
        me="me",
        context=port,
        membership=SimpleNamespace(
            is_member=is_member, branch=None, admission=SimpleNamespace(is_full=False)
        ),
        pairing=SimpleNamespace(unsure_rounds=0),
        rounds=SimpleNamespace(slowness=SimpleNamespace(named=lambda members: {"other": "line"})),
        snapshots=SimpleNamespace(coming=None),
        branching=SimpleNamespace(returning=SimpleNamespace(awaited=(), lacking=(), is_open=False)),
    )
    part = SimpleNamespace(
        peer=peer,
        role=role,
        watch=watch,
        step=0,
        tokens=128,
        trained_tokens=0,
        last_loss=None,
        work={"microbatches": 7},
        coded_on="",
        twin="",
        stopping=False,
        waits=lambda: [SimpleNamespace(what=what, whom=("other",), left_s=2.0)],
    )
    return SimpleNamespace(
        machine=SimpleNamespace(
            folder=SimpleNamespace(path=folder),
            place=SimpleNamespace(shares=Shares()),
        ),
        member=part,
        session=SimpleNamespace(world=SimpleNamespace(trouble=str)),
        links=Links(),
        run="ab",
        invite=lambda: "farflock:x",
        manifest=SimpleNamespace(
            run=SimpleNamespace(total_tokens=1000), exchange=SimpleNamespace(view_s=30.0)
        ),
        data=None,
        journal=SimpleNamespace(rounds={"ok": 4}, last_round=3),
        worker=SimpleNamespace(busy_s=0.0),
        awaited=lambda: awaited,
        leaving=SimpleNamespace(asked=False, doing="is leaving: saves step 7", said=""),
    )


def test_a_status_can_be_read_back_and_names_the_peers_that_are_waited_for(tmp_path):
    StatusWriter(node_in(tmp_path)).write()
    status = read_status(tmp_path / "status.json")
    assert status.waits == (Waiting("delta", 4, ("other",), 2.0),)
    (other,) = status.partners
    assert (other.rtt_ms, other.slow) == (12.5, "line")
    assert (other.sent_bytes, other.relayed_bytes) == (3_400_000, 1_000_000)
    assert status.dropped == {"x": 1, "queue full": 2}
    assert (status.rounds, status.last_round, status.doing) == ({"ok": 4}, 3, "trains")
    assert not list(tmp_path.glob("*.partial"))


def test_a_node_that_takes_a_part_of_its_machine_says_so(tmp_path):
    node = node_in(tmp_path)
    node.machine.place.shares = Shares(625_000.0, 0.0, 0.5)
    StatusWriter(node).write()
    said = "trains with at most 5 Mbit/s sent, 50% of its threads' time"
    assert read_status(tmp_path / "status.json").doing == said


@pytest.mark.parametrize("is_member", [False, True])
def test_it_says_for_whom_it_waits_while_its_view_cannot_decide(tmp_path, is_member):
    node = node_in(tmp_path, is_member=is_member)
    returning = node.member.peer.branching.returning
    returning.awaited, returning.lacking = ("12D3KooWabcdefgh",), ()
    waits = "waits for abcdefgh, without whom the run's members cannot decide anything"
    assert StatusWriter(node).write().doing.endswith(f"; {waits}")
    returning.awaited, returning.is_open = (), True
    signs = "counts as a member once all members have signed their return"
    assert StatusWriter(node).write().doing == ("trains" if is_member else f"trains; {signs}")


def test_a_node_that_downloads_the_runs_state_says_how_much_is_left(tmp_path, monkeypatch):
    node = node_in(tmp_path, is_member=False)
    node.member.peer.context.chain = object()
    written, coming = [], StateProgress(12_000_000, 86_000_000, 200_000.0, begun_bytes=1_000_000)
    monkeypatch.setattr(StatusWriter, "_put", lambda writer, status: written.append(status))

    async def joins():
        async with StatusWriter(node).while_joining():
            await asyncio.sleep(1.5)  # before it is asked for
            assert not written
            node.member.peer.snapshots.coming = coming
            await asyncio.sleep(1.0)

    run_virtual(joins())
    (status,) = written
    assert (status.doing, status.is_member) == ("downloads the run's state", False)
    (wait,) = status.waits
    assert wait.download == DownloadStatus(12_000_000, 86_000_000, 200_000, 365.0)
    said = "the run's state: 12.0 of 86.0 MB, 0.20 MB/s, about 0:06:05 left"
    assert wait.said({}) == said
    (mute,) = awaited_state(StateProgress(500_000, 1_000_000, 0.0))
    assert mute.said({}) == "the run's state: 0.5 of 1.0 MB, and nothing comes"


def test_a_node_that_waits_for_room_in_a_full_run_says_so(tmp_path):
    node = node_in(tmp_path, is_member=False)
    node.member.peer.context.chain = object()
    admission = node.member.peer.membership.admission
    admission.is_full = True

    async def waits():
        async with StatusWriter(node).while_joining():
            await asyncio.sleep(0.5)
            status = read_status(tmp_path / "status.json")
            assert status.doing == f"waits: {FULL}"
            assert (status.is_member, status.waits) == (False, ())
        return StatusWriter(node).write()  # of one that lost its place while it downloaded

    assert run_virtual(waits()).doing == f"trains, but does not count yet: {FULL}"


def test_it_has_the_newest_evaluation_with_its_member_and_a_sample(tmp_path):
    value = Evaluation(20, 640, 2.5, 0.125, 3.25)
    watch = SimpleNamespace(
        newest=("12D3KooWabcdefgh", value),
        alone=False,
        evaluations=SimpleNamespace(sample="The king"),
        difference="",
    )
    StatusWriter(node_in(tmp_path, watch=watch)).write()
    found = read_status(tmp_path / "status.json").evaluation
    assert found.lines() == [
        "held-out loss: 2.500 ± 0.125 nats a token, 3.250 bits a byte"
        " (before round 20, by abcdefgh)",
        "the weights write: The king",
    ]
    own = msgspec.structs.replace(found, own=True, loss=None, bits_per_byte=None)
    assert own.said() == "not finite (before round 20, of the weights that abcdefgh alone has)"
    watch.newest = None
    assert StatusWriter(node_in(tmp_path, watch=watch)).write().evaluation is None


@pytest.mark.parametrize(
    ("fields", "doing"),
    [
        ({"awaited": 4}, "waits for members: 2 of 4 are here"),
        ({"awaited": 2}, "trains"),
        ({"is_member": False}, f"trains; {NEWCOMER}"),
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
    assert StatusWriter(node).write().doing == "is leaving: saves step 7"


def test_the_last_status_of_a_node_is_that_of_no_member(tmp_path):
    """Else whoever starts the node again, and waits for it to be one, does not wait."""
    node = node_in(tmp_path)
    node.leaving.said = "saved"

    async def main():
        async with StatusWriter(node).showing(lambda status: None):
            await asyncio.sleep(1.0)
            assert read_status(tmp_path / "status.json").is_member

    run_virtual(main())
    last = read_status(tmp_path / "status.json")
    assert (last.doing, last.is_member) == ("has ended: saved", False)


def test_it_marks_a_member_that_sends_the_same_updates(tmp_path):
    node = node_in(tmp_path)
    assert [each.twin for each in StatusWriter(node).write().partners] == [False]
    node.member.twin = "other"
    assert [each.twin for each in StatusWriter(node).write().partners] == [True]


def test_pace_and_busy_share_are_those_of_the_last_seconds(tmp_path):
    node, shown = node_in(tmp_path), []

    async def main():
        writing = asyncio.create_task(StatusWriter(node).run(shown.append))
        for second in range(3 * PACE_SAMPLES):
            await asyncio.sleep(1.0)
            late = second >= 2 * PACE_SAMPLES
            node.member.trained_tokens += 64 * (10 if late else 5)
            node.worker.busy_s += 0.75 if late else 0.25
        writing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await writing

    run_virtual(main())
    paces = [status.tokens_per_s for status in shown]
    assert paces[0] is None
    assert paces[2 * PACE_SAMPLES - 1] == pytest.approx(5 * 64)
    assert paces[-1] == pytest.approx(10 * 64, rel=0.1)
    shares = [status.busy_share for status in shown]
    assert shares[0] is None
    assert shares[2 * PACE_SAMPLES - 1] == pytest.approx(0.25)
    assert shares[-1] == pytest.approx(0.75, rel=0.1)


def test_a_full_disk_is_said_once_and_ends_nothing(tmp_path, monkeypatch, caplog):
    writer = StatusWriter(node_in(tmp_path))

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with caplog.at_level(logging.WARNING, logger="farflock"), monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        for _ in range(3):
            assert writer.write().doing == "trains"
    assert caplog.text.count("No space left on device") == 1
    writer.write()
    assert read_status(tmp_path / "status.json").run == "ab"


def test_a_peer_that_is_waited_for_is_called_by_its_known_name():
    wait = Waiting("delta", 4, ("12D3KooWabcdefgh", "12D3KooWother123"), 2.4)
    assert (
        wait.said({"12D3KooWother123": "peer 1"}) == "abcdefgh, peer 1 (delta, round 4, 2 s left)"
    )
