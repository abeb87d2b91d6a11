"""Groups, proposers and reducers: pure functions of (run seed, view, stream, round), so that all members compute the
same without a word. SHA-256 gives the order: it is the same on every machine, unlike a library's shuffle."""

import hashlib
from collections.abc import Sequence
from typing import TypeVar

from farflock.swarm.links import PeerId
from farflock.swarm.messages import Key

T = TypeVar("T")


def order(members: Sequence[PeerId], seed: int, view: bytes, key: Key) -> tuple[PeerId, ...]:
    """The members in the seeded order of this exchange: proposers and groups are read off it."""
    salt = b"\x00".join(
        (str(seed).encode(), view, key.stream.encode(), str(key.round).encode(), str(key.attempt).encode())
    )
    return tuple(sorted(members, key=lambda peer: hashlib.sha256(salt + b"\x00" + peer.encode()).digest()))


def rotation(members: Sequence[PeerId], seed: int, stream: str) -> tuple[PeerId, ...]:
    """The members in the order from which reducers are read off: the same in all rounds, and where a member comes or goes the
    others keep theirs, for a reducer may have to remember what it left out."""
    return order(members, seed, b"", Key(stream, 0))


def group_of(me: PeerId, members: Sequence[PeerId], size: int, seed: int, view: bytes, key: Key) -> tuple[PeerId, ...]:
    """The random group of this round that holds `me`, in seeded order: disjoint groups of `size` that cover all
    members; the last one may be smaller, and with pairs an odd member stays alone."""
    ordered = order(members, seed, view, key)
    start = ordered.index(me) // size * size
    return ordered[start : start + size]


def reducers(rotation: Sequence[T], shard: int) -> tuple[T, ...]:
    """The reducers of this shard, in the order in which they take over: a rotation, so that load is even; the next
    member takes over what a dead one leaves."""
    shift = shard % len(rotation)
    return tuple(rotation[shift:]) + tuple(rotation[:shift])
