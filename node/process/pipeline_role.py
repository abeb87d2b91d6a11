"""A process's part in a pipeline: which stage this machine serves, whether it trains, and the node that does so.

A founder with nothing else asked of it serves the first stage and trains; whoever joins serves the stage that fewest serve.
"""

import hashlib
from collections.abc import Sequence

import psutil

from farflock.node.assembly.checkpoints import CheckpointManager, last_of
from farflock.node.errors import Usage
from farflock.node.model.tokenizer import TokenIds
from farflock.node.pipeline.lifecycle.assembly import NodeServices
from farflock.node.pipeline.lifecycle.state import living
from farflock.node.pipeline.node import PipelineNode
from farflock.node.process.network import MachineOptions
from farflock.node.reporting import Report
from farflock.node.run.manifest import Manifest
from farflock.node.run.memory import needed_stage_bytes, require_replica_memory, require_stage_memory
from farflock.node.run.terms import PipelinePlan
from farflock.node.state.checkpoint import Checkpoint
from farflock.node.state.paths import RunFolder
from farflock.swarm.compute import Worker
from farflock.swarm.links import PeerId
from farflock.swarm.peer.peer import Peer
from farflock.swarm.roles import EVERY, NOTHING, role_of, stage_of

ROLES = ("auto", "trainer", "replica", "stage", "stage:N")


def founders(role: str, pipeline: PipelinePlan) -> tuple[int, bool]:
    """The stage that a founder serves (`NOTHING` for none, `EVERY` for a full replica), and whether it trains."""
    return (0, True) if role == "auto" else _named(role, pipeline) or (0, False)


async def joiners(
    role: str, pipeline: PipelinePlan, peer: Peer, records: Sequence[bytes], timeout_s: float, founded: bool = False
) -> tuple[int, bool]:
    """The same for who joins: of what is left to this machine's choice, the stage that fewest serve by the members' own list,
    which knows who is gone before the directory does. Who `founded` the run and was to train goes on to. `TimeoutError` if no
    member answers."""
    if (named := _named(role, pipeline)) is not None:
        return named
    await peer.meet(records, timeout_s)
    return emptiest(living(peer, len(pipeline.stages)), peer.me), founded and role == "auto"


def emptiest(servers: Sequence[int], me: PeerId) -> int:
    """The stage that fewest others serve; of several one that depends on who asks: not all who come at once go to the same."""

    def chance(stage: int) -> bytes:
        return hashlib.sha256(f"{me}/{stage}".encode()).digest()

    return min(range(len(servers)), key=lambda stage: (servers[stage], chance(stage)))


def _named(role: str, pipeline: PipelinePlan) -> tuple[int, bool] | None:
    """What the option says; None where it leaves the choice. `Usage` for a role that there is not."""
    stages = len(pipeline.stages)
    if role in ("auto", "stage"):
        return None
    if role == "trainer":
        return NOTHING, True
    if role == "replica":
        return EVERY, True
    if 0 <= (stage := stage_of(role)) < stages:
        return stage, False
    raise Usage(
        "--role", f"{role!r} is none in a run of {stages} stages", f"choose from {', '.join(ROLES)}, N below {stages}"
    )


def last_of_part(folder: RunFolder, run: str, pipeline: PipelinePlan, stage: int) -> Checkpoint | None:
    """The checkpoint that tells how far this node was when it served this stage; of a full replica, that of the stage that was
    furthest behind. None where it held nothing, or lacks one."""
    saved = [last_of(folder, run, role_of(index)) for index in held(pipeline, stage)]
    found = [each for each in saved if each is not None]
    return min(found, key=lambda each: int(each.meta["tokens"])) if found and len(found) == len(saved) else None


def held(pipeline: PipelinePlan, stage: int) -> tuple[int, ...]:
    """The stages whose state is at who serves this one, `EVERY` of them, or `NOTHING`."""
    return tuple(index for index in range(len(pipeline.stages)) if stage in (index, EVERY))


def part_of(
    machine: MachineOptions,
    manifest: Manifest,
    run: str,
    peer: Peer,
    tokens: TokenIds,
    report: Report,
    stage: int,
    trains: bool,
) -> tuple[PipelineNode, list[CheckpointManager]]:
    """The node, and what keeps the checkpoints of its stages, each by itself: anybody may take one up some day. All that
    computes has one thread: no pass may see weights that a step is just changing."""
    pipeline = manifest.pipeline_plan()
    assert pipeline is not None, "a run of whole models has no stages"
    plan, worker = manifest.plan(), Worker("stage")
    free = int(psutil.virtual_memory().available)
    if stage == EVERY:
        require_replica_memory(plan, pipeline, free)
    elif stage != NOTHING:
        require_stage_memory(plan, pipeline, stage, free)
    saved = {index: last_of(machine.folder, run, role_of(index)) for index in held(pipeline, stage)}
    known = {index: each for index, each in saved.items() if each is not None}
    needs = tuple(needed_stage_bytes(plan, pipeline, index) for index in range(len(pipeline.stages)))
    means = NodeServices(worker, lambda work, cost: worker(work), worker, report, free, needs)
    node = PipelineNode(plan, pipeline, peer, means, stage, tokens if trains else None, known)
    text, keepers = manifest.canonical().decode(), []
    for serving in node.servings:
        role = role_of(serving.index)
        keepers.append(CheckpointManager(serving, machine.folder, run, text, machine.checkpoint_s, role))
        serving.loop.pause = keepers[-1].pause
    return node, keepers
