"""One node at a time on the simulated network: whole participants without processes. And texts to
prepare, with small shards and files, so that few texts make many."""

import asyncio

import pytest
import torch
from worlds.peers import identity, peer_in, record_of
from worlds.waiting import until

from farflock.node.assembly.node import replica_node
from farflock.node.assembly.resume import load_state
from farflock.node.data import folder, index, shard_writer
from farflock.node.data.samples import text_in_memory
from farflock.node.model.corpus import load_corpus
from farflock.node.model.llama import PRESETS
from farflock.node.model.replica import OnDevice, in_memory
from farflock.node.run.terms import RunPlan
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.schedule import Schedule
from farflock.swarm.peer.peer import RunTerms
from farflock.swarm.sim.network import SimNetwork
from farflock.swarm.sim.virtual_time import run_virtual

TOTAL = 3200


def none(node):
    """Do nothing."""


class Bench:
    """A network with nodes of one plan. A step takes half a virtual second, all else takes none."""

    def __init__(self, text, method="diloco", peers=1, total=TOTAL, **options):
        self.text, self.total = text, total
        inner, schedule = (
            InnerConfig(lr=1e-2),
            Schedule(1e-2, total, warmup_tokens=total // 10, joiner_steps=5),
        )
        self.plan = RunPlan(3, PRESETS["tiny"], inner, schedule, method, options, batch=2, seq=32)
        self.network = SimNetwork(3)
        self.identities = [identity(number) for number in range(peers)]

    def record(self, number, incarnation=1):
        return record_of(self.identities[number], "3", incarnation)

    def peer(self, number, incarnation=1, **terms):
        terms = RunTerms("3", 3, view_s=2.0, **terms)
        return peer_in(self.network, self.identities[number], terms, incarnation)

    def node(
        self,
        peer,
        report=lambda kind, fields: None,
        device=None,
        step_options=None,
        outer="host",
        **more,
    ):
        async def compute(work):
            return work()

        async def train(work):
            loss = work()
            await asyncio.sleep(0.5)
            return loss

        return replica_node(
            self.plan,
            peer,
            self.text,
            compute=compute,
            train=train,
            report=report,
            device=device,
            step_options=step_options,
            storage=OnDevice(device.place).allocate if outer == "device" else in_memory,
            **more,
        )

    def alone(self, tokens=640, device=None, saved=None, *, change=none, seen=none, **more):
        """Return a lone node after these tokens, from the start or from a checkpoint, and with this
        change; `seen` looks at it while it runs."""

        async def main():
            async with self.peer(0).running() as peer:
                node = self.node(peer, device=device, **more)
                change(node)
                node.peer.found()
                if saved is None:
                    node.state_sync.open()
                else:
                    load_state(node, saved)
                await node.loop.run(tokens)
                seen(node)
                return node

        return run_virtual(main())

    def together(self, devices, outer="host"):
        """Return two nodes that trained together, one after the other's start, with their outer
        state there if they are on a device (None: the CPU)."""

        async def main():
            first, second = (self.peer(number) for number in range(2))
            async with first.running(), second.running():
                nodes = [
                    self.node(peer, device=device, outer=outer if device else "host")
                    for peer, device in zip((first, second), devices, strict=True)
                ]
                nodes[0].found()
                founder = asyncio.create_task(nodes[0].run(self.total))
                await until(lambda: nodes[0].step >= 3)
                await nodes[1].join([self.record(0)], 60.0)
                await asyncio.gather(founder, nodes[1].run(self.total))
                return nodes

        return run_virtual(main())


@pytest.fixture(scope="session")
def text():
    torch.set_num_threads(1)
    return text_in_memory(ByteTokenizer().encode(load_corpus("shakespeare").train[:100_000]))


@pytest.fixture(scope="session")
def bench():
    """The class `Bench`."""
    return Bench


@pytest.fixture
def small(monkeypatch):
    """Shards of 1 kB in files of 4 kB, which nobody waits for."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    for module in (index, shard_writer):
        monkeypatch.setattr(module, "MAX_SHARD_BYTES", 1000)
    for module in (folder, shard_writer):
        monkeypatch.setattr(module, "MAX_TOKEN_FILE_BYTES", 4000)


@pytest.fixture
def texts(tmp_path):
    """A folder of texts: 60 files, each of a few words, and lines of JSON."""
    place = tmp_path / "texts"
    place.mkdir()
    for number in range(60):
        words = " ".join(f"word{number * step}" for step in range(1, 12))
        (place / f"{number:02}.txt").write_text(f"text {number}: {words}\n")
    lines = (f'{{"text": "line {number} of many"}}\n' for number in range(40))
    (place / "lines.jsonl").write_text("".join(lines))
    return place
