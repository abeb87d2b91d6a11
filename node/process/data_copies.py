"""Copies of a run's data at its members, so that no single one has to stay.

Each shard belongs to the members that rank first for it by a hash of both (rendezvous hashing): as
many as the manifest says. All members compute the same ones, and a member that goes moves only what
was its own. A member fetches its own shards below everything else, as far as its cache goes.
"""

import asyncio
import heapq
import logging
from collections.abc import Callable, Sequence

from farflock.node.data.coming_shards import FetchedShards
from farflock.node.data.shard_cache import CacheFull
from farflock.node.process.data_supply import DataSupply
from farflock.swarm.chunk_store import digest_of
from farflock.swarm.compute import Compute
from farflock.swarm.links import PeerId
from farflock.swarm.messages import MAX_HELD_CHUNKS
from farflock.swarm.peer.data_holders import DataHolders

LOOK_EVERY_S = 10.0

log = logging.getLogger(__name__)

_RANK_BYTES = 8  # of the hash, which decide


class Copies:
    """The copies that this peer keeps for the others, and how many all of them have. `members` are
    the others, without the founder; `me` is no member if this is the founder."""

    def __init__(
        self,
        supply: DataSupply,
        data_holders: DataHolders,
        members: Callable[[], Sequence[PeerId]],
        me: PeerId | None,
        copies: int,
        compute: Compute,
    ) -> None:
        self._supply, self._data_holders, self._members = supply, data_holders, members
        self._me, self._copies, self._compute = me, copies, compute
        self._mine: list[tuple[FetchedShards, int]] = []
        self._ranked: tuple[PeerId, ...] = ()
        self.is_full = False  # no more fit into the cache
        self.fewest = 0  # holders that any shard has beside the founder, at most as many as wanted

    async def run(self) -> None:
        """Keep copies, and count them, until cancelled."""
        while True:
            await self._rank()
            await self._fetch_some()
            await self._count()
            await asyncio.sleep(LOOK_EVERY_S)

    async def _rank(self) -> None:
        """Find out which shards are this peer's own, if the members have changed."""
        if self._me is None:
            return
        members = tuple(sorted({*self._members(), self._me}))
        if members != self._ranked:
            self._mine = await self._compute(lambda: self._ranked_for(members))
            self._ranked, self.is_full = members, False
            digests = [source.local.table.digest(n) for source, n in self._mine]
            self._supply.mine = frozenset(digests)

    def _ranked_for(self, members: Sequence[PeerId]) -> list[tuple[FetchedShards, int]]:
        return [
            (source, number)
            for source in self._supply.sources
            for number in range(len(source.local.table))
            if self._me in keepers(source.local.table.digest(number), members, self._copies)
        ]

    async def _fetch_some(self) -> None:
        """Fetch what is missing of this peer's own, as long as nothing else is."""
        for source, number in self._mine:
            if source.local.has(number):
                continue
            if self._supply.busy or self.is_full:
                return
            try:
                await self._supply.copied(source, number)
            except CacheFull:
                self.is_full = True
            except OSError as error:
                log.warning("no more data are kept for others: %s", error)
                self.is_full = True

    async def _count(self) -> None:
        """Find out how many holders each shard has beside the founder."""
        found = self._copies
        for source in self._supply.sources:
            for first in range(0, len(source.local.table), MAX_HELD_CHUNKS):
                await self._data_holders.ask(self._members(), source.local.root, first)
                found = min(found, self._min_copies(source, first))
        self.fewest = found

    def _min_copies(self, source: FetchedShards, first: int) -> int:
        """Return how many of the members have each of these shards, at least."""
        root, count = source.local.root, min(MAX_HELD_CHUNKS, len(source.local.table) - first)
        held = [self._data_holders.held(peer, root, first) for peer in self._members()]
        if self._me is not None:
            held.append(source.local.held(first))
        return min_copies([int.from_bytes(each, "little") for each in held], count, self._copies)


def min_copies(bitmaps: Sequence[int], count: int, wanted: int) -> int:
    """Return in how many of the bitmaps each of the lowest `count` bits is set, at least; no more
    than `wanted`."""
    whole = (1 << count) - 1
    levels = [whole, *[0] * wanted]  # bits that are set in so many of them
    for bits in bitmaps:
        for level in range(wanted, 0, -1):
            levels[level] |= levels[level - 1] & bits
    return max(level for level, bits in enumerate(levels) if bits & whole == whole)


def keepers(digest: bytes, members: Sequence[PeerId], copies: int) -> list[PeerId]:
    """Return the members to which a shard belongs, the first first."""
    return heapq.nsmallest(
        copies, members, key=lambda peer: (digest_of(digest + peer.encode())[:_RANK_BYTES], peer)
    )
