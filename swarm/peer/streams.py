"""A stream as the swarm sees it: shards, two functions of the node's, and the last rounds."""

import asyncio
import collections
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from farflock.swarm.chunks import Store
from farflock.swarm.links import PeerId
from farflock.swarm.messages import MAX_MEMBERS, MAX_SHARDS, Decided, Key, Offer
from farflock.swarm.protocol.exchange.availability import RoundItem
from farflock.swarm.protocol.exchange.close_list import CloseList, Terms, told
from farflock.swarm.protocol.log_truncation import LogTruncation

RoundStatus = Literal["ok", "partial", "alone", "failed", "lost"]


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduced shard without the corrupt payloads of `rejected` peers; None if none was usable."""

    data: bytes | None
    rejected: tuple[PeerId, ...] = ()


# (round, shard, inputs)
ReduceShard = Callable[[int, int, Sequence[tuple[PeerId, float, bytes]]], Reduction]
CheckShard = Callable[[int, int, bytes], bool]  # (round, shard, payload)


@dataclass(frozen=True, slots=True)
class Cadence:
    """Which rounds are a stream's: `first` and every `stride`-th after it.

    Rounds of all streams count on one axis, on which views begin.
    """

    first: int = 0
    stride: int = 1

    def upto(self, number: int) -> int:
        """The last round that is not after `number`; one before the first if there is none."""
        return self.first + max((number - self.first) // self.stride, -1) * self.stride


@dataclass(frozen=True, slots=True)
class Stream:
    """Tensors that are synchronised together: opaque shards and two functions that know them.

    `max_shard_bytes` bounds what is fetched. A stream of stage `stage` is that of the peers that
    serve it; all others only vote in its rounds. `wants` says which shards of a round this peer
    fetches where it does not contribute: all of a state that it holds, none, or the last one alone,
    which may say what the round is about (a pipeline's trainer).
    """

    name: str
    terms: Terms
    max_shard_bytes: int
    reduce: ReduceShard
    check: CheckShard
    cadence: Cadence = Cadence()
    stage: int | None = None
    wants: Literal["all", "last", "none"] = "all"

    def __post_init__(self) -> None:
        terms, first, stride = self.terms, self.cadence.first, self.cadence.stride
        if stride < 1 or first < 0 or terms.enough < 0:
            raise ValueError(f"stream {self.name}: first {first}, stride {stride}, enough {terms.enough}")
        if (self.is_paired and stride > 1) or (terms.enough and (self.is_paired or terms.kind == "mean")):
            raise ValueError(f"stream {self.name}: pairs have a stride of 1, and only a gather of all knows `enough`")
        most = MAX_SHARDS // MAX_MEMBERS if terms.kind == "gather" and not self.is_paired else MAX_SHARDS
        if not 1 <= terms.shards <= most:
            raise ValueError(
                f"stream {self.name}: a {terms.kind} has 1 to {most} shards, got {terms.shards}; cut larger ones"
            )

    @property
    def is_paired(self) -> bool:
        """Whether its exchanges are between two peers each (swarm/peer/pairing.py)."""
        return self.terms.group == 2

    def wanted(self, close: CloseList) -> list[RoundItem]:
        """The items of a round that this peer fetches although it has no part in it."""
        match self.wants:
            case "all":
                return list(close.items)
            case "last":
                return told(close, self.terms.shards)
            case "none":
                return []


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """What came of an exchange: `reduced` by shard, or `gathered` by peer (pairs and gathers).

    `taken` says by shard whether my contribution is in it. `tokens` are the run's agreed tokens
    after the round, `state` the hash of the state before it that most members had.
    """

    key: Key
    status: RoundStatus
    next_round: int
    participants: tuple[PeerId, ...] = ()
    weights: tuple[float, ...] = ()
    reduced: tuple[bytes, ...] | None = None
    gathered: dict[PeerId, tuple[bytes, ...]] | None = None
    taken: tuple[bool, ...] = ()
    tokens: int = 0
    state: bytes = b""


@dataclass(slots=True)
class LoggedRound:
    """One decided round, as the log has it.

    Indices in the list are places in `group`, of which `contributors` members contribute. It is
    `complete` once what this peer wants of its content is here.
    """

    close: CloseList
    group: tuple[PeerId, ...]
    contributors: int
    decided: Decided
    taken: tuple[bool, ...]
    complete: bool = False


@dataclass(slots=True)
class StreamState:
    """One stream at this peer."""

    stream: Stream
    newest: int = -1  # the last round that I know to be decided
    tokens: int = 0
    opened_tokens: int = 0  # those before the first round that is kept
    seen: int = -1  # the highest round that I heard of (-1 and the like: none)
    log: collections.OrderedDict[int, LoggedRound] = field(default_factory=collections.OrderedDict)
    # rounds before the log
    annals: collections.OrderedDict[int, LoggedRound] = field(default_factory=collections.OrderedDict)
    annals_bytes: int = 0
    offers: dict[int, Offer] = field(default_factory=dict)  # mine, by round, not yet resolved
    # By round, when I no longer wait for it, on the local clock.
    ends_s: dict[int, float] = field(default_factory=dict)
    waiting: dict[int, asyncio.Future[RoundOutcome]] = field(default_factory=dict)
    asked_s: float = 0.0
    # Which members have said that the next round left their log.
    forgotten: LogTruncation = field(default_factory=LogTruncation)
    skipped: bool = False  # the tokens are not known before the next decision

    @property
    def next(self) -> int:
        """The round after the newest."""
        return self.newest + self.stream.cadence.stride

    def entry(self, number: int) -> LoggedRound | None:
        """A decided round, from the log or the annals."""
        return self.log.get(number) or self.annals.get(number)

    @property
    def whole(self) -> int:
        """The last round up to which everything is decided and here."""
        entries = itertools.chain(self.annals.items(), self.log.items())
        incomplete = (number for number, entry in entries if not entry.complete)
        return min(incomplete, default=self.next) - self.stream.cadence.stride


def work_pin(key: Key) -> tuple[str, Key]:
    """The pin of what an exchange needs until it is complete; its result has the key itself."""
    return ("work", key)


def outcome(stream: Stream, number: int, logged: LoggedRound, store: Store) -> RoundOutcome:
    """What a decided round, whose content is in the store, means to this peer."""
    close, group = logged.close, logged.group
    bare = RoundOutcome(
        Key(stream.name, number),
        "failed",
        number + stream.cadence.stride,
        tokens=close.tokens,
        state=close.state,
    )
    if not close.items:
        return bare
    weights = dict(sorted((group[member], weight) for member, weight in close.members))
    contents = {item.index: store.get(item.digest) or b"" for item in close.items}
    all_in = len(weights) == logged.contributors and all(logged.taken)
    done = replace(
        bare,
        status="partial" if not all_in else "alone" if logged.contributors == 1 else "ok",
        participants=tuple(weights),
        weights=tuple(weights.values()),
        taken=logged.taken,
    )
    shards = range(stream.terms.shards)
    if stream.terms.kind == "mean":
        return replace(done, reduced=tuple(contents[shard] for shard in shards))
    places = {group[member]: member * stream.terms.shards for member, _ in close.members}
    return replace(done, gathered={peer: tuple(contents[places[peer] + s] for s in shards) for peer in weights})
