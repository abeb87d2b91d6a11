"""Interleaved weighted round-robin: which server of one stage gets a trainer's next microbatch.

Every server is charged the seconds that its tasks are expected to take, and the least charged one is next, so that visits
become proportional to speed without a plan and without a word between trainers (SWARM, arXiv:2301.11913, section 3.2 and
its released `balancer.py`).

Sans I/O: the caller says what it chose for, what came back and when; every refusal is a value.
"""

import heapq
import math
import random
import statistics
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal, assert_never

from farflock.swarm.links import PeerId

ALPHA = 0.1
BACKWARD_SIZE = 2.5  # a backward call counts as so many forward calls of the same samples
INITIAL_RATE = 1.0  # samples per second, where nobody told or measured anything
TRUST = 4.0  # an announced rate counts within this factor of the typical one, until it is measured
TOLD_TRUST = 16.0  # and the time that a server tells of a call within this one of what that took, with ways and queues
MIN_SECONDS = 1e-9  # a sample; calls that end at one moment would otherwise be infinitely fast
MAX_RATE = 1e12  # samples per second, as in a record
DIAL_BAN_S = 60.0
RPC_BAN_S = 3600.0
MAX_DOUBLINGS = 6  # of the charge of a server that lets one call after the other run out
MAX_PEERS = 1024  # servers of one stage; as many bans are remembered
STALE_SLACK = 16  # at most so many stale heap entries, or as many as there are servers

CallFailure = Literal["dial", "rpc", "deadline"]
JoinCharge = Literal["min", "max", "median"]

_Entry = tuple[float, float, PeerId]  # charge, a random tie-break, whose


@dataclass(frozen=True, slots=True)
class Announced:
    """What a server's newest record says: `rate` in samples per second, 0 if it does not tell."""

    peer: PeerId
    sequence: int
    rate: float = 0.0


@dataclass(slots=True)
class Ema:
    """Exponential mean of the seconds that a sample takes, bias corrected: one sample gives exactly that sample.

    Calls may overlap. Time counts from the last update on if that is later than the call's start, so that this measures
    throughput, not latency (`performance_ema.py` of the released code). That is the way to it and back where a server has
    nothing to do: it seems slow, and never gets the work that would show how fast it is. So what it says that it took counts
    (deviation), down to a share of what was measured: who says too little gets more than it can do, but not everything.
    """

    alpha: float = ALPHA
    _mean: float = 0.0
    _weight: float = 0.0
    _updated_s: float = -math.inf

    def update(self, samples: float, started_s: float, now_s: float, took_s: float | None = None) -> None:
        """Take in a call of `samples` that ran from `started_s` until now, and of which the server says that it `took_s`."""
        taken_s = max(0.0, now_s - max(started_s, self._updated_s))
        if took_s is not None:
            taken_s = max(min(took_s, now_s - started_s), taken_s / TOLD_TRUST)
        self._weight += self.alpha * (1.0 - self._weight)
        self._mean += (taken_s / samples - self._mean) * (self.alpha / self._weight)
        self._updated_s = max(self._updated_s, now_s)

    @property
    def seconds(self) -> float | None:
        """A sample; None before the first call."""
        return self._mean if self._weight else None

    @property
    def rate(self) -> float | None:
        """Samples per second; None before the first call."""
        return 1.0 / max(self._mean, MIN_SECONDS) if self._weight else None


@dataclass(slots=True)
class _Server:
    sequence: int
    announced: float
    charge: float
    warmup: int  # tasks left at the higher charge of a newcomer
    entry: _Entry | None = None  # its only valid heap entry; None while it is banned
    ema: Ema = field(default_factory=Ema)
    deadlines: int = 0  # in a row
    guessed: float = 0.0  # of its charge, what was charged before anything was measured
    guessed_samples: float = 0.0  # for so many


@dataclass(frozen=True, slots=True)
class _Ban:
    until_s: float
    sequence: int


class Balancer:
    """The servers of one stage as one trainer sees them.

    A ban ends with its time, or as soon as a newer record of the peer is seen. Who comes back from a ban keeps its charge
    unless newcomers would get a higher one, so that nobody who was away draws a burst of work.

    Deviations from the released code: a newcomer joins at the median charge, not at the minimum, and its first tasks count
    double; what was charged by a guess is charged anew at the first measurement, or one task more at first would cost a fast
    server the next hundreds; an announced rate is believed within a factor of the typical one; deadlines in a row double the
    charge, since neither a ban nor a measurement would take work from a server that only lets calls run out; a ban for a failed
    call also ends by time, so that there always is a moment at which to try again.
    """

    def __init__(
        self,
        chance: random.Random,
        join_charge: JoinCharge = "median",
        warmup_penalty: float = 2.0,
        warmup_tasks: int = 8,
    ) -> None:
        if not 1.0 <= warmup_penalty < math.inf or warmup_tasks < 0:
            raise ValueError(f"a warm-up counts at least once and not for ever, got {warmup_penalty}, {warmup_tasks}")
        self._chance, self._join_charge = chance, join_charge
        self._penalty, self._warmup_tasks = warmup_penalty, warmup_tasks
        self._servers: dict[PeerId, _Server] = {}
        self._bans: dict[PeerId, _Ban] = {}
        self._heap: list[_Entry] = []

    def choose(self, task_size: float, now_s: float, exclude: Collection[PeerId] = ()) -> PeerId | None:
        """The server for a task of `task_size` samples (backward: times `BACKWARD_SIZE`), charged for it at once and for good.
        None if all are banned or excluded: `next_ban_ends_s` is when it is worth asking again."""
        if not 0 < task_size < math.inf:
            raise ValueError(f"a task has a positive, finite number of samples, got {task_size}")
        self._end_bans(now_s)
        passed_over: list[_Entry] = []
        chosen = self._pop(exclude, passed_over)
        for entry in passed_over:
            heapq.heappush(self._heap, entry)
        if chosen is not None:
            self._charge(chosen, task_size)
        return chosen

    def finished(
        self, peer: PeerId, task_size: float, started_s: float, now_s: float, took_s: float | None = None
    ) -> None:
        """A call came back well, and took the server `took_s`, if it says. A peer that left meanwhile is not remembered for
        it."""
        if (server := self._servers.get(peer)) is not None:
            server.ema.update(task_size, started_s, now_s, took_s)
            server.deadlines = 0
            if server.guessed:
                server.charge += server.guessed_samples / self._rate(server) - server.guessed
                server.guessed = server.guessed_samples = 0.0
                self._enter(peer)

    def failed(self, peer: PeerId, reason: CallFailure, now_s: float) -> None:
        """A call failed; its charge stays. A failed dial bans for a short time, a failed call for a long one; a call that ran
        out of time may have been ours to blame and bans nobody."""
        if (server := self._servers.get(peer)) is None:
            return
        match reason:
            case "deadline":
                server.deadlines += 1
            case "dial":
                self._ban(peer, server, now_s + DIAL_BAN_S)
            case "rpc":
                self._ban(peer, server, now_s + RPC_BAN_S)
            case _:
                assert_never(reason)

    def busy(self, peer: PeerId) -> None:
        """A server refused for want of room: no ban, and its charge stays. It answers, so its deadlines are forgiven."""
        if (server := self._servers.get(peer)) is not None:
            server.deadlines = 0

    def refresh(self, records: Iterable[Announced], now_s: float) -> None:
        """The records that are valid now, in any order: others are forgotten, newcomers join, newer records end bans."""
        self._end_bans(now_s)
        newest = self._newest(records)
        for peer in [peer for peer in self._servers if peer not in newest]:
            del self._servers[peer]
        level, are_first = self._level(), not self._servers
        for peer, record in newest.items():
            if peer not in self._servers:
                warmup = 0 if are_first else self._warmup_tasks
                self._servers[peer] = _Server(record.sequence, _sane(record.rate), level, warmup)
                self._enter(peer)
            elif record.sequence > self._servers[peer].sequence:
                self._servers[peer].sequence = record.sequence
                self._servers[peer].announced = _sane(record.rate)
            if (ban := self._bans.get(peer)) is not None and record.sequence > ban.sequence:
                self._unban(peer, level)
        self._compact()

    @property
    def next_ban_ends_s(self) -> float | None:
        """When the first of the banned servers may be chosen again; None if no server is banned."""
        return min((ban.until_s for peer, ban in self._bans.items() if peer in self._servers), default=None)

    @property
    def charges(self) -> dict[PeerId, float]:
        """Expected seconds of work given so far to each server that may be chosen."""
        return {peer: server.charge for peer, server in self._servers.items() if server.entry is not None}

    @property
    def rates(self) -> dict[PeerId, float]:
        """Samples per second that each known server is taken to do."""
        return {peer: self._rate(server) for peer, server in self._servers.items()}

    def _pop(self, exclude: Collection[PeerId], passed_over: list[_Entry]) -> PeerId | None:
        while self._heap:
            entry = heapq.heappop(self._heap)
            server = self._servers.get(entry[2])
            if server is None or server.entry is not entry:
                continue  # stale: it left, was banned or came anew since
            if entry[2] not in exclude:
                return entry[2]
            passed_over.append(entry)
        return None

    def _charge(self, peer: PeerId, task_size: float) -> None:
        server = self._servers[peer]
        samples = task_size * 2.0 ** min(server.deadlines, MAX_DOUBLINGS)
        if server.warmup:
            server.warmup -= 1
            samples *= self._penalty
        cost_s = samples / self._rate(server)
        server.charge += cost_s
        if server.ema.rate is None:
            server.guessed += cost_s
            server.guessed_samples += samples
        self._enter(peer)

    def _enter(self, peer: PeerId) -> None:
        """Give a server its one valid heap entry, unless it is banned."""
        server = self._servers[peer]
        server.entry = None
        if peer not in self._bans:
            server.entry = (server.charge, self._chance.random(), peer)
            heapq.heappush(self._heap, server.entry)

    def _rate(self, server: _Server) -> float:
        if server.ema.rate is not None:
            return server.ema.rate
        known = [rate for other in self._servers.values() if (rate := other.ema.rate or other.announced)]
        if not known:
            return INITIAL_RATE
        typical = statistics.median_low(known)
        return min(max(server.announced or typical, typical / TRUST), typical * TRUST)

    def _level(self) -> float:
        """The charge of a newcomer."""
        charges = list(self.charges.values()) or [server.charge for server in self._servers.values()] or [0.0]
        match self._join_charge:
            case "min":
                return min(charges)
            case "max":
                return max(charges)
            case "median":
                return statistics.median(charges)
            case _:
                assert_never(self._join_charge)

    def _ban(self, peer: PeerId, server: _Server, until_s: float) -> None:
        known = self._bans.pop(peer, None)
        if len(self._bans) >= MAX_PEERS:
            self._unban(min(self._bans, key=lambda other: self._bans[other].until_s), self._level())
        self._bans[peer] = _Ban(max(until_s, known.until_s if known else until_s), server.sequence)
        server.entry = None
        self._compact()

    def _unban(self, peer: PeerId, level: float) -> None:
        del self._bans[peer]
        if (server := self._servers.get(peer)) is not None:
            if level > server.charge:
                server.charge, server.guessed, server.guessed_samples = level, 0.0, 0.0
            self._enter(peer)

    def _end_bans(self, now_s: float) -> None:
        for peer in [peer for peer, ban in self._bans.items() if ban.until_s <= now_s]:
            self._unban(peer, self._level())

    def _newest(self, records: Iterable[Announced]) -> dict[PeerId, Announced]:
        """One record a peer, in an order that all input orders share; of too many peers, those known are kept."""
        newest: dict[PeerId, Announced] = {}
        for record in records:
            if record.peer not in newest or record.sequence > newest[record.peer].sequence:
                newest[record.peer] = record
        kept = sorted(newest, key=lambda peer: (peer not in self._servers, peer))[:MAX_PEERS]
        return {peer: newest[peer] for peer in kept}

    def _compact(self) -> None:
        valid = [server.entry for server in self._servers.values() if server.entry is not None]
        if len(self._heap) - len(valid) > max(len(self._servers), STALE_SLACK):
            self._heap = valid
            heapq.heapify(self._heap)


def _sane(rate: float) -> float:
    return min(rate, MAX_RATE) if math.isfinite(rate) and rate > 0 else 0.0
