"""Several processes of one peer, as torchrun starts them: rank 0 is the node, the others follow.

torchrun gives each process its place in the environment, and tells all of them when one has failed
or Ctrl-C was pressed. The leader alone obeys signals; a follower ends when it is sent home or when
the leader is gone.
"""

import asyncio
import contextlib
import signal
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from farflock.node.assembly.text import NodeText
from farflock.node.errors import Failure, Usage
from farflock.node.model.device import Device
from farflock.node.model.ranks import (
    LEADER,
    LOST_EVERY_S,
    LOST_TIMEOUT_S,
    FollowerLost,
    Ranks,
)
from farflock.node.model.weights_folder import WeightsFolder
from farflock.node.process.network import MachineOptions
from farflock.node.process.signals import ASKING
from farflock.node.run.manifest import Manifest
from farflock.swarm.tasks import cancel

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from farflock.node.assembly.followers import ShardedReplica

GROUP_TIMEOUT_S = 600.0  # for the start of all processes, and for one collective of the model
NO_GROUPS = ("mps",)  # devices that torch.distributed does not know

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """The place of this process among those of its peer."""

    rank: int
    local_rank: int
    count: int


def place_of(environment: Mapping[str, str]) -> Place | None:
    """Return this process' place; None if it is alone, or if torchrun did not start it."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    rank, local_rank, count = (
        int(environment[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    )
    return Place(rank, local_rank, count) if count > 1 else None


@contextlib.contextmanager
def gathered(place: Place, device: Device) -> Iterator[Ranks]:
    """Meet the other processes; on leaving, send the followers home, and raise `FollowerLost` if
    one of them is the cause of an error."""
    store = _meet(place, device)
    ranks = Ranks(store)
    try:
        yield ranks
    except Exception as error:
        blamed = ranks.leads and not isinstance(error, FollowerLost)
        if blamed and (lost := ranks.lost()) is not None:
            raise lost from error
        raise
    finally:
        ranks.end()
    dist.destroy_process_group()


def _meet(place: Place, device: Device) -> "Store":
    from torch.distributed.distributed_c10d import PrefixStore  # late: not every torch has it

    kind, timeout = device.place.type, timedelta(seconds=GROUP_TIMEOUT_S)
    if kind in NO_GROUPS:
        raise Usage(
            "several processes cannot share this machine's device",
            f"torch.distributed has no collectives for {kind}",
            "start this peer as one process",
        )
    backend = "gloo"
    if kind != "cpu":
        torch.accelerator.set_device_index(place.local_rank)
        backend = f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
    found, rank, count = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
    store = PrefixStore("farflock", found)
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=timeout)
    return store


def leading(
    machine: MachineOptions,
    manifest: Manifest,
    me: str,
    text: NodeText,
    weights: WeightsFolder | None,
) -> "ShardedReplica | None":
    """Return the leader's part of a model that several processes train as one peer, once the
    followers have theirs; None if this process is alone."""
    if machine.ranks is None:
        return None
    from farflock.node.assembly.followers import Assignment, lead  # late: it loads FSDP

    options = machine.step_options
    assignment = Assignment(
        manifest.canonical(),
        me,
        checkpoints=options.checkpoints,
        compiles=options.compile == "on",
        micro_batch=options.micro_batch or 0,
        weights="" if weights is None else str(weights.folder.absolute()),
        start=text.start,
    )
    return lead(machine.ranks, assignment, text.tokens, machine.device)


def follow_leader(ranks: Ranks, device: Device, threads: int, folders: Sequence[Path] = ()) -> None:
    """Follow the leader until it sends this process home; raise `Failure` if it is gone."""
    from farflock.node.assembly import followers  # late: it loads FSDP

    for number in ASKING:
        signal.signal(number, signal.SIG_IGN)  # the leader decides
    try:
        followers.follow(ranks, device, threads, folders)
    except Exception as error:
        ranks.note_end(f"{type(error).__name__}: {error}")
        # only the error of a collective may have another process as its cause
        if isinstance(error, RuntimeError) and LEADER in ranks.gone_within(LOST_TIMEOUT_S):
            raise Failure(
                "this process follows rank 0 of its peer", "which has ended", ""
            ) from error
        raise


async def unless_lost(ranks: Ranks | None, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; cancel it and raise `FollowerLost` once a follower has ended."""
    if ranks is None:
        return await work
    working = asyncio.create_task(work)
    looking = asyncio.create_task(_first_lost(ranks))
    try:
        await asyncio.wait((working, looking), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise looking.result()
        error = None if working.cancelled() else working.exception()
        if isinstance(error, Exception) and not isinstance(error, Failure):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOST_TIMEOUT_S):
                    raise await looking from error
        return working.result()
    finally:
        await cancel(working, looking)


async def _first_lost(ranks: Ranks) -> FollowerLost:
    while not ranks.gone():  # noqa: ASYNC110 - other processes
        await asyncio.sleep(LOST_EVERY_S)
    lost = ranks.lost()
    assert lost is not None, "a process that had ended is back"
    return lost
