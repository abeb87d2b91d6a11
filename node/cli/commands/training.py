"""The common part of `run` and `join`: the live view, Ctrl-C, and the closing message."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farflock.node.assembly.leaving import TEARDOWN_S, Unsaved
from farflock.node.assembly.own_world import require_startable
from farflock.node.cli.live import watching
from farflock.node.cli.output import Output, conclude
from farflock.node.process import torchrun
from farflock.node.process.network import MachineOptions
from farflock.node.process.signals import GracefulStop, run_until_asked
from farflock.node.process.status import Status, measures_of
from farflock.node.sinks.choice import LogOptions, feeds
from farflock.node.sinks.feed import Origin

if TYPE_CHECKING:
    from farflock.node.process.node_process import NodeProcess

Greet = Callable[["NodeProcess"], None]
TrainingCommand = Callable[[MachineOptions, Greet], Coroutine[Any, Any, Path]]


def train(
    out: Output,
    title: str,
    machine: MachineOptions,
    logs: LogOptions,
    work: TrainingCommand,
    greet: Greet,
    grace_s: float | None = None,
) -> int:
    """Run a node to the end of its run, or until it is asked to stop; return the exit code.

    `work` calls its second argument with the node once the node is in the run; `greet` then prints
    what the user must know. `grace_s` is the time from a request to stop to the end. Of several
    processes of one peer, only the leader runs a node.
    """
    place = torchrun.place_of(os.environ)
    if place is None:
        return _train(out, title, machine, logs, work, greet, grace_s)
    with torchrun.gathered(place, machine.device) as ranks:
        if not ranks.leads:
            torchrun.follow_leader(ranks, machine.device, machine.threads, machine.data)
            return 0
        return _train(out, title, replace(machine, ranks=ranks), logs, work, greet, grace_s)


def _train(
    out: Output,
    title: str,
    machine: MachineOptions,
    logs: LogOptions,
    work: TrainingCommand,
    greet: Greet,
    grace_s: float | None,
) -> int:
    place = machine.place
    require_startable(machine.folder.path, place.hosts(), *place.ports)
    ending, nodes = GracefulStop(), list["NodeProcess"]()
    last_words = ending.last_words = once(lambda: _conclude(out, ending, nodes))
    with ending, feeds(logs, out.line) as measured, watching(title) as show:

        def watched(node: "NodeProcess") -> None:
            greet(node)
            nodes.append(node)
            ending.gently = node.stop
            node.leaving.grace_s = grace_s
            node.leaving.then = lambda: ending.end_within(TEARDOWN_S)

            def seen(status: Status) -> None:
                show(status, node.view_s)
                origin = Origin(machine.folder.path, status.run, status.peer)
                measured.write(origin, measures_of(status, time.time()))

            node.show_to(seen)

        with contextlib.suppress(Unsaved):  # it has said so, in its last words too
            run_until_asked(ending, lambda: work(machine, watched))
    return last_words()


def _conclude(out: Output, ending: GracefulStop, nodes: "list[NodeProcess]") -> int:
    if not nodes:
        return conclude(out, None, ending.asked)
    leaving = nodes[-1].leaving  # of its last life
    return conclude(out, leaving.saved, ending.asked, trained=True, said=leaving.said)


def once(words: Callable[[], int]) -> Callable[[], int]:
    """Return a function that says these words once, whichever thread comes first, and returns the
    exit code each time."""
    lock, codes = threading.Lock(), list[int]()

    def say() -> int:
        with lock:
            if not codes:
                codes.append(words())
            return codes[0]

    return say
