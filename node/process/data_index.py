"""The index of a run's data on its way to a machine that has no folder of them.

It is fetched before the run's members count the newcomer: the index by its hash, the root, which
the manifest names, and then the pages that it lists. Members say how long it is; whoever lies about
that is found out by the hash.
"""

import asyncio
from collections.abc import Sequence
from functools import partial

from farflock.node.data.index import BadIndex, read_index
from farflock.node.data.local_shards import cached_table
from farflock.node.data.shard_cache import ShardCache
from farflock.node.data.shard_table import ShardTable, pages_of
from farflock.node.errors import RefusedByRun
from farflock.swarm.chunks import GENTLE_SILENCE_S
from farflock.swarm.compute import Worker
from farflock.swarm.links import Links, PeerId
from farflock.swarm.messages import MAX_CHUNK_BYTES
from farflock.swarm.peer.bootstrap import Visitor, visiting

INDEX_TIMEOUT_S = 120.0  # to find a member that sends it
ASK_EVERY_S = 2.0


async def fetch_table(
    links: Links, run: str, root: str, members: Sequence[PeerId], cache: ShardCache
) -> ShardTable:
    """Return the shards of the data with this root, whose index comes from members unless the cache
    has it. Raise `RefusedByRun` if nobody sends it, or it is none."""
    files = Worker("index")
    try:
        table = await files(lambda: cached_table(root, cache))
        if table is not None:
            return table
        async with visiting(links, run, 2 * MAX_CHUNK_BYTES) as visit:
            raw = await _index_of(visit, root, members)
            for page in pages_of(read_index(raw, "the run's index", root)):
                if await files(partial(cache.index, page.name)) is None:
                    content = await _chunk(visit, page.name, page.size, members)
                    await files(partial(cache.keep_index, page.name, content))
        await files(partial(cache.keep_index, root, raw))
        table = await files(partial(cached_table, root, cache))
    except BadIndex as error:
        raise RefusedByRun("the run's data cannot be used", str(error), "") from None
    finally:
        files.close()
    assert table is not None, "all of it is here now"
    return table


async def _index_of(visit: Visitor, root: str, members: Sequence[PeerId]) -> bytes:
    """Return the index from a member that says how long it is, and is right."""
    digest, holders = bytes.fromhex(root), visit.data_holders
    loop = asyncio.get_running_loop()
    until_s = loop.time() + INDEX_TIMEOUT_S
    while loop.time() < until_s:
        await holders.ask(members, digest, 0)
        sizes = holders.index_sizes(digest)
        for size in sorted(set(sizes.values())):
            having = [peer for peer, said in sizes.items() if said == size]
            raw = await holders.fetch(digest, size, having)
            if raw is not None:
                return raw
        await asyncio.sleep(ASK_EVERY_S)
    raise _nobody(f"none of {len(members)} members sent its index")


async def _chunk(visit: Visitor, name: str, size: int, members: Sequence[PeerId]) -> bytes:
    raw = await visit.data_holders.fetch(bytes.fromhex(name), size, members)
    if raw is None:
        raise _nobody(f"no member sent a page of its index for {GENTLE_SILENCE_S:.0f} s")
    return raw


def _nobody(why: str) -> RefusedByRun:
    remedy = "get a copy of the prepared folder from the run's founder, and name it with --data"
    return RefusedByRun("the run's data cannot be had", why, remedy)
