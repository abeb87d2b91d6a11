"""`farflock leave`: ask the node on this machine to finish its step, save, and leave its run."""

import contextlib
import os
import signal
import time
from pathlib import Path

import click
import msgspec
import psutil

from farflock.node.cli.output import Output
from farflock.node.cli.own_runs import last_folder
from farflock.node.errors import Failure
from farflock.node.process.status import is_node, read_status

SILENT_S = 60.0  # without a new status: a save shows each of its seconds


@click.command("leave")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="The node's folder (default: that of the node that runs, or ran last).",
)
@click.option("--json", "as_json", is_flag=True, help="End standard output with one line of JSON.")
def command(folder: Path | None, as_json: bool) -> None:
    """Stop the node on this machine.

    As after Ctrl-C, the node says goodbye, finishes its step and saves a checkpoint; this waits for
    it as long as it does something.
    """
    path = (folder or last_folder().path) / "status.json"
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
    if not _ends(process, path):
        raise Failure(
            f"the node (process {pid}) has not stopped, nor said anything for {SILENT_S:.0f} s",
            "it may be stuck",
            "see `farflock status` for what it is doing, and try again",
        )
    said = _said(path) or "it has not said what it saved"
    Output(as_json).result({"left": True}, f"left the run; {said}")


def _ends(process: psutil.Process, path: Path) -> bool:
    """Wait for the node for as long as its status changes; return whether it has ended."""
    said, since_s = b"", time.monotonic()
    while time.monotonic() - since_s < SILENT_S:
        try:
            process.wait(1.0)
        except psutil.TimeoutExpired:
            with contextlib.suppress(OSError):
                if (now := path.read_bytes()) != said:
                    said, since_s = now, time.monotonic()
        else:
            return True
    return False


def _said(path: Path) -> str:
    """Return what the node's end has come to; nothing if it has not said that."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return read_status(path).doing.partition("has ended: ")[2]
    return ""
