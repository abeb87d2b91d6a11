"""A process's part in a run of whole models: the replica, which torchrun's processes may share, and
its checkpoints."""

from collections.abc import Awaitable, Callable
from functools import partial

from farflock.node.assembly.checkpoints import CheckpointManager, members_of
from farflock.node.assembly.node import ReplicaNode, replica_node
from farflock.node.assembly.resume import load_moments
from farflock.node.assembly.text import NodeText
from farflock.node.data.coming_shards import ReadingStopped
from farflock.node.process.brake import with_brake, with_share
from farflock.node.process.network import MachineOptions
from farflock.node.process.room import storage_of
from farflock.node.process.run_text import NodeInputs
from farflock.node.process.sample_keeper import SampleKeeper, keep_samples
from farflock.node.process.torchrun import leading
from farflock.node.reporting import Report
from farflock.node.run.manifest import Manifest
from farflock.node.state.checkpoint import Checkpoint
from farflock.node.state.outer_files import OuterFiles
from farflock.node.state.sample_position import SamplePosition
from farflock.node.train.absence import STALL_S, Absence
from farflock.node.train.evaluation_watch import go_on
from farflock.node.train.evaluator import Evaluator
from farflock.node.train.model_meter import ModelMeter
from farflock.node.train.state_sync import Spool
from farflock.node.train.task import Loss, Train
from farflock.optimizers.parts.spread import spread_over
from farflock.swarm.compute import Compute, Worker
from farflock.swarm.peer.peer import Peer


def until_stopped(train: Train) -> Train:
    """Return what trains, and ends once the node stops while data are waited for."""

    async def stoppable(work: Callable[[], Loss]) -> Loss | None:
        try:
            return await train(work)
        except ReadingStopped:
            return None

    return stoppable


def replica_of(
    inputs: NodeInputs,
    peer: Peer,
    report: Report,
    files: Worker,
    train: Compute,
    before: Checkpoint | None = None,
) -> tuple[ReplicaNode, CheckpointManager]:
    """Return the node and its checkpoint manager. `files` is the thread that writes snapshots,
    `train` the one that trains. A node that was in the run `before` keeps its place in the data and
    its inner moments; the state comes from the swarm."""
    machine, manifest, text = inputs.machine, inputs.known.manifest, inputs.text
    copies = OuterFiles(machine.folder.snapshots).allocate
    shared = leading(machine, manifest, peer.me, text, inputs.weights)
    if shared is not None:
        shared.replica.spool = copies
    node = replica_node(
        manifest.plan(),
        peer,
        text.tokens,
        compute=Worker("state"),  # training waits for it, not for what others need reduced
        train=until_stopped(train),
        report=report,
        storage=storage_of(machine),
        spool=Spool(files, copies),
        spread=spread_over(machine.codec_threads),
        device=machine.device,
        step_options=machine.step_options,
        shared=shared,
        weights=inputs.weights,
        start=text.start,
    )

    accumulate, batches = manifest.train.accumulate, node.training_task.batches
    position = SamplePosition(machine.folder.path, inputs.known.run)
    samples = SampleKeeper(position, batches, Worker("samples"))
    keep_samples(node, samples, accumulate)
    keeper = CheckpointManager(
        node,
        machine.folder,
        inputs.known.run,
        manifest.canonical().decode(),
        machine.checkpoint_s,
        keep=machine.keep,
        keep_bytes=machine.keep_bytes,
        tokenizer=text.tokenizer,
        model=node.model.config,
        cursor=lambda step: samples.place(step * accumulate),
        members=partial(members_of, peer),
    )
    keeper.alone = shared is None
    node.evaluator = _evaluator(node, manifest, text)
    keeper.watch = node.watch
    node.begins_alike = manifest.plan().weights is None
    if before is not None:
        node.before = before
        load_moments(node, before)
        go_on(node.watch, before.meta)
    share, threads = machine.place.shares.cpu, machine.threads
    pause = with_share(_pause(node, keeper), share, threads, lambda: node.stopping)
    node.loop.pause = with_brake(pause, lambda: node.stopping)
    return node, keeper


def says_replicas_device(machine: MachineOptions, manifest: Manifest) -> str:
    """Return a sentence on the device that a whole replica trains on, and how much at once."""
    ranks, options = machine.ranks, machine.step_options
    rows = -(-manifest.train.batch // (1 if ranks is None else ranks.count))
    at_once = options.micro_batch or rows
    some = "" if at_once >= rows else f", {at_once} of a batch's {rows} sequences at once"
    again = ", with layers computed again" if options.checkpoints else ""
    return f"this node trains on {machine.device}{some}{again}"


def _evaluator(node: ReplicaNode, manifest: Manifest, text: NodeText) -> Evaluator | None:
    """Return a node's part in the run's evaluations; None if it takes none.

    The leader of several processes measures alone, as it has the method's weights; the others wait
    for its next order."""
    if text.held_out is None or not node.loop.driver.streams:
        return None

    def is_over() -> bool:
        return node.loop.driver.position.agreed_tokens >= manifest.run.total_tokens

    meter = ModelMeter(node.model, text.held_out, text.tokenizer)
    return Evaluator(node.peer, node.loop, meter, manifest.evaluation.every, is_over)


def _pause(node: ReplicaNode, keeper: CheckpointManager) -> Callable[[], Awaitable[None]]:
    """Return what a node does between two steps."""
    absence = Absence(node.peer, node.loop)

    async def pause() -> None:
        await absence.during(keeper.pause(), STALL_S)
        if node.evaluator is not None:
            await node.evaluator.between_steps()

    return pause
