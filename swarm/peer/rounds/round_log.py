"""The log of a stream's last rounds: each decision, and whether its content is here.

A member that was away learns from others' logs what it missed, in order; a round that has left
every log is lost to a peer that still waits for it. The last shards of a witnessed round are kept
longer than its other content: peers without its state, a pipeline's trainers, follow at their own
pace and must miss none.
"""

import asyncio
import collections
import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from farflock.swarm.bundle_store import BundleStore
from farflock.swarm.context import PeerContext
from farflock.swarm.links import PeerId
from farflock.swarm.messages import Decided, Key, Offer
from farflock.swarm.protocol.agreement import axes
from farflock.swarm.protocol.agreement.convictions import Testimony
from farflock.swarm.protocol.entitlement import (
    BEGINNING,
    MAX_CLAIMED_ROUNDS,
    MAX_COUNTED,
    Precedent,
    precedent_after,
)
from farflock.swarm.protocol.exchange.close_list import CloseList, last_bundles, previous_of
from farflock.swarm.protocol.exchange.reminders import Reminders
from farflock.swarm.protocol.exchange.streams import RoundOutcome, RoundStatus, Stream
from farflock.swarm.protocol.log_truncation import LogTruncation
from farflock.swarm.protocol.views import Chain, Member, View
from farflock.swarm.roles import EVERY, NOTHING

LOG_ROUNDS = 8  # with all content, for members that were away
MAX_LOG_BYTES = 128 * 1024 * 1024  # per stream, of that content; the newest round always stays
MIN_SHELVED_BYTES = 1024 * 1024  # of a round's content; less stays in memory
MISSED = 3  # of the rounds in the log, from which on a member that missed them is a laggard
PROBATION = 8  # rounds, of which one waits for laggards too: so they come back within the log
OLD_LOG_ROUNDS = 256  # with the last shards only, for trainers
OLD_LOG_BYTES = 16 * 1024 * 1024  # per stream: last shards may be large


@dataclass(slots=True)
class LoggedRound:
    """A decided round in the log.

    Indices in the list are places in `group`, of which `contributors` members contribute. It is
    `complete` once all the content that this peer wants is here, and `forsaken` while no peer has
    had it for long."""

    close: CloseList
    group: tuple[PeerId, ...]
    contributors: int
    decided: Decided
    taken: tuple[bool, ...]
    complete: bool = False
    forsaken: bool = False
    content_bytes: int = 0  # once it is complete
    reminders: Reminders = field(default_factory=Reminders)
    testimony: Testimony | None = None  # of a decision in which this peer took part

    @property
    def precedent(self) -> Precedent:
        """The numbers of this list, from which the next round's bounds follow."""
        close = self.close
        said = close.tokens, close.idle, close.counted
        return precedent_after(self.decided.value, *said, self.group)


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
    precedent: Precedent = BEGINNING  # after the newest round
    opened: Precedent = BEGINNING  # before the first round that is kept
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
    # Since when the list of the newest round is missing here, and the members that lack it too.
    unlisted_s: float | None = None
    unlisted: set[PeerId] = field(default_factory=set)

    @property
    def next(self) -> int:
        """The round after the newest."""
        return self.newest + self.stream.cadence.stride

    def entry(self, number: int) -> LoggedRound | None:
        """Return a decided round from the log or the old rounds before it, or None."""
        return self.log.get(number) or self.old_log.get(number)

    def fits(self, decided: Decided) -> bool:
        """True unless a certified list is another one than that of its round here, or does not
        follow from the newest list here."""
        number, newest = decided.key.round, self.precedent.hash
        if (entry := self.entry(number)) is not None:
            return entry.decided.value == decided.value
        is_next = number == self.next and newest is not None
        return not is_next or previous_of(decided.value) in (None, newest)

    @property
    def tokens(self) -> int:
        """The run's agreed tokens after the newest round."""
        return self.precedent.tokens

    @property
    def wants_list(self) -> bool:
        """True if the next round's members could not be held to what they may claim: the list of
        the newest round is missing, and some peer may still have it."""
        return self.unlisted_s is not None

    def list_known(self, precedent: Precedent | None = None) -> None:
        """Note what the newest round's list says; None if no peer has it any more."""
        self.precedent, self.skipped = (
            precedent or self.precedent,
            self.skipped and precedent is None,
        )
        self.unlisted_s, self.unlisted = None, set()

    def skip(self, now_s: float) -> None:
        """Note that the list of the round that is now the newest is missing here."""
        self.skipped, self.precedent = True, Precedent(self.tokens, hash=None)
        self.unlisted_s, self.unlisted = now_s, set()

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


@dataclass(frozen=True, slots=True)
class Verdict:
    """A round's decision: the member whose list it was, those that signed the list, and what each
    contribution weighed, by id."""

    proposer: PeerId
    signers: tuple[PeerId, ...]
    weights: dict[PeerId, float]


def verdict(streams: Mapping[str, StreamState], name: str, number: int) -> Verdict | None:
    """Return who decided a round of a stream; None if the round is not in the log any more."""
    state = streams.get(name)
    entry = None if state is None else state.entry(number)
    if entry is None:
        return None
    decided, group = entry.decided, entry.group
    signers = tuple(group[member] for member, _ in decided.proofs)
    weights = dict(sorted((group[member], weight) for member, weight in entry.close.members))
    return Verdict(group[decided.ballot[1]], signers, weights)


def counted(streams: Mapping[str, StreamState], paired: Mapping[str, Stream], peer: PeerId) -> int:
    """Return in how many rounds a member was counted, by the newest lists known here.

    Rounds of pairs have no lists: there every member is as one that was counted often."""
    if paired and not streams:
        return MAX_COUNTED
    return max((state.precedent.counted.get(peer, 0) for state in streams.values()), default=0)


def has_lapsed(streams: Mapping[str, StreamState], chain: Chain, member: Member) -> bool:
    """True if a learner's place may go to others: no round of the last `MAX_CLAIMED_ROUNDS` counted
    it, although it was a member, by the newest lists known here.

    A voter keeps its place while it answers, for deciding is work too. So do a peer that serves no
    stage, and those of a run with rounds of pairs alone: no list names them."""
    place = chain.newest.index(member.peer, member.incarnation)
    if place is None or chain.newest.electorate.votes(place):
        return False
    if member.stage == NOTHING:
        return False
    since = chain.listed_since(member.peer)
    states = [
        state
        for state in streams.values()
        if state.stream.stage is None or member.stage in (state.stream.stage, EVERY)
    ]
    return bool(states) and all(_is_idle(state, since, member.peer) for state in states)


def _is_idle(state: StreamState, since: View, peer: PeerId) -> bool:
    first = axes.at(since.begins, state.stream.stage)
    rounds = (state.newest - first) // state.stream.cadence.stride
    idle = state.precedent.idle.get(peer, 0)
    return rounds >= MAX_CLAIMED_ROUNDS and idle >= MAX_CLAIMED_ROUNDS


def laggards(state: StreamState, peers: Sequence[PeerId]) -> frozenset[int]:
    """Return the members of a round of whole models (indices) that bring nothing.

    They are not in the newest list, nor in `MISSED` of those in the log, although these rounds had
    them as members."""
    missed: collections.Counter[PeerId] = collections.Counter()
    newest: Set[PeerId] = frozenset()
    for entry in state.log.values() if state.stream.stage is None else ():
        if counted := {entry.group[member] for member, _ in entry.close.members}:
            newest = set(entry.group) - counted
            missed.update(newest)
    return frozenset(
        index for index, peer in enumerate(peers) if peer in newest and missed[peer] >= MISSED
    )


def is_probation(stream: Stream, number: int) -> bool:
    """True if laggards are waited for in this round, so that a member that is slow and was away for
    a while counts again."""
    return number // stream.cadence.stride % PROBATION == 0


def is_filling(streams: Mapping[str, StreamState]) -> bool:
    """True if the next round of whole models that is not wholly here is decided, and its content
    may still come."""
    states = (state for state in streams.values() if state.stream.stage is None)
    nexts = (state.entry(state.whole + state.stream.cadence.stride) for state in states)
    return any(not entry.forsaken for entry in nexts if entry is not None)


def begun_after(stream: Stream, newest: int, tokens: int, now_s: float) -> StreamState:
    """Return a stream whose rounds up to `newest` are in this peer's state; the list of that round
    is missing, unless the stream begins here."""
    if newest < stream.cadence.first:
        return StreamState(stream, newest, seen=newest)
    before = Precedent(tokens, hash=None)
    return StreamState(stream, newest, before, before, seen=newest, unlisted_s=now_s)


class RoundLog:
    """The logs of one peer's streams; the machine of a round that leaves its log is dropped."""

    def __init__(self, context: PeerContext, machines: dict[Key, Any]) -> None:
        self._context, self._machines = context, machines

    def enter(self, state: StreamState, number: int, entry: LoggedRound) -> None:
        """Log a decided round as the stream's newest, and drop the oldest from a full log."""
        self._context.touched.bind(state.stream.stage, number)
        state.newest = number
        state.seen = max(state.seen, number)
        state.list_known(entry.precedent)
        state.log[number] = entry
        while len(state.log) > LOG_ROUNDS:
            self._retire(state, next(iter(state.log)))

    def _retire(self, state: StreamState, number: int) -> None:
        """Move a round from the log to the old ones; drop it unless its last shards are kept."""
        entry = state.log[number]
        if not (state.stream.terms.witnessed and (entry.complete or state.stream.wants == "last")):
            self._shorten(state, 0)
            self.evict(state, number)
            state.opened = entry.precedent
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
            state.opened = entry.precedent
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
        state.resolve(number, outcome(state.stream, number, entry, self._context.bundles))
        self._fit(state)
        shelve = self._context.shelve
        if shelve is not None and entry.content_bytes >= MIN_SHELVED_BYTES:
            self._context.spawn(self._context.store.move(key, shelve))

    def _fit(self, state: StreamState) -> None:
        """Drop the oldest complete rounds until the content of the others fits."""
        while sum(entry.content_bytes for entry in state.log.values()) > MAX_LOG_BYTES:
            oldest, entry = next(iter(state.log.items()))
            if oldest == state.newest or not entry.complete:
                return
            self._retire(state, oldest)

    def give_up(self, state: StreamState, next_round: int) -> None:
        """Resolve waiting exchanges as lost: no peer can tell their outcome any more."""
        for number in state.offers:
            state.resolve(number, RoundOutcome(Key(state.stream.name, number), "lost", next_round))


def _size_bytes(state: StreamState, entry: LoggedRound) -> int:
    """Return the approximate size of an old round."""
    return len(entry.decided.value) + sum(
        item.size for item in last_bundles(entry.close, state.stream.terms.bundles)
    )


def work_pin(key: Key) -> tuple[str, Key]:
    """Return the pin for an exchange in progress; its result is pinned by the key itself."""
    return ("work", key)


def outcome(stream: Stream, number: int, logged: LoggedRound, bundles: BundleStore) -> RoundOutcome:
    """Return the outcome for this peer of a decided round whose content is in the store."""
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
