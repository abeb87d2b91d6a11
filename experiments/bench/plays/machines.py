"""Faults of one machine: it dies, stands still, has a wrong clock, a full disk or no time."""

import contextlib
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from farflock.experiments.bench.plays.lines import FAULTS, LIMIT_S
from farflock.experiments.bench.plays.play import Play, Seconds
from farflock.experiments.bench.workers.hosted_swarm import (
    LOOK_EVERY_S,
    NEVER,
    HostedNode,
    HostedSwarm,
    Round,
    Setting,
)

FROZEN_S, BUSY_S, SLEPT_S, COPIED_S, FULL_S = 30.0, 90.0, 90.0, 60.0, 20.0
CLOCK_S, STEPPED_S, SLEPT_CLOCK_S = 600.0, 20.0, 4.0
DISK_BYTES, BLOCK_BYTES = 64 << 20, 1 << 16
DISK_RATE = 250_000.0  # bytes per second: a whole checkpoint takes half a minute
COPY_CODE = 3  # of a node that is told not to start again
ELSEWHERE = "10.78.0.200"
TRIED = "e28b7fbf on 2026-11-22, once"


def kill(swarm: HostedSwarm) -> Seconds:
    """Kill a member that joined, and start it again in its folder."""
    swarm.last.kill()
    gone_on_s = swarm.progress(swarm.others(swarm.last), LIMIT_S)
    swarm.join(swarm.last)
    return {"kill": gone_on_s, "kill.back": swarm.counts([swarm.last], LIMIT_S)}


def freeze(swarm: HostedSwarm) -> Seconds:
    """Stop a member and its helpers for a while."""
    gone_on_s = _stop(swarm, FROZEN_S)
    swarm.last.signal(signal.SIGCONT, helpers=True)
    return {"freeze": gone_on_s, "freeze.back": swarm.counts([swarm.last], LIMIT_S)}


def _stop(swarm: HostedSwarm, for_s: float) -> float:
    """Stop a member and its helpers for a while; return the seconds until the others' progress."""
    swarm.last.signal(signal.SIGSTOP, helpers=True)
    until_s = time.monotonic() + for_s
    gone_on_s = swarm.progress(swarm.others(swarm.last), for_s)
    time.sleep(max(0.0, until_s - time.monotonic()))
    return gone_on_s


def sleep_and_move(swarm: HostedSwarm) -> Seconds:
    """Stop a member; wake it at another address with a wrong clock, which is set right later."""
    node, before = swarm.last, swarm.last.address
    _stop(swarm, SLEPT_S)
    node.move(ELSEWHERE)
    node.clock.write_text(str(SLEPT_CLOCK_S))
    node.signal(signal.SIGCONT, helpers=True)
    back_s = swarm.counts([node], LIMIT_S)
    node.clock.unlink()
    node.move(before)
    return {"e22": back_s, "e22.again": swarm.counts([node], LIMIT_S)}


def clock(swarm: HostedSwarm) -> Seconds:
    """Set a member's clock ahead, and back."""
    swarm.last.clock.write_text(str(CLOCK_S))
    gone_on_s = swarm.whole(LIMIT_S)
    time.sleep(STEPPED_S)
    swarm.last.clock.unlink()
    return {"clock": gone_on_s, "clock.back": swarm.whole(LIMIT_S)}


def disk(swarm: HostedSwarm) -> Seconds:
    """Fill a member's disk, and make room again."""
    node, others = swarm.last, swarm.others(swarm.last)
    ballast = node.files / "ballast"
    _fill(ballast)
    me = node.peer

    def counted(rounds: Sequence[Round]) -> bool:
        return sum(me in each.participants for each in rounds) >= 2

    gone_on_s = swarm.seconds(others, counted, LIMIT_S)
    time.sleep(FULL_S)
    ballast.unlink()
    return {"disk": gone_on_s, "disk.back": swarm.whole(LIMIT_S)}


def _fill(path: Path) -> None:
    """Write to a file until nothing more fits on its disk, which has `DISK_BYTES`."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for _ in range(DISK_BYTES // BLOCK_BYTES):
            file.write(bytes(BLOCK_BYTES))


def busy(swarm: HostedSwarm) -> Seconds:
    """Keep a member's own code busy, while it still answers; the others may wait for it twice."""
    step = swarm.last.brake.read_text()
    swarm.last.brake.write_text(str(BUSY_S))
    time.sleep(2 * BUSY_S / 3)
    gap_s = swarm.longest_gap(swarm.others(swarm.last), BUSY_S / 3)
    swarm.last.brake.write_text(step)
    return {"e10": gap_s, "e10.back": swarm.counts([swarm.last], LIMIT_S)}


def copy(swarm: HostedSwarm) -> Seconds:
    """Start a member's folder on a second host, too; the copy has to end by itself."""
    (spare,) = swarm.spares
    shutil.copytree(swarm.last.files, spare.files, ignore=shutil.ignore_patterns("*.sock"))
    swarm.join(spare)
    gap_s = swarm.longest_gap(swarm.nodes, COPIED_S)
    ended = spare.code(LIMIT_S) == COPY_CODE
    spare.kill()
    shutil.rmtree(spare.files)
    return {"e23": gap_s if ended else NEVER, "e23.back": swarm.whole(LIMIT_S)}


def slow_disk(swarm: HostedSwarm) -> Seconds:
    """Ask a member to end while its disk is slow, and start it again."""
    node, others = swarm.last, swarm.others(swarm.last)
    before, began_s = node.checkpoints(), time.monotonic()
    node.disk.write_text(str(DISK_RATE))
    node.signal(signal.SIGTERM)
    gone_on_s = swarm.progress(others, LIMIT_S)
    is_saved = node.code(LIMIT_S) == 0 and bool(node.checkpoints() - before)
    ended_s = time.monotonic() - began_s if is_saved else NEVER
    node.disk.unlink()
    swarm.join(node)
    return {"e4": ended_s, "e4.others": gone_on_s, "e4.back": swarm.counts([node], LIMIT_S)}


def clean(swarm: HostedSwarm) -> Seconds:
    """Remove the sockets by which a member speaks to the daemon of its directory."""
    node, began_s = swarm.last, time.monotonic()
    for path in node.sockets():
        path.unlink()
    gone_on_s = swarm.whole(LIMIT_S)
    return {"e28": gone_on_s, "e28.back": _healed(node, began_s)}


def _healed(node: HostedNode, since_s: float) -> float:
    """Return the seconds until a node's directory has sockets again, and serves."""
    while time.monotonic() < since_s + LIMIT_S:
        if node.sockets() and "without the run's directory" not in str(node.status().get("doing")):
            return time.monotonic() - since_s
        time.sleep(LOOK_EVERY_S)
    return NEVER


PLAYS = (
    Play(
        "kill",
        "SIGKILL to one of four, its helpers included: the others' second round; .back: until its "
        "work counts, from its start in the same folder",
        kill,
        before={"kill": 1.6, "kill.back": 35.0},
        source=FAULTS,
    ),
    Play(
        "freeze",
        f"SIGSTOP to one of four for {FROZEN_S:.0f} s: the others' second round; .back: until its "
        "work counts, from SIGCONT",
        freeze,
        before={"freeze": 1.3, "freeze.back": 3.1},
        source=FAULTS,
    ),
    Play(
        "clock",
        f"the clock of one of four is set {CLOCK_S:.0f} s ahead: a round of all; .back: the same "
        f"after it is set back, {STEPPED_S:.0f} s later",
        clock,
    ),
    Play(
        "disk",
        f"the disk of one of four ({DISK_BYTES >> 20} MiB) is full for {FULL_S:.0f} s: two rounds "
        "with its work; .back: a round of all that it wrote down, once there is room",
        disk,
        Setting(disk_bytes=DISK_BYTES),
    ),
    Play(
        "e4",
        f"SIGTERM to one of four (0.5M parameters), whose disk takes {DISK_RATE / 1e6:g} MB/s:"
        " until it has ended with code 0 and its last step saved; .others: their second round;"
        " .back: until its work counts, from its start in the same folder",
        slow_disk,
        Setting(preset="demo"),
        before={"e4": NEVER},
        source=TRIED,
    ),
    Play(
        "e28",
        "the sockets of one of four to its directory's daemon are removed: a round of all; .back:"
        " until that directory serves again",
        clean,
    ),
    Play(
        "e10",
        f"one of three is busy for {BUSY_S:.0f} s in its own code, with a deadline of 30 s: the "
        "longest time without a round of the others, in the last third; .back: until its work "
        "counts",
        busy,
        Setting(nodes=3, deadline_s=30.0),
        before={"e10": 15.06},
        source=TRIED,
    ),
    Play(
        "e22",
        f"one of four sleeps for {SLEPT_S:.0f} s, and wakes at another address with its clock "
        f"{SLEPT_CLOCK_S:.0f} s ahead: until its work counts; .again: the same after it has its "
        "old address and time back",
        sleep_and_move,
    ),
    Play(
        "e23",
        f"the folder of one of three is started on another host, too: the longest time without a "
        f"round of all three in {COPIED_S:.0f} s, if the copy ends with code {COPY_CODE}; .back: a "
        "round of all after it",
        copy,
        Setting(nodes=3, spares=1),
        before={"e23": NEVER},
        source=TRIED,
    ),
)
