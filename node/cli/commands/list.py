"""`farflock list`: the runs of this user on this machine."""

from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from farflock.node.cli.output import Output

if TYPE_CHECKING:
    from farflock.node.cli.own_runs import OwnRun

COLUMNS = ("run", "name", "node", "progress", "seen", "folder")


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="End standard output with one line of JSON.")
def command(as_json: bool) -> None:
    """Show the runs that you take part in on this machine, the newest first.

    Each has a folder of its own; nodes with a `--folder` elsewhere are not among them.
    """
    from farflock.node.cli.own_runs import own_runs

    out, found = Output(as_json), own_runs()
    if as_json:
        out.result({"runs": [_facts(own) for own in found]}, "")
    elif found:
        out.table(COLUMNS, [_cells(own) for own in found])
    else:
        out.line("there is none yet; begin with `farflock join INVITE` or `farflock run MANIFEST`")


def _facts(own: "OwnRun") -> dict[str, Any]:
    status = own.status
    return {
        "run": own.run,
        "name": own.name,
        "folder": own.folder.path,
        "pid": own.pid,
        "doing": None if status is None else status.doing,
        "tokens": None if status is None else status.tokens,
        "total_tokens": None if status is None else status.total_tokens,
        "seen_s": own.seen_s,
    }


def _cells(own: "OwnRun") -> tuple[str, ...]:
    status, pid = own.status, own.pid
    share = "" if status is None else f"{status.tokens / max(status.total_tokens, 1):.1%}"
    return (
        own.run[:8],
        own.name,
        "stopped" if pid is None else f"process {pid}",
        share,
        f"{datetime.fromtimestamp(own.seen_s):%Y-%m-%d %H:%M}",
        str(own.folder.path),
    )
