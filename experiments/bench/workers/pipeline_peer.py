"""A worker of the pipeline benchmark: one stage of a pipeline, and a plain loop of its own.

`python -m farflock.experiments.bench.workers.pipeline_peer SETTINGS`, started by
experiments/bench/workers/fleet.py.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import torch
from torch import nn
from torch.nn import functional

from farflock.experiments.bench.workers import bare
from farflock.experiments.bench.workers.fleet import Owner
from farflock.experiments.bench.workers.member import Place, meet, member
from farflock.node.data.samples import Text, text_in_memory
from farflock.node.data.shard_order import SampleStream
from farflock.node.model.corpus import SHIPPED, load_corpus
from farflock.node.model.data import Batches
from farflock.node.model.llama import ModelConfig, build
from farflock.node.pipeline.lifecycle.assembly import NodeServices
from farflock.node.pipeline.node import PipelineNode
from farflock.node.pipeline.trainer.trainer import Trainer
from farflock.node.run.split import even
from farflock.node.run.terms import PipelinePlan, RunPlan
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.swarm.compute import Worker
from farflock.swarm.roles import role_of

FOREVER = 1 << 40  # tokens of a run that its owner ends
LOOK_S = 0.1  # rarely, as a look costs processor time of the pipeline's


class Settings(Place, frozen=True):
    """The owner's settings: the model, its microbatches, and how many make a step."""

    model: ModelConfig
    batch: int
    seq: int
    microbatches: int


def plan_of(model: ModelConfig, batch: int, seq: int) -> RunPlan:
    """Return the training terms: a step averages the gradients of its microbatches (DDP)."""
    plan = bare.plan_of("tiny", batch, seq, "ddp", codec="bf16")
    return replace(plan, model=model)


def pipeline_of(plan: RunPlan, stages: int, microbatches: int) -> PipelinePlan:
    """Return the pipeline with this many microbatches a step, and the product's defaults."""
    tokens = microbatches * plan.batch * plan.seq
    return PipelinePlan(even(plan.model, stages), tokens)


class PlainLoop:
    """The yardstick: the unsplit model, with steps of as many microbatches."""

    def __init__(self, plan: RunPlan, microbatches: int, tokens: Text, number: int) -> None:
        self._plan, self._count = plan, microbatches
        self.model = build(plan.model, plan.run_seed)
        self._inner = plan.inner.build(self.model)
        self._batches = Batches(
            tokens, SampleStream(plan.run_seed, str(number)), plan.batch, plan.seq
        )
        self.begun = 0  # microbatches

    def train(self, steps: int) -> float:
        """Take `steps` steps; return the processor seconds of this thread."""
        begun_s = time.thread_time()
        for _ in range(steps):
            self._inner.zero_grad()
            for _ in range(self._count):
                x, y = self._batches.batch(self.begun)
                loss = functional.cross_entropy(self.model(x).flatten(0, 1), y.flatten())
                (loss / self._count).backward()  # type: ignore[no-untyped-call]
                self.begun += 1
            if self._plan.clip_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self._plan.clip_norm)
            self._inner.step()
        return time.thread_time() - begun_s


@dataclass(slots=True)
class Gate:
    """Lets a trainer begin a number of microbatches, and no more."""

    left: int = 0

    def may_begin(self) -> bool:
        """Take one of them, if any is left."""
        if not self.left:
            return False
        self.left -= 1
        return True


@dataclass(slots=True)
class Turns:
    """The worker's turns, which run on command: the pipeline's, then the plain loop's."""

    owner: Owner
    settings: Settings
    node: PipelineNode
    gate: Gate
    plain: Callable[[int], float]
    compute: Worker

    async def staged(self, steps: int) -> None:
        """Train the microbatches of so many steps; return once all are in this stage's sum.

        A round may take in one more than its step needs, so the last ones may wait for the next
        turn's, and be counted then."""
        settings, server = self.settings, self.node.servings[0].server
        count = steps * settings.microbatches
        await self.owner.barrier()
        begun_s, before = time.process_time(), server.served["merged"]
        self.gate.left = 0 if settings.number else count
        # a merge has no event for others to wait for
        while server.served["merged"] < before + count:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        tokens = count * settings.batch * settings.seq
        self.owner.say("done", tokens=tokens, cpu_s=time.process_time() - begun_s)

    async def alone(self, steps: int) -> None:
        """Train steps in the plain loop."""
        settings = self.settings
        await self.owner.barrier()
        cpu_s = await self.compute(partial(self.plain, steps))
        tokens = steps * settings.microbatches * settings.batch * settings.seq
        self.owner.say("done", tokens=tokens, cpu_s=cpu_s)

    async def run(self) -> None:
        """Take turns until the owner disconnects."""
        while True:
            command = await self.owner.next()
            turn = self.staged if command["kind"] == "staged" else self.alone
            await turn(int(command["steps"]))


async def main(settings: Settings) -> None:
    """Work until the owner disconnects or kills this process."""
    torch.set_num_threads(1)
    owner, worker = await Owner.open(), Worker("stage")
    plan, tokens = plan_of(settings.model, settings.batch, settings.seq), corpus()
    pipeline = pipeline_of(plan, settings.count, settings.microbatches)
    role, trains = role_of(settings.number), settings.number == 0
    async with member(owner, settings, worker, role=role) as peer:
        means = NodeServices(worker, lambda work, cost: worker(work), worker)
        here = tokens if trains else None
        node = PipelineNode(plan, pipeline, peer, means, settings.number, here)
        gate = Gate()
        if isinstance(node.trainer, Trainer):
            node.trainer.may_begin = gate.may_begin
        await meet(owner, peer, settings, node.found, node.join)
        plain = PlainLoop(plan, settings.microbatches, tokens, settings.number)
        async with asyncio.TaskGroup() as both:
            both.create_task(node.run(FOREVER))
            owner.say("ready")
            turns = Turns(owner, settings, node, gate, plain.train, worker)
            both.create_task(turns.run())


def corpus() -> Text:
    """Return the text that both arms train on."""
    return text_in_memory(ByteTokenizer().encode(load_corpus(SHIPPED).train))


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Settings)))
