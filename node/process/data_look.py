"""A look at the prepared data of a run from outside: their sizes, and a few documents, whose shards
members send.
"""

import contextlib
from collections.abc import Sequence
from functools import partial

import msgspec

from farflock.node.data.excerpts import EXCERPTS, document_around, drawn_places, shown
from farflock.node.data.local_shards import LocalShards
from farflock.node.data.shard_cache import CacheFull, ShardNeeds
from farflock.node.process.run_data import RunData
from farflock.node.tokens.tokenizer import TokenIds, Tokenizer
from farflock.swarm.compute import Worker
from farflock.swarm.links import Links, PeerId
from farflock.swarm.messages import MAX_CHUNK_BYTES, MAX_HELD_CHUNKS
from farflock.swarm.peer.bootstrap import Visitor, visiting

SHARD_TIMEOUT_S = 60.0


class Excerpt(msgspec.Struct, frozen=True):
    """The beginning of a document; empty if no member sent its shard."""

    root: str
    shard: str
    text: str


async def read_excerpts(
    links: Links,
    run: str,
    data: RunData,
    members: Sequence[PeerId],
    tokenizer: Tokenizer,
    seed: int,
) -> list[Excerpt]:
    """Return a few documents to train on, drawn by the seed. Shards that are not here come from
    members, verified; raise `BadIndex` if one is not what the index says."""
    files, found = Worker("look"), list[Excerpt]()
    sizes = [local.table.train_sizes() for local in data.shards]
    try:
        async with visiting(links, run, 2 * MAX_CHUNK_BYTES) as visit:
            for place in drawn_places(sizes, seed, EXCERPTS):
                local = data.shards[place.source]
                tokens = await _tokens(visit, local, place.shard, members, files)
                text = ""
                if tokens is not None:
                    end = local.table.index.end_of_text
                    text = tokenizer.decode(document_around(tokens, end, place.token).tolist())
                shard = local.table.digest(place.shard).hex()
                found.append(Excerpt(local.table.root, shard, shown(text)))
    finally:
        files.close()
    return found


async def _tokens(
    visit: Visitor, local: LocalShards, number: int, members: Sequence[PeerId], files: Worker
) -> TokenIds | None:
    """Return the tokens of a shard; None if no member sends it."""
    if local.has(number):
        here = await files(partial(local.tokens, number))
        if here is not None:
            return here
    holders, table = visit.data_holders, local.table
    await holders.ask(members, local.root, number - number % MAX_HELD_CHUNKS)
    having = holders.holders(local.root, number)
    raw = await holders.fetch(table.digest(number), table.size(number), having, SHARD_TIMEOUT_S)
    if raw is None:
        return None
    with contextlib.suppress(CacheFull, OSError):
        await files(partial(local.keep, number, raw, ShardNeeds()))
    return await files(partial(local.tokens_in, number, raw))
