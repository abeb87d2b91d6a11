"""`farflock leave`: ask the node on this machine to finish its step, save, and leave its run."""

import os
import signal
from pathlib import Path

import click
import msgspec
import psutil

from farflock.node.cli.output import Output
from farflock.node.errors import Failure
from farflock.node.process.status import is_node, read_status
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
    path = RunFolder.at(folder).path / "status.json"
    try:
        pid = read_status(path).pid
        process = psutil.Process(pid)
        ours = is_node(pid)
    except (OSError, msgspec.MsgspecError, psutil.Error):
        ours = False
    if not ours:
        raise Failure(
            f"no node is running in {path.parent}",
            "there is nothing to stop",
            "if a node runs in another folder, name that with --folder",
        )
    os.kill(pid, signal.SIGTERM)
    try:
        process.wait(TIMEOUT_S)
    except psutil.TimeoutExpired:
        raise Failure(
            f"the node (process {pid}) has not stopped within {TIMEOUT_S:.0f} s",
            "it may still be saving",
            "see `farflock status` for what it is doing, and try again",
        ) from None
    Output(as_json).result({"left": True}, "left the run; its checkpoint is in the folder")
