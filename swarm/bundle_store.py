"""Bundles in the chunk store: a contribution put there, a bundle fetched shard by shard and read.

A bundle of one shard is that shard's chunk. Any other is its list, a chunk that names the chunks of
its shards (swarm/protocol/exchange/bundles.py).
"""

import asyncio
import collections
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from farflock.swarm.batch import take_batch
from farflock.swarm.chunk_store import Store
from farflock.swarm.chunks import Chunks
from farflock.swarm.compute import Compute
from farflock.swarm.links import PeerId
from farflock.swarm.protocol.exchange.bundles import (
    BadBundle,
    BundleCut,
    Entry,
    decode_list,
    encode_list,
    list_bytes,
)
from farflock.swarm.protocol.exchange.streams import Reduction, Stream

FETCHES = 4  # shards of one bundle under way at once; more would only wait for a holder's window

RUN_BYTES = 64 * 1024  # of small shards of one contribution that are reduced together

PeersToAsk = Callable[[], Sequence[PeerId]]


class BundleStore:
    """The bundles of one peer's exchanges, as chunks of its store."""

    def __init__(self, store: Store, chunks: Chunks, compute: Compute) -> None:
        self._store, self._chunks, self._compute = store, chunks, compute

    def put(self, cut: BundleCut, shards: Sequence[bytes], pin: Hashable) -> tuple[Entry, ...]:
        """Keep a contribution until `pin` is released; return the digest and size of each
        bundle."""
        store = self._store
        entries = [(store.put(shard, pin), len(shard)) for shard in shards]
        return tuple(
            self.put_list([entries[shard] for shard in cut.shards_of(bundle)], pin)
            for bundle in range(cut.bundles)
        )

    def put_list(self, entries: Sequence[Entry], pin: Hashable) -> Entry:
        """Return the digest and size of the bundle of these shards, which are in the store."""
        if len(entries) == 1:
            return entries[0]
        listed = encode_list(entries)
        return self._store.put(listed, pin), len(listed)

    def fits(self, stream: Stream, bundle: int, size: int) -> bool:
        """Return whether a correct member could announce this size for a bundle."""
        shards = len(stream.terms.cut.shards_of(bundle))
        return size <= stream.max_shard_bytes if shards == 1 else size == list_bytes(shards)

    def pin_held(self, stream: Stream, bundle: int, digest: bytes, pin: Hashable) -> bool:
        """Return whether a whole bundle is here; keep it until `pin` is released if so."""
        digests = self._digests(stream, bundle, digest)
        if any(chunk not in self._store for chunk in digests):
            return False
        for chunk in digests:
            self._store.pin(chunk, pin)
        return True

    def pin(self, stream: Stream, bundle: int, digest: bytes, pin: Hashable) -> None:
        """Keep what is here of a bundle until `pin` is released."""
        for chunk in self._digests(stream, bundle, digest):
            self._store.pin(chunk, pin)

    def shards(self, stream: Stream, bundle: int, digest: bytes) -> Iterator[bytes]:
        """Yield the shards of a bundle that is here."""
        for chunk, _ in self.entries(stream, bundle, digest):
            yield self._store.get(chunk) or b""

    def entries(self, stream: Stream, bundle: int, digest: bytes) -> list[Entry]:
        """Return the shards of a bundle whose list is here; raise `BadBundle` for a wrong list."""
        shards = stream.terms.cut.shards_of(bundle)
        data = self._store.get(digest) or b""
        if len(shards) == 1:
            return [(digest, len(data))]
        return decode_list(data, len(shards), stream.max_shard_bytes)

    async def fetch(
        self,
        stream: Stream,
        bundle: int,
        entry: Entry,
        holders: PeersToAsk,
        pin: Hashable,
        timeout_s: float,
        *,
        final: bool = False,
    ) -> bool:
        """Fetch a bundle, each chunk within `timeout_s`; return False if one is not to be had.

        Chunks that arrived stay pinned, so that a later call goes on from them. Raise `BadBundle`
        if its list is wrong."""
        fetch = self._chunks.fetch
        if not await fetch(*entry, holders, pin, timeout_s, final=final):
            return False
        if len(stream.terms.cut.shards_of(bundle)) == 1:
            return True
        left = collections.deque(self._missing(self.entries(stream, bundle, entry[0]), pin))

        async def some() -> bool:
            while left:
                batch = take_batch(left)
                if len(batch) > 1:
                    batch = await self._chunks.fetch_batch(batch, holders, pin, timeout_s)
                for chunk in batch:
                    if not await fetch(*chunk, holders, pin, timeout_s, final=final):
                        left.clear()  # without this one the others are of no use yet
                        return False
            return True

        return all(await asyncio.gather(*(some() for _ in range(FETCHES))))

    def _missing(self, entries: Iterable[Entry], pin: Hashable) -> Iterator[Entry]:
        """Yield each chunk that is not here, once; pin those that are."""
        for digest, size in dict(entries).items():
            if digest in self._store:
                self._store.pin(digest, pin)
            else:
                yield digest, size

    async def check(self, stream: Stream, round_number: int, bundle: int, digest: bytes) -> bool:
        """Return whether a correct peer could have sent this bundle, which is here."""
        shards = zip(
            stream.terms.cut.shards_of(bundle),
            self.shards(stream, bundle, digest),
            strict=True,
        )
        for shard, data in shards:
            check = functools.partial(stream.check, round_number, shard, data)
            if not await self._compute(check):
                return False
        return True

    async def reduce(
        self,
        stream: Stream,
        round_number: int,
        bundle: int,
        inputs: Sequence[tuple[PeerId, float, bytes]],
        pin: Hashable,
    ) -> tuple[Entry | None, tuple[PeerId, ...]]:
        """Reduce a bundle of these inputs (peer, weight, digest), shard by shard.

        Return the result, None if no input was usable, and the peers with corrupt shards. All
        shards are reduced without those: each contribution is in the whole bundle or not in it."""
        shards = stream.terms.cut.shards_of(bundle)
        usable = [
            (peer, weight, self.entries(stream, bundle, digest)) for peer, weight, digest in inputs
        ]
        rejected: list[PeerId] = []
        entries: list[Entry] = []
        while len(entries) < len(shards):
            start = len(entries)
            stop = _run_end(usable[0][2] if usable else (), start)
            payloads = [
                (peer, weight, [self._store.get(chunk) or b"" for chunk, _ in chunks[start:stop]])
                for peer, weight, chunks in usable
            ]
            work = functools.partial(stream.reduced, round_number, shards[start:stop], payloads)
            reductions: list[Reduction] = await self._compute(work)
            for reduction in reductions:
                if reduction.data is None:
                    return None, (*rejected, *reduction.rejected)
                if reduction.rejected and entries:
                    entries.clear()  # the shards before have contributions of peers rejected now
                else:
                    entries.append((self._store.put(reduction.data, pin), len(reduction.data)))
                if reduction.rejected:
                    rejected += reduction.rejected
                    usable = [entry for entry in usable if entry[0] not in rejected]
                    break  # the shards after have them too
        return self.put_list(entries, pin), tuple(rejected)

    def _digests(self, stream: Stream, bundle: int, digest: bytes) -> Iterable[bytes]:
        """Return the chunks of a bundle, as far as they are known here."""
        chunks = [digest]
        if len(stream.terms.cut.shards_of(bundle)) > 1 and digest in self._store:
            try:
                chunks += [shard for shard, _ in self.entries(stream, bundle, digest)]
            except BadBundle:
                return chunks  # it holds nothing but itself
        return chunks


def _run_end(entries: Sequence[Entry], start: int) -> int:
    """Return the end of a run of shards from `start` on: small ones together, or a single one."""
    end, left_bytes = start + 1, RUN_BYTES - sum(size for _, size in entries[start : start + 1])
    while end < len(entries) and (left_bytes := left_bytes - entries[end][1]) >= 0:
        end += 1
    return end
