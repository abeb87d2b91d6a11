"""Hosts on one machine: network namespaces on a bridge, each with a limited rate up and down.

The namespaces have no names: each belongs to a process that waits for the end of its standard
input, so the kernel removes them all when this process ends, however it ends. They need root,
iproute2 and util-linux. Links have no delay: that takes more than the tools that every Linux has.

TCP runs with Linux's default congestion control, CUBIC, not with this machine's: BBR, say, shares
such a line so unevenly that plain TCP between 4 hosts uses 0.78 of it, instead of 0.95.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from farflock.experiments.measure.metric import NotMeasured

TOOLS = ("ip", "tc", "unshare", "nsenter")
BURST_BYTES = 64 * 1024
QUEUE_MS = 50  # delay of a full queue
TRAIN = "8"  # packets that a link passes on together, for less work per packet
COMMAND_TIMEOUT_S = 10.0
NETWORK = "10.78.0.0/24"
CONGESTION_CONTROL = "cubic"
TCP = Path("/proc/sys/net/ipv4")


@dataclass(frozen=True, slots=True)
class Host:
    """A place to run a process: `prefix` goes before its command, and `address` reaches it."""

    address: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()


class NoHosts(NotMeasured):
    """Raised if namespaces cannot be created here."""


def obstacle() -> str:
    """Return why this machine cannot have hosts with a limited rate, or "" if it can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"{', '.join(missing)} not found (install iproute2 and util-linux)" if missing else ""


def congestion_control() -> str:
    """Return TCP's congestion control on all hosts: this machine's where it has no CUBIC."""
    available = (TCP / "tcp_available_congestion_control").read_text().split()
    if CONGESTION_CONTROL in available:
        return CONGESTION_CONTROL
    return (TCP / "tcp_congestion_control").read_text().strip()


@contextlib.contextmanager
def hosts(count: int, rate_bits: float | Sequence[float]) -> Iterator[tuple[Host, ...]]:
    """Create `count` hosts on a bridge, each with `rate_bits` per second each way, or with its own
    of these.

    Raise `NoHosts` if that fails.
    """
    if why := obstacle():
        raise NoHosts(why)
    with contextlib.ExitStack() as stack:
        hub, *spaces = [stack.enter_context(_namespace()) for _ in range(count + 1)]
        _inside(hub, "ip", "link", "add", "bridge", "type", "bridge")
        _inside(hub, "ip", "link", "set", "bridge", "up")
        rates = [rate_bits] * count if isinstance(rate_bits, float) else rate_bits
        each = zip(spaces, rates, strict=True)
        yield tuple(_plug(hub, space, place, bits) for place, (space, bits) in enumerate(each))


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    """Start a process with a network namespace that ends with it; yield its process id."""
    keeper = subprocess.Popen(
        ("unshare", "--net", "cat"), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    try:
        until_s = time.monotonic() + COMMAND_TIMEOUT_S
        while _space_of(keeper.pid) == _space_of(os.getpid()):
            if keeper.poll() is not None or time.monotonic() > until_s:
                raise NoHosts(
                    "could not create a network namespace (unshare --net); "
                    "in a container, add the capability CAP_SYS_ADMIN"
                )
            time.sleep(0.001)
        _inside(keeper.pid, "ip", "link", "set", "lo", "up")
        yield keeper.pid
    finally:
        keeper.kill()
        keeper.communicate()


def _space_of(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


def _plug(hub: int, space: int, number: int, rate_bits: float) -> Host:
    """Connect a namespace to the bridge, limited at both ends: at the host out, at the bridge in.

    Packets travel in short trains, and the limit counts each packet and header. Whole super-packets
    would not fit its burst; single packets cost so much that two cores cannot carry eight hosts.
    """
    address, port = f"10.78.0.{number + 1}", f"port{number}"
    _inside(
        hub, "ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(space)
    )
    _inside(hub, "ip", "link", "set", port, "master", "bridge")
    _inside(space, "ip", "address", "add", f"{address}/24", "dev", "eth0")
    for where, link in ((hub, port), (space, "eth0")):
        _inside(where, "ip", "link", "set", link, "gso_max_segs", TRAIN, "up")
        limit = (
            "rate",
            f"{rate_bits:.0f}bit",
            "burst",
            str(BURST_BYTES),
            "latency",
            f"{QUEUE_MS}ms",
        )
        _inside(where, "tc", "qdisc", "add", "dev", link, "root", "tbf", *limit)
    route = ("route", "replace", NETWORK, "dev", "eth0", "congctl", congestion_control())
    _inside(space, "ip", *route)
    return Host(address, _enter(space))


def _enter(pid: int) -> tuple[str, ...]:
    return ("nsenter", f"--net=/proc/{pid}/ns/net", "--")


def _inside(pid: int, *command: str) -> None:
    done = subprocess.run(
        (*_enter(pid), *command),
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise NoHosts(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
