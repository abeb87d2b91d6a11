"""The log of a stream's last rounds: each decision, and whether its content is here.

A member that was away learns from others' logs what it missed, in order; a round that has left
every log is lost to a peer that still waits for it. The last shards of a witnessed round are kept
longer than its other content: peers without its state, a pipeline's trainers, follow at their own
pace and must miss none.
"""

import asyncio
import collections
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from farflock.swarm.bundle_store import BundleStore
from farflock.swarm.join_time import RoundTraffic, TrafficMeter, together
from farflock.swarm.links import PeerId
from farflock.swarm.messages import Decided, Key, Offer
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.protocol.exchange.close_list import CloseList, last_bundles
from farflock.swarm.protocol.exchange.reminders import Reminders
from farflock.swarm.protocol.exchange.streams import RoundOutcome, RoundStatus, Stream
from farflock.swarm.protocol.log_truncation import LogTruncation

LOG_ROUNDS = 8  # with all content, for members that were away
MAX_LOG_BYTES = 128 * 1024 * 1024  # per stream, of that content; the newest round always stays
MIN_SHELVED_BYTES = 1024 * 1024  # of a round's content; less stays in memory
OLD_LOG_ROUNDS = 256  # with the last shards only, for trainers; of rounds without others, for all
OLD_LOG_BYTES = 16 * 1024 * 1024  # per stream: last shards may be large


@dataclass(slots=True)
class LoggedRound:
    """A decided round in the log.

    Indices in the list are places in `group`, of which `contributors` members contribute. It is
    `complete` once all the content that this peer wants is here."""

    close: CloseList
    group: tuple[PeerId, ...]
    contributors: int
    decided: Decided
    taken: tuple[bool, ...]
    complete: bool = False
    content_bytes: int = 0  # once it is complete
    reminders: Reminders = field(default_factory=Reminders)
    twins: tuple[PeerId, ...] = ()  # members that offered the same bytes as this one

    @property
    def weights(self) -> dict[PeerId, float]:
        """The weights of the contributions that were taken."""
        return {self.group[member]: weight for member, weight in self.close.members}


@dataclass(frozen=True, slots=True)
class OpenOffer:
    """This peer's offer to a round; the node waits for the outcome until `ends_s` (local clock)."""

    offer: Offer
    ends_s: float
    outcome: asyncio.Future[RoundOutcome]


@dataclass(slots=True)
class StreamState:
    """One stream at this peer."""

    stream: Stream
    newest: int = -1  # the last round known to be decided
    tokens: int = 0
    opened_tokens: int = 0  # tokens before the first round that is kept
    seen: int = -1  # the highest round heard of; negative if none
    log: collections.OrderedDict[int, LoggedRound] = field(default_factory=collections.OrderedDict)
    # Rounds that have left the log, with their last shards only.
    old_log: collections.OrderedDict[int, LoggedRound] = field(
        default_factory=collections.OrderedDict
    )
    old_log_bytes: int = 0
    offers: dict[int, OpenOffer] = field(default_factory=dict)  # ours, by round, unresolved
    asked_s: float = 0.0
    # Members that announced that the next round left their log.
    forgotten: LogTruncation = field(default_factory=LogTruncation)
    skipped: bool = False  # tokens are unknown until the next decision
    meter: TrafficMeter = field(default_factory=TrafficMeter)

    @property
    def next(self) -> int:
        """The round after the newest."""
        return self.newest + self.stream.cadence.stride

    def entry(self, number: int) -> LoggedRound | None:
        """Return a decided round from the log or the old rounds before it, or None."""
        return self.log.get(number) or self.old_log.get(number)

    def resolve(self, number: int, outcome: RoundOutcome) -> None:
        """Pass the outcome of a round to its waiting exchange, if any."""
        placed = self.offers.get(number)
        if placed is not None and not placed.outcome.done():
            placed.outcome.set_result(outcome)

    @property
    def whole(self) -> int:
        """The last round up to which everything is decided and here."""
        entries = itertools.chain(self.old_log.items(), self.log.items())
        incomplete = (number for number, entry in entries if not entry.complete)
        return min(incomplete, default=self.next) - self.stream.cadence.stride


class RoundLog:
    """The logs of one peer's streams; the machine of a round that leaves its log is dropped."""

    def __init__(self, context: PeerContext, machines: dict[Key, Any]) -> None:
        self._context, self._machines = context, machines

    def enter(self, state: StreamState, number: int, entry: LoggedRound) -> None:
        """Log a decided round as the stream's newest, and drop the oldest from a full log."""
        state.newest = number
        state.seen = max(state.seen, number)
        state.tokens, state.skipped = entry.close.tokens, False
        state.log[number] = entry
        for member, value in entry.close.evaluations:
            self._context.evaluated(state.stream.name, entry.group[member], value)
        most, _ = _limits(state.stream)
        while len(state.log) > most:
            self._retire(state, next(iter(state.log)))

    def _retire(self, state: StreamState, number: int) -> None:
        """Move a round from the log to the old ones; drop it unless its last shards are kept."""
        entry = state.log[number]
        if not (state.stream.terms.witnessed and (entry.complete or state.stream.wants == "last")):
            self._shorten(state, 0)
            self.evict(state, number)
            state.opened_tokens = entry.close.tokens
            return
        key = Key(state.stream.name, number)
        state.old_log[number] = state.log.pop(number)
        state.old_log_bytes += _size_bytes(state, entry)
        self._machines.pop(key, None)
        last = last_bundles(entry.close, state.stream.terms.bundles)
        self._context.store.keep_only([item.digest for item in last], key)
        self._context.store.forget(work_pin(key))
        self._shorten(state, OLD_LOG_ROUNDS)

    def _shorten(self, state: StreamState, limit: int) -> None:
        """Drop the oldest old rounds, without gaps, until at most `limit` are left and they fit."""
        while state.old_log and (len(state.old_log) > limit or state.old_log_bytes > OLD_LOG_BYTES):
            number, entry = state.old_log.popitem(last=False)
            state.old_log_bytes -= _size_bytes(state, entry)
            state.opened_tokens = entry.close.tokens
            self._context.store.release(Key(state.stream.name, number))

    def rewind(self, state: StreamState, first_round: int) -> None:
        """Forget the rounds from `first_round` on."""
        for number in [number for number in state.old_log if number >= first_round]:
            state.old_log_bytes -= _size_bytes(state, state.old_log.pop(number))
            self._context.store.release(Key(state.stream.name, number))
        for number in [number for number in state.log if number >= first_round]:
            del state.log[number]
            self._context.store.release(Key(state.stream.name, number))

    def clear(self, state: StreamState) -> None:
        """Forget all rounds, and give up waiting for their content."""
        for number in list(state.log):
            self.evict(state, number)
        self._shorten(state, 0)

    def evict(self, state: StreamState, number: int) -> None:
        """Remove a round from the log; an exchange still waiting for its content is lost."""
        key = Key(state.stream.name, number)
        del state.log[number]
        self._machines.pop(key, None)
        self._context.store.release(key)
        self._context.store.forget(work_pin(key))
        state.resolve(number, RoundOutcome(key, "lost", state.next))

    def completed(self, state: StreamState, number: int) -> None:
        """Note that all wanted content of a round is here, and resolve its waiting exchange."""
        entry = state.entry(number)
        if entry is None:
            return
        key = Key(state.stream.name, number)
        for item in entry.close.items:
            # Only what is here: a voter may have none of it.
            bundle = item.index % state.stream.terms.bundles
            self._context.bundles.pin(state.stream, bundle, item.digest, key)
        self._context.store.forget(work_pin(key))
        entry.complete = True
        entry.content_bytes = self._context.store.pinned_bytes(key)
        late = number + state.stream.cadence.stride < state.seen  # others may have begun the next
        state.meter.heard(entry.content_bytes, self._context.now(), late=late)
        state.resolve(number, outcome(state.stream, number, entry, self._context.bundles))
        self._fit(state)
        shelve = self._context.shelve
        if shelve is not None and entry.content_bytes >= MIN_SHELVED_BYTES:
            self._context.spawn(self._context.store.move(key, shelve))

    def _fit(self, state: StreamState) -> None:
        """Drop the oldest complete rounds until the content of the others fits."""
        _, most_bytes = _limits(state.stream)
        while sum(entry.content_bytes for entry in state.log.values()) > most_bytes:
            oldest, entry = next(iter(state.log.items()))
            if oldest == state.newest or not entry.complete:
                return
            self._retire(state, oldest)

    def give_up(self, state: StreamState, next_round: int) -> None:
        """Resolve waiting exchanges as lost: no peer can tell their outcome any more."""
        for number in state.offers:
            state.resolve(number, RoundOutcome(Key(state.stream.name, number), "lost", next_round))


def _limits(stream: Stream) -> tuple[int, int]:
    """Return how many rounds the log of a stream has, and the bytes of their content. Where a round
    is nothing but its last shards, they are as cheap to keep for members as for trainers."""
    has_only_last = stream.terms.witnessed and stream.terms.bundles == 1
    return (OLD_LOG_ROUNDS, OLD_LOG_BYTES) if has_only_last else (LOG_ROUNDS, MAX_LOG_BYTES)


def _size_bytes(state: StreamState, entry: LoggedRound) -> int:
    """Return the approximate size of an old round."""
    return len(entry.decided.value) + sum(
        item.size for item in last_bundles(entry.close, state.stream.terms.bundles)
    )


def work_pin(key: Key) -> tuple[str, Key]:
    """Return the pin for an exchange in progress; its result is pinned by the key itself."""
    return ("work", key)


def traffic_of(streams: Mapping[str, StreamState], stage: int | None = None) -> RoundTraffic:
    """Return what the rounds of a stage's streams (None: those of the whole model) take of the line
    of a peer that follows them."""
    return together(
        state.meter.traffic for state in streams.values() if state.stream.stage == stage
    )


def outcome(stream: Stream, number: int, logged: LoggedRound, bundles: BundleStore) -> RoundOutcome:
    """Return the outcome for this peer of a decided round whose content is in the store."""
    close, group = logged.close, logged.group
    bare = RoundOutcome(
        Key(stream.name, number),
        "failed",
        number + stream.cadence.stride,
        tokens=close.tokens,
        state=close.state,
        twins=logged.twins,
    )
    if not close.items:
        return bare
    weights = dict(sorted((group[member], weight) for member, weight in close.members))
    all_in = len(weights) == logged.contributors and all(logged.taken)
    whole: RoundStatus = "alone" if logged.contributors == 1 else "ok"
    done = replace(
        bare,
        status=whole if all_in else "partial",
        participants=tuple(weights),
        weights=tuple(weights.values()),
        taken=_taken_shards(stream, logged.taken),
    )
    # The items are in order: those of a member, and of a member the bundles.
    contents: dict[int, list[bytes]] = {member: [] for member, _ in close.members}
    reduced: list[bytes] = []
    for item in close.items:
        owner, bundle = divmod(item.index, stream.terms.bundles)
        shards = bundles.shards(stream, bundle, item.digest)
        (reduced if stream.terms.kind == "mean" else contents[owner]).extend(shards)
    if stream.terms.kind == "mean":
        return replace(done, reduced=tuple(reduced))
    members = {group[member]: tuple(shards) for member, shards in contents.items()}
    return replace(done, gathered={peer: members[peer] for peer in weights})


def _taken_shards(stream: Stream, taken: tuple[bool, ...]) -> tuple[bool, ...]:
    """Return for each shard whether its bundle was taken."""
    cut = stream.terms.cut
    return tuple(was for bundle, was in enumerate(taken) for _ in cut.shards_of(bundle))
