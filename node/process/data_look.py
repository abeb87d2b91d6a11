"""A look at the prepared data of a run from outside: their sizes, and a few documents, whose shards
members send.
"""

import contextlib
from collections.abc import Sequence
from functools import partial

import msgspec

from farflock.node.assembly.known_run import KnownRun, read_run
from farflock.node.assembly.learnt import known_members
from farflock.node.data.excerpts import EXCERPTS, document_around, drawn_places, shown
from farflock.node.data.local_shards import LocalShards
from farflock.node.data.shard_cache import CacheFull, ShardNeeds
from farflock.node.process.inspect_run import visiting_run
from farflock.node.process.network import MachineOptions
from farflock.node.process.run_data import RunData, fetch_data
from farflock.node.process.run_text import fetch_tokenizer
from farflock.node.run.data_section import tokenizer_of
from farflock.node.run.invite import Invite
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


async def look_at_data(
    machine: MachineOptions, invite: Invite, timeout_s: float, seed: int | None = None
) -> tuple[KnownRun, RunData | None, list[Excerpt]]:
    """Return an invite's run, verified, what is known of its prepared data, whose
    index is fetched, and a few documents of them, drawn by the seed (None: none); raise
    `RefusedByRun` if no member has the index."""
    async with visiting_run(invite, timeout_s) as visit:
        known, links, run = read_run(visit.learnt), visit.world.links, invite.run
        manifest = known.manifest
        members = known_members(links, visit.learnt.records, run)
        data = await fetch_data(links, run, manifest.data, members, machine)
        if data is not None:
            data.close()  # it is lent to nobody
        if data is None or seed is None:
            return known, data, []
        await fetch_tokenizer(links, run, manifest.data, members)
        tokenizer = tokenizer_of(manifest.data)
        return known, data, await read_excerpts(links, run, data, members, tokenizer, seed)


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
