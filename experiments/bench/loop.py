"""The speed of the node's loop next to a bare PyTorch loop: tokens per processor second, in turns.

The node is alone and assembled as in `node/process/node_process.py`, with real links, worker
threads for steps and codecs, and its history on disk, but no directory, checkpoints or status file,
and with a method that exchanges nothing. Both loops take the same steps on the same batches and
must reach the same loss.
"""

import asyncio
import contextlib
import math
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from farflock.experiments.bench.bare import Bare, plan_of
from farflock.experiments.bench.member import RUN, SEED, Place, member
from farflock.experiments.measure.metric import Metric, NotMeasured, Options, load, medians, seconds
from farflock.experiments.measure.threads import one_thread
from farflock.node.assembly.node import ReplicaNode, replica_node
from farflock.node.model.corpus import SHIPPED, load_corpus
from farflock.node.model.tokenizer import ByteTokenizer, TokenIds
from farflock.node.run.terms import RunPlan
from farflock.node.state.history import History
from farflock.swarm.compute import Worker
from farflock.swarm.peer.peer import RunTerms

SAME_LOSS = 1e-4  # relative; only the order of the arithmetic may differ


@dataclass(frozen=True, slots=True)
class Size:
    """The model, its batch, the steps per turn and the turns per repeat.

    Turns are short, so that both loops see the same load on the machine.
    """

    preset: str = "demo"
    batch: int = 8
    seq: int = 64
    steps: int = 10
    turns: int = 6


QUICK = Size("tiny", 2, 16, 5, 1)


class Unalike(NotMeasured):
    """Raised if the two loops trained differently, so that their speeds cannot be compared."""


def run(options: Options) -> Iterator[Metric]:
    """Yield `loop`: the node's tokens per processor second, as a ratio to the bare loop's."""
    size = QUICK if options.quick else Size()
    with one_thread(), ThreadPoolExecutor(1) as thread:
        pairs = asyncio.run(_pairs(size, options.repeats * size.turns, thread))
    value, yardstick, ratio = medians(pairs)
    unit = "tokens a processor second"
    note = (
        f"{size.preset} model, batch {size.batch} x {size.seq}, {size.steps} steps per turn, "
        "one thread"
    )
    yield Metric("loop", value, yardstick, ratio, len(pairs), load(), unit, note)


async def _pairs(size: Size, turns: int, thread: ThreadPoolExecutor) -> list[tuple[float, float]]:
    """Return both loops' rates, turn by turn, without the first, which warms up.

    The bare loop has a thread of its own, like the node's steps: memory is allocated per thread,
    which costs more than the difference to be measured. The node is idle meanwhile.
    """
    plan = plan_of(size.preset, size.batch, size.seq, "local")
    tokens = ByteTokenizer().encode(load_corpus(SHIPPED).train)
    turn_tokens = size.steps * size.batch * size.seq
    pairs = []
    async with alone(plan, tokens) as node:
        bare = Bare(plan, tokens, node.peer.me)
        for number in range(1, turns + 2):
            begin_s = time.process_time()
            await node.loop.run(number * turn_tokens)
            ours_s = time.process_time() - begin_s
            bare_s = seconds(
                lambda: thread.submit(bare.train, size.steps).result(), time.process_time
            )
            require_alike(node.loop.last_loss, bare.loss)
            pairs.append((turn_tokens / ours_s, turn_tokens / bare_s))
    return pairs[1:]


@contextlib.asynccontextmanager
async def alone(plan: RunPlan, tokens: TokenIds) -> AsyncIterator[ReplicaNode]:
    """Run a node that is the only member of its run; remove its files afterwards."""
    codecs, steps = Worker("codec"), Worker("train")
    with (
        tempfile.TemporaryDirectory(prefix="farflock-bench-") as folder,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(codecs.close)
        stack.callback(steps.close)
        history = stack.enter_context(History.open(Path(folder), time.time))

        def report(kind: str, fields: dict[str, object]) -> None:
            if kind == "step":
                history.metrics(int(str(fields["step"])), loss=float(str(fields["loss"])))

        async with member(None, Place(0, 1, "127.0.0.1"), codecs, RunTerms(RUN, SEED)) as peer:
            node = replica_node(plan, peer, tokens, compute=codecs, train=steps, report=report)
            node.found()
            yield node


def require_alike(ours: float | None, theirs: float) -> None:
    """Raise `Unalike` unless both loops ended with the same loss."""
    if ours is None or not math.isclose(ours, theirs, rel_tol=SAME_LOSS):
        raise Unalike(
            f"the losses at the end of a turn differ: node's loop {ours}, bare loop {theirs}"
        )
