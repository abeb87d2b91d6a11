"""The demo: a real swarm of processes on this machine that loses a peer and admits a newcomer.

Each peer is the command that a volunteer would type, in its own process. At one third of the run
the demo kills one of them, by about one half a newcomer has joined by invite, and later the demo
freezes the founder for a while; the others train on throughout.

A short run would end before the newcomer has joined. So at `HOLD_AT` the peers wait until it is a
member, then train slowly until a round has included it (node/process/brake.py).
"""

import contextlib
import math
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
from farflock.node.process.brake import BRAKE
from farflock.node.process.signals import LEASH
from farflock.node.process.status import Status, read_status
from farflock.node.state.history import RECEIPTS
from farflock.node.state.paths import write_whole

KILL_AT, JOIN_AT, STOP_AT = 1 / 3, 0.42, 0.62  # shares of the run's tokens
STOP_BY = 0.8  # latest freeze: a frozen founder admits no peer, so it first waits for the newcomer
STOPPED_S = 8.0
HOLD_AT = 0.55  # share at which the peers wait for a newcomer that has not joined yet
NEWCOMER_TIMEOUT_S = 90.0  # for a newcomer to be admitted and to take part in a round
# Per step, until a round has included the newcomer. The ten or so steps between two rounds must be
# shorter than half a round's deadline: with longer ones, two peers out of phase wait for each other
# in turn, and every round closes with one of them.
SLOW_STEP_S = 0.1
MIN_RUN_S = 15.0  # a faster run would be over between two checks of its peers' statuses
START_TIMEOUT_S = 90.0
END_TIMEOUT_S = 20.0
STALL_TIMEOUT_S = 120.0  # without any progress
POLL_S = 0.25
LEAVE_S = 10.0  # for children to save and leave


class _Receipt(msgspec.Struct):
    """The fields of a round's receipt that name the peers in it (node/state/run_log.py)."""

    participants: tuple[str, ...] = ()
    status: str = "failed"


@dataclass(frozen=True, slots=True)
class Mark:
    """An event of the demo, for the plot: the share of the run's tokens, and what happened."""

    share: float
    label: str


@dataclass(slots=True)
class Child:
    """One peer's process, as the demo sees it."""

    name: str
    folder: Path
    process: subprocess.Popen[bytes]
    killed: bool = False
    stopped: bool = False
    admitted: bool = False
    contributed: bool = False  # a round with enough contributors included it
    track: list[tuple[int, int]] = field(default_factory=list)  # (its step, the run's tokens)

    def look(self, contributors: int = 2) -> None:
        """Note the peer's progress. It has contributed once a round of this many included it, or
        without contributors once it has trained as a member."""
        if (status := self.status()) is None:
            return
        if not self.track or self.track[-1][0] < status.step:
            # an estimate may be corrected downwards; curves go to the right only
            tokens = max(status.tokens, self.track[-1][1] if self.track else 0)
            self.track.append((status.step, tokens))
        self.admitted |= status.is_member
        if not self.contributed:
            trained = self.admitted and status.step > 0
            shared = contributors > 0 and self._in_a_round(status.peer, contributors)
            self.contributed = shared if contributors else trained

    def _in_a_round(self, peer: str, contributors: int) -> bool:
        try:
            lines = (self.folder / RECEIPTS).read_bytes().splitlines()
        except OSError:
            return False
        for line in lines:
            with contextlib.suppress(msgspec.MsgspecError):  # a line that is being written
                receipt = msgspec.json.decode(line, type=_Receipt)
                enough = len(receipt.participants) >= contributors and receipt.status != "failed"
                if enough and peer in receipt.participants:
                    return True
        return False

    def status(self) -> Status | None:
        """Return the peer's last status; None if there is none."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return read_status(self.folder / "status.json")
        return None

    @property
    def running(self) -> bool:
        """True while the peer's process runs."""
        return self.process.poll() is None


@dataclass(frozen=True, slots=True)
class Moment:
    """One frame of the live view: all child processes, the progress of the run, and the news."""

    children: tuple[Child, ...]
    share: float
    news: tuple[str, ...]


@dataclass(slots=True)
class Demo:
    """The processes of one demo, and its events. `show` is called a few times a second. `steps` is
    the expected number of steps per peer, or 0 if the run is not to be slowed down.

    A newcomer counts once a round of `contributors` peers included it: 2 as a rule, 1 where a round
    may close with one contribution, 0 for a method that never communicates."""

    folder: Path
    manifest: Path
    peers: int
    show: Callable[[Moment], None]
    steps: int = 0
    contributors: int = 2
    codec_threads: int = 1  # of each process
    device: str = "auto"  # of each process
    children: list[Child] = field(default_factory=list)
    news: list[str] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    killed: int = 0
    joined_s: float | None = None  # when the newcomer was started
    _gave_up: bool = False
    _step_s: float = 0.0  # the brake, in seconds per step
    _stopped_s: float | None = None
    _stop_done: bool = False

    @contextlib.contextmanager
    def running(self) -> Iterator["Demo"]:
        """End all child processes when the block ends, for whatever reason."""
        try:
            yield self
        finally:
            self._end_all()

    def run(self) -> None:
        """Start all peers, let the demo's events happen, and return when all survivors are done."""
        self._brake(self._min_step_s())
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
            for child in self.survivors():
                child.look(self.contributors)
            self.let_happen(share, invite)
            self.attend(share)
            self.show(Moment(tuple(self.children), share, tuple(self.news)))
            if time.monotonic() - progressed_s > STALL_TIMEOUT_S:
                raise Failure(
                    "the demo makes no progress",
                    f"its peers trained nothing for {STALL_TIMEOUT_S:.0f} s",
                    self._where_logs_are(),
                )
            time.sleep(POLL_S)
        for child in self.survivors():
            child.look(self.contributors)
        self.require_success()

    def survivors(self) -> list[Child]:
        """Return the peers that were not killed."""
        return [child for child in self.children if not child.killed]

    def newcomers(self) -> list[Child]:
        """Return the peers that were started later."""
        return self.children[self.peers :]

    @property
    def joined(self) -> int:
        """The number of newcomers that were admitted and then took part in a round."""
        return sum(child.contributed for child in self.newcomers())

    def missing(self) -> list[str]:
        """Give the reason for each newcomer that does not count as joined."""
        return [
            f"{child.name} is not counted: {self._lacks(child)}; see {child.folder / 'log.txt'}"
            for child in self.newcomers()
            if not child.contributed
        ]

    def _lacks(self, child: Child) -> str:
        if child.status() is None:
            what = "it did not get into the run"
        elif not child.admitted:
            what = "no membership change admitted it"
        else:
            what = "no round included it"
        return f"{what} within {NEWCOMER_TIMEOUT_S:.0f} s" if self._gave_up else what

    def attend(self, share: float) -> None:
        """Hold the peers while a newcomer is not a member yet, and slow them down until a round has
        included it; give up after `NEWCOMER_TIMEOUT_S`."""
        late = [child for child in self.newcomers() if child.running and not child.contributed]
        if self.joined_s is None or not late or share < HOLD_AT or self._gave_up:
            self._brake(self._min_step_s())
        elif time.monotonic() - self.joined_s > NEWCOMER_TIMEOUT_S:
            self._gave_up = True
            self.news += self.missing()
        else:
            are_members = all(child.admitted for child in late)
            self._brake(max(SLOW_STEP_S, self._min_step_s()) if are_members else math.inf)

    def _min_step_s(self) -> float:
        return MIN_RUN_S / self.steps if self.steps else 0.0

    def _brake(self, step_s: float) -> None:
        """From now on, make each step of the peers take at least this long."""
        if not self.steps or step_s == self._step_s:
            return
        if step_s == math.inf:
            self.news.append("training waits for the newcomer, which is not a member yet")
        elif self._step_s == math.inf:
            self.news.append("training goes on")
        self._step_s = step_s
        write_whole(self._brake_file, f"{step_s}".encode())

    @property
    def _brake_file(self) -> Path:
        return self.folder / "seconds-per-step"

    def _tell(self, share: float, label: str, news: str) -> None:
        self.marks.append(Mark(share, label))
        self.news.append(news)

    def others(self) -> list[tuple[str, list[str]]]:
        """Return the peers that join at the start: their names, and their options of `farflock
        join`."""
        return [(f"peer {number}", []) for number in range(1, self.peers)]

    def _kill(self, victim: Child, share: float) -> None:
        victim.process.send_signal(signal.SIGKILL)
        victim.killed, self.killed = True, self.killed + 1
        self._tell(share, f"{victim.name} killed", f"{victim.name} was killed (SIGKILL)")

    def let_happen(self, share: float, invite: str) -> None:
        """Kill a peer, let a newcomer join, freeze the founder: each once, at its time."""
        if self.peers > 1 and share >= KILL_AT and not self.killed:
            self._kill(self.children[1], share)
        if share >= JOIN_AT and not self.newcomers():
            self.start("newcomer", ["join", invite])
            self.joined_s = time.monotonic()
            self._tell(share, "newcomer invited", "a newcomer joins by invite")
        founder = self.children[0]
        if self._stop_is_due(share) and founder.running:
            founder.process.send_signal(signal.SIGSTOP)
            founder.stopped, self._stopped_s = True, time.monotonic()
            news = f"the founder is frozen for {STOPPED_S:.0f} s (SIGSTOP)"
            self._tell(share, "founder frozen", news)
        if self._stopped_s is not None and time.monotonic() - self._stopped_s >= STOPPED_S:
            founder.process.send_signal(signal.SIGCONT)
            founder.stopped, self._stopped_s, self._stop_done = False, None, True
            self._tell(share, "founder back", "the founder is back")

    def _stop_is_due(self, share: float) -> bool:
        """Return whether to freeze the founder now: once, and only if there are other peers to
        decide rounds."""
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
            "--codec-threads",
            str(self.codec_threads),
            "--device",
            self.device,
        ]
        with open(folder / "log.txt", "wb") as log:
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.PIPE,  # never written to; closes when this process ends
                stdout=log,
                stderr=log,
                env=self._environment(),
                start_new_session=True,  # Ctrl-C reaches only this process, which ends its children
            )
        self.children.append(Child(name, folder, process))
        return self.children[-1]

    def _environment(self) -> dict[str, str]:
        brake = {BRAKE: str(self._brake_file)} if self.steps else {}
        return {**os.environ, "OMP_NUM_THREADS": "1", LEASH: "stdin", **brake}

    def _invite_of(self, founder: Child) -> str:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s and founder.running:
            status = founder.status()
            if status is not None:
                return status.invite
            time.sleep(POLL_S)
        why = f"no invite within {START_TIMEOUT_S:.0f} s"
        if not founder.running:
            why = f"its process has ended with exit code {founder.process.returncode}"
        raise Failure("the founder did not start", why, self._where_logs_are())

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
        """Ask all children to leave, and kill those that do not, so that none stays; if
        interrupted, kill them all at once."""
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
