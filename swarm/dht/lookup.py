"""The walk through the distributed table towards a key: ask peers and collect their answers.

hivemind's own search counts peers that were merely named: one reply with twenty made-up peers close
to the key hides all honest ones. Here only peers that answered count, our own contacts come first,
each peer is asked once, and results found by the deadline are kept.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from farflock.swarm.dht.item_store import StoredItem
from farflock.swarm.tasks import cancel

WIDTH = 20  # peers nearest to the key that must have answered
PARALLEL_CALLS = 8
MAX_ASKED = 64

LookupPeer = TypeVar("LookupPeer", bound=Hashable)


@dataclass(frozen=True, slots=True)
class LookupReply(Generic[LookupPeer]):
    """One peer's answer: its items under the key, and the peers it knows near it, with node ids."""

    items: Sequence[StoredItem]
    near: Sequence[tuple[int, LookupPeer]]


class Walk(Generic[LookupPeer]):
    """One search for the peers nearest to `target` (by XOR of node ids) and the items they store.

    `friends` are the peers of our own table; up to `WIDTH` of them are asked in any case. `ask`
    returns None for a silent peer and must have a deadline of its own. Results may be read at any
    time, even after `run` was cancelled.
    """

    def __init__(
        self,
        target: int,
        me: LookupPeer,
        friends: Iterable[tuple[int, LookupPeer]],
        ask: Callable[[LookupPeer], Awaitable[LookupReply[LookupPeer] | None]],
    ) -> None:
        self._target, self._ask = target, ask
        self._friends = sorted(friends, key=self._distance)[:WIDTH]
        self._strangers: list[tuple[int, LookupPeer]] = []
        self._seen: set[LookupPeer] = {me, *(peer for _, peer in self._friends)}
        self._asked = 0
        self._answered: list[tuple[int, LookupPeer]] = []
        self.replies: list[LookupReply[LookupPeer]] = []

    @property
    def nearest(self) -> list[tuple[int, LookupPeer]]:
        """The peers that answered, nearest first."""
        return sorted(self._answered, key=self._distance)

    async def run(self) -> None:
        """Ask until the `WIDTH` nearest peers answered, none is left, or `MAX_ASKED` were asked."""
        running: dict[asyncio.Task[LookupReply[LookupPeer] | None], tuple[int, LookupPeer]] = {}
        try:
            while True:
                while (
                    len(running) < PARALLEL_CALLS
                    and (contact := self._next(running.values())) is not None
                ):
                    running[asyncio.create_task(self._call(contact[1]))] = contact
                if not running:
                    return
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in running if task in done]:
                    self._take(running.pop(task), task.result())
        finally:
            await cancel(*running)

    async def _call(self, peer: LookupPeer) -> LookupReply[LookupPeer] | None:
        return await self._ask(peer)

    def _next(self, running: Iterable[tuple[int, LookupPeer]]) -> tuple[int, LookupPeer] | None:
        if self._asked >= MAX_ASKED:
            return None
        waiting = self._friends or self._strangers
        if not waiting or (waiting is self._strangers and not self._wanted(waiting[0], running)):
            return None
        self._asked += 1
        return waiting.pop(0)

    def _wanted(
        self, stranger: tuple[int, LookupPeer], running: Iterable[tuple[int, LookupPeer]]
    ) -> bool:
        """Return whether fewer than `WIDTH` peers that answered, or may yet, are nearer."""
        distance = self._distance(stranger)
        return (
            sum(self._distance(contact) < distance for contact in (*self._answered, *running))
            < WIDTH
        )

    def _take(self, contact: tuple[int, LookupPeer], reply: LookupReply[LookupPeer] | None) -> None:
        if reply is None:
            return
        self._answered.append(contact)
        self.replies.append(reply)
        fresh = [(node, peer) for node, peer in reply.near[:WIDTH] if peer not in self._seen]
        self._seen.update(peer for _, peer in fresh)
        self._strangers = sorted(
            {peer: (node, peer) for node, peer in [*self._strangers, *fresh]}.values(),
            key=self._distance,
        )

    def _distance(self, contact: tuple[int, LookupPeer]) -> int:
        return contact[0] ^ self._target
