"""One process of the GPU benchmark: a node's loop and a bare one on a device, in turns.

`python -m farflock.experiments.bench.workers.device_training SIZE` prints one JSON line with the
device and the rate of its matrix products, and one for each turn with the seconds of both loops.
The bare loop reads its loss once a turn, the node's once a step.
"""

import asyncio
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import torch

from farflock.experiments.bench.workers.bare import Bare, plan_of, schedule_at
from farflock.experiments.bench.workers.loop_process import alone, require_alike
from farflock.experiments.measure.metric import seconds
from farflock.node.data.samples import text_in_memory
from farflock.node.model.corpus import SHIPPED, load_corpus
from farflock.node.model.device import Device, choose
from farflock.node.model.llama import ModelConfig
from farflock.node.run.terms import RunPlan
from farflock.node.tokens.tokenizer import ByteTokenizer

GENTLE_RATE = 3e-4
SAME_LOSS = 0.02  # relative; in lower precision the order of sums shows sooner
PRODUCTS = 20  # of two matrices, for their rate


class Size(msgspec.Struct, frozen=True):
    """The device, the model, its batch, the steps of a turn, the turns, and the width of the square
    matrices whose products are timed."""

    device: str
    model: ModelConfig
    batch: int
    seq: int
    steps: int
    turns: int
    width: int

    def plan(self) -> RunPlan:
        """Return the plan of both loops, which exchange nothing."""
        plan = plan_of("tiny", self.batch, self.seq, "local")
        # A higher rate makes much of roundings, and both losses are compared.
        return dataclasses.replace(plan, model=self.model, schedule=schedule_at(GENTLE_RATE))


def product_flops(device: Device, width: int) -> float:
    """Return the floating-point operations a second of a product of square matrices, in the
    precision in which the device trains."""
    dtype = torch.bfloat16 if device.precision == "bf16" else torch.float32
    one, other = (torch.randn(width, width).to(device.place, dtype) for _ in range(2))

    def products() -> None:
        for _ in range(PRODUCTS):
            torch.mm(one, other)
        device.wait()

    products()
    return 2 * width**3 * PRODUCTS / statistics.median(seconds(products) for _ in range(3))


async def measured(
    size: Size, device: Device, thread: ThreadPoolExecutor
) -> AsyncIterator[dict[str, float]]:
    """Yield the seconds of each turn but the first, which warms up."""
    plan, clock = size.plan(), time.perf_counter
    tokens = text_in_memory(ByteTokenizer().encode(load_corpus(SHIPPED).train))
    turn_tokens = size.steps * size.batch * size.seq
    async with alone(plan, tokens, device) as (node, _):
        bare = Bare(plan, tokens, node.peer.me, device)
        for number in range(1, size.turns + 2):
            begin_s = clock()
            await node.loop.run(number * turn_tokens)
            ours_s = clock() - begin_s
            bare_s = seconds(lambda: thread.submit(bare.train, size.steps).result())
            require_alike(node.loop.losses.last, bare.loss, SAME_LOSS)
            if number > 1:
                yield {"ours_s": ours_s, "bare_s": bare_s, "loss": bare.loss}


async def main(size: Size) -> None:
    """Print the device and the turns."""
    device = choose(size.device)
    say({"device": str(device), "flops": product_flops(device, size.width)})
    with ThreadPoolExecutor(1) as thread:
        async for turn in measured(size, device, thread):
            say(turn)


def say(line: dict[str, object] | dict[str, float]) -> None:
    """Print a line of JSON."""
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Size)))
