"""`farflock log`: what the node on this machine has measured."""

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from farflock.node.cli.output import Output
from farflock.node.errors import Failure

if TYPE_CHECKING:
    from farflock.node.sinks.measures import Measures

SHOWN = 20
COLUMNS = ("time", "step", "loss", "tokens", "tokens/s", "busy", "peers", "rounds", "sent", "got")


@click.command("log")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="The node's folder (default: that of the node that runs, or ran last).",
)
@click.option(
    "--last",
    type=click.IntRange(min=1),
    help=f"Print the newest N measures (default: {SHOWN}; with --csv or --json all).",
)
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values with a head.")
@click.option("--json", "as_json", is_flag=True, help="End standard output with one line of JSON.")
def command(folder: Path | None, last: int | None, as_csv: bool, as_json: bool) -> None:
    """Print what the node on this machine has measured, oldest first, while it runs or later.

    Names and units of --csv and --json are those of every place where a run can be watched.

    \b
    Examples:
      farflock log --last 5
      farflock log --csv > measures.csv
    """
    import msgspec

    from farflock.node.cli.own_runs import last_folder
    from farflock.node.sinks import csv_file

    if as_csv and as_json:
        raise click.UsageError("--csv and --json exclude each other")
    place, out = folder or last_folder().path, Output(as_json)
    found = csv_file.read_measures(place)
    if not found:
        remedy = "start one with `farflock join INVITE`, or name its --folder"
        raise Failure(f"no node has measured anything in {place}", "", remedy)
    shown = found[-(last or (len(found) if as_csv or as_json else SHOWN)) :]
    if as_csv:
        for line in (csv_file.head(), *map(csv_file.row_of, shown)):
            out.line(line)
    elif as_json:
        out.result({"measures": msgspec.to_builtins(shown)}, "")
    else:
        out.table(COLUMNS, [_cells(measures) for measures in shown])


def _cells(measures: "Measures") -> tuple[str, ...]:
    from farflock.node.cli import words
    from farflock.node.sinks.measures import OUTCOMES

    def known(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    counts = {name: getattr(measures, f"rounds_{name}") for name in OUTCOMES}
    return (
        f"{datetime.fromtimestamp(measures.time_s):%m-%d %H:%M:%S}",
        f"{measures.step:,}",
        known(measures.loss, ".3f"),
        words.short(measures.tokens),
        known(measures.tokens_per_s, ",.0f"),
        known(measures.busy_share, ".0%"),
        str(measures.peers),
        ", ".join(f"{count:,} {name}" for name, count in counts.items() if count),
        words.size(measures.sent_bytes),
        words.size(measures.received_bytes),
    )
