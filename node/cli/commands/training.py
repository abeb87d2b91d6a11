"""What `run` and `join` have in common: the live view, Ctrl-C, and what they say at the end."""

import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farflock.node.cli.output import Output
from farflock.node.errors import INTERRUPTED

if TYPE_CHECKING:
    from farflock.node.process.node_process import Node

Work = Callable[[Callable[["Node"], None]], Coroutine[Any, Any, Path]]


def train(out: Output, title: str, work: Work, greet: Callable[["Node"], None]) -> int:
    """Run a node to its end, or until it is asked to end; returns the exit code.

    `work` is given what to call with the node once it is in its run; `greet` then prints what a person must know."""
    from farflock.node.cli.live import watching
    from farflock.node.process.signals import Ending, run_until_asked

    ending = Ending()
    with watching(title) as show:

        def watched(node: "Node") -> None:
            greet(node)
            ending.gently = node.participant.stop
            node.show = show

        saved = run_until_asked(ending, lambda: work(watched))
    return conclude(out, saved, ending.asked)


def conclude(out: Output, saved: Path | None, asked: signal.Signals | None) -> int:
    """Say what came of it. Ctrl-C is 130 in any case; whoever else asked for the end got it: 0 if all is saved."""
    code = 0 if asked is None or (saved and asked != signal.SIGINT) else _interrupted(asked)
    if saved is None:
        return out.failure("ended before it trained; nothing was changed", code)
    why = "done" if asked is None else "left the run"
    out.result({"checkpoint": str(saved), "ended": "left" if asked else "done"}, f"{why}; checkpoint {saved}")
    return code


def _interrupted(asked: signal.Signals) -> int:
    return INTERRUPTED if asked == signal.SIGINT else 128 + asked
