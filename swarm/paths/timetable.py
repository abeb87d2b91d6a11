"""The timetable of a plan if servers work first come, first served: what a planner minimises.

A microbatch goes forward along its path, then to the head for its loss, and back the same way. A
server does one thing at a time, returning microbatches first, since that frees memory; it begins no
forward pass without room for the activations that the backward pass needs. Message times are passed
in, so that the same code covers links that carry any number at once (SkipPipe, arXiv:2502.19913,
plans with those) and links that queue.
"""

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from farflock.swarm.links import PeerId
from farflock.swarm.paths.skippipe import Path, PathPlan, ScheduledPass

LOSS_SHARE, BACKWARD_SHARE = 0.25, 1.5  # of a forward pass, as in SkipPipe's simulation

# sender, receiver, now_s -> arrival time; called in the order of time
SendTime = Callable[[PeerId, PeerId, float], float]
ComputeTimes = Mapping[PeerId, float]  # seconds of a forward pass
TransferTimes = Mapping[PeerId, Mapping[PeerId, float]]  # seconds of a microbatch between two peers


@dataclass(frozen=True, slots=True)
class Timetable:
    """All passes, and the time at which each microbatch (lane, turn) is back."""

    works: tuple[ScheduledPass, ...]
    finished_s: Mapping[tuple[int, int], float]
    microbatches: int

    @property
    def makespan_s(self) -> float:
        """The end of the last microbatch; infinite if microbatches wait for each other's memory."""
        return (
            max(self.finished_s.values())
            if len(self.finished_s) == self.microbatches
            else float("inf")
        )

    @property
    def mean_s(self) -> float:
        """The mean time at which a microbatch is back; infinite if the makespan is."""
        return (
            sum(self.finished_s.values()) / self.microbatches
            if self.makespan_s < float("inf")
            else float("inf")
        )


def constant(transfer_s: TransferTimes) -> SendTime:
    """Return links that carry any number of messages at once, as in SkipPipe's cost model."""

    def send(sender: PeerId, receiver: PeerId, now_s: float) -> float:
        return now_s + transfer_s[sender][receiver]

    return send


def timetable(
    plan: PathPlan, forward_s: ComputeTimes, memory: int, send: SendTime, head_is_first: bool = True
) -> Timetable:
    """Run a plan's horizon with all microbatches present at 0, each lane's in turn.

    The loss is the first stop's if `head_is_first`, as in SkipPipe, else the last one's.
    """
    run = _Run(forward_s, memory, send)
    for turn in range(len(plan.lanes[0])):
        for lane, paths in enumerate(plan.lanes):
            run.begin(_Trip((lane, turn), _legs(paths[turn], head_is_first), len(paths[turn])))
    run.play()
    return Timetable(tuple(run.works), run.finished_s, len(plan.paths))


def _legs(path: Path, head_is_first: bool) -> tuple[PeerId, ...]:
    """Return the holder of the microbatch after each hop: K forward, the loss, K back."""
    peers = [stop.peer for stop in path]
    return (*peers, peers[0] if head_is_first else peers[-1], *reversed(peers))


@dataclass(slots=True)
class _Trip:
    microbatch: tuple[int, int]
    legs: Sequence[PeerId]
    stops: int
    leg: int = 0


@dataclass(slots=True)
class _Server:
    room: int
    is_busy: bool = False
    forward: deque[_Trip] = field(default_factory=deque)
    returning: deque[_Trip] = field(default_factory=deque)

    def next(self) -> _Trip | None:
        """Return the trip that the server begins now, or None."""
        if self.is_busy:
            return None
        if self.returning:
            return self.returning.popleft()
        if self.forward and self.room:
            self.room -= 1
            return self.forward.popleft()
        return None


class _Run:
    def __init__(self, forward_s: ComputeTimes, memory: int, send: SendTime) -> None:
        self._forward_s, self._send = forward_s, send
        self._servers = {peer: _Server(memory) for peer in forward_s}
        self._heap: list[tuple[float, int, bool, _Trip]] = []  # time, order, is end, trip
        self._events = 0
        self.works: list[ScheduledPass] = []
        self.finished_s: dict[tuple[int, int], float] = {}

    def begin(self, trip: _Trip) -> None:
        """Add a microbatch that is present from the start."""
        self._push(0.0, False, trip)

    def play(self) -> None:
        """Run until no event is left."""
        while self._heap:
            now_s, _, ends, trip = heapq.heappop(self._heap)
            peer = trip.legs[trip.leg]
            if ends:
                self._end(trip, peer, now_s)
            else:
                server = self._servers[peer]
                (server.forward if trip.leg < trip.stops else server.returning).append(trip)
            self._start(peer, now_s)

    def _start(self, peer: PeerId, now_s: float) -> None:
        server = self._servers[peer]
        if trip := server.next():
            server.is_busy = True
            share = (
                1.0
                if trip.leg < trip.stops
                else LOSS_SHARE
                if trip.leg == trip.stops
                else BACKWARD_SHARE
            )
            end_s = now_s + share * self._forward_s[peer]
            self.works.append(ScheduledPass(peer, trip.microbatch, now_s, end_s))
            self._push(end_s, True, trip)

    def _end(self, trip: _Trip, peer: PeerId, now_s: float) -> None:
        server = self._servers[peer]
        server.is_busy = False
        server.room += trip.leg > trip.stops
        trip.leg += 1
        if trip.leg == len(trip.legs):
            self.finished_s[trip.microbatch] = now_s
            return
        receiver = trip.legs[trip.leg]
        self._push(now_s if receiver == peer else self._send(peer, receiver, now_s), False, trip)

    def _push(self, at_s: float, ends: bool, trip: _Trip) -> None:
        self._events += 1
        heapq.heappush(self._heap, (at_s, self._events, ends, trip))
