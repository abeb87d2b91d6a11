"""A run's prepared data on this machine: in folders in place, in the cache, or on their way."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from farflock.node.assembly.held_out_rows import HeldOutRows
from farflock.node.assembly.text import absent_data, require_vocabulary
from farflock.node.data.coming_shards import FetchedShards
from farflock.node.data.folder import PreparedFolder
from farflock.node.data.local_shards import LocalShards, table_of
from farflock.node.data.samples import Text
from farflock.node.data.shard_cache import ShardCache
from farflock.node.data.shard_table import ShardTable
from farflock.node.data.web_folder import WebFolder
from farflock.node.errors import Failure
from farflock.node.process.data_copies import Copies
from farflock.node.process.data_index import fetch_table
from farflock.node.process.data_supply import DataSupply, HeldOutSupply
from farflock.node.process.network import MachineOptions
from farflock.node.process.status import DataStatus
from farflock.node.process.web_shards import WebShards
from farflock.node.run.data_section import DataSection
from farflock.node.state.paths import home
from farflock.node.turns import TurnNeverCame
from farflock.swarm.compute import Worker
from farflock.swarm.links import Links, PeerId
from farflock.swarm.peer.peer import Peer
from farflock.swarm.tasks import cancel


class RunData:
    """The sources of a run's data, in the manifest's order, and the weight of each."""

    def __init__(
        self,
        shards: Sequence[LocalShards],
        weights: Sequence[float],
        copies: int,
        files: Worker | None = None,
        urls: Sequence[str] = (),
    ) -> None:
        self.shards, self._weights, self._copies = tuple(shards), tuple(weights), copies
        self._files = files  # reads shards for others
        self._urls = urls
        self.sources = tuple(map(FetchedShards, shards))
        self.supply: DataSupply | None = None
        self.copies: Copies | None = None
        self.held_out: HeldOutRows | None = None

    def text(self) -> Text:
        """Return the shards to train on, which are read when they are needed."""
        return Text(self.sources, self._weights)

    def hold_out(self, seq: int, sequences: int) -> HeldOutRows:
        """Return the sequences that the run is evaluated on, as far as their shards are here. Raise
        `BadData` if there is too little text, and `BadIndex` if a shard is damaged."""
        rows = HeldOutRows([each.table for each in self.shards], seq, sequences)
        for shard in list(rows.missing):
            local = self.shards[shard.source]
            tokens = local.tokens(shard.number) if local.has(shard.number) else None
            if tokens is not None:
                rows.take(shard, tokens)
        self.held_out = rows
        return rows

    def status(self, peer: Peer) -> DataStatus:
        """Return what is here, and what has come and gone."""
        tables = [each.table for each in self.shards]
        counts = [source.counts for source in self.sources]
        from_web = 0 if self.supply is None else self.supply.web.fetched_bytes
        return DataStatus(
            roots=tuple(table.root for table in tables),
            tokens=sum(table.all_tokens for table in tables),
            shards=sum(map(len, tables)),
            here=sum(each.count for each in self.shards),
            seen=sum(len(source.seen) for source in self.sources),
            fetched_bytes=peer.data_holders.fetched_bytes + from_web,
            sent_bytes=peer.context.chunks.lending.sent_bytes,
            late=sum(each.late for each in counts),
            skipped=sum(each.skipped for each in counts),
            skipped_tokens=sum(each.skipped_tokens for each in counts),
            copies=0 if self.copies is None else self.copies.fewest,
            wanted=self._copies,
            held_out_missing=0 if self.held_out is None else len(self.held_out.missing),
            waits_for=next((each.waits_for for each in self.sources if each.waits_for), ""),
        )

    def stop_with(self, stopping: Callable[[], bool]) -> None:
        """Let nothing be waited for once the node stops."""
        for source in self.sources:
            source.stops = stopping

    def close(self) -> None:
        """End the thread that reads shards for others."""
        if self._files is not None:
            self._files.close()

    @contextlib.asynccontextmanager
    async def travelling(
        self, peer: Peer, known: Sequence[PeerId], founder: PeerId, *, evaluates: bool
    ) -> AsyncIterator[None]:
        """Lend what is here, and fetch what is about to be read, while the block runs, and what the
        run is evaluated on if this peer does so; `known` are members to ask before this peer knows
        a view."""
        lending, writer, ranker = (
            peer.context.chunks.lending.lenders,
            Worker("data"),
            Worker("copies"),
        )
        lending |= {each.root: each for each in self.shards}
        members = partial(members_of, peer, known)
        roots = {each.table.root for each in self.shards}
        web = WebShards(list(map(WebFolder, self._urls)), roots)
        self.supply = DataSupply(self.sources, peer.data_holders, members, writer, web)
        me = None if peer.me == founder else peer.me

        def others() -> Sequence[PeerId]:
            return [each for each in members_of(peer, ()) if each != founder]

        self.copies = Copies(self.supply, peer.data_holders, others, me, self._copies, ranker)
        try:
            async with self.supply.running():
                tasks = [asyncio.create_task(self.copies.run())]
                if not evaluates:
                    self.held_out = None
                elif self.held_out is not None:
                    bringing = HeldOutSupply(self.supply, self.held_out)
                    tasks.append(asyncio.create_task(bringing.run()))
                try:
                    yield
                finally:
                    await cancel(*tasks)
        finally:
            for each in self.shards:
                del lending[each.root]
            for worker in (writer, ranker):
                worker.close()
            self.close()


def members_of(peer: Peer, known: Sequence[PeerId]) -> Sequence[PeerId]:
    """Return the other members that may be asked: of the newest view, or else those known."""
    chain = peer.context.chain
    peers = known if chain is None else chain.newest.peers
    return [each for each in peers if each != peer.me and peer.context.life(each) != "dead"]


async def data_in_place(data: DataSection, machine: MachineOptions) -> RunData | None:
    """Return the prepared data that a founder has in folders; None for a run on a corpus. Raise
    `RefusedByRun` if one is missing."""
    return await _gathered(data, machine, _missing)


async def fetch_data(
    links: Links, run: str, data: DataSection, members: Sequence[PeerId], machine: MachineOptions
) -> RunData | None:
    """Return the prepared data of a run that this machine joins, whose index comes from members
    where no folder has it; None for a run on a corpus. Raise `RefusedByRun` if nobody sends it."""
    if machine.ranks is not None:  # their followers read folders
        return await data_in_place(data, machine)

    async def fetched(root: str, cache: ShardCache) -> ShardTable:
        return await fetch_table(links, run, root, members, cache)

    return await _gathered(data, machine, fetched)


def opened_cache(folder: Path, max_bytes: int, fetches: bool) -> ShardCache:
    """Return the cache in a folder; raise `Failure` if it cannot be read, or be written to though
    shards are to be fetched."""
    try:
        cache = ShardCache(folder, max_bytes)
        if fetches:
            cache.require_writable()
    except OSError as error:
        what, stuck = f"the cache of data {folder} cannot be used", isinstance(error, TurnNeverCame)
        remedy = "" if stuck else "make the folder yours, or set FARFLOCK_HOME to one that is"
        raise Failure(what, (error.strerror or str(error)).lower(), remedy) from None
    return cache


async def _missing(root: str, cache: ShardCache) -> ShardTable:
    raise absent_data(root)


async def _gathered(
    data: DataSection,
    machine: MachineOptions,
    absent: Callable[[str, ShardCache], Coroutine[Any, Any, ShardTable]],
) -> RunData | None:
    """Return a run's data; `absent` gives the shards of a root that no folder has."""
    if not data.weights:
        return None
    files = Worker("data")
    folders = await files(lambda: {each.root: each for each in map(PreparedFolder, machine.data)})
    fetches = not folders.keys() >= data.weights.keys()
    cache = await files(lambda: opened_cache(home() / "data", machine.data_cache, fetches))
    found = list[LocalShards]()
    for root in data.weights:
        folder = folders.get(root)
        table = table_of(folder) if folder is not None else await absent(root, cache)
        require_vocabulary(data, table.index)
        found.append(LocalShards(table, cache, folder, files))
    weights = tuple(data.weights.values())
    return RunData(found, weights, data.copies or 0, files, data.urls or ())
