"""One process of the benchmark of checkpoints: a node that is alone trains, and writes some.

`python -m farflock.experiments.bench.workers.checkpoint_process SETTINGS` prints one JSON line for
each step, one for each checkpoint, and one for a plain file of as many bytes. The node is that of
`loop_process`; it writes checkpoints as `farflock run` does, into a temporary folder.
"""

import asyncio
import gc
import json
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec

from farflock.experiments.bench.workers.bare import plan_of
from farflock.experiments.bench.workers.loop_process import alone
from farflock.experiments.measure.threads import one_thread
from farflock.node.assembly.checkpoints import CheckpointManager
from farflock.node.assembly.node import ReplicaNode
from farflock.node.data.samples import text_in_memory
from farflock.node.model.corpus import SHIPPED, load_corpus
from farflock.node.model.llama import ModelConfig
from farflock.node.state import checkpoint
from farflock.node.state.cut import OpenCuts
from farflock.node.state.paths import RunFolder
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.swarm.compute import Worker

QUIET_STEPS = 2  # before each checkpoint, and after the last; as many at the beginning do not count
LOOK_EVERY_S = 0.01
PERIOD = 100_000  # steps of a round: none ends while this runs
WRITE_BYTES = 4 << 20  # at once, of the plain file


class Settings(msgspec.Struct, frozen=True):
    """The owner's settings."""

    model: ModelConfig
    seq: int
    checkpoints: int


class TimedCuts(OpenCuts):
    """Open cuts that measure how long the last step waited for them."""

    saving_s = 0.0

    def before_step(self) -> None:
        """Save what a local step is about to change."""
        begin_s = time.monotonic()
        super().before_step()
        self.saving_s = time.monotonic() - begin_s


@dataclass(slots=True)
class Watch:
    """Begins checkpoints between steps, and notes how long training stands still in each step:
    since the last one, and in its own thread, until what it changes is saved."""

    node: ReplicaNode
    keeper: CheckpointManager
    cuts: TimedCuts
    left: int  # checkpoints
    lines: list[dict[str, float | str]] = field(default_factory=list)
    _quiet: int = 0
    _ended_s: float = field(default_factory=time.monotonic)
    _writing: asyncio.Task[None] | None = None

    async def train(self, steps: Worker, work: Callable[[], float]) -> float:
        """Take a local step in its worker, and note it."""
        writing, before_s = self._writing is not None, self._ended_s

        def timed() -> tuple[float, float, float]:
            begin_s = time.monotonic()
            return work(), begin_s, time.monotonic()

        loss, begin_s, self._ended_s = await steps(timed)
        self.lines.append(
            {
                "kind": "writing" if writing else "quiet",
                "step_s": self._ended_s - before_s,
                "between_s": begin_s - before_s,
                "saving_s": self.cuts.saving_s,
            }
        )
        self._quiet = 0 if writing else self._quiet + 1
        return loss

    async def pause(self) -> None:
        """Begin a checkpoint when it is time for one; at the end, stop the node."""
        if self._writing is not None and self._writing.done():
            await self._writing
            self._writing = None
        due = self._writing is None and self._quiet >= QUIET_STEPS
        if due and not self.left:
            self.node.stop()
        self.keeper.every_s = 0.0 if due and self.left else float("inf")
        begin_s = time.monotonic()
        await self.keeper.pause()
        if due and self.left:
            self.left -= 1
            self._writing = asyncio.create_task(self._written(begin_s))

    async def _written(self, begin_s: float) -> None:
        while self.keeper.writing:  # noqa: ASYNC110 - a step would see the end late
            await asyncio.sleep(LOOK_EVERY_S)
        ((_, folder),) = checkpoint.steps(self.keeper.folder.checkpoints)
        self.lines.append(
            {
                "kind": "checkpoint",
                "seconds": time.monotonic() - begin_s,
                "bytes": checkpoint.bytes_of(folder),
            }
        )


async def measured(settings: Settings, folder: Path) -> list[dict[str, float | str]]:
    """Return the lines of all steps but the first, and of all checkpoints."""
    plan = plan_of("demo", 1, settings.seq, "diloco", codec="int8", period=PERIOD)
    plan = replace(plan, model=settings.model)
    tokens = text_in_memory(ByteTokenizer().encode(load_corpus(SHIPPED).train))
    async with alone(plan, tokens) as (node, steps):
        cuts = node.loop.driver.cuts = TimedCuts()
        keeper = CheckpointManager(node, RunFolder(folder), "bench", "", float("inf"), keep=1)
        watch = Watch(node, keeper, cuts, settings.checkpoints, _quiet=-QUIET_STEPS)
        node.loop.train, node.loop.pause = partial(watch.train, steps), watch.pause
        gc.collect()
        gc.freeze()  # as a node's process does
        await node.loop.run(sys.maxsize)
        return watch.lines[QUIET_STEPS:]


def plain_write(folder: Path, size: int) -> float:
    """Return the seconds that a plain file of this size takes, past the system's cache where that
    is possible."""
    piece, begin_s = memoryview(mmap.mmap(-1, WRITE_BYTES)), time.monotonic()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        file = os.open(folder / "plain", flags | getattr(os, "O_DIRECT", 0))
    except OSError:
        file = os.open(folder / "cached", flags)
    try:
        for _ in range(-(-size // WRITE_BYTES)):
            os.write(file, piece)
        os.fsync(file)
    finally:
        os.close(file)
    return time.monotonic() - begin_s


def main(settings: Settings) -> None:
    """Print what was measured."""
    with one_thread(), tempfile.TemporaryDirectory(prefix="farflock-checkpoint-") as folder:
        lines = asyncio.run(measured(settings, Path(folder, "node")))
        size = max(int(line.get("bytes", 0)) for line in lines)
        lines.append({"kind": "plain", "seconds": plain_write(Path(folder), size)})
    for line in lines:
        sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Settings))
