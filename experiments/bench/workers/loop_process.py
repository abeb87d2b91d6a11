"""One process of the loop benchmark: a node's loop and a bare one, in turns.

`python -m farflock.experiments.bench.workers.loop_process SIZE` prints one JSON line for each
turn: the processor seconds of both loops, and those of the node's training thread, its event loop
and all its other threads.

The node is alone and assembled as in `node/process/assembling.py`, with real links, worker
threads for steps and codecs, and its history on disk, but no directory, checkpoints or status file,
and with a method that exchanges nothing. Both loops take the same steps on the same batches and
must reach the same loss.
"""

import asyncio
import contextlib
import json
import math
import operator
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from farflock.experiments.bench.workers.bare import Bare, plan_of
from farflock.experiments.bench.workers.member import RUN, SEED, Place, member
from farflock.experiments.measure.metric import NotMeasured, seconds
from farflock.experiments.measure.threads import one_thread
from farflock.node.assembly.node import ReplicaNode, replica_node
from farflock.node.data.samples import Text, text_in_memory
from farflock.node.model.corpus import SHIPPED, load_corpus
from farflock.node.model.device import Device
from farflock.node.run.terms import RunPlan
from farflock.node.state.history import History
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.swarm.compute import Worker
from farflock.swarm.peer.peer import RunTerms

SAME_LOSS = 1e-4  # relative; only the order of the arithmetic may differ


class Size(msgspec.Struct, frozen=True):
    """The model, its batch, the steps of a turn, and the turns.

    Turns are short, so that both loops see the same load on the machine.
    """

    preset: str = "demo"
    batch: int = 8
    seq: int = 64
    steps: int = 10
    turns: int = 6


QUICK = Size("tiny", 2, 16, 5, 2)


class Unalike(NotMeasured):
    """Raised if the two loops trained differently, so that their speeds cannot be compared."""


async def measured(size: Size, thread: ThreadPoolExecutor) -> AsyncIterator[dict[str, float]]:
    """Yield the seconds of each turn but the first, which warms up.

    The bare loop has a thread of its own, like the node's steps: memory is allocated per thread,
    which costs more than the difference to be measured. The node is idle meanwhile.
    """
    plan = plan_of(size.preset, size.batch, size.seq, "local")
    tokens = text_in_memory(ByteTokenizer().encode(load_corpus(SHIPPED).train))
    turn_tokens = size.steps * size.batch * size.seq
    async with alone(plan, tokens) as (node, steps):
        bare = Bare(plan, tokens, node.peer.me)
        for number in range(1, size.turns + 2):
            before = await _clocks(steps)
            await node.loop.run(number * turn_tokens)
            spent = map(operator.sub, await _clocks(steps), before)
            bare_s = seconds(
                lambda: thread.submit(bare.train, size.steps).result(), time.process_time
            )
            require_alike(node.loop.losses.last, bare.loss)
            ours_s, train_s, loop_s = spent
            if number > 1:
                yield {
                    "ours_s": ours_s,
                    "bare_s": bare_s,
                    "train_s": train_s,
                    "loop_s": loop_s,
                    "other_s": ours_s - train_s - loop_s,
                }


async def _clocks(steps: Worker) -> tuple[float, float, float]:
    """Return the processor seconds of this process, the training thread and this thread."""
    train_s = await steps(time.thread_time)
    return time.process_time(), train_s, time.thread_time()


@contextlib.asynccontextmanager
async def alone(
    plan: RunPlan, tokens: Text, device: Device | None = None
) -> AsyncIterator[tuple[ReplicaNode, Worker]]:
    """Run a node that is the only member of its run, on a device (None: the CPU), and the worker of
    its steps; remove its files afterwards."""
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
            node = replica_node(
                plan, peer, tokens, compute=codecs, train=steps, report=report, device=device
            )
            node.found()
            yield node, steps


def require_alike(ours: float | None, theirs: float, rel_tol: float = SAME_LOSS) -> None:
    """Raise `Unalike` unless both loops ended with the same loss."""
    if ours is None or not math.isclose(ours, theirs, rel_tol=rel_tol):
        raise Unalike(
            f"the losses at the end of a turn differ: node's loop {ours}, bare loop {theirs}"
        )


async def main(size: Size) -> None:
    """Print the turns."""
    with one_thread(), ThreadPoolExecutor(1) as thread:
        async for turn in measured(size, thread):
            sys.stdout.write(json.dumps(turn) + "\n")


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Size)))
