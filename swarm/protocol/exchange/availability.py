"""The items of one exchange as one member sees them: which are here, and who holds which.

Kept up to date by small steps: an exchange has thousands of items and as many events, so that
looking through all of them at each event would cost the square.
"""

import collections
from collections.abc import Iterable
from typing import Annotated

import msgspec

from farflock.swarm.messages import MAX_MEMBERS, MAX_SHARDS, Digest, Mask, Size
from farflock.swarm.protocol.quorum import is_quorum

PREFIX_BYTES = 8
_NOTHING = bytes(PREFIX_BYTES)


class RoundItem(msgspec.Struct, frozen=True, array_like=True):
    """One piece of the result: its place, its content, and the members in it (bit i: member i)."""

    index: Annotated[int, msgspec.Meta(ge=0, lt=MAX_SHARDS * MAX_MEMBERS)]
    digest: Digest
    size: Size
    mask: Mask


def contributions(item: RoundItem) -> int:
    """The number of members whose contributions are in an item."""
    return int.from_bytes(item.mask, "little").bit_count()


def mask_of(members: Iterable[int]) -> bytes:
    """The mask of an item with these members' contributions."""
    return sum(1 << member for member in members).to_bytes(8, "little")


def has(item: RoundItem, member: int) -> bool:
    """True if a member's contribution is in an item."""
    return bool(int.from_bytes(item.mask, "little") >> member & 1)


class Availability:
    """The items that are here, of places 0 to `places` - 1, as member `me` of `members` sees it.

    Rival items may be announced for one place. The rival with the smallest digest is preferred; if
    `fewest`, one with as few contributions as possible.
    """

    def __init__(self, places: int, members: int, me: int, *, fewest: bool = False) -> None:
        self._members, self._me, self._fewest = members, me, fewest
        # The members whose majority counts, where it is not that of all.
        self._electorate: frozenset[int] | None = None
        self.rivals: list[dict[bytes, RoundItem]] = [{} for _ in range(places)]
        # Digests that are here, of items and of whatever else the exchange needs.
        self.held: set[bytes] = set()
        self.corrupt: set[bytes] = set()  # what no correct encoder wrote
        self.agreed: dict[int, RoundItem] = {}  # by place: what is here, and a quorum says to hold
        self.version = 0  # changes with `agreed`
        # By announced digest, the places that it is announced for.
        self._places: dict[bytes, list[int]] = collections.defaultdict(list)
        self._prefixes = bytearray(PREFIX_BYTES * places)  # what I report
        self._said: dict[int, bytes] = {}
        self._missing: set[int] = set()
        self._filled: set[int] = set()

    def add(self, item: RoundItem) -> bool:
        """Note an announced item; False if it is known already, or one rival too many."""
        rivals = self.rivals[item.index]
        if item.digest in rivals or len(rivals) >= self._members:
            return False
        rivals[item.digest] = item
        self._places[item.digest].append(item.index)
        self._update(item.index)
        return True

    def hold(self, *digests: bytes) -> None:
        """This content is here from now on."""
        self.held.update(digests)
        self._update_all(digests)

    def spoil(self, *digests: bytes) -> None:
        """This content is corrupt, whoever has it."""
        self.corrupt.update(digests)
        self._update_all(digests)

    def hear(self, member: int, prefixes: bytes) -> None:
        """Note what another member says to hold."""
        before = self._said.get(member, b"")
        self._said[member] = prefixes
        for index in range(len(self.rivals)):
            place = slice(PREFIX_BYTES * index, PREFIX_BYTES * (index + 1))
            if prefixes[place] != before[place]:
                self._agree(index)

    def rely_on(self, electorate: frozenset[int]) -> None:
        """From now on what more than half of these hold is agreed, whatever the others do."""
        if electorate != self._electorate:
            self._electorate = electorate
            for index in range(len(self.rivals)):
                self._agree(index)

    def said(self, item: RoundItem) -> list[int]:
        """The other members who say to hold this item."""
        place = slice(PREFIX_BYTES * item.index, PREFIX_BYTES * (item.index + 1))
        prefix = item.digest[:PREFIX_BYTES]
        return [member for member, prefixes in self._said.items() if prefixes[place] == prefix]

    @property
    def report(self) -> bytes:
        """My holdings, as others hear of them: of each place the first bytes of one digest, or zeros."""
        return bytes(self._prefixes)

    @property
    def filled(self) -> bool:
        """True if something is here for every place."""
        return len(self._filled) == len(self.rivals)

    @property
    def whole(self) -> bool:
        """True if everything that was announced so far is here, or cannot be used."""
        return not self._missing

    def wanted(self) -> list[RoundItem]:
        """The announced items that are neither here nor corrupt."""
        return [
            item
            for index in sorted(self._missing)
            for item in self.rivals[index].values()
            if item.digest not in self.held and item.digest not in self.corrupt
        ]

    def _ranked(self, index: int) -> list[tuple[bytes, RoundItem]]:
        """A place's rivals, the preferred one first."""
        rivals = self.rivals[index]
        if len(rivals) < 2:
            return list(rivals.items())
        return sorted(
            rivals.items(),
            key=lambda entry: (contributions(entry[1]) if self._fewest else 0, entry[0]),
        )

    def _update_all(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            for index in self._places.get(digest, ()):
                self._update(index)

    def _update(self, index: int) -> None:
        rivals = self.rivals[index]
        here = next((digest for digest, _ in self._ranked(index) if digest in self.held), _NOTHING)
        self._prefixes[PREFIX_BYTES * index : PREFIX_BYTES * (index + 1)] = here[:PREFIX_BYTES]
        if here != _NOTHING:
            self._filled.add(index)
        if all(digest in self.held or digest in self.corrupt for digest in rivals):
            self._missing.discard(index)
        else:
            self._missing.add(index)
        self._agree(index)

    def _agree(self, index: int) -> None:
        agreed = self._agreed(index)
        if agreed is not self.agreed.get(index):
            self.version += 1
            if agreed is None:
                del self.agreed[index]
            else:
                self.agreed[index] = agreed

    def _agreed(self, index: int) -> RoundItem | None:
        for digest, item in self._ranked(index):
            if digest in self.held and self._suffices({self._me, *self.said(item)}):
                return item
        return None

    def _suffices(self, holders: set[int]) -> bool:
        if self._electorate is None:
            return is_quorum(holders, self._members)
        return 2 * len(holders & self._electorate) > len(self._electorate)
