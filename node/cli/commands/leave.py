"""`farflock leave`: ask the local node to finish its step, save, say goodbye and end."""

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

WAIT_S = 60.0


@click.command("leave")
@click.option(
    "--folder", type=click.Path(file_okay=False, path_type=Path), help="The node's folder."
)
@click.option(
    "--json", "as_json", is_flag=True, help="The last line of standard output is one JSON object."
)
def command(folder: Path | None, as_json: bool) -> None:
    """End the local node as Ctrl-C would."""
    path = RunFolder.at(folder).path / "status.json"
    try:
        pid = read_status(path).pid
        process = psutil.Process(pid)
        ours = is_node(pid)
    except (OSError, msgspec.MsgspecError, psutil.Error):
        ours = False
    if not ours:
        raise Failure(
            "no node runs here",
            f"{path} names no living node",
            "name the --folder of a node that runs",
        )
    os.kill(pid, signal.SIGTERM)
    try:
        process.wait(WAIT_S)
    except psutil.TimeoutExpired:
        raise Failure(
            "the node is still ending", f"it did not end within {WAIT_S:.0f} s", "look at its log"
        ) from None
    Output(as_json).result({"left": True}, "left the run; its checkpoint is in the folder")
