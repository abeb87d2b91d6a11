"""The terms of a group's exchanges, and the list that states the outcome of one."""

import functools
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec

from farflock.swarm.links import PeerId
from farflock.swarm.messages import MAX_BUNDLES, MAX_MEMBERS, Count, Index, Weight
from farflock.swarm.protocol.entitlement import UNBOUNDED, Entitlement, Precedent
from farflock.swarm.protocol.exchange.availability import RoundItem
from farflock.swarm.protocol.exchange.bundles import BundleCut


class CloseList(msgspec.Struct, frozen=True, array_like=True):
    """A group's decision about an exchange; a list without items says that the exchange failed.

    `members` are the included members with their weights. `tokens` are the run's agreed tokens
    after this round, `state` is the hash of the state before it that most members announced.
    `previous` is the hash of the stream's list before, empty in the first one, and `idle` has, for
    each member of the view, the rounds up to this one in which it was not included; `counted`, in
    how many it was."""

    items: Annotated[tuple[RoundItem, ...], msgspec.Meta(max_length=MAX_BUNDLES)]
    members: Annotated[tuple[tuple[Index, Weight], ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    tokens: Count
    state: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    previous: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    idle: Annotated[bytes, msgspec.Meta(max_length=MAX_MEMBERS)] = b""
    counted: Annotated[bytes, msgspec.Meta(max_length=MAX_MEMBERS)] = b""


@dataclass(frozen=True, slots=True)
class RoundTerms:
    """The terms of a stream's exchanges, known to all members in advance.

    `group` is 0 for all members of the view and 2 for pairs. A gather with `enough` above 0 closes
    as soon as that many contributions are complete; 0 turns this off. In a `uniform` mean each
    contribution is in all bundles or in none. In a `witnessed` exchange a voter must hold the last
    shards of a list before it accepts the list. `entitlement` bounds what a member may claim."""

    kind: Literal["mean", "gather"]
    shards: int
    deadline_s: float = 30.0
    min_participants: int = 1
    enough: int = 0
    uniform: bool = False
    witnessed: bool = False
    group: int = 0
    entitlement: Entitlement = UNBOUNDED
    cut: BundleCut = field(init=False)

    def __post_init__(self) -> None:
        cut = BundleCut.of_gather if self.kind == "gather" else BundleCut.of_mean
        object.__setattr__(self, "cut", cut(self.shards, last_alone=self.witnessed))

    @property
    def bundles(self) -> int:
        """The number of bundles: of a contribution, and of a mean."""
        return self.cut.bundles


class BadCloseList(ValueError):
    """Raised for a close list that no correct member proposes."""


class OtherPast(BadCloseList):
    """Raised for a close list that does not follow from the list before it, as that is known here:
    its proposer lies, or holds another one."""


class NotEntitled(BadCloseList):
    """Raised for an offer or a close list with more than its members may claim; the message says
    which. Both sides know the same list before, so no honest peer makes either."""


_decoder = msgspec.msgpack.Decoder(CloseList)
_fields_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])
_PREVIOUS = CloseList.__struct_fields__.index("previous")


def decode_close_list(raw: bytes, terms: RoundTerms, contributors: Collection[int]) -> CloseList:
    """Decode a value proposed to a group with these contributors.

    Raise `BadCloseList` for anything that could not be applied."""
    try:
        close = _decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadCloseList(f"not a close list: {error}") from None
    members = [member for member, _ in close.members]
    masks = [int.from_bytes(item.mask, "little") for item in close.items]
    union = functools.reduce(operator.or_, masks, 0)
    included = [member for member in range(MAX_MEMBERS) if union >> member & 1]
    if members != included or not all(masks) or not set(members) <= set(contributors):
        raise BadCloseList(
            f"a close list names members {members}, its items {included}, "
            f"and the contributors are {sorted(contributors)}"
        )
    if terms.uniform and len(set(masks)) > 1:
        raise BadCloseList(
            "bundles of a uniform mean with different contributions; each is in all bundles or none"
        )
    _require_places(close, terms, members, masks)
    return close


def require_entitled(
    close: CloseList, prior: Precedent, entitlement: Entitlement, peers: Sequence[PeerId]
) -> None:
    """Raise `BadCloseList` for a list that does not follow from the one before, and `NotEntitled`
    for one that counts more than its members may claim.

    Where the list before is not known, only the bounds are checked."""
    included = [member for member, _ in close.members]
    follows = prior.hash, prior.idle_after(peers, included), prior.counted_after(peers, included)
    if prior.hash is not None and (close.previous, close.idle, close.counted) != follows:
        raise OtherPast("a close list that does not follow from the list before it")
    rounds = [prior.rounds(peers[member]) for member in included]
    most = prior.tokens + sum(map(entitlement.max_tokens, rounds))
    too_heavy = any(
        weight > entitlement.max_weight(number)
        for number, (_, weight) in zip(rounds, close.members, strict=True)
    )
    if too_heavy or not prior.tokens <= close.tokens <= most:
        kind = BadCloseList if prior.hash is None else NotEntitled
        raise kind("close list above its members' entitlement")


def previous_of(value: bytes) -> bytes | None:
    """Return the hash of the list before an encoded one, which may be long; None if it is no
    list."""
    try:
        return msgspec.msgpack.decode(_fields_decoder.decode(value)[_PREVIOUS], type=bytes)
    except (msgspec.MsgspecError, RecursionError, IndexError):
        return None


def _require_places(
    close: CloseList, terms: RoundTerms, members: list[int], masks: list[int]
) -> None:
    """Raise `BadCloseList` unless the items are its members' bundles, in order."""
    owners = members if terms.kind == "gather" else [0] if close.items else []
    places = [owner * terms.bundles + bundle for owner in owners for bundle in range(terms.bundles)]
    if [item.index for item in close.items] != places:
        raise BadCloseList(
            f"a close list of {len(close.items)} items; the terms ask for {len(places)}, in order"
        )
    owned = (
        mask == 1 << item.index // terms.bundles
        for mask, item in zip(masks, close.items, strict=True)
    )
    if terms.kind == "gather" and not all(owned):
        raise BadCloseList("a gathered item has contributions of others than its owner")


def last_bundles(close: CloseList, bundles: int) -> list[RoundItem]:
    """Return the items of the last bundle: one per contribution, or the one reduction of it.

    In a witnessed exchange that is the last shard alone."""
    return [item for item in close.items if item.index % bundles == bundles - 1]
