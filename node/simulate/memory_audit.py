"""An audit of what a peer holds: the longest table, list or queue anywhere inside it.

Each bounded container has a named constant, and a container whose bound was forgotten has none. So
the audit walks every object that a peer holds, whatever its name.
"""

import asyncio
import collections
import functools
from collections.abc import Iterable, Mapping

from farflock.swarm.peer.peer import Peer
from farflock.swarm.sim.network import SimNetwork

_OURS = "farflock.swarm."
_ATOMS = frozenset((str, bytes, int, float, bool, type(None)))


def longest(peer: Peer) -> tuple[int, str]:
    """Return the length of the longest container that this peer holds, and the path to it."""
    best, seen = (0, ""), {id(peer)}
    waiting: list[tuple[object, str]] = [(peer, "peer")]
    while waiting:
        thing, way = waiting.pop()
        if isinstance(thing, dict | list | set | collections.deque):
            best = max(best, (len(thing), way))
        for name, child in _children(thing):
            if type(child) not in _ATOMS and id(child) not in seen:
                seen.add(id(child))
                waiting.append((child, f"{way}.{name}"))
    return best


def _children(thing: object) -> Iterable[tuple[str, object]]:
    """Return a container's items, or the attributes of one of Farflock's objects, without what
    peers share."""
    if isinstance(thing, Mapping):
        return (("[]", value) for value in thing.values())
    if isinstance(thing, list | tuple | set | frozenset | collections.deque):
        return (("[]", value) for value in thing)
    if isinstance(thing, asyncio.Queue):
        return (("queue", thing._queue),)  # type: ignore[attr-defined]
    if isinstance(thing, SimNetwork) or not type(thing).__module__.startswith(_OURS):
        return ()
    names = [*getattr(thing, "__dict__", ()), *_slots(type(thing))]  # type: ignore[arg-type]  # mypy: types hash
    return [(name, getattr(thing, name)) for name in names if hasattr(thing, name)]


@functools.cache
def _slots(kind: type[object]) -> tuple[str, ...]:
    return tuple(
        name
        for base in kind.__mro__
        for name in getattr(base, "__slots__", ())
        if name != "__weakref__"
    )
