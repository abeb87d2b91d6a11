"""The common part of `run` and `join`: the live view, Ctrl-C, and the closing message."""

import os
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
) -> int:
    """Run a node to the end of its run, or until it is asked to stop; return the exit code.

    `work` calls its second argument with the node once the node is in the run; `greet` then prints
    what the user must know. Of several processes of one peer, only the leader runs a node.
    """
    place = torchrun.place_of(os.environ)
    if place is None:
        return _train(out, title, machine, logs, work, greet)
    with torchrun.gathered(place, machine.device) as ranks:
        if not ranks.leads:
            torchrun.follow_leader(ranks, machine.device, machine.threads, machine.data)
            return 0
        return _train(out, title, replace(machine, ranks=ranks), logs, work, greet)


def _train(
    out: Output,
    title: str,
    machine: MachineOptions,
    logs: LogOptions,
    work: TrainingCommand,
    greet: Greet,
) -> int:
    ports = () if machine.client_mode else (machine.port, machine.dht_port)
    require_startable(machine.folder.path, machine.host, *ports)
    ending = GracefulStop()
    with feeds(logs, out.line) as measured, watching(title) as show:

        def watched(node: "NodeProcess") -> None:
            greet(node)
            ending.gently = node.stop

            def seen(status: Status) -> None:
                show(status, node.view_s)
                origin = Origin(machine.folder.path, status.run, status.peer)
                measured.write(origin, measures_of(status, time.time()))

            node.show_to(seen)

        saved = run_until_asked(ending, lambda: work(machine, watched))
    return conclude(out, saved, ending.asked, trained=ending.gently is not None)
