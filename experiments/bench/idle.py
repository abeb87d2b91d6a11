"""The processor time of a node that does not train: alone, and in a run of 64 members.

The node is a whole one, as `farflock run` starts it: links, directory, history and status file. Its
training stands still after one step, and its method exchanges nothing. Only its own process counts;
the note gives the event loop's share, and what the directory's daemon takes.

The partners are light: each is an identity with real links over loopback, which joins the run,
answers the node's questions about the time and asks them as members do. A few processes hold them
all, and none knows the others.
"""

import asyncio
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from farflock.experiments.bench.workers.fleet import Fields, Worker, fleet, hear_all
from farflock.experiments.bench.workers.netns import Host
from farflock.experiments.measure.metric import Metric, Options, load
from farflock.swarm.messages import MAX_MEMBERS

WORKER = "farflock.experiments.bench.workers.idle_peer"
ALLOWED_ALONE_MS, ALLOWED_FULL_MS = 2.0, 5.0  # the goals, a second
START_S = 5.0  # from the run's start until the node is ready
START_TIMEOUT_S = 120.0
JOIN_TIMEOUT_S = 120.0  # beyond `Size.join_s`
UNIT = "ms of CPU a second"


@dataclass(frozen=True, slots=True)
class Size:
    """The members, the processes that hold all but one, and the seconds of a repeat."""

    members: int = MAX_MEMBERS
    processes: int = 3
    window_s: float = 10.0
    settle_s: float = 10.0
    join_s: float = 20.0  # for all partners to ask: only the node decides, and only once


QUICK = Size(3, 1, 0.5, 0.5, 4.0)


def run(options: Options) -> Iterator[Metric]:
    """Yield `idle.alone` and `idle.MEMBERS`."""
    size = QUICK if options.quick else Size()
    alone, full = asyncio.run(_measured(size, options.repeats))
    yield _metric("idle.alone", alone, ALLOWED_ALONE_MS)
    yield _metric(f"idle.{size.members}", full, ALLOWED_FULL_MS)


async def _measured(size: Size, repeats: int) -> tuple[list[Fields], list[Fields]]:
    """Return what the node took in each repeat, alone and with all members."""
    places = [Host()] * (1 + size.processes)
    with tempfile.TemporaryDirectory(prefix="farflock-bench-") as folder:
        alone_s = size.settle_s + repeats * size.window_s
        settings = {
            "partners": size.members - 1,
            "folder": folder,
            "view_s": START_S + alone_s + size.join_s,
        }
        async with fleet(WORKER, places, settings) as (node, *holders):
            return await _before_and_after(node, holders, size, repeats)


async def _before_and_after(
    node: Worker, holders: Sequence[Worker], size: Size, repeats: int
) -> tuple[list[Fields], list[Fields]]:
    known = await node.hear("record", START_TIMEOUT_S)
    alone = await _watch(node, size, repeats)
    for holder in holders:
        holder.tell("join", run=known["run"], record=known["record"], invite=known["invite"])
    await hear_all(holders, "joined", size.join_s + JOIN_TIMEOUT_S)
    return alone, await _watch(node, size, repeats)


async def _watch(node: Worker, size: Size, repeats: int) -> list[Fields]:
    await asyncio.sleep(size.settle_s)
    seen = []
    for _ in range(repeats):
        node.tell("watch", seconds=size.window_s)
        seen.append(await node.hear("took"))
    return seen


def _metric(name: str, seen: Sequence[Fields], allowed_ms: float) -> Metric:
    value, loop, daemon = (
        statistics.median(one[what] for one in seen) for what in ("all_ms", "loop_ms", "daemon_ms")
    )
    note = (
        f"{seen[-1]['members']} members; event loop {loop:.2f}, other threads {value - loop:.2f}; "
        f"the directory's daemon, not counted, {daemon:.2f}; the goal beside it"
    )
    ratio = round(value / allowed_ms, 4)
    return Metric(name, value, allowed_ms, ratio, len(seen), load(), UNIT, note)
