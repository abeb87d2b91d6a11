"""SkipPipe's own simulation of a schedule, mistakes included; it gives the published times.

The released program (gensyn-ai/skippipe, `com_sym`) moves messages in ticks of a second, with
fifteen sweeps over all nodes per tick. Its quirks are kept where they affect the result: a message
whose slot is taken waits without its time advancing, and is forgotten when the tick ends; a full
node's messages are delayed by 0.1 s per sweep; a node rests 0.13 s after most work. Links carry any
number of messages at once. Sweeps after one that changed nothing, and ticks after the last message,
have no effect and are left out.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Literal

import msgspec

from farflock.experiments.pipelines import released
from farflock.experiments.pipelines.released import Path, Start
from farflock.experiments.pipelines.table import Parameters, Progress, Table, exact

TICKS = 10_000
SWEEPS = 15
SEEDED = 10_000.0  # "received" time of initial messages
RETRY_S = 0.1  # delay before a message retries at a full node
REST_S, SEEDED_REST_S = 0.13, 0.09
LOSS_SHARE, BACKWARD_SHARE = 0.25, 1.5  # of the time of a forward pass
SLOTS = 100  # numbers that differ by a multiple of this share a slot

Phase = Literal["forward", "loss", "backward"]
_by_time = attrgetter("start_s", "received_s")


@dataclass(slots=True)
class _Message:
    start_s: float
    received_s: float
    number: int
    path: Path
    place: int  # in the path
    phase: Phase = "forward"
    is_done: bool = False


@dataclass(slots=True)
class _Node:
    memory: int
    inbox: list[_Message] = field(default_factory=list)
    free_s: float = 0.0
    open_slots: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Worked:
    """One computation of a node on a microbatch."""

    node: int
    number: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of each microbatch, those that the program forgot, and all computations."""

    finished_s: dict[int, float]
    forgotten: tuple[int, ...]
    worked: tuple[Worked, ...]

    @property
    def makespan_s(self) -> float:
        """The end of the last microbatch as the program reports it, without forgotten ones."""
        return max(self.finished_s.values())


@dataclass(slots=True)
class _Program:
    delays_s: Sequence[Sequence[float]]
    forward_s: float
    nodes: list[_Node]
    finished_s: dict[int, float] = field(default_factory=dict)
    worked: list[Worked] = field(default_factory=list)

    def tick(self, tick: int) -> None:
        """Run all sweeps of one tick."""
        for _ in range(SWEEPS):
            changes = [self._step(index, tick) for index in range(len(self.nodes))]
            if not any(changes):
                return

    def waits_after(self, tick: int) -> bool:
        """Return whether any message's time is yet to come."""
        return any(message.start_s >= tick for node in self.nodes for message in node.inbox)

    def _step(self, index: int, tick: int) -> bool:
        """Let one node handle its messages of this tick; return whether anything changed."""
        node = self.nodes[index]
        if not any(math.floor(message.start_s) == tick for message in node.inbox):
            return False
        node.inbox.sort(key=_by_time)
        changed = False
        for message in node.inbox:
            if math.floor(message.start_s) == tick and not message.is_done:
                changed |= self._look(index, message)
        node.inbox = [message for message in node.inbox if not message.is_done]
        return changed

    def _look(self, index: int, message: _Message) -> bool:
        node = self.nodes[index]
        if message.start_s < node.free_s:
            message.start_s = node.free_s
            return True
        if message.phase == "forward":
            if node.memory <= 0:
                message.start_s += RETRY_S
                return True
            if message.place == 0 and message.number % SLOTS in node.open_slots:
                return False
        self._work(index, message)
        return True

    def _work(self, index: int, message: _Message) -> None:
        node, start_s = self.nodes[index], message.start_s
        duration_s = self._pass_on(index, message)
        self.worked.append(Worked(index, message.number, start_s, start_s + duration_s))
        message.is_done = True
        node.free_s = (
            start_s + duration_s + (SEEDED_REST_S if message.received_s > 1000 else REST_S)
        )
        for other in node.inbox:
            if other.number != message.number and start_s <= other.start_s < node.free_s:
                other.start_s = node.free_s

    def _pass_on(self, index: int, message: _Message) -> float:
        """Compute the message's pass and send the result on; return the seconds that this takes."""
        node, last = self.nodes[index], len(message.path) - 1
        match message.phase:
            case "forward":
                node.memory -= 1
                if message.place < last:
                    node.open_slots.add(message.number)
                    return self._send(index, message, message.place + 1, "forward", self.forward_s)
                return self._send(index, message, 0, "loss", self.forward_s)
            case "loss":
                return self._send(index, message, last, "backward", self.forward_s * LOSS_SHARE)
            case "backward":
                node.memory += 1
                duration_s = BACKWARD_SHARE * self.forward_s
                if message.place:
                    return self._send(index, message, message.place - 1, "backward", duration_s)
                node.open_slots.discard(message.number % SLOTS)
                self.finished_s[message.number] = message.start_s + duration_s
                return duration_s

    def _send(
        self, index: int, message: _Message, place: int, phase: Phase, duration_s: float
    ) -> float:
        to = message.path[place]
        arrives_s = message.start_s + duration_s + self.delays_s[index][to]
        self.nodes[to].inbox.append(
            _Message(arrives_s, arrives_s, message.number, message.path, place, phase)
        )
        return duration_s


def simulate(
    starts: Iterable[Start],
    delays_s: Sequence[Sequence[float]],
    forward_s: float = released.FORWARD_S,
    memory: int = released.MEMORY,
) -> Outcome:
    """Run the released program on these microbatches."""
    program = _Program(delays_s, forward_s, [_Node(memory) for _ in delays_s])
    for start in starts:
        inbox = program.nodes[start.path[0]].inbox
        inbox.append(_Message(start.start_s, SEEDED, start.number, start.path, 0))
    for tick in range(TICKS):
        if not program.waits_after(tick):
            break
        program.tick(tick)
    forgotten = [message.number for node in program.nodes for message in node.inbox]
    return Outcome(program.finished_s, tuple(sorted(forgotten)), tuple(program.worked))


def reproduce(forward_s: float = released.FORWARD_S, mistaken: bool = True) -> dict[str, float]:
    """Return the released plans' makespans; by default they are those of `schedule.json`."""
    delays_s = released.delays_s(mistaken)
    runs = {
        "full": released.full_starts(),
        "random": released.drawn_starts(released.RANDOM, forward_s),
        "not collision-aware": released.drawn_starts(released.NOT_COLLISION_AWARE, forward_s),
        "collision-aware": released.planned_starts(released.COLLISION_AWARE),
    }
    return {name: simulate(starts, delays_s, forward_s).makespan_s for name, starts in runs.items()}


class Size(Parameters, frozen=True, kw_only=True):
    """The seconds of a forward pass behind the published times, and others to try."""

    forward_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = released.FORWARD_S
    also_s: list[Annotated[float, msgspec.Meta(gt=0, le=60)]] = msgspec.field(
        default_factory=lambda: [released.SCRIPT_FORWARD_S]
    )


def compute(size: Size, progress: Progress) -> Table:
    """Tabulate the plans' makespans: as released, with correct links, and at other speeds."""
    runs = [
        ("", reproduce(size.forward_s)),
        (", links corrected", reproduce(size.forward_s, mistaken=False)),
    ]
    runs += [
        (f", forward pass of {forward_s:g} s", reproduce(forward_s)) for forward_s in size.also_s
    ]
    rows = [
        exact(f"{name}{how}", makespan_s)
        for how, found in runs
        for name, makespan_s in found.items()
    ]
    progress(1.0)
    return Table(
        rows,
        f"{released.NODES} nodes in {len(released.PARTITION)} stages, "
        f"a forward pass of {size.forward_s:g} s",
    )
