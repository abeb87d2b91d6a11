"""`farflock leave`: ask the node on this machine to finish its step, save, and leave its run."""

from pathlib import Path

import click
import psutil

from farflock.node.cli.output import Output
from farflock.node.errors import Failure
from farflock.node.state.node_lock import node_in
from farflock.node.state.paths import RunFolder

TIMEOUT_S = 60.0


@click.command("leave")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="The node's folder (default: the one that `run` and `join` use).",
)
@click.option("--json", "as_json", is_flag=True, help="End standard output with one line of JSON.")
def command(folder: Path | None, as_json: bool) -> None:
    """Stop the node on this machine.

    As after Ctrl-C, the node finishes its step, saves a checkpoint and leaves the run.
    """
    process = _node_of(RunFolder.at(folder).path)
    process.terminate()  # psutil checks once more that this is the process it found
    try:
        process.wait(TIMEOUT_S)
    except psutil.TimeoutExpired:
        raise Failure(
            f"the node (process {process.pid}) has not stopped within {TIMEOUT_S:.0f} s",
            "it may still be saving",
            "see `farflock status` for what it is doing, and try again",
        ) from None
    Output(as_json).result({"left": True}, "left the run; its checkpoint is in the folder")


def _node_of(folder: Path) -> psutil.Process:
    """Return the process that keeps this folder locked; raise `Failure` if there is none."""
    here = node_in(folder)
    if here is None:
        raise Failure(
            f"no node is running in {folder}",
            "there is nothing to stop",
            "if a node runs in another folder, name that with --folder",
        )
    if here.process is None:
        raise Failure(
            f"a node runs in {folder}, but its process cannot be seen from here",
            "it may be in another container, or only just starting",
            "try again, or stop it where it was started",
        )
    return here.process
