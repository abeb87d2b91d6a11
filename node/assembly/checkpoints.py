"""A node's checkpoints: the times at which they are written, those that are kept, and the one
that a restart takes."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from farflock.node.assembly.resume import STEPPED, Resumable, checkpoint_state
from farflock.node.state import checkpoint
from farflock.node.state.checkpoint import Checkpoint, CheckpointCorrupt, CheckpointError
from farflock.node.state.cut import Cut
from farflock.node.state.paths import RunFolder
from farflock.node.tokens.json_tokenizer import JSON_NAME, JsonTokenizer
from farflock.node.tokens.tokenizer import ByteTokenizer, Tokenizer
from farflock.node.train.evaluation_curve import CURVE
from farflock.node.train.evaluation_watch import EvaluationWatch
from farflock.swarm.compute import Compute, inline
from farflock.swarm.links import PeerId
from farflock.swarm.peer.peer import Peer

SAMPLES = "samples"  # in a checkpoint's meta: where its node stood in the data
KEPT = 3  # unless `--keep` says otherwise

log = logging.getLogger(__name__)


class CheckpointCut(NamedTuple):
    """A node's state at one step, as a checkpoint stores it."""

    step: int
    parts: dict[str, Cut]
    meta: dict[str, object]


@dataclass(slots=True)
class CheckpointManager:
    """Writes a node's checkpoints every `every_s` seconds and at the end, and keeps the newest
    `keep`, or as many of them as take at most `keep_bytes`; one in any case.

    Training goes on while a checkpoint is written: it is read from a cut (node/state/cut.py).
    `compute` takes the cut. At a stage that is the worker of its passes, since a pass may put other
    weights in the place of the stage's own. `members` are the run's, at the time of a cut, and
    `watch` is what the node knows of its evaluations."""

    node: Resumable
    folder: RunFolder
    run: str
    manifest: str  # its canonical text
    every_s: float
    role: str = "replica"  # each stage has its own folder: tensors differ
    keep: int = KEPT
    keep_bytes: int | None = None
    compute: Compute = inline
    tokenizer: Tokenizer = field(default_factory=ByteTokenizer)
    cursor: Callable[[int], bytes] = lambda step: b""  # in the node's samples
    members: Callable[[], Sequence[PeerId]] = tuple
    watch: EvaluationWatch | None = None  # None: the run is not evaluated here
    _intact: set[Path] = field(default_factory=set)
    _written_s: float = field(default_factory=time.monotonic)
    _writing: asyncio.Task[Path] | None = None

    async def pause(self) -> None:
        """Begin to write a checkpoint between two steps if one is due and none is being written.
        A full disk does not end training."""
        if self._writing is not None and self._writing.done():
            await self.written()
        if self._writing is None and time.monotonic() - self._written_s >= self.every_s:
            self._written_s = time.monotonic()
            if self._present() is None:
                self._writing = asyncio.create_task(self._write(await self.compute(self.cut)))

    async def save(self) -> Path:
        """Write a checkpoint unless there is one of this step; return its folder."""
        await self.written()
        return self._present() or await self._write(await self.compute(self.cut))

    def _present(self) -> Path | None:
        """Return the folder of the checkpoint of this step, if there is one."""
        step, present = self.node.loop.step, checkpoint.steps(folder_of(self.folder, self.role))
        return next((path for at, path in present if at == step), None)

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

    def cut(self) -> CheckpointCut:
        """Return the node's state between two steps; its driver keeps it as it is."""
        driver, step = self.node.loop.driver, self.node.loop.step
        parts, cursors = checkpoint_state(self.node)
        cuts = {name: Cut(tensors) for name, tensors in parts.items()}
        exact = driver.method.equality == "exact"  # only rounds change shared state
        for name, cut in cuts.items():
            driver.cuts.add(cut, stepped=name in STEPPED or not exact)
        meta = {
            "run": self.run,
            "step": step,
            "tokens": driver.tokens,
            "manifest": self.manifest,
            "members": list(self.members()),
            CURVE: msgspec.to_builtins([] if self.watch is None else self.watch.curve.points),
            "node": cursors,
            SAMPLES: self.cursor(step).hex(),
        }
        return CheckpointCut(step, cuts, meta)

    async def _write(self, moment: CheckpointCut) -> Path:
        folder = folder_of(self.folder, self.role)
        config = {"config.json": msgspec.json.encode(self.node.model.config)}
        if isinstance(self.tokenizer, JsonTokenizer):
            config[JSON_NAME] = self.tokenizer.raw
        with self.node.loop.driver.cuts.added(*moment.parts.values()):
            write = partial(checkpoint.save, folder, moment.step, moment.parts, moment.meta, config)
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


def members_of(peer: Peer) -> Sequence[PeerId]:
    """Return the members of the newest view that a peer knows."""
    chain = peer.context.chain
    return () if chain is None else chain.newest.peers


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
