"""A process's part in a run of whole models: its replica, the checkpoints of that, and what it
awaits between two steps."""

from functools import partial
from typing import TYPE_CHECKING

from farflock.node.assembly.checkpoints import CheckpointManager
from farflock.node.assembly.node import ReplicaNode, replica_node
from farflock.node.data.sequences import Text
from farflock.node.process.brake import Pause, with_brake
from farflock.node.process.data_supply import DataSupply
from farflock.node.process.held_out import facts_of
from farflock.node.process.network import MachineOptions
from farflock.node.process.room import storage_of
from farflock.node.reporting import Report
from farflock.node.run.manifest import Manifest
from farflock.node.state.base_note import BaseNote
from farflock.node.state.outer_files import OuterFiles
from farflock.node.state.sample_cursor import SampleCursor
from farflock.node.state.weights_file import WeightsFolder
from farflock.node.train.state_sync import Spool
from farflock.optimizers.parts.spread import spread_over
from farflock.swarm.compute import Worker
from farflock.swarm.peer.peer import Peer

if TYPE_CHECKING:
    from farflock.node.assembly.followers import SharedPart


def replica_part(
    machine: MachineOptions,
    manifest: Manifest,
    run: str,
    peer: Peer,
    text: Text,
    report: Report,
    files: Worker,
    cursor: SampleCursor,
    supply: DataSupply | None,
    weights: WeightsFolder | None,
) -> tuple[ReplicaNode, CheckpointManager]:
    """Return the node and the keeper of its checkpoints; `files` runs what reads and writes."""
    copies = OuterFiles(machine.folder.snapshots).allocate
    shared = _shared(machine, manifest, peer.me, text, weights)
    if shared is not None:
        shared.replica.spool = copies
    node = replica_node(
        manifest.plan(),
        peer,
        text,
        compute=Worker("state"),  # training waits for it, not for what others need reduced
        train=Worker("train"),
        report=report,
        storage=storage_of(machine),
        spool=Spool(files, copies),
        spread=spread_over(machine.codec_threads),
        device=machine.device,
        step_options=machine.step_options,
        shared=shared,
        weights=weights,
    )
    keeper = CheckpointManager(
        node,
        machine.folder,
        run,
        manifest.canonical().decode(),
        machine.checkpoint_s,
        keep=machine.keep,
        keep_bytes=machine.keep_bytes,
        tokenizer=None if supply is None else supply.tokenizer,
    )
    keeper.base = _base_note(manifest, weights)
    keeper.facts = partial(facts_of, node)
    if (evaluator := node.evaluator) is not None and manifest.guard.on == "end":
        keeper.good_round = lambda: evaluator.good
    pause = with_brake(keeper.pause, lambda: node.stopping)
    node.loop.pause = _between_steps(node, pause, cursor, supply)
    return node, keeper


def _base_note(manifest: Manifest, weights: WeightsFolder | None) -> BaseNote | None:
    """Return what checkpoints of adapters say of the base; None if all weights are trained."""
    lora, start = manifest.train.lora, manifest.model.start
    if lora is None:
        return None
    assert weights is not None, "adapters are trained beside weights"
    assert start is not None, "a manifest of adapters names these weights"
    return BaseNote(lora=lora, start=start, folder=str(weights.folder.absolute()))


def _shared(
    machine: MachineOptions,
    manifest: Manifest,
    me: str,
    text: Text,
    weights: WeightsFolder | None,
) -> "SharedPart | None":
    """Return the leader's part of a model that several processes train as one peer; None if this
    process is alone."""
    if machine.ranks is None:
        return None
    from farflock.node.assembly.followers import Assignment, lead  # late: it loads FSDP

    options = machine.step_options
    how = options.checkpoints, options.compile == "on", options.micro_batch or 0
    folders = (*machine.data, str(machine.cache.folder))
    begun = "" if weights is None else str(weights.folder.absolute())
    assignment = Assignment(manifest.canonical(), me, *how, folders, begun)
    return lead(machine.ranks, assignment, text, machine.device)


def _between_steps(
    node: ReplicaNode, pause: Pause, cursor: SampleCursor, supply: DataSupply | None
) -> Pause:
    """Return what a node awaits between two steps: its cursor is kept, and the data of the next
    step has to be here."""

    async def wait() -> None:
        cursor.write(node.step)
        if node.evaluator is not None:
            await node.evaluator.between_steps()
        await pause()
        if supply is not None:
            batches = (node.step + 1) * node.training_task.accumulate
            await supply.ready(batches - 1, lambda: node.stopping)

    return wait
