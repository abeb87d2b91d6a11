"""One exchange of a whole group: offers, reduction shard by shard, and one close list that all apply.

Sans I/O: events come in (`receive`, `fetched`, `reduced`, `tick`), actions go out (`take`). In a mean, shard s is
reduced by the first live member of a rotation that is the same in all rounds; each reduced shard is an item. In a gather, each
member's shards are the items. Members fetch the items and say what they hold; a proposer puts forward only what a
quorum holds; what is decided (swarm/protocol/decide.py) is applied by everybody who holds its content, and fetched by who does
not. The same code runs for a member that is still computing: it has no offer yet, but reduces, holds and votes.

A round that cannot be filled by the deadline is decided empty, so that all agree that it failed.

In a `uniform` mean all shards hold the same contributions, so that each is in as a whole or not at all: where one shard has
been reduced without a member, because it died while others fetched from it, the reducers of the others reduce again.

Of a model that is cut into stages, only a stage's members contribute to its exchanges, reduce and hold them; the others vote,
so that a stage of two members can decide when one of them dies. Such content is put forward as soon as most of the living
contributors hold it: of a stage that has one living member left nobody else could. In a `witnessed` exchange who only votes
accepts a list once it holds the last shard itself: what that says outlives the stage.
"""

import collections
import functools
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec

from farflock.swarm.links import PeerId
from farflock.swarm.messages import (
    MAX_MEMBERS,
    MAX_SHARDS,
    Count,
    Decided,
    Holds,
    Index,
    Key,
    Message,
    Offer,
    Promise,
    Propose,
    Reduced,
    Weight,
)
from farflock.swarm.protocol.decide import Decision, Sends
from farflock.swarm.protocol.groups import reducers
from farflock.swarm.protocol.holdings import Holdings, Item, contributions

RESEND_S = 0.5
FIRST_PROPOSERS = 3  # hear at once who holds what; others at the next repetition
TAKEOVER_S = 1.0  # each later proposer waits this much longer before it steps in for a silent one
MOST_DOUBLED = 6  # a proposer that is overtaken waits twice as long each time: over long lines one has to get through
SOFT = 0.5  # of the deadline: until then the live but slow are waited for
LATE_REDUCER = 0.7  # of the deadline: from then on a live but silent reducer is replaced


class CloseList(msgspec.Struct, frozen=True, array_like=True):
    """What a group decided about an exchange; no items: it failed, for everybody.

    `members` are the included ones with their weights, `tokens` the run's agreed tokens after this round, `state` the
    hash of the state before it that most members announced.
    """

    items: Annotated[tuple[Item, ...], msgspec.Meta(max_length=MAX_SHARDS)]
    members: Annotated[tuple[tuple[Index, Weight], ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    tokens: Count
    state: Annotated[bytes, msgspec.Meta(max_length=32)] = b""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get this chunk, a payload of `shard`, from any of these members, best first; asked anew, for more come to hold
    it."""

    shard: int
    digest: bytes
    size: int
    holders: Callable[[], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Reduce:
    """Reduce these members' chunks of a shard: (member, weight, digest)."""

    shard: int
    inputs: tuple[tuple[int, float, bytes], ...]


Action = tuple[int, Message] | Fetch | Reduce


@dataclass(frozen=True, slots=True)
class Terms:
    """What all members know of an exchange beforehand."""

    kind: Literal["mean", "gather"]
    shards: int
    deadline_s: float
    min_participants: int = 1
    enough: int = 0  # contributions of a gather that are; 0: everybody's
    uniform: bool = False  # a mean whose shards all have the same contributions
    witnessed: bool = False  # who only votes holds the last shard before it accepts a list


class BadCloseList(ValueError):
    """A close list that no correct proposer puts forward."""


_close_list_decoder = msgspec.msgpack.Decoder(CloseList)


def decode_close_list(raw: bytes, terms: Terms, contributors: Collection[int]) -> CloseList:
    """Decode a value put forward to a group in which these members contribute; `BadCloseList` for anything that could not be
    applied."""
    try:
        close = _close_list_decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadCloseList(f"not a close list: {error}") from None
    members = [member for member, _ in close.members]
    masks = [int.from_bytes(item.mask, "little") for item in close.items]
    included = [member for member in range(MAX_MEMBERS) if any(mask >> member & 1 for mask in masks)]
    if members != included or not all(masks) or not set(members) <= set(contributors):
        raise BadCloseList(f"a close list of members {members}, its items of {included}; {contributors} contribute")
    if terms.uniform and len(set(masks)) > 1:
        raise BadCloseList("shards with different contributions, in a mean that has each as a whole")
    owners = members if terms.kind == "gather" else [0] if close.items else []
    if [item.index for item in close.items] != [
        owner * terms.shards + s for owner in owners for s in range(terms.shards)
    ]:
        raise BadCloseList(f"a close list of {len(close.items)} items, but {terms.shards} shards")
    if terms.kind == "gather" and any(
        mask != 1 << item.index // terms.shards for mask, item in zip(masks, close.items, strict=True)
    ):
        raise BadCloseList("a gathered item that is not its owner's alone")
    return close


def told(close: CloseList, shards: int) -> list[Item]:
    """The last shards of a list's contributions, or what they were reduced to."""
    return [item for item in close.items if item.index % shards == shards - 1]


@dataclass(slots=True)
class Collective:
    """One exchange as member `me` of `group` sees it. Of the group's indices, `ordered` says who proposes first, `rotation` who
    reduces what: the same for all rounds, unlike the former, which it is where it is not given. `rotation` lists those who
    contribute; the others only vote."""

    key: Key
    view: bytes
    group: tuple[PeerId, ...]
    me: int
    ordered: tuple[int, ...]
    terms: Terms
    started_s: float
    prior_tokens: int | None = 0  # None: not known here, so that I put nothing forward
    holding: Callable[[bytes], bool] = lambda digest: False  # whether the chunk store has this digest
    rotation: tuple[int, ...] | None = None
    holds_back: Callable[[], bool] = lambda: (
        False
    )  # whether a next view may take this round over, so that I must not vote

    decision: Decision = field(init=False)
    holdings: Holdings = field(init=False)
    offers: dict[int, Offer] = field(default_factory=dict)
    close: CloseList | None = None
    complete: bool = False  # decided, and all its content is here
    suspects: frozenset[int] = frozenset()
    _fetching: set[bytes] = field(default_factory=set)
    _contributed: dict[bytes, set[int]] = field(default_factory=dict)  # shards that need a contribution not yet here
    _reducing: dict[int, tuple[tuple[int, float, bytes], ...]] = field(default_factory=dict)  # inputs by shard
    _announced: dict[int, Reduced] = field(default_factory=dict)
    _announcers: dict[bytes, set[int]] = field(default_factory=dict)  # of each item: they hold it
    _actions: list[Action] = field(default_factory=list)
    _reducers: tuple[int, ...] = field(init=False)
    contributors: frozenset[int] = field(init=False)
    contributes: bool = field(init=False)  # whether I do
    _common: int = field(init=False)  # the members that are in every reduction announced so far; all, if not uniform
    _may_narrow: bool = False  # a reduction was announced since `_narrow` looked
    _reported: bytes = b""
    _sent_s: float = 0.0
    _proposed_s: float | None = None
    _proposals: int = 0
    _ready_s: float | None = None
    _gathered: tuple[int, list[int]] = (-1, [])  # whose payload is agreed whole, as of a version of the holdings

    def __post_init__(self) -> None:
        self._reducers = self.ordered if self.rotation is None else self.rotation
        self.contributors = frozenset(self._reducers)
        self.contributes = self.me in self.contributors
        self._common = (1 << len(self.group)) - 1
        places = self.terms.shards * (len(self.group) if self.terms.kind == "gather" else 1)
        self.holdings = Holdings(places, len(self.group), self.me, fewest=self.terms.uniform)
        self.decision = Decision(
            self.key,
            self.view,
            self.me,
            len(self.group),
            self.ordered,
            holds_back=self.holds_back,
            ready=self._is_witnessed,
        )
        self._rely_on_the_living()

    # events

    def offer(self, now_s: float, offer: Offer) -> None:
        """Bring my own contribution; only the first one counts, for a key is used once."""
        if self.me not in self.offers:
            self._take_offer(self.me, offer)
            self._to_others(offer)
        self.advance(now_s, range(self.terms.shards))

    def receive(self, now_s: float, sender: int, message: Message) -> None:
        """Take in a member's message about this key; `BadCloseList` if it carries a value that cannot be one."""
        if isinstance(message, Propose | Promise | Decided) and message.value is not None:
            decode_close_list(message.value, self.terms, self.contributors)
        if self.decision.decided is not None and not isinstance(message, Decided):
            self._actions += self.decision.receive(sender, message) or self._remind(sender, message)
            return
        concerned = range(0)
        match message:
            case Offer() | Reduced() | Holds() if not {self.me, sender} <= self.contributors:
                return  # content is no affair of who only votes
            case Offer():
                self._take_offer(sender, message)
                concerned = range(self.terms.shards)
            case Reduced():
                self._take_reduced(sender, message)
            case Holds(prefixes=prefixes):
                self.holdings.hear(sender, prefixes)
            case _:
                self._actions += self.decision.receive(sender, message)
        self.advance(now_s, concerned)

    def fetched(self, now_s: float, digest: bytes, *, intact: bool, corrupt: bool = False) -> None:
        """A chunk has arrived (`intact`), could not be had now, or holds what no correct encoder wrote."""
        self._fetching.discard(digest)
        if corrupt:
            self.holdings.spoil(digest)
        elif intact:
            self.holdings.hold(digest)
            self._actions += self.decision.resume()
        self.advance(now_s, self._contributed.pop(digest, ()))

    def reduced(self, now_s: float, shard: int, digest: bytes, size: int, rejected: tuple[int, ...]) -> None:
        """My reduction of a shard is in the chunk store; payloads of `rejected` members were corrupt and left out."""
        inputs = self._reducing[shard]
        self._spoil(entry for member, _, entry in inputs if member in rejected)
        self.holdings.hold(digest)
        mask = _mask([member for member, _, _ in inputs if member not in rejected])
        message = self._announced[shard] = Reduced(self.key, self.view, shard, digest, size, mask)
        self._take_reduced(self.me, message)
        self._to_others(message)
        self.advance(now_s, ())

    def unreduced(self, now_s: float, shard: int) -> None:
        """No payload of a reduction was usable; try again with whatever else comes."""
        self._spoil(digest for _, _, digest in self._reducing.pop(shard))
        self.advance(now_s, (shard,))

    def tick(self, now_s: float, suspects: frozenset[int]) -> None:
        """Time passes: who is suspect, what to repeat, what to take over."""
        self.suspects = suspects - {self.me}
        if self.complete:
            return
        self._rely_on_the_living()
        if now_s - self._sent_s >= RESEND_S:
            self._sent_s = now_s
            self._resend()
        self._collect(self.holdings.wanted())
        self.advance(now_s, range(self.terms.shards))

    def take(self) -> list[Action]:
        """The actions since the last call, in order."""
        actions, self._actions = self._actions, []
        return actions

    # what is known

    @property
    def _place(self) -> int:
        return self.ordered.index(self.me)

    @property
    def ends_s(self) -> float:
        """The deadline: from then on an empty round is put forward."""
        return self.started_s + self.terms.deadline_s

    def awaited(self) -> tuple[PeerId, ...]:
        """Whom this exchange waits for now: live members whose offer is missing."""
        return tuple(
            peer
            for member, peer in enumerate(self.group)
            if member in self._living and member not in self.offers and member != self.me
        )

    def taken(self) -> tuple[bool, ...]:
        """By shard: is my contribution in the result?"""
        assert self.close is not None, f"{self.key} is not decided"
        mine = {item.index % self.terms.shards for item in self.close.items if _has(item.mask, self.me)}
        return tuple(shard in mine and self.me in self.offers for shard in range(self.terms.shards))

    @property
    def _living(self) -> frozenset[int]:
        """Who contributes and is not suspect."""
        return self.contributors - self.suspects

    def _rely_on_the_living(self) -> None:
        """In a group of whom all contribute, what a decision rests on is held by a majority of all, for it must be decided by
        one anyway."""
        if len(self.contributors) < len(self.group):
            self.holdings.rely_on(self._living)

    # the machine

    def advance(self, now_s: float, concerned: Iterable[int]) -> None:
        """Do whatever has become possible; `concerned` are the shards whose reduction may have."""
        if self.decision.decided is not None:
            self._finish()
            return
        if self.terms.kind == "mean" and self.contributes:
            self._reduce(now_s, concerned)
            if self._may_narrow:
                self._narrow()
        self._report()
        self._propose(now_s)
        if self.decision.decided is not None:
            self._finish()

    def _take_offer(self, member: int, offer: Offer) -> None:
        if member in self.offers or len(offer.digests) != self.terms.shards:
            return
        self.offers[member] = offer
        if member == self.me:
            for digest in offer.digests:
                self.holdings.hold(digest)
        if self.terms.kind == "gather":
            for shard, (digest, size) in enumerate(zip(offer.digests, offer.sizes, strict=True)):
                self._add_item(member, Item(member * self.terms.shards + shard, digest, size, _mask([member])))

    def _take_reduced(self, member: int, message: Reduced) -> None:
        known = 0 < int.from_bytes(message.mask, "little") < 1 << len(self.group)
        if message.shard < self.terms.shards and self.terms.kind == "mean" and known:
            self._add_item(member, self._item_of(message))

    def _item_of(self, message: Reduced) -> Item:
        return Item(message.shard, message.digest, message.size, message.mask)

    def _add_item(self, member: int, item: Item) -> None:
        """Note an item that a member announces, and fetch it."""
        if self.terms.uniform:
            self._common &= int.from_bytes(item.mask, "little")
            self._may_narrow = True
        if self.holdings.add(item):
            self._announcers.setdefault(item.digest, set()).add(member)
            self._collect([item])
        elif item.digest in self._announcers:
            self._announcers[item.digest].add(member)

    def _spoil(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            self.holdings.spoil(digest)

    def _reduce(self, now_s: float, shards: Iterable[int]) -> None:
        """Fetch the contributions to my shards as they are offered; reduce once all that will come have come."""
        for shard in sorted(shards):
            if shard in self._reducing or not self._is_mine(shard, now_s):
                continue
            inputs = self._inputs(shard)
            missing = [(member, digest) for member, _, digest in inputs if digest not in self.holdings.held]
            for member, digest in missing:
                self._contributed.setdefault(digest, set()).add(shard)
                self._fetch(shard, digest, self.offers[member].sizes[shard], functools.partial(_only, member))
            if self._may_reduce(now_s, len(inputs), {member for member, _ in missing}):
                held = tuple(entry for entry in inputs if entry[2] in self.holdings.held)
                self._reducing[shard] = held
                self._actions.append(Reduce(shard, held))

    def _narrow(self) -> None:
        """Reduce once more what has contributions in it that another shard does not have."""
        self._may_narrow = False
        for shard in list(self._announced):
            inputs = self._reducing[shard]
            fewer = tuple(entry for entry in inputs if self._common >> entry[0] & 1)
            has = contributions(self._item_of(self._announced[shard]))
            if max(self.terms.min_participants, 1) <= len(fewer) < has:
                del self._announced[shard]  # until it is replaced
                self._reducing[shard] = fewer
                self._actions.append(Reduce(shard, fewer))

    def _is_mine(self, shard: int, now_s: float) -> bool:
        """Whether I reduce this shard: the first of its rotation does, then whoever follows the dead or the silent."""
        rank = reducers(self._reducers, shard).index(self.me)
        if rank == 0:
            return True
        rivals = [
            digest
            for digest, item in self.holdings.rivals[shard].items()
            if not int.from_bytes(item.mask, "little") & ~self._common
        ]
        if any(digest in self.holdings.held for digest in rivals):
            return False
        if all(member in self.suspects for member in reducers(self._reducers, shard)[:rank]):
            return True
        return not rivals and now_s >= self.started_s + self.terms.deadline_s * LATE_REDUCER + TAKEOVER_S * rank

    def _inputs(self, shard: int) -> tuple[tuple[int, float, bytes], ...]:
        """Contributions to a shard in member order, of those that started from the state that most started from."""
        state = self._common_state()
        return tuple(
            (member, offer.weight, offer.digests[shard])
            for member, offer in sorted(self.offers.items())
            if offer.state == state and offer.digests[shard] not in self.holdings.corrupt and self._common >> member & 1
        )

    def _common_state(self) -> bytes:
        counts = collections.Counter(offer.state for offer in self.offers.values())
        return min(counts, key=lambda state: (-counts[state], state), default=b"")

    def _may_reduce(self, now_s: float, offered: int, missing: set[int]) -> bool:
        all_here = self._living <= self.offers.keys() and not missing - self.suspects
        usable = offered - len(missing) >= self.terms.min_participants
        return usable and (all_here or now_s >= self.started_s + SOFT * self.terms.deadline_s)

    def _collect(self, items: Iterable[Item]) -> None:
        for item in items:
            self._fetch_item(item)

    def _holders(self, item: Item) -> tuple[int, ...]:
        """Who announced it or said they hold it; while none of them lives, who ought to, then anybody. The chunk store
        asks whichever is the least busy of these, so nobody who cannot have it yet may be among them."""
        known = {*self._announcers.get(item.digest, ()), *self.holdings.said(item)} - {self.me}
        if known - self.suspects:
            return tuple(sorted(known))
        gathered = self.terms.kind == "gather"
        ought = (item.index // self.terms.shards,) if gathered else reducers(self._reducers, item.index)
        return tuple(dict.fromkeys(member for member in (*sorted(known), *ought) if member != self.me))

    def _fetch_item(self, item: Item) -> None:
        self._fetch(item.index % self.terms.shards, item.digest, item.size, functools.partial(self._holders, item))

    def _fetch(self, shard: int, digest: bytes, size: int, holders: Callable[[], tuple[int, ...]]) -> None:
        if digest in self._fetching or digest in self.holdings.held or digest in self.holdings.corrupt:
            return
        if self.holding(digest):
            self.holdings.hold(digest)
        else:
            self._fetching.add(digest)
            self._actions.append(Fetch(shard, digest, size, holders))

    def _report(self) -> None:
        """Tell everybody what I hold, once that is all there is; what is held until then is told by `_resend`."""
        ready = self.holdings.whole and (self.holdings.filled or self.terms.kind == "gather")
        if ready and (report := self.holdings.report) != self._reported and any(report):
            self._reported = report
            self._to_others(Holds(self.key, self.view, report))

    def _propose(self, now_s: float) -> None:
        """Put a close list forward if there is one and it is my turn."""
        items = self._ready_items(now_s)
        if items is None:
            return
        self._ready_s = now_s if self._ready_s is None else self._ready_s
        waiting_for = sum(member not in self.suspects for member in self.ordered[: self._place])
        turn_s = self._ready_s + TAKEOVER_S * waiting_for
        patience_s = TAKEOVER_S * (2 + self._place) * 2 ** min(self._proposals - 1, MOST_DOUBLED)
        again_s = 0.0 if self._proposed_s is None else self._proposed_s + patience_s
        if now_s >= turn_s and now_s >= again_s and (value := self._proposal(items, now_s)) is not None:
            self._proposed_s, self._proposals = now_s, self._proposals + 1
            self._actions += self.decision.propose(value)

    def _proposal(self, agreed: Iterable[int], now_s: float) -> bytes | None:
        """The close list of the agreed items at these places, or None to wait on."""
        items = tuple(self.holdings.agreed[index] for index in agreed)
        if not self.offers.keys() >= set(self._included(items)):
            if now_s < self.ends_s:
                return None  # a reducer heard of a member whose offer I lack: who knows its weight proposes
            items = ()
        included = self._included(items)
        members = tuple((member, self.offers[member].weight) for member in included)
        tokens = sum(self.offers[member].tokens for member in included)
        close = CloseList(items, members, (self.prior_tokens or 0) + tokens, self._common_state())
        return msgspec.msgpack.encode(close)

    def _included(self, items: tuple[Item, ...]) -> list[int]:
        return [member for member in range(len(self.group)) if any(_has(item.mask, member) for item in items)]

    def _ready_items(self, now_s: float) -> Iterable[int] | None:
        """The places of what could be decided now: all shards of a mean; of a gather all live members' or, when the
        time is half over or there are enough, whichever there are; nothing at all after the deadline."""
        shards = self.terms.shards
        nothing = None if now_s < self.ends_s and self._living else ()
        if not self.contributes:
            return None if self.prior_tokens is None else nothing
        if self.terms.kind == "mean":
            agreed = self.holdings.agreed
            alike = not self.terms.uniform or len({item.mask for item in agreed.values()}) == 1
            return range(shards) if len(agreed) == shards and alike else nothing
        whole = self._whole()
        if 0 < self.terms.enough <= len(whole):
            return [member * shards + shard for member in whole for shard in range(shards)]
        late = now_s >= self.started_s + SOFT * self.terms.deadline_s
        if len(whole) < self.terms.min_participants or not (self._living <= set(whole) or late):
            return nothing
        return [member * shards + shard for member in whole for shard in range(shards)]

    def _whole(self) -> list[int]:
        """The members of a gather all of whose shards are agreed."""
        if self._gathered[0] != self.holdings.version:
            counts = collections.Counter(index // self.terms.shards for index in self.holdings.agreed)
            whole = sorted(member for member, count in counts.items() if count == self.terms.shards)
            self._gathered = (self.holdings.version, whole)
        return self._gathered[1]

    def _finish(self) -> None:
        """Decided: fetch what I lack of it, then it can be applied."""
        if self.close is None:
            assert self.decision.decided is not None
            self.close = decode_close_list(self.decision.decided, self.terms, self.contributors)
        wanted = self.close.items if self.contributes else ()
        missing = [item for item in wanted if item.digest not in self.holdings.held]
        self._collect(missing)
        self.complete = all(item.digest in self.holdings.held for item in missing)

    def _is_witnessed(self, value: bytes) -> bool:
        """Whether I hold what a list's last shards say, if I must before I accept it; if I do not, I get it."""
        if self.contributes or not self.terms.witnessed:
            return True
        close = decode_close_list(value, self.terms, self.contributors)
        missing = [item for item in told(close, self.terms.shards) if item.digest not in self.holdings.held]
        for item in missing:
            self._fetch(item.index % self.terms.shards, item.digest, item.size, self._witnesses)
        return all(item.digest in self.holdings.held for item in missing)

    def _witnesses(self) -> tuple[int, ...]:
        """Who has what I am asked to accept: its contributors; when they are gone, whoever accepted it before."""
        members = self._living or range(len(self.group))
        return tuple(member for member in sorted(members) if member != self.me)

    def _resend(self) -> None:
        if self.me in self.offers:
            self._to_others(self.offers[self.me])
        for reduced in self._announced.values():
            self._to_others(reduced)
        if any(report := self.holdings.report):
            self._reported = report
            self._to_others(Holds(self.key, self.view, report))
        self._actions += self.decision.retry()

    def _remind(self, sender: int, message: Message) -> Sends:
        """A member that still works on a decided round learns the decision."""
        return [(sender, self.decision.announcement())] if isinstance(message, Offer | Holds | Reduced) else []

    def _to_others(self, message: Message) -> None:
        """To all who contribute."""
        self._actions += [(member, message) for member in sorted(self.contributors) if member != self.me]


def _only(member: int) -> tuple[int, ...]:
    return (member,)


def _mask(members: list[int]) -> bytes:
    return sum(1 << member for member in members).to_bytes(8, "little")


def _has(mask: bytes, member: int) -> bool:
    return bool(int.from_bytes(mask, "little") >> member & 1)
