"""The roll: which keys a run has admitted, by the capability that let each in, and which vote.

Each view names its root, so uses of a capability are counted in the certified chain, and every
voter computes the same next root from the same additions. Members hold it; a newcomer fetches it as
a chunk, whose digest is the root. A key that is on the roll needs no second use.

Sans I/O, pure. swarm/protocol/enrolment.py says which additions are justified.
"""

import functools
import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Annotated

import msgspec

from farflock.swarm.capability import MAX_USES
from farflock.swarm.chunk_store import digest_of
from farflock.swarm.links import PeerId
from farflock.swarm.messages import MAX_MEMBERS, Digest

MAX_ADMITTED = 16_384  # keys in the life of a run
MAX_ROLL_BYTES = 2 * 1024 * 1024  # of that many keys, each with a capability of its own
FOUNDERS = bytes(32)  # the founder's entry: it came by no capability

_PeerId = Annotated[str, msgspec.Meta(max_length=64)]
_Place = Annotated[int, msgspec.Meta(ge=0, lt=MAX_ADMITTED)]


class Admittance(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The capability by which a key came, with its `uses` (0: any number) and `votes`."""

    capability: Digest
    uses: Annotated[int, msgspec.Meta(ge=0, le=MAX_USES)]
    votes: Annotated[int, msgspec.Meta(ge=0, le=MAX_MEMBERS)]


class RollEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The keys that one capability let in, in the order in which they came; those at the places
    `voting` have taken up a vote. They are more than it brings only if the founder promoted some.
    """

    by: Admittance
    keys: Annotated[tuple[_PeerId, ...], msgspec.Meta(min_length=1, max_length=MAX_ADMITTED)]
    voting: Annotated[tuple[_Place, ...], msgspec.Meta(max_length=MAX_MEMBERS)] = ()

    @property
    def uses(self) -> int:
        """The number of keys that the capability lets in; 0 is any."""
        return self.by.uses

    @property
    def votes(self) -> int:
        """The number of its keys that may vote."""
        return self.by.votes


_RollEntries = Annotated[tuple[RollEntry, ...], msgspec.Meta(max_length=MAX_ADMITTED)]
_decoder: msgspec.msgpack.Decoder[tuple[RollEntry, ...]] = msgspec.msgpack.Decoder(_RollEntries)
_encoder = msgspec.msgpack.Encoder()


class BadRoll(ValueError):
    """Bytes that are no roll."""


@dataclass(frozen=True)
class Roll:
    """All admitted keys; a value that never changes."""

    entries: tuple[RollEntry, ...]

    @functools.cached_property
    def encoded(self) -> bytes:
        """The chunk as which a newcomer fetches it."""
        return _encoder.encode(self.entries)

    @functools.cached_property
    def root(self) -> bytes:
        """The digest of that chunk, which views name."""
        return digest_of(self.encoded)

    @functools.cached_property
    def _by_key(self) -> dict[PeerId, RollEntry]:
        return {key: entry for entry in self.entries for key in entry.keys}

    @functools.cached_property
    def _used(self) -> dict[bytes, int]:
        return {entry.by.capability: len(entry.keys) for entry in self.entries}

    @functools.cached_property
    def voting(self) -> frozenset[PeerId]:
        """The keys that have taken up a vote, members or not."""
        return frozenset(entry.keys[place] for entry in self.entries for place in entry.voting)

    def entry_of(self, key: PeerId) -> RollEntry | None:
        """Return the entry that names a key, or None."""
        return self._by_key.get(key)

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: PeerId) -> bool:
        return key in self._by_key

    def used(self, capability: bytes) -> int:
        """Return how many keys a capability has let in."""
        return self._used.get(capability, 0)

    def with_keys(self, additions: Iterable[tuple[PeerId, Admittance]]) -> "Roll":
        """Return the roll with further keys, each with its capability; a key stays where it is."""
        entries = {entry.by.capability: entry for entry in self.entries}
        known = set(self._by_key)
        for key, by in additions:
            if key not in known:
                known.add(key)
                entry = entries.get(by.capability)
                keys = (key,) if entry is None else (*entry.keys, key)
                entries[by.capability] = (
                    RollEntry(by, keys)
                    if entry is None
                    else msgspec.structs.replace(entry, keys=keys)
                )
        made = tuple(entries.values())
        return self if made == self.entries else Roll(made)

    def with_votes(self, keys: Collection[PeerId]) -> "Roll":
        """Return the roll on which these of its keys have taken up their votes."""
        if self.voting.issuperset(keys):
            return self
        return Roll(tuple(_voting(entry, keys) for entry in self.entries))


def _voting(entry: RollEntry, keys: Collection[PeerId]) -> RollEntry:
    new = {place for place, key in enumerate(entry.keys) if key in keys}
    voting = tuple(sorted(new.union(entry.voting)))
    return msgspec.structs.replace(entry, voting=voting)


def first_roll(founder: PeerId) -> Roll:
    """Return the roll of view 0: the founder alone."""
    return Roll((RollEntry(Admittance(FOUNDERS, 1, 1), (founder,), (0,)),))


def decode_roll(raw: bytes) -> Roll:
    """Decode a roll; raise `BadRoll` for anything else."""
    if len(raw) > MAX_ROLL_BYTES:
        raise BadRoll(f"a roll of {len(raw)} bytes is over the limit of {MAX_ROLL_BYTES}")
    try:
        roll = Roll(_decoder.decode(raw))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRoll(f"not a roll: {error}") from None
    listed = sum(len(entry.keys) for entry in roll.entries)
    names = {entry.by.capability for entry in roll.entries}
    if len(roll) != listed or len(names) < len(roll.entries):
        raise BadRoll("a roll names a key or a capability twice")
    if not all(map(_votes_are_right, roll.entries)):
        raise BadRoll("a roll gives a vote to no key, or twice")
    if listed > MAX_ADMITTED or roll.encoded != raw:
        raise BadRoll("a roll has too many keys, or is not in its canonical form")
    return roll


def _votes_are_right(entry: RollEntry) -> bool:
    voting = entry.voting
    in_order = all(place < later for place, later in itertools.pairwise(voting))
    return in_order and max(voting, default=0) < len(entry.keys)
