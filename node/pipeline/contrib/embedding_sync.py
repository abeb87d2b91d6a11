"""Distribution of the frozen embedding's versions (embedding_versions.py) to all servers of a run.

Servers of the first stage make the versions. Every server of any stage, and every full replica,
downloads the versions that it is missing and serves those that it has, so that a version is lost
only if all these nodes are. Of several offers a node takes the one that most members of a stage
announce. A download larger than a table is never begun; each chunk is verified by its digest, and
the whole by its offer's hash."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from farflock.compression.subspace_versions import SubspaceVersions
from farflock.node.model.llama import ModelConfig
from farflock.node.pipeline.contrib.embedding_versions import (
    EmbeddingVersions,
    VersionedContributions,
    finite_table,
)
from farflock.node.pipeline.lifecycle.frozen_embedding import FrozenEmbedding
from farflock.node.pipeline.lifecycle.state import living
from farflock.node.pipeline.passes.constraint import EMBEDDING, ConstrainedReplica
from farflock.node.run.terms import FIRST_VERSION, EmbeddingSchedule
from farflock.node.train.driver import ContributionLog, Driver
from farflock.node.train.state_sync import CorruptSnapshot, decode_state, encode_state
from farflock.swarm.compute import Compute
from farflock.swarm.peer.peer import Peer
from farflock.swarm.peer.snapshots import Snapshot, SnapshotUnavailable
from farflock.swarm.tasks import cancel

NAME = "table"  # name of the snapshots and of their tensor
LOOK_EVERY_S = 0.5
FETCH_TIMEOUT_S = 60.0  # for a whole table
FIND_TIMEOUT_S = 10.0  # until the first bytes: then another stage is asked
HEAD_BYTES = 1 << 12  # bound on the name and shape before the values

log = logging.getLogger(__name__)


class EmbeddingSync(FrozenEmbedding):
    """One node's part in the distribution. `stream` is the first stage's stream; the run has
    `stages` stages."""

    def __init__(
        self,
        codec: SubspaceVersions,
        turns: EmbeddingSchedule,
        peer: Peer,
        config: ModelConfig,
        stages: int,
        stream: str,
        compute: Compute,
    ) -> None:
        self._tables = EmbeddingVersions(codec, turns)
        self._peer, self._config, self._compute = peer, config, compute
        self._stages, self._stream = stages, stream
        self._first: VersionedContributions | None = None
        self._applied: Callable[[], int] = self._heard
        self._rewrite: Callable[[], None] = lambda: None

    def at_first(
        self, contributions: ContributionLog, driver: Driver, applied: Callable[[], int]
    ) -> VersionedContributions:
        """As `FrozenEmbedding.at_first`: the log also makes and follows versions."""
        replica = driver.replica if isinstance(driver.replica, ConstrainedReplica) else None

        def averaged() -> dict[str, Tensor]:
            return dict(driver.method.eval_params(driver.replica))

        def rewrite() -> None:
            driver.cuts.before_change()
            driver.replica.write(averaged(), "param")

        self._applied, self._rewrite = applied, rewrite
        self._first = VersionedContributions(
            contributions, self._tables, lambda: averaged()[EMBEDDING], replica, driver.cuts
        )
        return self._first

    def founded(self) -> None:
        """As `FrozenEmbedding.founded`: there is no peer to ask yet."""
        if self._first is not None:
            self._begun_first(self._first, anew=True)

    async def before(self, after: int) -> None:
        """As `FrozenEmbedding.before`: fetch the version in effect."""
        await self._fetch_effective(max(after, self._applied()))
        if self._first is not None:
            await self._compute(partial(self._first.follow, after))

    async def begun(self, *, anew: bool) -> None:
        """As `FrozenEmbedding.begun`: fetch the version in effect, and rewrite the first stage in
        it."""
        await self._fetch_effective(self._applied())
        if self._first is not None:
            await self._compute(partial(self._begun_first, self._first, anew=anew))

    def _begun_first(self, first: VersionedContributions, *, anew: bool) -> None:
        applied = self._applied()
        if anew and first.begin_anew(applied):
            log.warning(
                "no peer has the frozen embedding of round %d; the present average takes its place",
                applied,
            )
        if self._tables.turns.in_effect(applied) != FIRST_VERSION:
            first.follow(applied)
            self._rewrite()
        self._tables.give_up(applied)

    async def run(self) -> None:
        """Download and serve versions forever."""
        for slot in range(self._tables.turns.max_held):
            self._peer.snapshots.serve(
                f"{NAME}/{slot}", partial(self.offered, slot), partial(self.in_slot, slot)
            )
        # By slot: a lost version must not hold up the others.
        downloads: dict[int, asyncio.Task[bool]] = {}
        try:
            while True:
                for version in self._tables.lacking(self._applied()):
                    slot = version % self._tables.turns.max_held
                    if slot in downloads and downloads[slot].done():
                        downloads.pop(slot).result()
                    if slot not in downloads:
                        downloads[slot] = asyncio.ensure_future(self.fetch(version))
                await self._compute(self._tidy)
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            await cancel(*downloads.values())

    def _tidy(self) -> None:
        applied = self._applied()
        if self._first is not None:
            self._first.follow_late(applied)
        self._tables.give_up(applied)

    async def _fetch_effective(self, applied: int) -> None:
        """Fetch the version that weights are written with; the others can wait."""
        version = self._tables.turns.in_effect(applied)
        if version in self._tables.lacking(applied):
            await self.fetch(version)

    async def fetch(self, version: int) -> bool:
        """Download a version from a stage that has it, asking the first stage first; return True
        if the version is held afterwards."""
        for stage, others in enumerate(living(self._peer, self._stages)):
            if others and await self._fetch_from(version, stage):
                return True
        return False

    async def _fetch_from(self, version: int, stage: int) -> bool:
        try:
            snapshot = await self._download(version, stage)
        except SnapshotUnavailable as reason:
            what = "could not get version %d of the frozen embedding from stage %d: %s"
            log.info(what, version, stage, reason)
            return False
        if snapshot.round != version:
            return False  # its holders have moved on and serve a later version in the slot
        if await self._compute(partial(self._taken, version, snapshot)):
            return True
        # otherwise the next attempt would download the same bytes again
        self._peer.snapshots.distrust(self._name(version))
        return False

    def _taken(self, version: int, snapshot: Snapshot) -> bool:
        """Store a downloaded version; return False unless it is a table of this run's shape."""
        try:
            tensors = dict(decode_state(snapshot))
        except CorruptSnapshot as reason:
            log.warning("discarded version %d of the frozen embedding: %s", version, reason)
            return False
        table = finite_table(tensors, NAME, self._config.vocab_size, self._config.dim)
        if table is None or not self._tables.hold(version, table):
            return False
        self._tables.give_up(self._applied())  # rounds may have passed it by while it came
        return True

    def _name(self, version: int) -> str:
        return f"{NAME}/{version % self._tables.turns.max_held}"

    async def _download(self, version: int, stage: int) -> Snapshot:
        """Download a version. Raise `SnapshotUnavailable` if nothing has come within
        `FIND_TIMEOUT_S`: its holders may be gone."""
        name, comes = self._name(version), asyncio.Event()
        max_bytes = HEAD_BYTES + 4 * self._config.vocab_size * self._config.dim
        fetch = self._peer.snapshots.fetch(
            name, FETCH_TIMEOUT_S, lambda here, total: comes.set(), version, stage, max_bytes
        )
        task, began = asyncio.ensure_future(fetch), asyncio.ensure_future(comes.wait())
        try:
            await asyncio.wait(
                [task, began], timeout=FIND_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
            )
            if not (task.done() or comes.is_set()):
                raise SnapshotUnavailable(
                    f"no peer of stage {stage} offered {name} within {FIND_TIMEOUT_S:.0f} s"
                )
            return await task
        finally:
            await cancel(task, began)

    def in_slot(self, slot: int) -> int:
        """Return the last version served in this slot, negative if there is none. The first version
        is not served: every peer has it."""
        held = [version for version in self._tables.codec.held if version != FIRST_VERSION]
        return max(
            (version for version in held if version % self._tables.turns.max_held == slot),
            default=-1,
        )

    async def offered(self, slot: int) -> Snapshot:
        return await self._compute(partial(self._encoded, slot))

    def _encoded(self, slot: int) -> Snapshot:
        version = self.in_slot(slot)
        table = self._tables.table(version)
        content: dict[str, Any] = {} if table is None else {NAME: torch.clone(table)}
        return encode_state(content, version if content else -1, 0)

    def _heard(self) -> int:
        """Return the last round of the first stage known to be over."""
        return self._peer.rounds.newest(self._stream)
