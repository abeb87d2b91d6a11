"""The room that a run of whole models needs on this machine: reckoned, and then tried.

It is known before a founder opens its run, and before a joiner downloads anything of its state.
"""

from dataclasses import replace
from functools import partial
from typing import Literal

from farflock.node.assembly.trial_step import fitting
from farflock.node.errors import FarflockError
from farflock.node.process.network import MachineOptions
from farflock.node.run.manifest import Manifest
from farflock.node.run.memory import (
    Exchanged,
    kept_outer,
    refusal,
    require_device_memory,
    require_memory,
)
from farflock.node.train.run_size import exchanged
from farflock.swarm.compute import Worker


def require_room(machine: MachineOptions, manifest: Manifest, error: type[FarflockError]) -> None:
    """Raise `error` unless a whole model fits the memory. A pipeline's node checks that once it
    knows its stage."""
    if manifest.pipeline is not None:
        return
    plan, beside = manifest.plan(), _exchanged(manifest)
    require_memory(plan, error, machine.outer, beside, *_computes(machine))
    if machine.device.place.type != "cpu":
        require_device_memory(plan, machine.device, error, beside)


def outer_place(machine: MachineOptions, manifest: Manifest) -> Literal["host", "disk"]:
    """Return where to keep the method's state."""
    return kept_outer(machine.outer, manifest.plan(), _exchanged(manifest), *_computes(machine))


async def fitted(
    machine: MachineOptions, manifest: Manifest, error: type[FarflockError]
) -> MachineOptions:
    """Return the machine with the number of sequences that its device computes at once, as true
    steps have shown; raise `error` if there is no room even for one.

    A CPU is not tried: systems promise more memory than they have, and end who takes it."""
    if manifest.pipeline is not None or machine.device.place.type == "cpu":
        return machine
    plan, trial = manifest.plan(), Worker("trial")
    found = await trial(partial(fitting, plan, machine.device, machine.micro_batch))
    trial.close()
    if found is None:
        raise error(*refusal(plan, machine.device, _exchanged(manifest)))
    return replace(machine, micro_batch=found)


def _computes(machine: MachineOptions) -> tuple[int | None, bool]:
    """Return how many sequences are computed at once, and whether a device does it."""
    return machine.micro_batch, machine.device.place.type != "cpu"


def _exchanged(manifest: Manifest) -> Exchanged:
    return exchanged(manifest.plan(), max(manifest.exchange.start_peers, 2))
