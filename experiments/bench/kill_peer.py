"""One worker of the benchmark of sudden deaths: a node that trains a small model with DiLoCo, as a process would.

`python -m farflock.experiments.bench.kill_peer SETTINGS`, started by experiments/bench/fleet.py. On command it stops in
the middle of its next reduction, so that the signal that follows meets it in mid-exchange, owing others a shard.
"""

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from farflock.experiments.bench.fleet import Owner
from farflock.experiments.bench.member import SEED, Place, meet, member
from farflock.node.assembly.node import ReplicaNode, replica_node
from farflock.node.model.corpus import load_corpus
from farflock.node.model.llama import ModelConfig
from farflock.node.model.tokenizer import ByteTokenizer
from farflock.node.run.terms import RunPlan
from farflock.optimizers.diloco import STREAM
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.schedule import Schedule
from farflock.optimizers.parts.state import state_hash
from farflock.swarm.compute import Worker

PERIOD = 5
BATCH, SEQ = 2, 32
ENDLESS = 2**50  # tokens: the run ends with its owner
TEXT = 200_000  # characters of the corpus


class Settings(Place, frozen=True):
    """The model's width and depth."""

    dim: int
    layers: int


def plan(settings: Settings) -> RunPlan:
    """What all workers do alike."""
    dim = settings.dim
    model = ModelConfig(dim=dim, layers=settings.layers, heads=4, kv_heads=4, ffn_dim=3 * dim, context=SEQ)
    options = {"period": PERIOD}
    return RunPlan(SEED, model, InnerConfig(lr=1e-3), Schedule(1e-3, ENDLESS), "diloco", options, batch=BATCH, seq=SEQ)


class Reductions:
    """Computes for the swarm until it is told to hold: the next reduction then waits to be released."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._free = asyncio.Event()
        self._free.set()

    async def __call__(self, work: Callable[[], Any]) -> Any:  # noqa: ANN401 - whatever the work gives
        """The result of `work`."""
        if not self._free.is_set():
            Owner.say("holding")
            await self._free.wait()
        return await self._worker(work)

    def hold(self) -> None:
        """From the next reduction on."""
        self._free.clear()

    def release(self) -> None:
        """Go on."""
        self._free.set()


@dataclass(slots=True)
class Books:
    """Which of this worker's steps are in the run's state, which are on their way, which are lost."""

    participant: ReplicaNode | None = None
    counted: int = 0  # steps that a decided round has taken in
    lost: int = 0  # steps that were given up for a snapshot
    _settled: int = 0  # the step up to which each is one of the two
    _offered: dict[int, int] = field(default_factory=dict)  # by round: the step at which it was offered

    def report(self, kind: str, fields: dict[str, object]) -> None:
        """What the loop says, when it says it."""
        assert self.participant is not None
        loop = self.participant.loop
        if kind == "step":
            for pending in loop.driver.table:
                self._offered.setdefault(pending.exchange.key.round, pending.since_step)
        elif kind == "adopt":
            self.lost += loop.step - self._settled
            self._settled = loop.step
            self._offered.clear()
        else:
            self._round(self.participant, int(str(fields["round"])))

    def _round(self, part: ReplicaNode, number: int) -> None:
        offered = self._offered.pop(number, part.loop.step)  # by default it was applied before another step
        outcome = part.peer.decided(STREAM, number)
        assert outcome is not None, f"round {number} was applied and is not in the log"
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
    """Hold and release as told."""
    while True:
        command = await owner.next()
        if command["kind"] == "hold":
            reductions.hold()
        else:
            reductions.release()


async def main(settings: Settings) -> None:
    """Train until the owner hangs up, kills us or something breaks."""
    torch.set_num_threads(1)
    owner, codecs, steps, contributions = await Owner.open(), Worker("codec"), Worker("train"), Books()
    text = ByteTokenizer().encode(load_corpus("shakespeare").train[:TEXT])
    reductions = Reductions(codecs)
    async with member(owner, settings, reductions) as peer:
        part = replica_node(plan(settings), peer, text, compute=codecs, train=steps, report=contributions.report)
        contributions.participant = part
        await meet(owner, peer, settings, part.found, part.join)
        owner.say("ready")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(part.loop.run(ENDLESS))
            tasks.create_task(obey(owner, reductions))


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Settings)))
