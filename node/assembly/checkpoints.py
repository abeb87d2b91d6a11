"""A node's checkpoints: the times at which they are written, those that are kept, and the one
that a restart takes."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from farflock.node.assembly.resume import Resumable, checkpoint_state
from farflock.node.model.llama import Llama
from farflock.node.state import checkpoint
from farflock.node.state.checkpoint import Checkpoint, CheckpointCorrupt, CheckpointError
from farflock.node.state.paths import RunFolder

KEPT = 3

log = logging.getLogger(__name__)


class SavedNode(Resumable, Protocol):
    """A node whose model is saved with its state."""

    @property
    def model(self) -> Llama: ...


@dataclass(slots=True)
class CheckpointManager:
    """Writes a node's checkpoints every `every_s` seconds and at the end, and keeps the newest
    `KEPT`."""

    node: SavedNode
    folder: RunFolder
    run: str
    manifest: str  # its canonical text
    every_s: float
    role: str = "replica"  # each stage has its own folder: tensors differ
    _written_s: float = field(default_factory=time.monotonic)

    async def pause(self) -> None:
        """Write a checkpoint between two steps if one is due. A full disk does not end training."""
        if time.monotonic() - self._written_s < self.every_s:
            return
        try:
            await self.save()
        except checkpoint.CheckpointError as error:
            log.warning("could not write a checkpoint, training goes on: %s", error)
            self._written_s = time.monotonic()

    async def save(self) -> Path:
        """Write a checkpoint unless there is one of this step; return its folder."""
        step = self.node.loop.step
        parts, cursors = checkpoint_state(self.node)
        self._written_s = time.monotonic()
        folder = folder_of(self.folder, self.role)
        if newest := [path for at, path in checkpoint.steps(folder) if at == step]:
            return newest[0]
        tokens = self.node.loop.driver.tokens
        meta = {
            "run": self.run,
            "step": step,
            "tokens": tokens,
            "manifest": self.manifest,
            "node": cursors,
        }
        config = {"config.json": msgspec.json.encode(self.node.model.config)}
        written = await asyncio.to_thread(checkpoint.save, folder, step, parts, meta, config)
        await asyncio.to_thread(checkpoint.prune, folder, KEPT)
        return written


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
