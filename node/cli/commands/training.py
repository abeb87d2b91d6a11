"""The common part of `run` and `join`: the live view, Ctrl-C, and the closing message."""

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from farflock.node.cli.live import watching
from farflock.node.cli.output import Output, conclude
from farflock.node.process.signals import GracefulStop, run_until_asked
from farflock.node.process.status import Status

if TYPE_CHECKING:
    from farflock.node.process.network import MachineOptions


class WatchedNode(Protocol):
    """A node that reports its status while it trains and can be asked to stop."""

    @property
    def view_s(self) -> float: ...
    def show_to(self, show: Callable[[Status], None]) -> None: ...
    def stop(self) -> None: ...


def place_text(machine: "MachineOptions", batch: int) -> str:
    """Return the line that says where a node trains, and how much of a batch it computes at
    once."""
    whole = machine.micro_batch is None or machine.micro_batch >= batch
    part = "" if whole else f", {machine.micro_batch} of a batch's {batch} sequences at once"
    return f"this node trains on {machine.device}{part}"


NodeT = TypeVar("NodeT", bound=WatchedNode)
TrainingCommand = Callable[[Callable[[NodeT], None]], Coroutine[Any, Any, Path]]


def train(
    out: Output, title: str, work: TrainingCommand[NodeT], greet: Callable[[NodeT], None]
) -> int:
    """Run a node to the end of its run, or until it is asked to stop; return the exit code.

    `work` calls its argument with the node once the node is in the run; `greet` then prints what
    the user must know.
    """
    ending = GracefulStop()
    with watching(title) as show:

        def watched(node: NodeT) -> None:
            greet(node)
            ending.gently = node.stop
            node.show_to(lambda status: show(status, node.view_s))

        saved = run_until_asked(ending, lambda: work(watched))
    return conclude(out, saved, ending.asked, trained=ending.gently is not None)
