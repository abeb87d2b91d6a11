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

from farflock.node.assembly.coming_back import VIEW
from farflock.node.assembly.resume import STEPPED, Resumable, checkpoint_state
from farflock.node.model.llama import ModelConfig
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
CHECKPOINT_S = 600.0  # between two of them, unless `--checkpoint-every` says otherwise
LOOK_EVERY_S = 0.05  # between two looks at a state that is being changed

log = logging.getLogger(__name__)


class CheckpointCut(NamedTuple):
    """A node's state at one step, as a checkpoint stores it."""

    step: int
    groups: dict[str, Cut]
    meta: dict[str, object]


@dataclass(slots=True)
class SaveProgress:
    """Progress of one checkpoint: `passed` bytes are on the disk or were read again from there, so
    that each counts twice by the end. `rate`, in bytes of a checkpoint a second, is that of the
    last whole one."""

    step: int = 0
    total: int = 0
    passed: int = 0
    rate: float | None = None
    is_open: bool = False
    _given_up: bool = False

    def begins(self, step: int, size_bytes: int) -> None:
        """Note the beginning of a checkpoint."""
        self.step, self.total, self.passed, self.is_open = step, size_bytes, 0, True

    def passes(self, count: int) -> None:
        """Count bytes, in the thread that writes; raise `CheckpointError` once nobody waits for
        them, so that no checkpoint appears that was said not to be there."""
        if self._given_up:
            raise CheckpointError("the checkpoint was given up")
        self.passed += count

    def ended(self, took_s: float) -> None:
        """Note that the checkpoint is whole."""
        self.rate = self.total / took_s if took_s > 0 else None

    def give_up(self) -> None:
        """Let what is being written come to nothing."""
        self._given_up = True

    @property
    def expected_s(self) -> float:
        """The seconds that another one takes at the last one's rate; 0 if there was none."""
        return 0.0 if self.rate is None else self.total / self.rate

    @property
    def share(self) -> float:
        """The part that is written, at most 1; after that it is read again."""
        return min(self.passed / self.total, 1.0) if self.total else 0.0


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
    model: ModelConfig | None = None  # None: a program's own, of which no export can be made
    watch: EvaluationWatch | None = None  # None: the run is not evaluated here
    alone: bool = True  # no other process has a part of the state
    progress: SaveProgress = field(default_factory=SaveProgress)
    _intact: set[Path] = field(default_factory=set)
    written_s: float = field(default_factory=time.monotonic)  # -inf: the first is due at once
    _writing: asyncio.Task[Path] | None = None

    async def pause(self) -> None:
        """Begin to write a checkpoint between two steps if one is due and none is being written.
        A full disk does not end training."""
        if self._writing is not None and self._writing.done():
            await self.written()
        if self._writing is None and time.monotonic() - self.written_s >= self.every_s:
            self.written_s = time.monotonic()
            if self._present() is None:
                self._writing = asyncio.create_task(self._write(await self.compute(self.cut)))

    async def save(self) -> Path:
        """Write a checkpoint of the last step unless there is one; return its folder. A step that
        is under way is not waited for where it has not changed the state yet."""
        await self.written()
        while (present := self._present()) is None:
            if (cut := await self.compute(self._cut_at_rest)) is not None:
                return await self._write(cut)
            await asyncio.sleep(LOOK_EVERY_S)
        return present

    @property
    def whole_steps(self) -> bool:
        """True if a step that is under way may have changed what is saved: the gradients, or the
        part that another process has."""
        return not self.alone or self.node.loop.driver.method.keeps_gradients

    def _cut_at_rest(self) -> CheckpointCut | None:
        """Return a cut; None if a step, counted or not, or a result is changing the state."""
        driver = self.node.loop.driver
        return driver.cuts.at_rest(lambda: None if driver.ahead else self.cut())

    def _present(self) -> Path | None:
        """Return the folder of the checkpoint of this step, if there is one."""
        step, present = self.node.loop.step, checkpoint.steps(folder_of(self.folder, self.role))
        return next((path for at, path in present if at == step), None)

    def newest(self) -> tuple[int, Path] | None:
        """Return the step and folder of the newest checkpoint on the disk; None without one."""
        present = checkpoint.steps(folder_of(self.folder, self.role))
        return present[-1] if present else None

    def trust(self) -> None:
        """Take what is on the disk for intact, so that no old checkpoint is read again: there is
        no time for that once the newest one is written."""
        self._intact |= {path for _, path in checkpoint.steps(folder_of(self.folder, self.role))}

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
        groups, cursors = checkpoint_state(self.node)
        cuts = {name: Cut(tensors) for name, tensors in groups.items()}
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
            VIEW: self.node.state_sync.held.under.hex(),
        }
        return CheckpointCut(step, cuts, meta)

    async def _write(self, moment: CheckpointCut) -> Path:
        folder = folder_of(self.folder, self.role)
        config = {} if self.model is None else {"config.json": msgspec.json.encode(self.model)}
        if isinstance(self.tokenizer, JsonTokenizer):
            config[JSON_NAME] = self.tokenizer.raw
        began_s = time.monotonic()
        self.progress.begins(moment.step, sum(cut.size_bytes for cut in moment.groups.values()))
        try:
            with self.node.loop.driver.cuts.added(*moment.groups.values()):
                what = folder, moment.step, moment.groups, moment.meta, config, self.progress.passes
                written = await asyncio.to_thread(checkpoint.save, *what)
        finally:
            self.progress.is_open = False
        self.progress.ended(time.monotonic() - began_s)
        self._intact.add(written)
        prune = partial(checkpoint.prune, folder, self.keep, self.keep_bytes, self._intact)
        try:
            await asyncio.to_thread(prune)
        except OSError as error:
            log.warning("an old checkpoint could not be deleted, and stays: %s", error)
        size_bytes = checkpoint.bytes_of(written)
        if self.keep_bytes is not None and size_bytes > self.keep_bytes:
            log.warning(
                "%s takes %d bytes, above the %d that are allowed; it stays, because it is the only"
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
