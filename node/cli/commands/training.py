"""What `run` and `join` have in common: the live view, Ctrl-C, and what they say at the end."""

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farflock.node.cli.output import Output, conclude

if TYPE_CHECKING:
    from farflock.node.process.node_process import NodeProcess

TrainingCommand = Callable[[Callable[["NodeProcess"], None]], Coroutine[Any, Any, Path]]


def train(out: Output, title: str, work: TrainingCommand, greet: Callable[["NodeProcess"], None]) -> int:
    """Run a node to its end, or until it is asked to end; returns the exit code.

    `work` is given what to call with the node once it is in its run; `greet` then prints what a person must know."""
    from farflock.node.cli.live import watching
    from farflock.node.process.signals import GracefulStop, run_until_asked

    ending = GracefulStop()
    with watching(title) as show:

        def watched(node: "NodeProcess") -> None:
            greet(node)
            ending.gently = node.participant.stop
            node.show = show

        saved = run_until_asked(ending, lambda: work(watched))
    return conclude(out, saved, ending.asked)
