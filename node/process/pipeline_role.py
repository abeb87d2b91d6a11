"""A process's part in a pipeline: which stage it serves, whether it trains, and the node for it.

By default a founder serves the first stage and trains; a joiner serves the stage of fewest servers.
"""

from collections.abc import Sequence
from functools import partial

from farflock.node.assembly.checkpoints import CheckpointManager, last_of, members_of
from farflock.node.errors import Usage
from farflock.node.machine import host_memory
from farflock.node.model.device import Device
from farflock.node.model.replica import in_memory
from farflock.node.pipeline.lifecycle.assembly import NodeServices, StageNode
from farflock.node.pipeline.lifecycle.reservations import choose_stage
from farflock.node.pipeline.node import PipelineNode, evaluate
from farflock.node.pipeline.passes.stage import used_by_stages
from farflock.node.pipeline.trainer.trainer import Trainer
from farflock.node.process.brake import brake_of
from farflock.node.process.network import MachineOptions
from farflock.node.process.run_text import NodeInputs
from farflock.node.process.sample_keeper import SampleKeeper
from farflock.node.reporting import Report
from farflock.node.run.memory import (
    needed_stage_bytes,
    needed_stage_device_bytes,
    require_replica_memory,
    require_stage_device_memory,
    require_stage_memory,
)
from farflock.node.run.terms import PipelinePlan, RunPlan
from farflock.node.state.checkpoint import Checkpoint
from farflock.node.state.outer_files import OuterFiles
from farflock.node.state.paths import RunFolder
from farflock.node.state.sample_position import SamplePosition
from farflock.node.train.evaluation_watch import go_on
from farflock.node.train.state_sync import Spool
from farflock.swarm.compute import Compute, Worker
from farflock.swarm.peer.peer import Peer
from farflock.swarm.roles import EVERY, NOTHING, role_of, stage_of

ROLES = ("auto", "trainer", "replica", "stage", "stage:N")


def founders(role: str, pipeline: PipelinePlan | None) -> tuple[int, bool]:
    """Return a founder's stage (`NOTHING`, or `EVERY` for a full replica) and whether it trains."""
    if pipeline is None:
        return EVERY, True
    return (0, True) if role == "auto" else _named(role, pipeline) or (0, False)


async def joiners(
    role: str,
    pipeline: PipelinePlan,
    peer: Peer,
    records: Sequence[bytes],
    timeout_s: float,
    founded: bool = False,
) -> tuple[int, bool]:
    """Return a joiner's stage and whether it trains, like `founders`.

    If the role leaves the stage open, it is the one that the newest view lists for this key: after
    a power cut nobody else may have the state of that. For any other key a member chooses
    (node/pipeline/lifecycle/reservations.py). A peer that `founded` the run with role auto keeps
    training. Raise `TimeoutError` if no member answers."""
    if (named := _named(role, pipeline)) is not None:
        return named
    await peer.meet(records, timeout_s)
    trains, view = founded and role == "auto", peer.context.views.newest
    before = next((each.stage for each in view.members if each.peer == peer.me), NOTHING)
    if 0 <= before < len(pipeline.stages):
        return before, trains
    return await choose_stage(peer, len(pipeline.stages)), trains


def _named(role: str, pipeline: PipelinePlan) -> tuple[int, bool] | None:
    """Return the part that the option asks for, or None if it leaves the choice; raise `Usage`
    for an unknown role."""
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
        "--role",
        f"{role[:64]!r} is not a role in a run of {stages} stages",
        f"choose from {', '.join(ROLES)}, where N is below {stages}",
    )


def last_of_part(
    folder: RunFolder, run: str, pipeline: PipelinePlan | None, stage: int
) -> Checkpoint | None:
    """Return the checkpoint with this node's progress when it served this stage; for a full
    replica of a pipeline, that of the stage furthest behind. Return None if the node held no stage
    or a checkpoint is missing."""
    if pipeline is None:
        return last_of(folder, run)
    saved = [last_of(folder, run, role_of(index)) for index in held(pipeline, stage)]
    found = [each for each in saved if each is not None]
    return (
        min(found, key=lambda each: int(each.meta["tokens"]))
        if found and len(found) == len(saved)
        else None
    )


def held(pipeline: PipelinePlan, stage: int) -> tuple[int, ...]:
    """Return the stages held when serving `stage`: all for `EVERY`, none for `NOTHING`."""
    return tuple(index for index in range(len(pipeline.stages)) if stage in (index, EVERY))


def part_of(
    inputs: NodeInputs, peer: Peer, report: Report, stage: int, trains: bool, worker: Compute
) -> tuple[PipelineNode, list[CheckpointManager]]:
    """Return the node, and one checkpoint manager per stage, because any peer may later resume a
    single stage. All computation shares one thread, `worker`: no pass may see weights in the middle
    of a step."""
    manifest, text, folder = inputs.known.manifest, inputs.text, inputs.machine.folder
    plan, pipeline, run = manifest.plan(), manifest.pipeline_plan(), inputs.known.run
    assert pipeline is not None, "a run of whole models has no stages"
    if 0 < (inputs.machine.place.shares.cpu or 0.0) < 1.0:
        why = "a server of stages computes whenever others need it"
        raise Usage("--cpu does not hold in a run of stages", why, "join with --cpu 100%")
    saved = {index: last_of(folder, run, role_of(index)) for index in held(pipeline, stage)}
    known = {index: each for index, each in saved.items() if each is not None}
    means = _means(inputs, pipeline, stage, worker, report)
    node = PipelineNode(
        plan, pipeline, peer, means, stage, text.tokens if trains else None, known, text.start
    )
    if text.held_out is not None:
        evaluate(node, manifest.evaluation.every, text.held_out)
    for before in known.values():
        go_on(node.watch, before.meta)
    keepers = [_keeper(inputs, serving, worker) for serving in node.servings]
    for serving, keeper in zip(node.servings, keepers, strict=True):
        keeper.watch, serving.loop.pause = node.watch, keeper.pause
    if node.trainer is not None:
        position, files = SamplePosition(folder.path, run), Worker("samples")
        samples = SampleKeeper(position, node.batches, files)
        node.trainer.source.counted = lambda batch: peer.context.spawn(samples.counted(batch))
    brake = brake_of(lambda: node.stopping)
    if brake is not None and isinstance(node.trainer, Trainer):
        begins, tokens = node.trainer.may_begin, plan.batch * plan.seq
        node.trainer.may_begin = lambda: (
            begins() and brake.may_begin(pipeline.batch_tokens // tokens)
        )
    return node, keepers


def says_stages_device(role: str, device: Device) -> str:
    """Return a sentence on the device that a node of a pipeline computes on, as stages use it."""
    device, stage = used_by_stages(device), stage_of(role)
    if stage == EVERY:
        return f"this node trains on {device}"
    if stage == NOTHING:
        return f"this node trains without weights: servers of stages compute, and not {device.name}"
    return f"this node serves stage {stage} on {device}"


def _means(
    inputs: NodeInputs, pipeline: PipelinePlan, stage: int, worker: Compute, report: Report
) -> NodeServices:
    """Return what this machine gives a node; may raise `Uncomposable`, as `_room` does."""
    machine = inputs.machine
    free, needs = _room(machine, inputs.known.manifest.plan(), pipeline, stage)
    storage = OuterFiles(machine.folder.outer).allocate if machine.outer == "disk" else in_memory
    return NodeServices(
        worker,
        lambda work, cost: worker(work),
        worker,
        report,
        memory_bytes=free,
        needs_bytes=needs,
        storage=storage,
        spool=Spool(Worker("files"), OuterFiles(machine.folder.snapshots).allocate),
        device=machine.device,
        weights=inputs.weights,
    )


def _keeper(inputs: NodeInputs, serving: StageNode, worker: Compute) -> CheckpointManager:
    machine = inputs.machine
    return CheckpointManager(
        serving,
        machine.folder,
        inputs.known.run,
        inputs.known.manifest.canonical().decode(),
        machine.checkpoint_s,
        role_of(serving.index),
        keep=machine.keep,
        keep_bytes=machine.keep_bytes,
        compute=worker,
        tokenizer=inputs.text.tokenizer,
        model=serving.model.config,
        members=partial(members_of, serving.peer),
    )


def _room(
    machine: MachineOptions, plan: RunPlan, pipeline: PipelinePlan, stage: int
) -> tuple[int, tuple[int, ...]]:
    """Return the bytes that are free for a stage, and those that each stage needs; raise
    `Uncomposable` if there is too little memory for what the node serves.

    Both memories count where stages are on a device of their own: what is free is less than the
    need of any stage that the device does not hold, so that no node moves there."""
    indices = range(len(pipeline.stages))
    needs = tuple(needed_stage_bytes(plan, pipeline, index) for index in indices)
    free = host_memory().free
    if stage == EVERY:
        require_replica_memory(plan, pipeline, free)
    elif stage != NOTHING:
        require_stage_memory(plan, pipeline, stage, free)
    if machine.device.place.type != "cpu":
        there, _ = machine.device.memory()
        require_stage_device_memory(plan, pipeline, held(pipeline, stage), there)
        too_large = [i for i in indices if needed_stage_device_bytes(plan, pipeline, i) > there]
        free = min([free, *(needs[index] - 1 for index in too_large)])
    return free, needs
