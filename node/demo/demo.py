"""The demo: a real swarm of processes on this machine that loses a peer, takes one in, and goes on.

Each peer is the command that a volunteer would type, in its own process. At one third of the run
one of them is killed, by one half a new one has joined by invite, and later the founder is stopped
for a while; training goes on throughout.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from farflock.node.errors import Failure
from farflock.node.process.signals import LEASH
from farflock.node.process.status import Status, read_status

KILL_AT, JOIN_AT, STOP_AT = 1 / 3, 0.42, 0.62  # a newcomer is in by about one half of the run
STOP_BY = 0.8  # latest stop: a stopped founder lets nobody in, so it first waits for the newcomer
STOPPED_S = 8.0
START_TIMEOUT_S = 90.0
END_TIMEOUT_S = 20.0
STALL_TIMEOUT_S = 120.0  # without any progress
POLL_S = 0.25
LEAVE_S = 10.0  # for children to end in good order


@dataclass(slots=True)
class Child:
    """One peer's process."""

    name: str
    folder: Path
    process: subprocess.Popen[bytes]
    killed: bool = False
    stopped: bool = False

    def status(self) -> Status | None:
        """Return its last status, None if there is none."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return read_status(self.folder / "status.json")
        return None

    @property
    def running(self) -> bool:
        """True while the process runs."""
        return self.process.poll() is None


@dataclass(frozen=True, slots=True)
class Moment:
    """One frame of the live view: all children, the progress of the run, and its news."""

    children: tuple[Child, ...]
    share: float
    news: tuple[str, ...]


@dataclass(slots=True)
class Demo:
    """The processes of one demo and what happens to them. `show` is called a few times a second."""

    folder: Path
    manifest: Path
    peers: int
    show: Callable[[Moment], None]
    children: list[Child] = field(default_factory=list)
    news: list[str] = field(default_factory=list)
    killed: int = 0
    _stopped_s: float | None = None
    _stop_done: bool = False

    @contextlib.contextmanager
    def running(self) -> Iterator["Demo"]:
        """End all children with the block, however it is left."""
        try:
            yield self
        finally:
            self._end_all()

    def run(self) -> None:
        """Start all peers, let the demo's events happen, and return when all survivors are done."""
        founder = self.start("founder", ["run", str(self.manifest)])
        invite = self._invite_of(founder)
        for name, arguments in self.others():
            self.start(name, ["join", invite, *arguments])
        progressed_s, best = time.monotonic(), -1.0
        while any(child.running for child in self.survivors()):
            share = self._share()
            if share > best:
                best, progressed_s = share, time.monotonic()
            if best >= 1 and time.monotonic() - progressed_s > END_TIMEOUT_S:
                break  # a peer that is still joining is too late
            self.let_happen(share, invite)
            self.show(Moment(tuple(self.children), share, tuple(self.news)))
            if time.monotonic() - progressed_s > STALL_TIMEOUT_S:
                raise Failure(
                    "the demo stands still",
                    f"no progress for {STALL_TIMEOUT_S:.0f} s",
                    self._where_logs_are(),
                )
            time.sleep(POLL_S)
        self.require_success()

    def survivors(self) -> list[Child]:
        """Return the peers that were not killed."""
        return [child for child in self.children if not child.killed]

    def newcomers(self) -> list[Child]:
        """Return the peers that were started later."""
        return self.children[self.peers :]

    @property
    def joined(self) -> int:
        """The number of newcomers that joined; in a short run they may be too late."""
        return sum(child.status() is not None for child in self.newcomers())

    def others(self) -> list[tuple[str, list[str]]]:
        """Return the peers that join at the start: names, and options of `farflock join`."""
        return [(f"peer {number}", []) for number in range(1, self.peers)]

    def _kill(self, victim: Child) -> None:
        victim.process.send_signal(signal.SIGKILL)
        victim.killed, self.killed = True, self.killed + 1
        self.news.append(f"{victim.name} was killed (SIGKILL)")

    def let_happen(self, share: float, invite: str) -> None:
        """Kill, join, stop, each once, when its time has come."""
        if self.peers > 1 and share >= KILL_AT and not self.killed:
            self._kill(self.children[1])
        if share >= JOIN_AT and not self.newcomers():
            self.start("newcomer", ["join", invite])
            self.news.append("a newcomer joins by invite")
        founder = self.children[0]
        if self._stop_is_due(share) and founder.running:
            founder.process.send_signal(signal.SIGSTOP)
            founder.stopped, self._stopped_s = True, time.monotonic()
            self.news.append(f"the founder is stopped for {STOPPED_S:.0f} s (SIGSTOP)")
        if self._stopped_s is not None and time.monotonic() - self._stopped_s >= STOPPED_S:
            founder.process.send_signal(signal.SIGCONT)
            founder.stopped, self._stopped_s, self._stop_done = False, None, True
            self.news.append("the founder is back")

    def _stop_is_due(self, share: float) -> bool:
        """Return whether to stop the founder: once, and only if others are there to decide."""
        once = self._stopped_s is None and not self._stop_done and self.peers > 2
        return once and share >= (STOP_AT if self.joined else STOP_BY)

    def _share(self) -> float:
        statuses = [status for child in self.children if (status := child.status()) is not None]
        return max((status.tokens / status.total_tokens for status in statuses), default=0.0)

    def start(self, name: str, command: list[str]) -> Child:
        folder = self.folder / name.replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        arguments = [
            sys.executable,
            "-m",
            "farflock.node.cli",
            *command,
            "--folder",
            str(folder),
            "--threads",
            "1",
        ]
        with open(folder / "log.txt", "wb") as log:
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.PIPE,  # never written to; closes when this process ends
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", LEASH: "stdin"},
                start_new_session=True,  # Ctrl-C reaches only this process, which ends its children
            )
        self.children.append(Child(name, folder, process))
        return self.children[-1]

    def _invite_of(self, founder: Child) -> str:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s and founder.running:
            status = founder.status()
            if status is not None:
                return status.invite
            time.sleep(POLL_S)
        raise Failure(
            "the founder did not start",
            f"no invite within {START_TIMEOUT_S:.0f} s",
            self._where_logs_are(),
        )

    def require_success(self) -> None:
        late = (
            [child for child in self.newcomers() if child.status() is None]
            if self._share() >= 1
            else []
        )
        there = [child for child in self.survivors() if child not in late]
        failed = [child.name for child in there if child.process.returncode not in (0, None)]
        if failed:
            raise Failure(
                "the demo failed",
                f"{', '.join(failed)} ended with an error",
                self._where_logs_are(),
            )

    def _where_logs_are(self) -> str:
        return f"read the log.txt files under {self.folder}"

    def _end_all(self) -> None:
        """Ask all children to leave, then kill them, at once if interrupted, so that none stays."""
        alive = [child for child in self.children if child.running]
        try:
            for child in alive:
                child.process.send_signal(signal.SIGCONT)
                child.process.terminate()
            deadline_s = time.monotonic() + LEAVE_S
            for child in alive:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(max(deadline_s - time.monotonic(), 0.1))
        finally:
            for child in alive:
                child.process.kill()
            for child in alive:
                child.process.wait()
