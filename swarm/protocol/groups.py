"""Groups, proposers and reducers: pure functions of (run seed, view, stream, round), without any
message. SHA-256 gives the order: it is the same on every machine, unlike a library's shuffle."""

import hashlib
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from farflock.swarm.links import PeerId
from farflock.swarm.messages import Key

T = TypeVar("T")


def order(members: Sequence[PeerId], seed: int, view: bytes, key: Key) -> tuple[PeerId, ...]:
    """Return the members in this exchange's seeded order, which gives proposers and groups."""
    salt = b"\x00".join(
        (
            str(seed).encode(),
            view,
            key.stream.encode(),
            str(key.round).encode(),
            str(key.attempt).encode(),
        )
    )
    return tuple(
        sorted(members, key=lambda peer: hashlib.sha256(salt + b"\x00" + peer.encode()).digest())
    )


def rotation(members: Sequence[PeerId], seed: int, stream: str) -> tuple[PeerId, ...]:
    """Return the members in the order that assigns reducers, the same in all rounds. A join
    or a death leaves the others' order as it is, as a reducer may keep an error-feedback residual.
    """
    return order(members, seed, b"", Key(stream, 0))


def proposers(
    ordered: Sequence[int],
    serving: Collection[int],
    votes: Callable[[int], bool],
    stage: int | None,
) -> tuple[int, ...]:
    """Return the members that may propose a round's list, in their order: those that serve it,
    voters first, then the other voters, which have nothing to propose.

    All servers of a stage may be learners, so they propose too. Of a whole model, each voter has
    what there is to propose."""
    able = [each for each in ordered if votes(each) or (stage is not None and each in serving)]
    return tuple(sorted(able, key=lambda each: (each not in serving, not votes(each))))


def group_of(
    me: PeerId, members: Sequence[PeerId], size: int, seed: int, view: bytes, key: Key
) -> tuple[PeerId, ...]:
    """Return this round's random group of `me`, in seeded order: disjoint groups of `size` cover
    all members; the last may be smaller, so with pairs an odd member stays alone."""
    ordered = order(members, seed, view, key)
    start = ordered.index(me) // size * size
    return ordered[start : start + size]


def reducers(rotation: Sequence[T], shard: int) -> tuple[T, ...]:
    """Return a shard's reducers in takeover order: a rotation, so that load is even."""
    shift = shard % len(rotation)
    return tuple(rotation[shift:]) + tuple(rotation[:shift])
