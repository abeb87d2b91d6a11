"""The items of one exchange as one member sees them: those that are here, and the holders of each.

Updated in small steps: an exchange has thousands of items and as many events, so a full scan per
event would be quadratic.
"""

import collections
from collections.abc import Iterable
from typing import Annotated

import msgspec

from farflock.swarm.messages import MAX_BUNDLES, MAX_MEMBERS, Digest, Mask, Size
from farflock.swarm.protocol.agreement.electorate import Electorate

PREFIX_BYTES = 8  # of a digest; enough to tell the few rivals for one place apart
_NOTHING = bytes(PREFIX_BYTES)


class RoundItem(msgspec.Struct, frozen=True, array_like=True):
    """One item of the result: its place, its digest and size, and the members that it contains.

    Bit i of `mask` is set if member i's contribution is in the item."""

    index: Annotated[int, msgspec.Meta(ge=0, lt=MAX_BUNDLES * MAX_MEMBERS)]
    digest: Digest
    size: Size
    mask: Mask


def contributions(item: RoundItem) -> int:
    """Return the number of members whose contributions are in an item."""
    return int.from_bytes(item.mask, "little").bit_count()


def mask_of(members: Iterable[int]) -> bytes:
    """Return the mask of an item with these members' contributions."""
    return sum(1 << member for member in members).to_bytes(8, "little")


def has(item: RoundItem, member: int) -> bool:
    """True if the member's contribution is in the item."""
    return bool(int.from_bytes(item.mask, "little") >> member & 1)


class Availability:
    """The items at places 0 to `places` - 1, as seen by member `me` of an electorate.

    Rival items may be announced for one place. The one with the smallest digest is preferred; with
    `fewest`, the one with the fewest contributions, and of those the smallest digest. All that name
    a member whose offer is not here come last: this member could not propose them, and if nobody
    else has that offer, nobody can."""

    def __init__(
        self, places: int, electorate: Electorate, me: int, *, fewest: bool = False
    ) -> None:
        self._electorate, self._me, self._fewest = electorate, me, fewest
        # Members whose majority counts; None: a quorum of all.
        self._relied: frozenset[int] | None = None
        self._staying: frozenset[int] = frozenset()  # members of which one must hold an item
        self.rivals: list[dict[bytes, RoundItem]] = [{} for _ in range(places)]
        self._contested: set[int] = set()  # places with rivals
        self._offered = 0  # bit mask of the members whose offers are here
        # Digests that are here, of items and of all else the exchange needs.
        self.held: set[bytes] = set()
        self.corrupt: set[bytes] = set()  # content that no correct encoder wrote
        self.agreed: dict[int, RoundItem] = {}  # by place: items here, held by a quorum
        self.version = 0  # changes with `agreed`
        # By announced digest, the places it is announced for.
        self._places: dict[bytes, list[int]] = collections.defaultdict(list)
        # Our own holdings as they changed: a place, and the first bytes of the digest there.
        self.changes: list[tuple[int, bytes]] = []
        self._prefixes: dict[int, bytes] = {}
        self._said: dict[int, dict[int, bytes]] = {}  # by member and place
        self._missing: set[int] = set()
        self._filled: set[int] = set()

    def add(self, item: RoundItem) -> bool:
        """Note an announced item; return False if it is known or its place is full."""
        rivals = self.rivals[item.index]
        # One rival per member suffices; more would let a member fill our memory.
        if item.digest in rivals or len(rivals) >= len(self._electorate):
            return False
        rivals[item.digest] = item
        if len(rivals) > 1:
            self._contested.add(item.index)
        self._places[item.digest].append(item.index)
        self._update(item.index)
        return True

    def know_offer(self, member: int) -> None:
        """Note that a member's offer is here."""
        self._offered |= 1 << member
        for index in sorted(self._contested):
            self._update(index)

    def knows_offers(self, item: RoundItem) -> bool:
        """True if the offers of all members whose contributions are in an item are here."""
        return not int.from_bytes(item.mask, "little") & ~self._offered

    def hold(self, *digests: bytes) -> None:
        """Note that the content with these digests is here."""
        self.held.update(digests)
        self._update_all(digests)

    def spoil(self, *digests: bytes) -> None:
        """Note that the content with these digests is corrupt, at every holder."""
        self.corrupt.update(digests)
        self._update_all(digests)

    def hear(self, member: int, changes: Iterable[tuple[int, bytes]]) -> None:
        """Note changes of another member's holdings."""
        said = self._said.setdefault(member, {})
        for index, prefix in changes:
            if index < len(self.rivals):
                said[index] = prefix
                self._agree(index)

    def rely_on(self, relied: frozenset[int] | None, staying: frozenset[int]) -> None:
        """From now on, agree on an item once more than half of `relied` (None: a quorum of all)
        hold it, and if any are `staying`, one of those."""
        if (relied, staying) != (self._relied, self._staying):
            self._relied, self._staying = relied, staying
            for index in range(len(self.rivals)):
                self._agree(index)

    def said(self, item: RoundItem) -> list[int]:
        """Return the other members that announced that they hold this item."""
        prefix = item.digest[:PREFIX_BYTES]
        return [member for member, said in self._said.items() if said.get(item.index) == prefix]

    @property
    def filled(self) -> bool:
        """True if every place has an item here."""
        return len(self._filled) == len(self.rivals)

    @property
    def whole(self) -> bool:
        """True if everything announced so far is here or corrupt."""
        return not self._missing

    def wanted(self) -> list[RoundItem]:
        """Return the announced items that are neither here nor corrupt."""
        return [
            item
            for index in sorted(self._missing)
            for item in self.rivals[index].values()
            if item.digest not in self.held and item.digest not in self.corrupt
        ]

    def _ranked(self, index: int) -> list[tuple[bytes, RoundItem]]:
        """Return a place's rivals, the preferred one first."""
        rivals = self.rivals[index]
        if len(rivals) < 2:
            return list(rivals.items())
        return sorted(
            rivals.items(),
            key=lambda entry: (
                not self.knows_offers(entry[1]),
                contributions(entry[1]) if self._fewest else 0,
                entry[0],
            ),
        )

    def _update_all(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            for index in self._places.get(digest, ()):
                self._update(index)

    def _update(self, index: int) -> None:
        rivals = self.rivals[index]
        here = next((digest for digest, _ in self._ranked(index) if digest in self.held), _NOTHING)
        prefix = here[:PREFIX_BYTES]
        if prefix != self._prefixes.get(index, _NOTHING):
            self._prefixes[index] = prefix
            self.changes.append((index, prefix))
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
        if self._staying and not holders & self._staying:
            return False
        if self._relied is None:
            return self._electorate.is_quorum(holders)
        # A plain majority: it only keeps content available. The decision itself takes a quorum.
        return 2 * len(holders & self._relied) > len(self._relied)
