"""A swarm of real nodes, each a command in a network namespace of its own, as `faults` strikes it.

A node's rounds are read from its `receipts.jsonl` and timed when they are seen here, so that a node
whose clock is wrong is measured like any other.
"""

import contextlib
import dataclasses
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from farflock.experiments.bench.workers.fleet import Fields, surroundings
from farflock.experiments.bench.workers.hosted_node import CLOCK_FILE, DISK_FILE
from farflock.experiments.bench.workers.netns import Host, hosts
from farflock.experiments.measure.metric import NotMeasured
from farflock.node.process.brake import BRAKE

NEVER = -1.0
WORKERS = "farflock.experiments.bench.workers"
LINE_BITS = 1e8
START_TIMEOUT_S = 300.0  # of one node, on a machine that does other things too
LOOK_EVERY_S = 0.05
LOG_CHARACTERS = 300  # of a node that ended, in the sentence that says so
NOWHERE = "02:00:00:00:00:99"  # an Ethernet address that no host has
RUN = """
[run]
name = "faults"
total_tokens = 1_000_000_000_000
[train]
batch = 2
seq = 16
[exchange]
view_s = 2.0
deadline_s = {deadline_s}
[model]
preset = "{preset}"
"""
WHOLE = """
[method]
name = "diloco"
options.round_s = {round_s}
"""
STAGED = """
layers = {stages}
tied = false
[method]
name = "ddp"
[pipeline]
stages = {stages}
batch = 4
"""


@dataclass(frozen=True, slots=True)
class Setting:
    """The number of nodes that train together, and of hosts on which nothing runs yet; the seconds
    between two rounds, those after which a round closes without whom it waits for, and those that a
    local step takes at least; the size of the last node's disk (0: what this machine has); the
    stages of the model (0: it is whole, and rounds are not by the clock), and its preset; and
    whether the nodes are programs with a model of their own."""

    nodes: int = 4
    spares: int = 0
    stages: int = 0
    round_s: float = 1.0
    deadline_s: float = 10.0
    step_s: float = 0.1
    disk_bytes: int = 0
    preset: str = "tiny"
    programs: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """A round that a node applied, when that was seen, and the members whose work is in it."""

    number: int
    seen_s: float
    participants: tuple[str, ...]


class HostedNode:
    """One node: its host, its folder, and the command that runs there, if it does."""

    def __init__(self, host: Host, folder: Path, setting: Setting) -> None:
        self.host, self.folder, self.address = host, folder, host.address
        self.worker = f"{WORKERS}.{'hosted_program' if setting.programs else 'hosted_node'}"
        self.rounds: list[Round] = []
        self.process: subprocess.Popen[bytes] | None = None
        self._read = 0  # bytes of its receipts
        folder.mkdir()
        self.files = folder / "node"  # the node's own
        self.brake, self.clock = folder / "brake.txt", folder / "clock.txt"
        self.disk = folder / "disk.txt"  # while it is there, bytes per second
        self.brake.write_text(str(setting.step_s))

    @property
    def name(self) -> str:
        """Return its folder's name."""
        return self.folder.name

    def start(self, *words: str) -> None:
        """Start the command; its output goes to the end of `log.txt`."""
        place = ("--folder", str(self.files), "--host", "0.0.0.0")
        files = {BRAKE: self.brake, CLOCK_FILE: self.clock, DISK_FILE: self.disk}
        named = {name: str(path) for name, path in files.items()}
        with (self.folder / "log.txt").open("ab") as log:
            self.process = subprocess.Popen(
                [*self.host.prefix, sys.executable, "-m", self.worker, *words, *place],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**surroundings(), **named, "FARFLOCK_HOME": str(self.folder)},
                start_new_session=True,
            )

    def signal(self, number: signal.Signals, *, helpers: bool = False) -> None:
        """Send a signal to the node, with or without the processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            if self.process is not None and helpers:
                os.killpg(self.process.pid, number)
            elif self.process is not None:
                self.process.send_signal(number)

    def kill(self) -> None:
        """Kill the node and its helpers, stopped or not."""
        self.signal(signal.SIGKILL, helpers=True)
        if self.process is not None:
            self.process.wait()

    def code(self, limit_s: float) -> int | None:
        """Return the exit code with which the node ends by itself; None if it does not, in time."""
        assert self.process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(limit_s)
        return None

    def checkpoints(self) -> set[Path]:
        """Return the whole checkpoints in its folder."""
        return {path.parent for path in self.files.glob("checkpoints/step-*/manifest.json")}

    def sockets(self) -> list[Path]:
        """Return the files of the sockets at which the node and its helpers hear each other: all
        that are open on its host, which nothing else uses."""
        found = set()
        with contextlib.suppress(OSError):
            assert self.process is not None
            lines = Path(f"/proc/{self.process.pid}/net/unix").read_text().splitlines()
            found = {Path(words[7]) for line in lines[1:] if len(words := line.split()) == 8}
        return sorted(path for path in found if path.is_absolute() and path.exists())

    def status(self) -> Fields:
        """Return what the node last wrote of itself; nothing before that."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            found: Fields = msgspec.json.decode((self.files / "status.json").read_bytes())
            return found
        return {}

    @property
    def peer(self) -> str:
        """Return its name in the run; empty before it has one."""
        return str(self.status().get("peer", ""))

    def look(self) -> None:
        """Read which rounds it has applied since the last look."""
        with contextlib.suppress(OSError), (self.files / "receipts.jsonl").open("rb") as file:
            file.seek(self._read)
            whole, _, _ = file.read().rpartition(b"\n")
            self._read += len(whole) + (1 if whole else 0)
            now_s = time.monotonic()
            self.rounds += [found for line in whole.splitlines() if (found := _round(line, now_s))]

    def move(self, address: str) -> None:
        """Give its host another address in place of the one that it has."""
        _ip(self.host, "address", "del", f"{self.address}/24")
        _ip(self.host, "address", "add", f"{address}/24")
        self.address = address

    def told(self) -> str:
        """Return the end of what it has said."""
        return (self.folder / "log.txt").read_text(errors="replace")[-LOG_CHARACTERS:]


def _round(line: bytes, seen_s: float) -> Round | None:
    """Return the round of a receipt; nothing for a line that a crash cut short."""
    with contextlib.suppress(msgspec.DecodeError):
        receipt = msgspec.json.decode(line)
        return Round(receipt["round"], seen_s, tuple(receipt["participants"]))
    return None


class HostedSwarm:
    """Nodes that train together; the first one founded the run."""

    def __init__(
        self,
        nodes: Sequence[HostedNode],
        folder: Path,
        spares: Sequence[HostedNode] = (),
        *,
        staged: bool = False,
    ) -> None:
        self.nodes, self.folder, self.spares, self.staged = nodes, folder, spares, staged

    @property
    def founder(self) -> HostedNode:
        """Return the node that founded the run."""
        return self.nodes[0]

    @property
    def last(self) -> HostedNode:
        """Return a node that joined, the one that most faults strike."""
        return self.nodes[-1]

    def others(self, *struck: HostedNode) -> list[HostedNode]:
        """Return the other nodes."""
        return [node for node in self.nodes if node not in struck]

    def found(self) -> None:
        """Start the founder, and return once it trains; one with a stage waits for the others."""
        self.founder.start("run", str(self.folder / "run.toml"))
        there = "invite" if self.staged else "step"
        self._require(lambda node: node.status().get(there), self.founder)

    def join(self, node: HostedNode) -> None:
        """Start a node that joins, or that returns to its run."""
        node.start("join", str(self.founder.status()["invite"]))

    def start_again(self, node: HostedNode) -> None:
        """Start a node again in its folder, by the command that it was first started with."""
        if node is self.founder:
            node.start("run", str(self.folder / "run.toml"))
        else:
            self.join(node)

    def require_whole(self) -> None:
        """Return once all nodes have applied a round of all; raise `NotMeasured` if that does not
        come."""
        for node in self.nodes:
            self._require(lambda node: node.peer, node)
        if self.whole(START_TIMEOUT_S) == NEVER:
            raise NotMeasured("the nodes did not come to a round of all before the fault")

    def whole(self, limit_s: float) -> float:
        """Return the seconds until every node has applied a round with the work of all; of stages,
        two rounds: no round has the work of all."""
        if self.staged:
            return self.progress(self.nodes, limit_s)
        return self.counts(self.nodes, limit_s)

    def progress(self, nodes: Sequence[HostedNode], limit_s: float) -> float:
        """Return the seconds until each of these nodes has applied two rounds: the first one may
        have been decided before the fault."""
        return self.seconds(nodes, lambda rounds: len(rounds) >= 2, limit_s)

    def counts(self, nodes: Sequence[HostedNode], limit_s: float) -> float:
        """Return the seconds until every node has applied a round with the work of these."""
        names = {node.peer for node in nodes}

        def enough(rounds: Sequence[Round]) -> bool:
            return any(names <= set(each.participants) for each in rounds)

        return self.seconds(self.nodes, enough, limit_s)

    def seconds(
        self,
        nodes: Sequence[HostedNode],
        enough: Callable[[Sequence[Round]], bool],
        limit_s: float,
    ) -> float:
        """Return the seconds from now until the rounds that each of these nodes applies from now on
        are enough; `NEVER` after the limit."""
        for node in self.nodes:
            node.look()
        before = {node.name: len(node.rounds) for node in nodes}
        began_s = time.monotonic()
        while time.monotonic() < began_s + limit_s:
            for node in nodes:
                node.look()
            if all(enough(node.rounds[before[node.name] :]) for node in nodes):
                return time.monotonic() - began_s
            time.sleep(LOOK_EVERY_S)
        return NEVER

    def longest_gap(self, nodes: Sequence[HostedNode], for_s: float) -> float:
        """Let `for_s` seconds pass; return the longest time in them in which one of these nodes
        applied no round, `NEVER` if one of them applied none at all."""
        began_s = time.monotonic()
        self.seconds(nodes, lambda rounds: False, for_s)
        worst_s = 0.0
        for node in nodes:
            times = [each.seen_s for each in node.rounds if each.seen_s > began_s]
            if not times:
                return NEVER
            edges = [began_s, *times, time.monotonic()]
            gaps = [after - before for before, after in itertools.pairwise(edges)]
            worst_s = max(worst_s, *gaps)
        return worst_s

    def deafen(self, deaf: Sequence[HostedNode], to: Sequence[HostedNode]) -> None:
        """Let nothing that the nodes `to` send reach the deaf ones: their packets go to an Ethernet
        address that nobody has, so nobody is told."""
        nobody = ("lladdr", NOWHERE, "nud", "permanent")
        for sender in to:
            for node in deaf:
                _ip(sender.host, "neigh", "replace", node.address, *nobody)

    def hear(self, deaf: Sequence[HostedNode], to: Sequence[HostedNode]) -> None:
        """Undo `deafen`."""
        for sender in to:
            for node in deaf:
                _ip(sender.host, "neigh", "del", node.address)

    def part(self, one: Sequence[HostedNode], other: Sequence[HostedNode]) -> None:
        """Let nothing pass between two groups of nodes, either way."""
        self.deafen(one, other)
        self.deafen(other, one)

    def mend(self, one: Sequence[HostedNode], other: Sequence[HostedNode]) -> None:
        """Undo `part`."""
        self.hear(one, other)
        self.hear(other, one)

    def _require(self, condition: Callable[[HostedNode], object], node: HostedNode) -> None:
        """Return once the condition holds; raise `NotMeasured` if the node ends, or after the
        limit."""
        until_s = time.monotonic() + START_TIMEOUT_S
        while not condition(node):
            assert node.process is not None
            if node.process.poll() is not None or time.monotonic() > until_s:
                raise NotMeasured(f"{node.name} did not come into the run: {node.told()!r}")
            time.sleep(LOOK_EVERY_S)


def _ip(host: Host, kind: str, verb: str, address: str, *more: str) -> None:
    """Change an address of a host, or what it knows of a neighbour's."""
    command = (*host.prefix, "ip", kind, verb, address, "dev", "eth0", *more)
    subprocess.run(command, capture_output=True, check=True, timeout=10.0)


@contextlib.contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    """Make a file system of this size, and yield the path of its root; it ends with this process.

    It is mounted in a namespace of its own, into which the path leads; a process waits there for
    the end of its input. Raise `NotMeasured` if that cannot be had."""
    folder.mkdir()
    mount = f'mount -t tmpfs -o size={size_bytes} none "$0" && echo up && exec cat'
    keeper = subprocess.Popen(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", mount, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert keeper.stdout is not None
        if keeper.stdout.readline() != b"up\n":
            raise NotMeasured("a file system of its own could not be mounted (unshare --mount)")
        yield Path(f"/proc/{keeper.pid}/root{folder.resolve()}")
    finally:
        keeper.kill()
        keeper.communicate()


@contextlib.contextmanager
def hosted_swarm(setting: Setting) -> Iterator[HostedSwarm]:
    """Run nodes, each on a host of its own, and yield them once they train together.

    Raise `NoHosts` or `NotMeasured` if that does not come. The block's end kills them."""
    with contextlib.ExitStack() as stack:
        places = stack.enter_context(hosts(setting.nodes + setting.spares, LINE_BITS))
        made = tempfile.TemporaryDirectory(prefix="farflock-bench-", ignore_cleanup_errors=True)
        folder = Path(stack.enter_context(made))
        text = RUN + (STAGED if setting.stages else WHOLE)
        (folder / "run.toml").write_text(text.format(**dataclasses.asdict(setting)))
        everyone = [
            HostedNode(place, folder / f"node-{number}", setting)
            for number, place in enumerate(places)
        ]
        nodes, spares = everyone[: setting.nodes], everyone[setting.nodes :]
        swarm = HostedSwarm(nodes, folder, spares, staged=bool(setting.stages))
        if setting.disk_bytes:
            disk = stack.enter_context(small_disk(folder / "disk", setting.disk_bytes))
            swarm.last.files = disk / "node"
        try:
            swarm.found()
            for node in nodes[1:]:
                swarm.join(node)
            swarm.require_whole()
            yield swarm
        finally:
            for node in everyone:
                node.kill()
