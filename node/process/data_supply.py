"""A run's data on their way to this machine, ahead of need, and from it to others.

The thread that trains says which shards it reads next (node/data/coming_shards.py). This task asks
the members who has those that are missing, fetches some at once, the first ones first, and keeps
them in the cache. What no member delivers may lie on the web. What nobody has for a while is given
up.

The held-out shards on which the run is evaluated come below those, one at a time, and once: their
sequences stay in memory. Until then the node passes its turns to evaluate
(node/train/evaluator.py).
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from functools import partial

from farflock.node.assembly.held_out_rows import HeldOutRows, HeldOutShard
from farflock.node.data.coming_shards import FetchedShards
from farflock.node.data.index import BadIndex
from farflock.node.data.shard_cache import CacheFull, ShardNeeds
from farflock.node.process.web_shards import WebShards
from farflock.node.tokens.tokenizer import TokenIds
from farflock.swarm.compute import Compute
from farflock.swarm.links import PeerId
from farflock.swarm.messages import MAX_HELD_CHUNKS
from farflock.swarm.peer.data_holders import DataHolders
from farflock.swarm.tasks import cancel

AT_ONCE = 3  # shards under way
ASK_EVERY_S = 5.0  # who has what is missing
GIVE_UP_S = 60.0  # after so long without a shard that is needed now
LOOK_EVERY_S = 30.0
TRY_EVERY_S = 2.0  # a held-out shard

log = logging.getLogger(__name__)

_Job = tuple[int, int]  # which source, and which of its shards


class DataSupply:
    """Fetches what sources are about to read. `members` are the peers to ask now; `compute` runs
    what writes files; `web` are servers with copies."""

    def __init__(
        self,
        sources: Sequence[FetchedShards],
        data_holders: DataHolders,
        members: Callable[[], Sequence[PeerId]],
        compute: Compute,
        web: WebShards | None = None,
    ) -> None:
        self.sources, self._data_holders = tuple(sources), data_holders
        self.web = web or WebShards((), ())
        self._members, self._compute = members, compute
        self._woken = asyncio.Event()
        self._under_way: set[_Job] = set()
        self._tried_s: dict[_Job, float] = {}
        self._lacking_s: dict[_Job, float] = {}  # since when it was wanted in vain
        self._asking = asyncio.Lock()
        self._asked_s: dict[tuple[bytes, int], float] = {}
        self.mine: Collection[bytes] = ()  # kept for others (data_copies.py)
        self.fetched: list[tuple[int, int]] = []  # which source, and which of its shards, in turn

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Fetch what is wanted while the block runs."""
        loop = asyncio.get_running_loop()
        for source in self.sources:
            source.wake = partial(loop.call_soon_threadsafe, self._woken.set)
        workers = [asyncio.create_task(self._work()) for _ in range(AT_ONCE)]
        try:
            yield
        finally:
            for source in self.sources:
                source.wake = lambda: None
            await cancel(*workers)

    async def _work(self) -> None:
        """Fetch one shard after the other. What fails ends the training, where that waits."""
        try:
            while True:
                if (job := self._next()) is None:
                    await self._pause()
                elif not await self._bring(job):
                    self._tried_s[job] = _now()
        except Exception as error:
            for source in self.sources:
                source.failure = error
                source.came()

    def _next(self) -> _Job | None:
        """Return a shard that is missing and is not under way. What is read next has the line to
        itself."""
        missing = [
            (place, number, number in source.now)
            for place, source in enumerate(self.sources)
            for number in source.missing
        ]
        for soon in (True, False):
            jobs = [(place, number) for place, number, now in missing if now is soon]
            for job in jobs:
                tried_s = self._tried_s.get(job, -ASK_EVERY_S)
                if job not in self._under_way and _now() >= tried_s + ASK_EVERY_S:
                    return job
            if not self._under_way.isdisjoint(jobs):
                return None
        return None

    async def _pause(self) -> None:
        """Wait until something else is wanted, or what nobody had may be had."""
        wanted = self.busy
        self._woken.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ASK_EVERY_S / 4 if wanted else LOOK_EVERY_S):
                await self._woken.wait()

    async def _bring(self, job: _Job) -> bool:
        """Fetch a shard and keep it; return False if nobody delivers it."""
        self._under_way.add(job)
        try:
            if await self._fetched(job):
                self._lacking_s.pop(job, None)
                self._tried_s.pop(job, None)
                return True
        finally:
            self._under_way.discard(job)
        source, number = self.sources[job[0]], job[1]
        since_s = self._lacking_s.setdefault(job, _now())
        if _now() - since_s >= GIVE_UP_S and number in source.now:
            source.give_up(number)
            del self._lacking_s[job]
        return False

    async def copied(self, source: FetchedShards, number: int) -> bool:
        """Fetch a shard to keep it for others; return False if nobody delivers it. Raise
        `CacheFull` if there is no room."""
        job = self.sources.index(source), number
        if source.local.has(number) or job in self._under_way:
            return True
        self._under_way.add(job)
        try:
            return await self._fetched(job)
        finally:
            self._under_way.discard(job)

    async def tokens(self, source: FetchedShards, number: int) -> TokenIds | None:
        """Return the tokens of a shard that is read once (n,), and keep it if there is room; None
        if nobody delivers it. Raise `BadIndex` if they are not what the index says."""
        job = self.sources.index(source), number
        found = await self._compute(partial(source.local.tokens, number))
        if found is not None or job in self._under_way:
            return found
        self._under_way.add(job)
        try:
            raw = await self._sent(job)
            if raw is None:
                return None
            with contextlib.suppress(CacheFull, OSError):
                await self._keep(job, raw)
            return await self._compute(partial(source.local.tokens_in, number, raw))
        finally:
            self._under_way.discard(job)

    async def _fetched(self, job: _Job) -> bool:
        raw = await self._sent(job)
        if raw is not None:
            await self._keep(job, raw)
        return raw is not None

    async def _keep(self, job: _Job, raw: bytes) -> None:
        source, number = self.sources[job[0]], job[1]
        await self._compute(partial(source.local.keep, number, raw, self.needs()))
        self.fetched.append(job)
        source.came()

    async def _sent(self, job: _Job) -> bytes | None:
        """Return the bytes of a shard, verified; None if nobody delivers it."""
        table, number = self.sources[job[0]].local.table, job[1]
        raw = await self._sent_by_members(job)
        return await self.web.fetch(table, number) if raw is None else raw

    async def _sent_by_members(self, job: _Job) -> bytes | None:
        source, number = self.sources[job[0]], job[1]
        table, root = source.local.table, source.local.root
        holders = self._holders(root, number)
        if not holders:
            await self._ask(root, number)
            holders = self._holders(root, number)
        if not holders:
            return None
        digest, size = table.digest(number), table.size(number)
        known = partial(self._holders, root, number)
        raw = await self._data_holders.fetch(digest, size, holders, known=known)
        if raw is None:
            self._data_holders.forget(root, number)
        return raw

    def needs(self) -> ShardNeeds:
        """Return the shards that have to stay in the cache."""
        tables = [(source.local.table, source.wanted) for source in self.sources]
        wanted = {table.digest(n) for table, numbers in tables for n in numbers}
        return ShardNeeds(wanted, self.mine)

    @property
    def busy(self) -> bool:
        """True if anything is missing that is about to be read."""
        return any(source.missing for source in self.sources)

    @property
    def presses(self) -> bool:
        """True if anything is missing that is read now."""
        return any(n in source.now for source in self.sources for n in source.missing)

    def _holders(self, root: bytes, number: int) -> list[PeerId]:
        members = set(self._members())
        return [p for p in self._data_holders.holders(root, number) if p in members]

    async def _ask(self, root: bytes, number: int) -> None:
        """Ask the members who has a shard and those beside it, unless they were asked lately."""
        place = root, number - number % MAX_HELD_CHUNKS
        async with self._asking:  # for others the answers may come meanwhile
            await self._ask_once(place)

    async def _ask_once(self, place: tuple[bytes, int]) -> None:
        if _now() - self._asked_s.get(place, -ASK_EVERY_S) >= ASK_EVERY_S:
            self._asked_s[place] = _now()
            await self._data_holders.ask(self._members(), *place)


class HeldOutSupply:
    """Brings the shards that are missing of a run's held-out sequences."""

    def __init__(self, supply: DataSupply, rows: HeldOutRows) -> None:
        self._supply, self._rows, self._warned = supply, rows, False

    async def run(self) -> None:
        """Bring one shard after the other; end once all are here."""
        try:
            for shard in list(self._rows.missing):
                await self._bring(shard)
        except BadIndex as error:
            log.warning("this node cannot evaluate the run: %s", error)

    async def _bring(self, shard: HeldOutShard) -> None:
        source, since_s = self._supply.sources[shard.source], math.inf
        while True:
            if not self._supply.presses:
                tokens = await self._supply.tokens(source, shard.number)
                if tokens is not None:
                    self._rows.take(shard, tokens)
                    return
                since_s = min(since_s, _now())
                if not self._warned and _now() - since_s >= GIVE_UP_S:
                    self._warned = True
                    log.warning(
                        "nobody has the held-out shard %s… of the run's data: this node cannot"
                        " evaluate the run until a member has it",
                        source.local.table.digest(shard.number).hex()[:16],
                    )
            await asyncio.sleep(TRY_EVERY_S)


def _now() -> float:
    return asyncio.get_running_loop().time()
