"""Interleaved weighted round-robin: the server of one stage that gets a trainer's next microbatch.

Every server is charged the seconds that its tasks are expected to take, and the least charged one
is next, so that visits become proportional to speed without a plan and without messages between
trainers (SWARM, arXiv:2301.11913, section 3.2 and its released `balancer.py`).

Sans I/O: the caller reports tasks, outcomes and times; every refusal is a value.
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
BACKWARD_SIZE = 2.5  # forward calls that a backward call of the same samples counts as
INITIAL_RATE = 1.0  # samples per second, with nothing announced or measured
TRUST = 4.0  # an announced rate counts within this factor of the typical one, until it is measured
TOLD_TRUST = 16.0  # a reported time counts within this factor of the round trip's
MIN_SECONDS = 1e-9  # per sample; otherwise calls that end at one moment would be infinitely fast
MAX_RATE = 1e12  # samples per second, as in a record
DIAL_BAN_S = 60.0
RPC_BAN_S = 3600.0
MAX_DOUBLINGS = 6  # of the charge of a server whose calls time out in a row
MAX_PEERS = 1024  # servers of one stage; as many bans are remembered
WARMUP_TASKS = 8  # of a newcomer, which count more
WARMUP_PENALTY = 2.0  # how many times as much
TRIAL_CALLS = 3  # of a newcomer, before its speed is known: the first ones may be slow
STALE_SLACK = 16  # maximum of stale heap entries, or the number of servers if more

CallFailure = Literal["dial", "rpc", "deadline"]

_Entry = tuple[float, float, PeerId]  # charge, random tie-break, peer


@dataclass(frozen=True, slots=True)
class Announced:
    """A server's newest record; `rate` in samples per second, 0 if not announced."""

    peer: PeerId
    sequence: int
    rate: float = 0.0


@dataclass(slots=True)
class Ema:
    """Exponential mean of the seconds per sample, bias corrected: one sample gives exactly itself.

    Calls may overlap. Time counts from the later of the last update and the call's start, so this
    measures throughput, not latency (`performance_ema.py` of the released code). For an idle server
    that is mostly the round trip: the server seems slow, and never gets the work that would show
    its speed. So (deviation) the time that the server reports counts, but never less than a share
    of the measured time: a server that reports too little gets too much work, but not all of it.

    The mean begins with the median of the first `trial` calls; until then, nothing is known.
    """

    trial: int = 1
    alpha: float = ALPHA
    _mean: float = 0.0
    _weight: float = 0.0
    _updated_s: float = -math.inf
    _first: list[float] = field(default_factory=list)  # seconds per sample of the trial's calls

    def update(
        self, samples: float, started_s: float, now_s: float, took_s: float | None = None
    ) -> None:
        """Add a call of `samples` from `started_s` to now; `took_s` is the server's own report."""
        taken_s = max(0.0, now_s - max(started_s, self._updated_s))
        if took_s is not None:
            taken_s = max(min(took_s, now_s - started_s), taken_s / TOLD_TRUST)
        self._updated_s = max(self._updated_s, now_s)
        per_sample = taken_s / samples
        if len(self._first) < self.trial:
            self._first.append(per_sample)
            if len(self._first) < self.trial:
                return
            per_sample = statistics.median(self._first)
        self._weight += self.alpha * (1.0 - self._weight)
        self._mean += (per_sample - self._mean) * (self.alpha / self._weight)

    @property
    def seconds(self) -> float | None:
        """Seconds per sample; None before the trial is over."""
        return self._mean if self._weight else None

    @property
    def rate(self) -> float | None:
        """Samples per second; None before the trial is over."""
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
    guessed: float = 0.0  # part of the charge made before any measurement
    guessed_samples: float = 0.0  # samples behind that part


@dataclass(frozen=True, slots=True)
class _Ban:
    until_s: float
    sequence: int


class Balancer:
    """The servers of one stage as one trainer sees them.

    A ban ends with its time, or once a newer record of the peer is seen. A server that returns from
    a ban keeps its charge unless newcomers would get a higher one, so that absence earns no burst
    of work.

    Deviations from the released code: a newcomer joins at the median charge, not the minimum, and
    its first tasks count double; its speed is known after three calls, since a first one that took
    seconds would charge it with minutes of the others' work; charges based on a guess are redone
    at the first measurement, otherwise one early extra task would cost a fast server the next
    hundreds; an announced rate is believed within a factor of the typical one; missed deadlines in
    a row double the charge, since neither a ban nor a measurement would take work from a server
    that only lets calls time out; a ban for a failed call also ends by time, so that there is
    always a moment to try again.
    """

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._servers: dict[PeerId, _Server] = {}
        self._bans: dict[PeerId, _Ban] = {}
        self._heap: list[_Entry] = []

    def choose(
        self, task_size: float, now_s: float, exclude: Collection[PeerId] = ()
    ) -> PeerId | None:
        """Return the server for a task of `task_size` samples, charged at once and for good.

        A backward task counts `BACKWARD_SIZE` times. None if all are banned or excluded:
        `next_ban_ends_s` is when it is worth asking again.
        """
        if not 0 < task_size < math.inf:
            raise ValueError(
                f"a task of {task_size} samples; their number must be positive and finite"
            )
        self._end_bans(now_s)
        passed_over: list[_Entry] = []
        chosen = self._pop(exclude, passed_over)
        for entry in passed_over:
            heapq.heappush(self._heap, entry)
        if chosen is not None:
            self._charge(chosen, task_size)
        return chosen

    def first_back(self, exclude: Collection[PeerId] = ()) -> PeerId | None:
        """Return the banned server whose ban ends first, to ask it where `choose` has none: the
        failure may have been of the moment, as in a partition that has ended, and the only server
        of a stage is worth another call."""
        bans = {p: ban for p, ban in self._bans.items() if p in self._servers and p not in exclude}
        return min(bans, key=lambda peer: (bans[peer].until_s, peer), default=None)

    def finished(
        self,
        peer: PeerId,
        task_size: float,
        started_s: float,
        now_s: float,
        took_s: float | None = None,
    ) -> None:
        """Record a successful call; by the server's report it `took_s`. Ignore a peer that left."""
        if (server := self._servers.get(peer)) is not None:
            server.ema.update(task_size, started_s, now_s, took_s)
            server.deadlines = 0
            if server.guessed and server.ema.rate is not None:
                server.charge += server.guessed_samples / self._rate(server) - server.guessed
                server.guessed = server.guessed_samples = 0.0
                self._enter(peer)

    def failed(self, peer: PeerId, reason: CallFailure, now_s: float) -> None:
        """Record a failed call; its charge stays.

        A failed dial bans for a short time, a failed call for a long one. A call that timed out
        bans for none: that may be our fault.
        """
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
        """Record a refusal for lack of room: no ban; the charge stays, missed deadlines do not."""
        if (server := self._servers.get(peer)) is not None:
            server.deadlines = 0

    def refresh(self, records: Iterable[Announced], now_s: float) -> None:
        """Take the valid records: forget other servers, admit new ones, lift bans on newer ones."""
        self._end_bans(now_s)
        newest = self._newest(records)
        for peer in [peer for peer in self._servers if peer not in newest]:
            del self._servers[peer]
        level, are_first = self._level(), not self._servers
        for peer, record in newest.items():
            if peer not in self._servers:
                warmup, trial = (0, 1) if are_first else (WARMUP_TASKS, TRIAL_CALLS)
                known = _Server(record.sequence, _sane(record.rate), level, warmup)
                known.ema.trial = trial
                self._servers[peer] = known
                self._enter(peer)
            elif record.sequence > self._servers[peer].sequence:
                self._servers[peer].sequence = record.sequence
                self._servers[peer].announced = _sane(record.rate)
            if (ban := self._bans.get(peer)) is not None and record.sequence > ban.sequence:
                self._unban(peer, level)
        self._compact()

    @property
    def next_ban_ends_s(self) -> float | None:
        """The time of the first banned server's return; None if no server is banned."""
        return min(
            (ban.until_s for peer, ban in self._bans.items() if peer in self._servers), default=None
        )

    @property
    def charges(self) -> dict[PeerId, float]:
        """Expected seconds of work given so far to each server that may be chosen."""
        return {
            peer: server.charge
            for peer, server in self._servers.items()
            if server.entry is not None
        }

    @property
    def rates(self) -> dict[PeerId, float]:
        """Assumed samples per second of each known server."""
        return {peer: self._rate(server) for peer, server in self._servers.items()}

    def _pop(self, exclude: Collection[PeerId], passed_over: list[_Entry]) -> PeerId | None:
        while self._heap:
            entry = heapq.heappop(self._heap)
            server = self._servers.get(entry[2])
            if server is None or server.entry is not entry:
                continue  # stale: it left, was banned or rejoined since
            if entry[2] not in exclude:
                return entry[2]
            passed_over.append(entry)
        return None

    def _charge(self, peer: PeerId, task_size: float) -> None:
        server = self._servers[peer]
        samples = task_size * 2.0 ** min(server.deadlines, MAX_DOUBLINGS)
        if server.warmup:
            server.warmup -= 1
            samples *= WARMUP_PENALTY
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
        known = [
            rate for other in self._servers.values() if (rate := other.ema.rate or other.announced)
        ]
        if not known:
            return INITIAL_RATE
        typical = statistics.median_low(known)
        return min(max(server.announced or typical, typical / TRUST), typical * TRUST)

    def _level(self) -> float:
        """Return the charge of a newcomer."""
        known = self.charges.values() or [server.charge for server in self._servers.values()]
        return statistics.median(known or [0.0])

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
        """Return one record per peer in a reproducible order; above the limit, known peers stay."""
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
