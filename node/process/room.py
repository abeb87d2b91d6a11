"""The room that a run of whole models needs on this machine: reckoned, and then tried.

It is known before a founder opens its run, and before a joiner downloads anything of its state.
"""

from dataclasses import replace
from functools import partial

from farflock.node.assembly.trial_step import fitting
from farflock.node.errors import FarflockError, Usage
from farflock.node.model.replica import OnDevice, Storage, in_memory
from farflock.node.process.network import MachineOptions
from farflock.node.run.fit import require_moments
from farflock.node.run.manifest import Manifest
from farflock.node.run.memory import (
    Exchanged,
    StepChoices,
    kept_outer,
    refusal,
    require_device_memory,
    require_memory,
    state_on_device,
)
from farflock.node.state.outer_files import OuterFiles
from farflock.node.train.run_size import exchanged
from farflock.optimizers.catalog import method
from farflock.swarm.compute import Worker


def with_room(
    machine: MachineOptions, manifest: Manifest, error: type[FarflockError]
) -> MachineOptions:
    """Return the machine with the place of the method's state chosen. Raise `error` unless a whole
    model fits the memory, and `Usage` if the run cannot have such moments or several processes. A
    pipeline's node checks its memory once it knows its stage."""
    plan, computing = manifest.plan(), _computing(machine)
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
    if machine.ranks is not None and (computing.moments != "fp32" or computing.micro_batch):
        raise Usage(
            "--moments, --micro-batch",
            "several processes are this peer, and compute with shards",
            "leave these options out",
        )
    beside = _exchanged(manifest)
    # A node of a shared model keeps nothing on its device but its shard.
    home = machine.device if machine.ranks is None else None
    machine = replace(machine, outer=kept_outer(machine.outer, plan, beside, computing, home))
    require_memory(plan, error, machine.outer, beside, computing)
    if computing.on_device and home is not None:
        terms = machine.device, error, beside, computing, _state_beside(machine, beside)
        require_device_memory(plan, *terms)
    return machine


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
    computes at once, and whether it has to compute layers again for that. Raise `error` if there is
    no room even for one.

    A CPU is not tried: systems promise more memory than they have, and end who takes it."""
    shared = machine.ranks is not None  # each of several processes has a part of the model
    if shared or manifest.pipeline is not None or machine.device.place.type == "cpu":
        return machine
    plan, exchanged, trial = manifest.plan(), _exchanged(manifest), Worker("trial")
    state_bytes = _state_beside(machine, exchanged)
    found = await trial(partial(fitting, plan, machine.device, machine.step_options, state_bytes))
    trial.close()
    if found is None:
        terms = machine.device, exchanged, _computing(machine), state_bytes
        raise error(*refusal(plan, *terms))
    return replace(machine, step_options=found)


def _state_beside(machine: MachineOptions, exchanged: Exchanged) -> int:
    """Return the bytes of the method's state on the device."""
    return state_on_device(exchanged) if machine.outer == "device" else 0


def _computing(machine: MachineOptions) -> StepChoices:
    options, device = machine.step_options, machine.device
    return StepChoices(
        options.micro_batch,
        device.place.type != "cpu",
        options.moments,
        options.checkpoints,
        device.precision != "fp32",
    )


def _exchanged(manifest: Manifest) -> Exchanged:
    return exchanged(manifest.plan(), max(manifest.exchange.start_peers, 2))
