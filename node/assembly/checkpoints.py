"""A node's checkpoints: when they are written, which are kept, and which one a new start goes on from."""

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
    """Writes a checkpoint between two steps every `every_s` seconds, and one at the end; the last `KEPT` are kept."""

    node: SavedNode
    folder: RunFolder
    run: str
    manifest: str  # its canonical text
    every_s: float
    role: str = "replica"  # a stage's are kept apart: they are of other tensors
    _written_s: float = field(default_factory=time.monotonic)

    async def pause(self) -> None:
        """Called between steps: write one if it is time. A disk that is full then must not end the training."""
        if time.monotonic() - self._written_s < self.every_s:
            return
        try:
            await self.save()
        except checkpoint.CheckpointError as error:
            log.warning("this checkpoint is left out: %s", error)
            self._written_s = time.monotonic()

    async def save(self) -> Path:
        """Write one now, unless this step has one already; returns its folder."""
        step = self.node.loop.step
        parts, cursors = checkpoint_state(self.node)
        self._written_s = time.monotonic()
        folder = folder_of(self.folder, self.role)
        if newest := [path for at, path in checkpoint.steps(folder) if at == step]:
            return newest[0]
        tokens = self.node.loop.driver.tokens
        meta = {"run": self.run, "step": step, "tokens": tokens, "manifest": self.manifest, "node": cursors}
        config = {"config.json": msgspec.json.encode(self.node.model.config)}
        written = await asyncio.to_thread(checkpoint.save, folder, step, parts, meta, config)
        await asyncio.to_thread(checkpoint.prune, folder, KEPT)
        return written


async def save_all(keepers: Sequence[CheckpointManager], folder: RunFolder) -> Path:
    """Write one of each node, of a full replica each stage; returns the folder of the only one, or of all."""
    saved = [await keeper.save() for keeper in keepers] or [folder.path]
    return saved[0] if len(saved) == 1 else folder.checkpoints


def folder_of(folder: RunFolder, role: str) -> Path:
    """Where the checkpoints of a role are."""
    return folder.checkpoints if role == "replica" else folder.checkpoints / role.replace(":", "-")


def last_of(folder: RunFolder, run: str, role: str = "replica") -> Checkpoint | None:
    """The newest whole checkpoint of this run, of a replica or a stage, in a node's folder; None if there is none at all.

    Raise `CheckpointError` where there are only others: to go on would write among them, and in time over them."""
    checkpoints = folder_of(folder, role)
    newest = checkpoint.latest(checkpoints)
    if newest is not None and newest.meta.get("run") != run:
        raise CheckpointError(
            f"{newest.folder} is of another run ({str(newest.meta.get('run'))[:8]}, not {run[:8]});"
            " choose another --folder, or move the checkpoints away"
        )
    if newest is None and checkpoint.steps(checkpoints):
        raise CheckpointCorrupt(
            f"no checkpoint in {checkpoints} is whole; restore one, or move them away to begin anew"
        )
    return newest
