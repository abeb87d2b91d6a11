"""A worker of the overlap benchmark: nodes that train timed pieces of their runs on command.

`python -m farflock.experiments.bench.workers.overlap_peer SETTINGS`, started by fleet.py.
"""

import asyncio
import dataclasses
import sys
import time
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import msgspec
import torch

from farflock.experiments.bench.workers.bare import plan_of
from farflock.experiments.bench.workers.fleet import Owner
from farflock.experiments.bench.workers.member import Place, meet, member
from farflock.node.assembly.node import ReplicaNode, replica_node
from farflock.node.data.samples import text_in_memory
from farflock.node.model.corpus import load_corpus
from farflock.node.model.device import choose
from farflock.node.model.llama import ModelConfig
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.swarm.compute import Worker

TEXT = 200_000  # characters of the corpus


class Arm(msgspec.Struct, frozen=True):
    """The method of one of the loops, with its options."""

    name: str
    method: str
    options: dict[str, Any]


class Settings(Place, frozen=True):
    """The owner's settings: the model, its batch, the loops that take turns, and their device."""

    model: ModelConfig
    batch: int
    seq: int
    arms: list[Arm]
    device: str


class Pieces:
    """A node that trains piece by piece; `results` has those of the last piece's exchanges."""

    def __init__(self, owner: Owner, node: ReplicaNode, results: list[dict[str, object]]) -> None:
        self._owner, self._node, self._results = owner, node, results

    def begin(self, first_round: int) -> None:
        """Set the method's state so that it begins at `first_round`.

        All workers have equal states, so none needs a download.
        """
        driver, rounds = self._node.loop.driver, {}
        state = dict(driver.method.snapshot(driver.replica))
        for template in driver.method.streams(driver.replica):
            name, number = template.key.stream, template.key.round
            number += -(-max(first_round - number, 0) // template.stride) * template.stride
            state[f"round.{name.rpartition('.')[2]}"] = torch.tensor(number)
            rounds[name] = number - template.stride
        driver.method.restore(driver.replica, state, "adopt")
        self._node.state_sync.open(rounds)

    async def train(self, steps: int) -> None:
        """Take `steps` steps of the node's own loop, starting at the barrier."""
        start_s = await self._owner.barrier()
        self._results.clear()
        loop, begun_s = self._node.loop, time.process_time()
        for _ in range(steps):
            progress = await loop.begin_step()
            loss = await loop.train(partial(loop.train_one, progress))
            assert loss is not None, "a replica stopped before its last step"
            await loop.end_step(loss)
        rounds = [(result["status"], result["peers"]) for result in self._results]
        took_s, cpu_s = asyncio.get_running_loop().time() - start_s, time.process_time() - begun_s
        self._owner.say("done", took_s=took_s, cpu_s=cpu_s, rounds=rounds)


async def node_of(
    owner: Owner,
    settings: Settings,
    arm: Arm,
    works: tuple[Worker, Worker, Worker],
    left: AsyncExitStack,
) -> Pieces:
    """Join the run of this arm's nodes, one per worker; closing `left` ends the membership."""
    codecs, state, steps = works
    plan = plan_of("demo", settings.batch, settings.seq, arm.method, **arm.options)
    plan = dataclasses.replace(plan, model=settings.model)
    tokens = text_in_memory(ByteTokenizer().encode(load_corpus("shakespeare").train[:TEXT]))
    results: list[dict[str, object]] = []

    def report(kind: str, fields: dict[str, object]) -> None:
        if kind == "round":
            results.append(fields)

    peer = await left.enter_async_context(member(owner, settings, codecs))
    node = replica_node(
        plan,
        peer,
        tokens,
        compute=state,
        train=steps,
        report=report,
        device=choose(settings.device),
    )
    view = await meet(owner, peer, settings, peer.found, peer.join)
    pieces = Pieces(owner, node, results)
    pieces.begin(view.first_round)
    owner.say("ready")
    return pieces


async def main(settings: Settings) -> None:
    """Work until the owner disconnects or kills this process."""
    torch.set_num_threads(1)
    owner = await Owner.open()
    works = Worker("codec"), Worker("state"), Worker("train")
    async with AsyncExitStack() as left:
        arms = {arm.name: await node_of(owner, settings, arm, works, left) for arm in settings.arms}
        while True:
            asked = await owner.command("train")
            await arms[asked["arm"]].train(int(asked["steps"]))


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Settings)))
