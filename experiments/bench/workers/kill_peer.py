"""A worker of the kill benchmark: a node that trains a small model with DiLoCo.

`python -m farflock.experiments.bench.workers.kill_peer SETTINGS`, started by fleet.py.
On command it holds back its next reduction, so that the signal comes in mid-exchange, while it owes
the others a shard.
"""

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from farflock.experiments.bench.workers.fleet import Owner
from farflock.experiments.bench.workers.member import SEED, Place, meet, member
from farflock.node.assembly.node import ReplicaNode, replica_node
from farflock.node.data.samples import text_in_memory
from farflock.node.model.corpus import load_corpus
from farflock.node.model.llama import ModelConfig
from farflock.node.run.terms import RunPlan
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.optimizers.diloco import STREAM
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.schedule import Schedule
from farflock.optimizers.parts.state import state_hash
from farflock.swarm.compute import Worker

PERIOD = 5
BATCH, SEQ = 2, 32
ENDLESS = 2**50  # tokens; the run ends when its owner does
TEXT = 200_000  # characters of the corpus


class Settings(Place, frozen=True):
    """The model's width and depth."""

    dim: int
    layers: int


def plan(settings: Settings) -> RunPlan:
    """Return the plan that all workers share."""
    dim = settings.dim
    model = ModelConfig(
        dim=dim, layers=settings.layers, heads=4, kv_heads=4, ffn_dim=3 * dim, context=SEQ
    )
    options = {"period": PERIOD}
    return RunPlan(
        SEED,
        model,
        InnerConfig(lr=1e-3),
        Schedule(1e-3, ENDLESS),
        "diloco",
        options,
        batch=BATCH,
        seq=SEQ,
    )


class Reductions:
    """The swarm's computations; after `hold`, the next one waits until `release`."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._free = asyncio.Event()
        self._free.set()

    async def __call__(self, work: Callable[[], Any]) -> Any:  # noqa: ANN401 - the work's result
        """Run `work` and return its result."""
        if not self._free.is_set():
            Owner.say("holding")
            await self._free.wait()
        return await self._worker(work)

    def hold(self) -> None:
        """Hold back the next reduction."""
        self._free.clear()

    def release(self) -> None:
        """Let the held reduction go on."""
        self._free.set()


@dataclass(slots=True)
class Books:
    """Counts of this worker's steps: in the run's state, on the way there, or lost."""

    node: ReplicaNode | None = None
    counted: int = 0  # steps included in a decided round
    lost: int = 0  # steps given up for a snapshot
    _settled: int = 0  # every step up to this one is counted or lost
    _offered: dict[int, int] = field(default_factory=dict)  # by round: the step of its offer

    def report(self, kind: str, fields: dict[str, object]) -> None:
        """Record an event that the training loop reports."""
        assert self.node is not None
        loop = self.node.loop
        if kind == "step":
            for pending in loop.driver.table:
                self._offered.setdefault(pending.exchange.key.round, pending.since_step)
        elif kind == "adopt":
            self.lost += loop.step - self._settled
            self._settled = loop.step
            self._offered.clear()
        else:
            self._round(self.node, int(str(fields["round"])))

    def _round(self, part: ReplicaNode, number: int) -> None:
        # A round without a recorded offer was applied before another step was taken.
        offered = self._offered.pop(number, part.loop.step)
        outcome = part.peer.decided(STREAM, number)
        assert outcome is not None, f"round {number} was applied but is not in the log"
        if any(outcome.taken):
            self.counted += offered - self._settled
            self._settled = offered
        state = state_hash(part.loop.driver.method.snapshot(part.loop.driver.replica))
        Owner.say(
            "round",
            number=number,
            at_s=asyncio.get_running_loop().time(),
            members=len(outcome.participants),
            status=outcome.status,
            state=state.hex(),
            agreed=outcome.tokens // part.loop.training_task.tokens_per_step,
            counted=self.counted,
            lost=self.lost,
        )


async def obey(owner: Owner, reductions: Reductions) -> None:
    """Hold and release reductions on the owner's command."""
    while True:
        command = await owner.next()
        if command["kind"] == "hold":
            reductions.hold()
        else:
            reductions.release()


async def main(settings: Settings) -> None:
    """Train until the owner disconnects, kills this process, or something breaks."""
    torch.set_num_threads(1)
    owner, codecs, steps, contributions = (
        await Owner.open(),
        Worker("codec"),
        Worker("train"),
        Books(),
    )
    text = text_in_memory(ByteTokenizer().encode(load_corpus("shakespeare").train[:TEXT]))
    reductions = Reductions(codecs)
    async with member(owner, settings, reductions) as peer:
        part = replica_node(
            plan(settings), peer, text, compute=codecs, train=steps, report=contributions.report
        )
        contributions.node = part
        await meet(owner, peer, settings, part.found, part.join)
        owner.say("ready")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(part.loop.run(ENDLESS))
            tasks.create_task(obey(owner, reductions))


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Settings)))
