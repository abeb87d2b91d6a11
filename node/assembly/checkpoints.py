"""A node's checkpoints: the times at which they are written, those that are kept, and the one
that a restart takes."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from farflock.node.assembly.resume import STEPPED, Resumable, checkpoint_state
from farflock.node.model.llama import Llama
from farflock.node.state import checkpoint
from farflock.node.state.checkpoint import Checkpoint, CheckpointCorrupt, CheckpointError
from farflock.node.state.cut import Cut
from farflock.node.state.paths import RunFolder

KEPT = 3  # unless `--keep` says otherwise

log = logging.getLogger(__name__)


class SavedNode(Resumable, Protocol):
    """A node whose model is saved with its state."""

    @property
    def model(self) -> Llama: ...


@dataclass(slots=True)
class CheckpointManager:
    """Writes a node's checkpoints every `every_s` seconds and at the end, and keeps the newest
    `keep`, or as many of them as take at most `keep_bytes`; one in any case.

    Training goes on while a checkpoint is written: it is read from a cut (node/state/cut.py). A
    stage's passes may put other weights in place of its own, so a stage's cut is copied at once."""

    node: SavedNode
    folder: RunFolder
    run: str
    manifest: str  # its canonical text
    every_s: float
    role: str = "replica"  # each stage has its own folder: tensors differ
    keep: int = KEPT
    keep_bytes: int | None = None
    _intact: set[Path] = field(default_factory=set)
    _written_s: float = field(default_factory=time.monotonic)
    _writing: asyncio.Task[Path] | None = None

    async def pause(self) -> None:
        """Begin to write a checkpoint between two steps if one is due and none is being written.
        A full disk does not end training."""
        if self._writing is not None and self._writing.done():
            await self.written()
        if self._writing is None and time.monotonic() - self._written_s >= self.every_s:
            self._writing = asyncio.create_task(self._write())
            await asyncio.sleep(0)  # the task takes its cut before the next step

    async def save(self) -> Path:
        """Write a checkpoint unless there is one of this step; return its folder."""
        await self.written()
        return await self._write()

    @property
    def writing(self) -> bool:
        """True while a checkpoint that `pause` began is being written."""
        return self._writing is not None and not self._writing.done()

    async def written(self) -> None:
        """Wait for the checkpoint that is being written, if any."""
        writing, self._writing = self._writing, None
        try:
            if writing is not None:
                await writing
        except CheckpointError as error:
            log.warning("could not write a checkpoint, training goes on: %s", error)

    async def _write(self) -> Path:
        self._written_s = time.monotonic()
        step = self.node.loop.step
        folder = folder_of(self.folder, self.role)
        if newest := [path for at, path in checkpoint.steps(folder) if at == step]:
            return newest[0]
        parts, cursors = checkpoint_state(self.node)
        cuts = {name: Cut(tensors) for name, tensors in parts.items()}
        tokens = self.node.loop.driver.tokens
        meta = {
            "run": self.run,
            "step": step,
            "tokens": tokens,
            "manifest": self.manifest,
            "node": cursors,
        }
        config = {"config.json": msgspec.json.encode(self.node.model.config)}
        with self.opened(cuts):
            write = partial(checkpoint.save, folder, step, cuts, meta, config)
            written = await asyncio.to_thread(write)
        self._intact.add(written)
        prune = partial(checkpoint.prune, folder, self.keep, self.keep_bytes, self._intact)
        await asyncio.to_thread(prune)
        size_bytes = checkpoint.bytes_of(written)
        if self.keep_bytes is not None and size_bytes > self.keep_bytes:
            log.warning(
                "%s takes %d bytes, above the %d of --keep-bytes; it stays, because it is the only"
                " one left; allow for two of them, so that one is intact while another is written",
                *(written, size_bytes, self.keep_bytes),
            )
        return written

    @contextlib.contextmanager
    def opened(self, parts: Mapping[str, Cut]) -> Iterator[None]:
        """Keep the parts of a checkpoint as they are while it is written."""
        exact = self.node.loop.driver.method.equality == "exact"  # only rounds change shared state
        cuts = self.node.loop.driver.cuts
        with cuts.added(*parts.values()):
            for name, cut in parts.items():
                cuts.add(cut, stepped=name in STEPPED or not exact)
                if self.role != "replica":
                    cut.save()
            yield


async def save_all(keepers: Sequence[CheckpointManager], folder: RunFolder) -> Path:
    """Write a checkpoint of each node (a full replica's: of each stage); return their folder."""
    saved = [await keeper.save() for keeper in keepers] or [folder.path]
    return saved[0] if len(saved) == 1 else folder.checkpoints


def folder_of(folder: RunFolder, role: str) -> Path:
    """Return the folder of a role's checkpoints."""
    return folder.checkpoints if role == "replica" else folder.checkpoints / role.replace(":", "-")


def last_of(folder: RunFolder, run: str, role: str = "replica") -> Checkpoint | None:
    """Return the newest intact checkpoint of this run and role; None if there is none.

    Raise `CheckpointError` if all are corrupt or the newest belongs to another run: a new run
    would write its own among them, and in time prune them."""
    checkpoints = folder_of(folder, role)
    newest = checkpoint.latest(checkpoints)
    if newest is not None and newest.meta.get("run") != run:
        other = str(newest.meta.get("run"))[:8]
        raise CheckpointError(
            f"{newest.folder} belongs to another run ({other}, not {run[:8]}); "
            "choose another --folder, or move the checkpoints away"
        )
    if newest is None and checkpoint.steps(checkpoints):
        raise CheckpointCorrupt(
            f"no checkpoint in {checkpoints} is intact; "
            "restore one from a copy, or move them away to start again"
        )
    return newest
