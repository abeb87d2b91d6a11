"""The room that a run of whole models needs on this machine: reckoned, and then tried.

It is known before a founder opens its run, and before a joiner downloads anything of its state.
"""

from dataclasses import replace
from functools import partial

from farflock.node.assembly.trial_step import fitting
from farflock.node.errors import FarflockError, Usage
from farflock.node.model.device import Device
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
)
from farflock.node.state.outer_files import OuterFiles
from farflock.node.train.run_size import exchanged
from farflock.optimizers.catalog import method
from farflock.swarm.compute import Worker


def require_room(machine: MachineOptions, manifest: Manifest, error: type[FarflockError]) -> None:
    """Raise `error` unless a whole model fits the memory, and `Usage` if the run cannot have such
    moments or several processes. A pipeline's node checks its memory once it knows its stage."""
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
        return
    if machine.ranks is not None and (computing.moments != "fp32" or computing.micro_batch):
        raise Usage(
            "--moments, --micro-batch",
            "several processes are this peer, and compute with shards",
            "leave these options out",
        )
    beside = _exchanged(manifest)
    require_memory(plan, error, machine.outer, beside, computing, _home(machine))
    if computing.on_device and machine.ranks is None:
        require_device_memory(plan, machine.device, error, beside, computing)


def storage_of(machine: MachineOptions, manifest: Manifest) -> Storage:
    """Return where this machine keeps the state of the run's method."""
    terms = machine.outer, manifest.plan(), _exchanged(manifest), _computing(machine)
    match kept_outer(*terms, _home(machine)):
        case "device":
            return OnDevice(machine.device.place).allocate
        case "disk":
            return OuterFiles(machine.folder.outer).allocate
    return in_memory


async def fitted(
    machine: MachineOptions, manifest: Manifest, error: type[FarflockError]
) -> MachineOptions:
    """Return the machine with the number of sequences that its device computes at once, as true
    steps have shown; raise `error` if there is no room even for one.

    A CPU is not tried: systems promise more memory than they have, and end who takes it."""
    shared = machine.ranks is not None  # each of several processes has a part of the model
    if shared or manifest.pipeline is not None or machine.device.place.type == "cpu":
        return machine
    plan, trial = manifest.plan(), Worker("trial")
    found = await trial(partial(fitting, plan, machine.device, machine.step_options))
    trial.close()
    if found is None:
        raise error(*refusal(plan, machine.device, _exchanged(manifest), _computing(machine)))
    return replace(machine, step_options=replace(machine.step_options, micro_batch=found))


def _home(machine: MachineOptions) -> Device | None:
    """Return the device that may keep the method's state: none of several processes' own."""
    return machine.device if machine.ranks is None else None


def _computing(machine: MachineOptions) -> StepChoices:
    options, on_device = machine.step_options, machine.device.place.type != "cpu"
    return StepChoices(options.micro_batch, on_device, options.moments, options.checkpoints)


def _exchanged(manifest: Manifest) -> Exchanged:
    return exchanged(manifest.plan(), max(manifest.exchange.start_peers, 2))
