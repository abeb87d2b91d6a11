"""One microbatch goes through few files, and docs/architecture.md says what each of them does."""

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace

import torch
from worlds.switchboard import Switchboard

from farflock.compression.activation_catalog import activation_codec
from farflock.node.model.llama import ModelConfig, build
from farflock.node.pipeline.lifecycle.features import edge_ends
from farflock.node.pipeline.passes.edges import Edges
from farflock.node.pipeline.passes.stage import Stage
from farflock.node.pipeline.server.server import StageServer
from farflock.node.pipeline.server.weight_versions import WeightVersions
from farflock.node.pipeline.trainer.in_flight import MicrobatchSource
from farflock.node.pipeline.trainer.stage_directory import StageDirectory, StreamName
from farflock.node.pipeline.trainer.trainer import Trainer
from farflock.node.run.policies import policy_of
from farflock.node.run.split import even
from farflock.node.run.terms import ServerTerms, TrainerTerms
from farflock.swarm.compute import inline
from farflock.swarm.protocol.views import Certified, Chain, Member, View
from farflock.swarm.roles import NOTHING
from farflock.swarm.sim.virtual_time import run_virtual
from tests.tidy.trace import Trace

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "architecture.md").read_text()

MODEL = ModelConfig(
    vocab_size=16, dim=8, layers=2, heads=2, kv_heads=1, ffn_dim=16, context=8, tied=False
)
STAGES, TOKENS = 2, 8
EDGES = Edges(activation_codec("raw"), 1, TOKENS, MODEL.dim, MODEL.vocab_size, 0)
PATH = [
    "node/pipeline/trainer/in_flight.py",
    "node/pipeline/passes/edges.py",
    "node/pipeline/trainer/trainer.py",
    "node/pipeline/trainer/commits.py",
    "node/pipeline/trainer/walker.py",
    "node/pipeline/trainer/stage_directory.py",
    "node/pipeline/trainer/edge_codecs.py",
    "node/pipeline/trainer/stage_client.py",
    "node/pipeline/trainer/blame.py",
    "node/pipeline/passes/requests.py",
    "swarm/peer/calls.py",
    "swarm/peer/payloads.py",
    "swarm/peer/context.py",
    "swarm/peer/call_server.py",
    "swarm/peer/left.py",
    "node/pipeline/server/server.py",
    "node/pipeline/server/passes.py",
    "node/pipeline/passes/stage.py",
    "node/pipeline/server/edge_ends.py",
    "node/pipeline/server/queue.py",
    "node/pipeline/server/pending.py",
    "node/pipeline/server/weight_versions.py",
    "node/pipeline/passes/graphs.py",
    "node/pipeline/passes/coming.py",
    "node/pipeline/server/accounts.py",
]


class Swarm:
    """A trainer's view of the swarm: a server of each stage, and the rounds that the test plays."""

    me = "t"

    def __init__(self, world):
        life = world.peer(self.me)
        self.calls, self.codec_offers = life.calls, SimpleNamespace(of=lambda peer, life: None)
        self.context = self.rounds = self
        members = (
            *(Member(str(stage), 1, stage) for stage in range(STAGES)),
            Member(self.me, 1, NOTHING),
        )
        self.views = Chain("run", [Certified(View(1, bytes(32), 0, members))])
        self.logs = {}
        self.streams = {f"s/{stage}": self for stage in range(STAGES)}

    def gone(self, view, peer):
        return False

    def now(self):
        return asyncio.get_running_loop().time()

    def tokens(self, name):
        return 0

    def newest(self, name):
        return 0 if name in self.logs else -1

    def oldest_kept(self, name):
        return 0

    def entry(self, number):
        return None

    def last_shards(self, name, number):
        return self.logs.get(name) if number == 0 else None


def server_of(stage, span):
    made = Stage(build(MODEL, 0, span))
    computing = SimpleNamespace(compute=inline, run_pass=lambda work, cost: inline(work))
    place = {"life": 1, "applied": lambda: -1, "versions": WeightVersions()}
    return StageServer(stage, made, edge_ends(EDGES), ServerTerms(), computing, **place)


async def one_microbatch():
    """Train until a microbatch is done; a stage has a round as soon as its server has merged."""
    world, streams = (
        Switchboard(),
        {stage: StreamName(f"s/{stage}", 0, 1) for stage in range(STAGES)},
    )
    servers = [server_of(stage, span) for stage, span in enumerate(even(MODEL, STAGES))]
    for stage, server in enumerate(servers):
        world.peer(str(stage), server)
    swarm, text = (
        Swarm(world),
        SimpleNamespace(batch=lambda number: (torch.zeros(1, TOKENS).long(),) * 2),
    )
    directory, policy = (
        StageDirectory(swarm, streams),
        policy_of("swarm", (1,) * STAGES, 0, swarm.me),
    )
    trainer = Trainer(
        swarm, directory, policy, MicrobatchSource(text, EDGES, policy), TrainerTerms(1, 1)
    )
    tasks = [
        asyncio.create_task(work)
        for work in (*(server.run() for server in servers), trainer.run(lambda: False))
    ]
    for stage, server in enumerate(servers):
        await server.accounts.merged.wait()
        server.accounts.take()
        noted = server.accounts.brought(0)
        server.accounts.closing(0, noted)
        server.accounts.closed(0, noted)
        swarm.logs[streams[stage].name] = (noted,)
    while not trainer.commits.finished:  # noqa: ASYNC110 - it looks around now and then
        await asyncio.sleep(0.1)
    for task in (*tasks, *(task for life in world.lives for task in life.tasks)):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_a_microbatch_enters_these_files_in_this_order():
    trace = Trace(
        ("node/pipeline", "swarm/peer"), begin="MicrobatchSource.draw", end="CommitTracker._end"
    )
    with trace.watching():
        run_virtual(one_microbatch())
    modules = list(trace.entered)
    print(*modules, sep="\n")
    assert modules == PATH


def test_the_page_says_what_happens_in_each_of_them():
    section = PAGE.partition("## One microbatch, file by file\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\d+\. `([^`]+)`: .+", section, re.M) == PATH
