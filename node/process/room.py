"""The room that a run needs on this machine: on its disk, and for whole models in its memory,
reckoned, and then tried.

It is known before a founder opens its run, and before a joiner downloads anything of its state.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from farflock.node.assembly.trial_step import fitting
from farflock.node.errors import FarflockError, Usage
from farflock.node.model.device import Device
from farflock.node.model.loss import MAX_LOGITS
from farflock.node.model.replica import OnDevice, Storage, in_memory
from farflock.node.model.step_options import StepOptions, logits_on
from farflock.node.process.disk import disk_need, planned
from farflock.node.process.network import MachineOptions
from farflock.node.run.fit import require_moments
from farflock.node.run.manifest import Manifest
from farflock.node.run.memory import (
    Exchanged,
    StepChoices,
    evaluation_room,
    kept_outer,
    min_device_bytes,
    needed_shard_bytes,
    refusal,
    require_device_memory,
    require_memory,
    stage_parameters,
    state_on_device,
)
from farflock.node.run.terms import RunPlan
from farflock.node.state.outer_files import OuterFiles
from farflock.node.train.run_size import exchanged
from farflock.optimizers.catalog import method
from farflock.swarm.compute import Worker

log = logging.getLogger(__name__)


def with_room(
    machine: MachineOptions, manifest: Manifest, error: type[FarflockError]
) -> MachineOptions:
    """Return the machine with the place of the method's state chosen, and what its disk is given
    to. Raise `error` unless the run fits the disk and a whole model the memory, and `Usage` if the
    run cannot have such moments or several processes. A pipeline's node checks its memory once it
    knows its stage."""
    return with_disk(_with_memory(machine, manifest, error), manifest, error)


def with_disk(
    machine: MachineOptions, manifest: Manifest, error: type[FarflockError]
) -> MachineOptions:
    """Return the machine with what its disk is given to; raise `error` if `--disk` allows too
    little. A node that does not know its stage yet is given the largest one's room."""
    stages = _stages(machine, manifest)
    sources = len(manifest.data.weights) if machine.ranks is None else 0
    fetched = max(sources - len(machine.data), 0)
    need = disk_need(manifest, stages, outer=machine.outer == "disk", fetched=fetched)
    given = machine.disk, machine.keep, machine.keep_bytes, machine.data_cache
    plan = planned(need, *given, error)
    machine = replace(machine, disk_plan=plan)
    if machine.disk is None:
        return machine
    older = (plan.checkpoints - need.checkpoint) // max(len(stages or ()), 1)  # each has its own
    return replace(machine, keep_bytes=min(older, machine.keep_bytes or older) or None)


def _stages(machine: MachineOptions, manifest: Manifest) -> Sequence[int] | None:
    """Return the stages that a node may have to keep; None for a whole model."""
    pipeline = manifest.pipeline_plan()
    if pipeline is None:
        return None
    sizes = [stage_parameters(manifest.plan().model, span) for span in pipeline.stages]
    match machine.role:
        case "replica":
            return range(len(sizes))
        case "trainer":
            return ()
    return (sizes.index(max(sizes)),)


def _with_memory(
    machine: MachineOptions, manifest: Manifest, error: type[FarflockError]
) -> MachineOptions:
    """Return the machine with the place of the method's state chosen, as `with_room` does; if
    possible where there is room to evaluate the run too."""
    plan, computing = manifest.plan(), choices_of(machine.step_options, machine.device)
    made, in_stages = method(plan.method, **plan.options), manifest.pipeline is not None
    require_moments(plan.method, made, plan.inner, computing.moments, in_stages)
    if in_stages:
        if machine.ranks is not None:
            raise Usage(
                "several processes cannot be one peer of this run",
                "its model is a pipeline, and each part of it is one process",
                "start it without torchrun",
            )
        return machine
    if machine.ranks is not None and computing.moments != "fp32":
        raise Usage(
            f"--moments {computing.moments}",
            "several processes are this peer, and step shards",
            "leave this option out",
        )
    beside = _exchanged(manifest)
    # A node of a shared model keeps nothing on its device but its shard.
    home = machine.device if machine.ranks is None else None
    wanted = computing._replace(evaluates=manifest.evaluation.every > 0)
    machine = replace(machine, outer=kept_outer(machine.outer, plan, beside, wanted, home))
    require_memory(plan, error, machine.outer, beside, computing)
    if computing.on_device and machine.ranks is not None:
        _require_shard(plan, machine.device, error, machine.ranks.count)
    elif computing.on_device:
        terms = machine.device, error, beside, computing, _state_beside(machine, beside)
        require_device_memory(plan, *terms)
    return machine


def _require_shard(plan: RunPlan, device: Device, error: type[FarflockError], count: int) -> None:
    """Raise `error` if a shard of the model alone does not fit this device."""
    least, free = min_device_bytes(plan) // count, device.memory()[0]
    if least > free:
        raise error(
            f"the run's model is too large for {count} processes",
            f"a shard of its weights, gradients and moments takes about {least / 1e6:,.0f} MB of"
            f" each device's memory, and {free / 1e6:,.0f} MB are free here",
            "start more processes on more devices, or close programs that use them",
        )


def storage_of(machine: MachineOptions) -> Storage:
    """Return where this machine keeps the state of the run's method."""
    match machine.outer:
        case "device":
            return OnDevice(machine.device.place).allocate
        case "disk":
            return OuterFiles(machine.folder.outer).allocate
    return in_memory


async def fitted(
    machine: MachineOptions, manifest: Manifest, error: type[FarflockError]
) -> MachineOptions:
    """Return the machine with what true steps have shown: the number of sequences that its device
    computes at once, whether it has to compute layers again for that, and whether there is room to
    evaluate the run. Raise `error` if there is no room even for one.

    A CPU is not tried: systems promise more memory than they have, and end who takes it. Nor are
    several processes: one that runs out of memory leaves the others waiting."""
    if manifest.pipeline is not None:
        return machine
    if machine.device.place.type == "cpu":
        return _evaluating(machine, manifest)
    if machine.ranks is not None:
        options = reckoned(
            manifest.plan(), machine.device, machine.step_options, machine.ranks.count
        )
        return replace(machine, step_options=options)
    plan, exchanged, trial = manifest.plan(), _exchanged(manifest), Worker("trial")
    state_bytes = _state_beside(machine, exchanged)
    found = await trial(partial(fitting, plan, machine.device, machine.step_options, state_bytes))
    trial.close()
    if found is None:
        choices = choices_of(machine.step_options, machine.device)
        raise error(*refusal(plan, machine.device, exchanged, choices, state_bytes))
    return _evaluating(replace(machine, step_options=found), manifest)


def _evaluating(machine: MachineOptions, manifest: Manifest) -> MachineOptions:
    """Return the machine with whether it has room to evaluate the run; say it if not. Of several
    processes the first one tries, as its share of the model says nothing of it."""
    if not manifest.evaluation.every or machine.ranks is not None:
        return machine
    plan, beside, device = manifest.plan(), _exchanged(manifest), machine.device
    choices, on_device = choices_of(machine.step_options, device), _state_beside(machine, beside)
    needed, free = evaluation_room(plan, beside, choices, machine.outer, device, on_device)
    if needed <= free:
        return machine
    log.warning(
        "this node trains, but leaves the evaluations of the run to other members: they would take"
        " about %s MB of memory in all, and %s MB are free; to take part, close other programs and"
        " start it again",
        *(f"{size / 1e6:,.0f}" for size in (needed, free)),
    )
    return replace(machine, evaluates=False)


def reckoned(plan: RunPlan, device: Device, options: StepOptions, count: int) -> StepOptions:
    """Return the options with how many sequences each of `count` processes that share a model
    computes at once, and whether it computes layers again, as far as can be reckoned from this
    device; the least of both if nothing else fits."""
    wanted = min(options.micro_batch or plan.batch, -(-plan.batch // count))
    again = [replace(options, checkpointing="on")] if options.checkpointing == "auto" else []
    free = device.memory()[0]
    for chosen in (options, *again):
        at_once = wanted
        while at_once:
            chosen = replace(chosen, micro_batch=at_once)
            if needed_shard_bytes(plan, choices_of(chosen, device), count) <= free:
                return chosen
            at_once //= 2
    return chosen


def _state_beside(machine: MachineOptions, exchanged: Exchanged) -> int:
    """Return the bytes of the method's state on the device."""
    return state_on_device(exchanged) if machine.outer == "device" else 0


def choices_of(options: StepOptions, device: Device) -> StepChoices:
    """Return the part of these choices on which memory depends."""
    return StepChoices(
        options.micro_batch,
        device.place.type != "cpu",
        options.moments,
        options.checkpoints,
        device.precision != "fp32",
        logits_on(device) or MAX_LOGITS,
    )


def _exchanged(manifest: Manifest) -> Exchanged:
    return exchanged(manifest.plan(), max(manifest.exchange.start_peers, 2))
