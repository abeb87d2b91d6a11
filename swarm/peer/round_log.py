"""The log of a stream's last rounds: each decision, and whether its content is here.

A member that was away learns from others' logs what it missed, in order; a round that has left
every log is lost to a peer that still waits for it. The last shards of a witnessed round are kept
longer than its other content: peers without its state, a pipeline's trainers, follow at their own
pace and must miss none.
"""

import asyncio
import collections
import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from farflock.swarm.bundle_store import BundleStore
from farflock.swarm.join_time import RoundTraffic, TrafficMeter, together
from farflock.swarm.links import PeerId
from farflock.swarm.messages import Decided, Key, Offer
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.protocol import axes
from farflock.swarm.protocol.axes import Floor
from farflock.swarm.protocol.exchange.close_list import CloseList, last_bundles
from farflock.swarm.protocol.exchange.reminders import Reminders
from farflock.swarm.protocol.exchange.streams import RoundOutcome, RoundStatus, Stream
from farflock.swarm.protocol.log_truncation import LogTruncation

LOG_ROUNDS = 8  # with all content, for members that were away
MAX_LOG_BYTES = 128 * 1024 * 1024  # per stream, of that content; the newest round always stays
MIN_SHELVED_BYTES = 1024 * 1024  # of a round's content; less stays in memory
# Of the rounds after a state that is read. A tiny state takes longer to ask for than to send, and
# its rounds come fast.
MIN_LATER_BYTES = 1024 * 1024
FILLS = 4  # rounds whose content is fetched at once while a node replays them
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
    is_in_memory: bool = False
    reminders: Reminders = field(default_factory=Reminders)
    twins: tuple[PeerId, ...] = ()  # members that offered the same bytes as this one

    @property
    def weights(self) -> dict[PeerId, float]:
        """The weights of the contributions that were taken."""
        return {self.group[member]: weight for member, weight in self.close.members}


@dataclass(frozen=True, slots=True)
class OpenOffer:
    """This peer's offer to a round, made in view number `view`; the node waits for the outcome
    until `ends_s` (local clock)."""

    offer: Offer
    view: int
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
    withdrawn: set[int] = field(default_factory=set)  # rounds to which an offer of ours was dropped
    asked_s: float = 0.0
    applied: int = -1  # the last round that the node is past, as far as it said
    # whether the node replays rounds: none that it has not applied leaves the log
    catching_up: bool = False
    # of fetching the content of rounds that are replayed: on a slow line, those before come first
    turn: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(FILLS))
    open_round: int = -1  # the last one of which a member said that it is not decided
    # Members that announced that the next round left their log.
    forgotten: LogTruncation = field(default_factory=LogTruncation)
    skipped: bool = False  # tokens are unknown until the next decision
    meter: TrafficMeter = field(default_factory=TrafficMeter)

    @property
    def next(self) -> int:
        """The round after the newest."""
        return self.newest + self.stream.cadence.stride

    def changes(self, stage: int | None) -> bool:
        """Return whether the rounds change the state of a `stage` (None: of whole models)."""
        return self.stream.wants == "all" and self.stream.stage == stage

    def entry(self, number: int) -> LoggedRound | None:
        """Return a decided round from the log or the old rounds before it, or None."""
        return self.log.get(number) or self.old_log.get(number)

    def has_passed(self, number: int) -> bool:
        """Return whether a round is decided, here or as far as others have said."""
        return number <= self.newest or number < self.seen

    def resolve(self, number: int, outcome: RoundOutcome) -> None:
        """Pass the outcome of a round to its waiting exchange, if any."""
        placed = self.offers.get(number)
        if placed is not None and not placed.outcome.done():
            placed.outcome.set_result(outcome)

    def withdraw(self, number: int) -> None:
        """Note that this peer does not wait for a round any more, in which its offer may be."""
        self.withdrawn = {at for at in self.withdrawn if at in self.log or at > self.newest}
        self.withdrawn.add(number)

    def to_offer(self, outcome: RoundOutcome) -> RoundOutcome:
        """Return an outcome as that of the present offer: what was taken may be of an earlier one,
        made of work that this peer has given up since."""
        if outcome.key.round not in self.withdrawn:
            return outcome
        return replace(outcome, taken=(False,) * len(outcome.taken))

    @property
    def whole(self) -> int:
        """The last round up to which everything is decided and here."""
        entries = itertools.chain(self.old_log.items(), self.log.items())
        incomplete = (number for number, entry in entries if not entry.complete)
        return min(incomplete, default=self.next) - self.stream.cadence.stride


Streams = Mapping[str, StreamState]


class KeptRounds:
    """The logs of the streams that change the state of a `stage` (None: of whole models), for those
    that read it (swarm/protocol/state_readers.py)."""

    def __init__(self, streams: Streams, stage: int | None) -> None:
        self._streams, self._stage = streams, stage

    @property
    def names(self) -> Collection[str]:
        """The streams."""
        return [state.stream.name for state in self._states]

    @property
    def _states(self) -> list[StreamState]:
        return [state for state in self._streams.values() if state.changes(self._stage)]

    def lead_on(self, number: int, firsts: Mapping[str, int]) -> bool:
        """Return whether all rounds after this one are kept; of some streams, from these on."""
        return all(
            next(iter(state.log), state.next)
            <= firsts.get(
                state.stream.name,
                state.stream.cadence.upto(number) + state.stream.cadence.stride,
            )
            for state in self._states
        )

    def size_bytes(self, number: int) -> int:
        """Return the bytes of the kept rounds after this one."""
        return sum(size_after(state, number) for state in self._states)

    def are_here(self) -> bool:
        """Return whether this peer has all rounds of which it knows that they are decided."""
        return all(
            state.whole == state.newest and state.seen <= state.next for state in self._states
        )

    def are_followed(self) -> bool:
        """Return whether a member said that no further round is decided."""
        return all(state.open_round == state.next for state in self._states)

    def keep(self) -> None:
        """Let no round that the node has not applied leave the logs until it offers again, or has
        caught up: it takes a state over, from which they lead on."""
        for state in self._states:
            state.catching_up = True

    def caught_up(self) -> None:
        """Note that the node has applied what is here."""
        for state in self._states:
            state.catching_up = False


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
        while len(state.log) > most and self._may_retire(state, next(iter(state.log))):
            self._retire(state, next(iter(state.log)))

    def _retire(self, state: StreamState, number: int) -> None:
        """Move a round from the log to the old ones; drop it unless its last shards are kept."""
        self._drop(state, number)
        self._context.readers.outgrown()

    def _drop(self, state: StreamState, number: int) -> None:
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
        """Let a stream go on with this round, or with the first that is not in the state here."""
        looks_on = state.stream.wants != "all"
        first = first_round if looks_on else max(first_round, state.whole + 1)
        self._forget(state, first)
        before = state.stream.cadence.upto(first - 1)
        # who only looks on has no state that would be led on by rounds in between
        if state.newest > before or (looks_on and state.newest < before):
            state.newest = state.seen = before
            last = state.entry(before)
            state.tokens = last.close.tokens if last is not None else state.opened_tokens
            state.skipped = looks_on and last is None

    def _forget(self, state: StreamState, first_round: int) -> None:
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
        entry.is_in_memory = True
        state.resolve(number, outcome(state.stream, number, entry, self._context.bundles))
        self._fit(state)
        self._shelve(state)

    def _shelve(self, state: StreamState) -> None:
        """Move large content out of memory, and together small ones that stay for long."""
        shelve, last = self._context.shelve, state.newest - LOG_ROUNDS * state.stream.cadence.stride
        if shelve is None:
            return
        there = {number: entry for number, entry in state.log.items() if entry.is_in_memory}
        large = {n: one for n, one in there.items() if one.content_bytes >= MIN_SHELVED_BYTES}
        old = {n: one for n, one in there.items() if n <= last and n not in large}
        if sum(entry.content_bytes for entry in old.values()) >= MIN_SHELVED_BYTES:
            large |= old
        for entry in large.values():
            entry.is_in_memory = False
        if large:
            keys = [Key(state.stream.name, number) for number in large]
            self._context.spawn(self._context.store.move_together(keys, shelve))

    def _fit(self, state: StreamState) -> None:
        """Drop the oldest complete rounds until the content of the others fits."""
        _, most_bytes = _limits(state.stream)
        while size_after(state, -1) > most_bytes:
            oldest, entry = next(iter(state.log.items()))
            is_last = oldest == state.newest or not entry.complete
            if is_last or not self._may_retire(state, oldest):
                return
            self._retire(state, oldest)

    def _may_retire(self, state: StreamState, number: int) -> bool:
        """Return whether nobody needs a round: neither this peer's own node, nor a peer that reads
        its state, for which a newer state is cheaper once the rounds since are as large."""
        if state.catching_up and number > state.applied:
            return False
        wanted = self._context.readers.wanted(state.stream.name)
        if wanted is None:
            return True
        after, most_bytes = wanted
        return number <= after or size_after(state, after) > max(most_bytes, MIN_LATER_BYTES)

    def give_up(self, state: StreamState, next_round: int) -> None:
        """Resolve waiting exchanges as lost: no peer can tell their outcome any more."""
        for number in state.offers:
            state.resolve(number, RoundOutcome(Key(state.stream.name, number), "lost", next_round))


def size_after(state: StreamState, number: int) -> int:
    """Return the bytes of content of the logged rounds after this one."""
    return sum(entry.content_bytes for at, entry in state.log.items() if at > number)


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


def change(streams: Streams, stage: int | None = None) -> bool:
    """True if there are streams that change a stage (None: whole models) here."""
    return any(state.changes(stage) for state in streams.values())


def first_open(streams: Streams, stage: int | None = None) -> int:
    """Return the first round of the streams that change a stage (None: whole models) that is not
    wholly here; 0 without such streams."""
    states = [state for state in streams.values() if state.changes(stage)]
    return min((state.whole + state.stream.cadence.stride for state in states), default=0)


def are_within(streams: Streams, begins: Floor) -> bool:
    """True if no state here is of later rounds than those before `begins`: a return may begin
    there."""
    stages = {state.stream.stage for state in streams.values() if state.stream.wants == "all"}
    return all(first_open(streams, stage) <= axes.at(begins, stage) for stage in stages)


def are_before(streams: Streams, begins: Floor) -> bool:
    """True if nothing that is here of any stream is of a round from `begins` on."""
    states = [state for state in streams.values() if state.stream.wants == "all"]
    return all(state.whole < axes.at(begins, state.stream.stage) for state in states)
