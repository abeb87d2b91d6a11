"""The terms of a group's exchanges, and the list that states the outcome of one."""

import functools
import operator
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec

from farflock.swarm.messages import MAX_BUNDLES, MAX_MEMBERS, Count, Evaluation, Index, Weight
from farflock.swarm.protocol.exchange.availability import RoundItem
from farflock.swarm.protocol.exchange.bundles import BundleCut


class CloseList(msgspec.Struct, frozen=True, array_like=True):
    """A group's decision about an exchange; a list without items says that the exchange failed.

    `members` are the included members with their weights. `tokens` are the run's agreed tokens
    after this round, `state` is the hash of the state before it that most members announced.
    `evaluations` are what included members measured."""

    items: Annotated[tuple[RoundItem, ...], msgspec.Meta(max_length=MAX_BUNDLES)]
    members: Annotated[tuple[tuple[Index, Weight], ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    tokens: Count
    state: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    evaluations: Annotated[
        tuple[tuple[Index, Evaluation], ...], msgspec.Meta(max_length=MAX_MEMBERS)
    ] = ()


@dataclass(frozen=True, slots=True)
class RoundTerms:
    """The terms of a stream's exchanges, known to all members in advance.

    `group` is 0 for all members of the view and 2 for pairs. A gather with `enough` above 0 closes
    as soon as that many contributions are complete; 0 turns this off. In a `uniform` mean each
    contribution is in all bundles or in none. In a `witnessed` exchange a voter must hold the last
    shards of a list before it accepts the list."""

    kind: Literal["mean", "gather"]
    shards: int
    deadline_s: float = 30.0
    min_participants: int = 1
    enough: int = 0
    uniform: bool = False
    witnessed: bool = False
    group: int = 0
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


_decoder = msgspec.msgpack.Decoder(CloseList)


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
    measuring = [member for member, _ in close.evaluations]
    if measuring != [member for member in members if member in measuring]:
        raise BadCloseList(f"evaluations of {measuring}, and the members are {members}")
    return close


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
