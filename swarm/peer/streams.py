"""A stream as the swarm sees it: opaque shards, two functions of the node's, and the log of its last rounds."""

import asyncio
import collections
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from farflock.swarm.links import PeerId
from farflock.swarm.messages import MAX_MEMBERS, MAX_SHARDS, Decided, Key, Offer
from farflock.swarm.peer.chunks import Store
from farflock.swarm.protocol.collective import CloseList, Terms, told
from farflock.swarm.protocol.forgetting import Forgetting
from farflock.swarm.protocol.holdings import Item

Status = Literal["ok", "partial", "alone", "failed", "lost"]


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduced shard, and whose payloads were corrupt and are not in it; `data` is None if none was usable."""

    data: bytes | None
    rejected: tuple[PeerId, ...] = ()


ReduceShard = Callable[[int, int, Sequence[tuple[PeerId, float, bytes]]], Reduction]  # (round, shard, inputs)
CheckShard = Callable[[int, int, bytes], bool]  # (round, shard, payload)


@dataclass(frozen=True, slots=True)
class Stream:
    """Tensors that are synchronised together, as the swarm sees them: opaque shards and two functions of the node's.

    `group` 0 is everybody in the view; 2 are pairs (swarm/peer/pairing.py). `max_shard_bytes` bounds what is fetched.

    Rounds of all streams count on one axis, on which views begin; this stream has `first` and every `stride`-th after it.
    A stream of stage `stage` is that of those who serve it; all others only vote in its rounds. `wants` says which shards of
    a round this peer fetches where it does not contribute: all of a state that it holds, none, or the last one alone, which
    may say what the round is about (a pipeline's trainer).
    A gather with `enough` above 0 closes as soon as so many contributions are whole. A mean that is `uniform` has each
    contribution in all shards or in none. In a `witnessed` one those who only vote hold the last shard of what they accept.
    """

    name: str
    kind: Literal["mean", "gather"]
    shards: int
    max_shard_bytes: int
    reduce: ReduceShard
    check: CheckShard
    group: int = 0
    deadline_s: float = 30.0
    min_participants: int = 1
    first: int = 0
    stride: int = 1
    enough: int = 0
    uniform: bool = False
    witnessed: bool = False
    stage: int | None = None
    wants: Literal["all", "last", "none"] = "all"

    def __post_init__(self) -> None:
        if self.stride < 1 or self.first < 0 or self.enough < 0:
            raise ValueError(f"stream {self.name}: first {self.first}, stride {self.stride}, enough {self.enough}")
        if (self.group == 2 and self.stride > 1) or (self.enough and (self.group == 2 or self.kind == "mean")):
            raise ValueError(f"stream {self.name}: pairs have a stride of 1, and only a gather of all knows `enough`")
        most = MAX_SHARDS // MAX_MEMBERS if self.kind == "gather" and self.group != 2 else MAX_SHARDS
        if not 1 <= self.shards <= most:
            raise ValueError(
                f"stream {self.name}: a {self.kind} has 1 to {most} shards, got {self.shards}; cut larger ones"
            )

    @property
    def terms(self) -> Terms:
        """What its exchanges' machines are told."""
        return Terms(
            self.kind,
            self.shards,
            self.deadline_s,
            self.min_participants,
            self.enough,
            self.uniform,
            self.witnessed,
        )

    def wanted(self, close: CloseList) -> list[Item]:
        """The items of a round that this peer fetches although it has no part in it."""
        match self.wants:
            case "all":
                return list(close.items)
            case "last":
                return told(close, self.shards)
            case "none":
                return []

    def upto(self, number: int) -> int:
        """This stream's last round that is not after `number`; one before its first if there is none."""
        return self.first + max((number - self.first) // self.stride, -1) * self.stride


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an exchange: `reduced` by shard (mean over everybody) or `gathered` by peer (pairs, gathers).

    `taken` says by shard whether my contribution is in it. `tokens` are the run's agreed tokens after the round,
    `state` the hash of the state before it that most members had.
    """

    key: Key
    status: Status
    next_round: int
    participants: tuple[PeerId, ...] = ()
    weights: tuple[float, ...] = ()
    reduced: tuple[bytes, ...] | None = None
    gathered: dict[PeerId, tuple[bytes, ...]] | None = None
    taken: tuple[bool, ...] = ()
    tokens: int = 0
    state: bytes = b""


@dataclass(slots=True)
class Logged:
    """One decided round: its list, the group that the list's indices mean, how many of it contribute, and whether what this
    peer wants of its content is here."""

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
    log: collections.OrderedDict[int, Logged] = field(default_factory=collections.OrderedDict)
    # rounds before the log
    annals: collections.OrderedDict[int, Logged] = field(default_factory=collections.OrderedDict)
    annals_bytes: int = 0
    offers: dict[int, Offer] = field(default_factory=dict)  # mine, by round, not yet resolved
    ends_s: dict[int, float] = field(default_factory=dict)  # when I no longer wait for them, on the local clock
    waiting: dict[int, asyncio.Future[Outcome]] = field(default_factory=dict)
    asked_s: float = 0.0
    forgotten: Forgetting = field(default_factory=Forgetting)  # who has said that the next round left its log
    skipped: bool = False  # the tokens are not known before the next decision

    @property
    def next(self) -> int:
        """The round after the newest."""
        return self.newest + self.stream.stride

    def entry(self, number: int) -> Logged | None:
        """A decided round, from the log or the annals."""
        return self.log.get(number) or self.annals.get(number)

    @property
    def whole(self) -> int:
        """The last round up to which everything is decided and here."""
        entries = itertools.chain(self.annals.items(), self.log.items())
        incomplete = (number for number, entry in entries if not entry.complete)
        return min(incomplete, default=self.next) - self.stream.stride


def work_pin(key: Key) -> tuple[str, Key]:
    """Pins what an exchange needs until it is complete: contributions; its result stays pinned under the key itself."""
    return ("work", key)


def outcome(stream: Stream, number: int, logged: Logged, store: Store) -> Outcome:
    """What a decided round, whose content is in the store, means to this peer; participants in sorted order."""
    close, group = logged.close, logged.group
    bare = Outcome(Key(stream.name, number), "failed", number + stream.stride, tokens=close.tokens, state=close.state)
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
    shards = range(stream.shards)
    if stream.kind == "mean":
        return replace(done, reduced=tuple(contents[shard] for shard in shards))
    places = {group[member]: member * stream.shards for member, _ in close.members}
    return replace(done, gathered={peer: tuple(contents[places[peer] + s] for s in shards) for peer in weights})
