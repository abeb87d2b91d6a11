"""A run's data on its way to this machine, ahead of need.

The index comes first, then the pages of its shards; from then on the shards that this node draws
from, in the order in which it needs them. Until a shard is here, training waits.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from farflock.node.assembly.checkpoints import SavedTokenizer
from farflock.node.assembly.text import listed_text
from farflock.node.data.index import DataShard, read_index
from farflock.node.data.local_data import LocalData, NamedFile
from farflock.node.data.mirror import Mirror
from farflock.node.data.sequences import PackedBatches, SequenceStream, ShardedText
from farflock.node.errors import RefusedByRun, Usage, explained
from farflock.node.process.data_fetch import LOOK_EVERY_S, DataFetcher, NothingCame
from farflock.node.process.network import MachineOptions
from farflock.node.run.data_section import DataSection
from farflock.node.train.task import StepImpossible
from farflock.swarm.chunks import Chunks
from farflock.swarm.compute import Worker
from farflock.swarm.links import PeerId
from farflock.swarm.peer.peer import Peer
from farflock.swarm.tasks import cancel

INDEX_TIMEOUT_S = 120.0  # without any progress, before a newcomer gives up
AHEAD_STEPS = 256  # at least so many are looked ahead
MAX_AHEAD = 2**20  # sequences


class DataSupply:
    """The data of one run as this node gets it. `mix` weighs its sources (node/data/draws.py)."""

    def __init__(self, fetcher: DataFetcher, mix: Mapping[str, float] | None = None) -> None:
        self.fetcher, self._mix, self._work = fetcher, mix, fetcher.work
        self.local: LocalData = fetcher.local
        self._came = asyncio.Event()
        self._wanted: tuple[DataShard, ...] = ()
        self._ready_until = 0  # the first step whose shards are not all known to be here
        self._lacks = False  # whether training waits
        self.tokenizer: SavedTokenizer | None = None  # None until it is here, and for bytes
        self.failure: BaseException | None = None  # of `run`, raised where training waits

    # the index

    async def text(self) -> ShardedText:
        """Return the run's text, after fetching what describes it: the index, its pages and the
        tokenizer. Raise `RefusedByRun` if nothing of it comes for too long, or there is nobody to
        ask."""
        if self.fetcher.is_alone and await self._work(self.local.index_bytes) is None:
            raise RefusedByRun(
                "the run's data is not on this machine",
                f"no folder here has an index with the root {self.local.root}",
                "name its prepared folder with --data",
            )
        try:
            return await self.fetcher.coming(self._text(), INDEX_TIMEOUT_S)
        except NothingCame:
            raise RefusedByRun(
                "the run's data cannot be had",
                f"no member sent its index within {INDEX_TIMEOUT_S:.0f} s",
                "get a copy of the prepared folder, and name it with --data",
            ) from None

    async def _text(self) -> ShardedText:
        raw = await self.fetcher.index_bytes()
        index = read_index(raw, "the index", self.local.root)
        await self._work(partial(self.local.keep_index, raw))
        files: list[NamedFile] = [page for each in index.sources.values() for page in each.pages]
        if index.tokenizer is not None:
            files.append(index.tokenizer)
        for file in files:
            await self.bring(file)
        if index.tokenizer is not None:
            content = await self._work(partial(self.local.read, index.tokenizer))
            self.tokenizer = SavedTokenizer(content, index.end_of_text)
        return await self._work(partial(listed_text, index, self.local, self._mix))

    async def bring(self, file: NamedFile, *, patient: bool = True) -> bool:
        """Fetch a file of the data, unless it is here, and return whether it is. As long as nobody
        has it, wait if `patient`."""
        keep = {shard.sha256 for shard in self._wanted} | {file.sha256}
        return await self.fetcher.bring(file, keep, patient=patient)

    # ahead of need

    @contextlib.asynccontextmanager
    async def running(
        self, stream: SequenceStream | None, step: Callable[[], int]
    ) -> AsyncIterator[None]:
        """Fetch the shards of the steps to come while the block runs; `step` is the next one. A
        node that does not train has no stream."""
        if not isinstance(stream, PackedBatches):
            yield
            return
        task = asyncio.create_task(self.run(stream, step))
        try:
            yield
        finally:
            await cancel(task)

    async def run(self, stream: PackedBatches, step: Callable[[], int]) -> None:
        """Fetch the shards of the steps to come, until cancelled or until that fails, which
        `is_ready` raises."""
        try:
            await self._keep_ahead(stream, step)
        except Exception as error:
            self.failure = error
            self._came.set()

    async def _keep_ahead(self, stream: PackedBatches, step: Callable[[], int]) -> None:
        while True:
            looked = step()
            ahead = await self._work(partial(shards_ahead, stream, looked))
            self._wanted = _fitting(ahead, self.local.cache_bytes)
            lacking: list[DataShard] = []  # of all members, now
            for shard in self._wanted:
                if not await self.bring(shard, patient=False):
                    lacking.append(shard)
                await self._look(stream, step())
            if lacking:
                await self.bring(lacking[0])  # training comes to this one first
                continue
            await self._look(stream, step())
            enough = looked + max((self._ready_until - looked) // 4, 1)
            while step() < enough:  # noqa: ASYNC110 - the step is the loop's
                await asyncio.sleep(LOOK_EVERY_S)

    async def _look(self, stream: PackedBatches, step: int) -> None:
        """Find out for how many steps everything is here. Only what is wanted counts, for the rest
        may go at any time."""
        steps = await self._work(partial(_steps_here, stream, step, self._wanted, self.local))
        if step + steps > self._ready_until:
            self._ready_until = step + steps
            self._came.set()

    def is_ready(self, step: int) -> bool:
        """Return whether all that a step draws from is here; raise `StepImpossible` if nothing
        more will come."""
        if self.failure is not None:
            what = "this machine cannot keep the run's data"
            known = explained(self.failure)
            if known is None:
                raise self.failure
            raise StepImpossible(
                what, ": ".join(filter(None, (known.what, known.why))), known.remedy
            )
        self._lacks = step >= self._ready_until
        return not self._lacks

    def awaited(self) -> str:
        """Return what training waits for, in words; nothing if it does not wait."""
        return (self.fetcher.waits_for or "the run's data") if self._lacks else ""

    async def ready(self, step: int, stopping: Callable[[], bool]) -> None:
        """Wait until all that a step draws from is here, or the node is `stopping`."""
        while not (self.is_ready(step) or stopping()):
            self._came.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._came.wait()


def _now() -> float:
    return asyncio.get_running_loop().time()


def supply_of(
    machine: MachineOptions,
    section: DataSection,
    chunks: Chunks,
    members: Callable[[], Sequence[PeerId]],
) -> DataSupply | None:
    """Return the supply of a run on prepared data; None if its text comes with Farflock."""
    if section.root is None:
        return None
    places = machine.data, section.root, machine.cache.folder, machine.cache.max_bytes
    local, mirrors = local_data_at(*places)
    return DataSupply(
        DataFetcher(local, chunks, members, mirrors, Worker("data")), section.mix or None
    )


def local_data_at(
    places: Sequence[str], root: str, cache: Path, cache_bytes: int | None
) -> tuple[LocalData, list[Mirror]]:
    """Return the files of this data that folders and the cache have, and the web servers among the
    places; raise `Usage` for a folder that is not there, and `BadMirror` for an address that
    cannot be one."""
    folders = [Path(place) for place in places if not _is_url(place)]
    for folder in folders:
        if not folder.is_dir():
            raise Usage("--data", f"there is no folder {folder}", "name one, or a web address")
    mirrors = [Mirror(place) for place in places if _is_url(place)]
    return LocalData(root, folders, cache, cache_bytes), mirrors


def others_in(peer: Peer) -> tuple[PeerId, ...]:
    """Return the other members of the newest view; none before this peer knows one."""
    chain = peer.context.chain
    return () if chain is None else tuple(each for each in chain.newest.peers if each != peer.me)


def _is_url(place: str) -> bool:
    return "://" in place


def shards_ahead(stream: PackedBatches, step: int) -> tuple[DataShard, ...]:
    """Return the shards to fetch: at least one more of each source than the next step needs."""
    steps, least = AHEAD_STEPS, 2 * len(stream.needed(step, 1))
    needed = stream.needed(step, steps)
    while len(needed) < least and steps * stream.batch_size < MAX_AHEAD:
        steps *= 4
        needed = stream.needed(step, steps)
    return tuple(needed)


def _fitting(shards: Sequence[DataShard], room: int | None) -> tuple[DataShard, ...]:
    """Return the shards that fit into a cache together, in the order of need; the first anyway."""
    fitting: list[DataShard] = []
    for shard in shards:
        room = None if room is None else room - shard.size
        if fitting and room is not None and room < 0:
            break
        fitting.append(shard)
    return tuple(fitting)


def _steps_here(
    stream: PackedBatches, step: int, wanted: Sequence[DataShard], local: LocalData
) -> int:
    """Return how many steps from `step` on need no shards but the wanted ones that are here, as far
    as is looked ahead."""
    shards = {shard.sha256 for shard in wanted if local.find(shard)}
    here = 0
    while here < AHEAD_STEPS:
        some = max(here, 1)
        if not all(shard.sha256 in shards for shard in stream.needed(step + here, some)):
            return here
        here += some
    return here
