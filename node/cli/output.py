"""The only printer: plain lines for people, one JSON object as the last line for programs.

A terminal gets rich tables and bars, imported only then; files, pipes and logs get plain lines.
"""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import click

from farflock.node.errors import INTERRUPTED


class Output:
    """Where a command's words go. With `as_json`, words go to standard error and standard output is JSON alone."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def line(self, text: str) -> None:
        """Say something on the way."""
        click.echo(text, err=self._as_json)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Show rows on the way; cells that are numbers are aligned to the right."""
        stream = self._words()
        if stream.isatty():
            _print_rich(stream, columns, rows)
        else:
            self.line(plain_table(columns, rows))

    def result(self, facts: Mapping[str, Any], text: str) -> None:
        """Say what came of it: `facts` as one line of JSON (NaN and infinity become null), or `text`.

        A command whose results are many calls this once for each."""
        click.echo(one_line(facts) if self._as_json else text)

    def failure(self, sentence: str, exit_code: int) -> int:
        """Say why it ends: one sentence on standard error, and as JSON where that was asked for; returns `exit_code`."""
        click.echo(f"farflock: {sentence}", err=True)
        if self._as_json:
            click.echo(one_line({"error": sentence, "exit_code": exit_code}))
        return exit_code

    @contextlib.contextmanager
    def progress(self, what: str) -> Iterator[Callable[[float], None]]:
        """A function that takes the share that is done; a bar on a terminal, tenths elsewhere; on standard error."""
        if not sys.stderr.isatty():
            yield _Tenths(what)
            return
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=1.0)
            yield lambda share: bar.update(task, completed=share)

    def _words(self) -> TextIO:
        return sys.stderr if self._as_json else sys.stdout


def one_line(facts: Mapping[str, Any]) -> str:
    """Facts as one line of JSON; raise `TypeError` for a value that JSON cannot hold."""
    import msgspec

    return msgspec.json.encode(facts, enc_hook=_plain).decode()


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The rows under their columns, two spaces apart."""
    cells = [[str(name) for name in columns], *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[place]) for line in cells) for place in range(len(columns))]
    right = [_all_numbers(rows, place) for place in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if numbers else cell.ljust(width)
            for cell, width, numbers in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in cells
    )


def _print_rich(stream: TextIO, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for place, name in enumerate(columns):
        table.add_column(Text(name), justify="right" if _all_numbers(rows, place) else "left")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))  # Text: cells are never markup
    Console(file=stream).print(table)


def _all_numbers(rows: Sequence[Sequence[object]], place: int) -> bool:
    return bool(rows) and all(isinstance(row[place], int | float) for row in rows)


def _plain(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is no JSON value; turn it into one first")


class _Tenths:
    """Progress without a terminal: a line per tenth."""

    def __init__(self, what: str) -> None:
        self._what, self._told = what, 0

    def __call__(self, share: float) -> None:
        if int(share * 10) > self._told:
            self._told = int(share * 10)
            click.echo(f"{self._what}: {share:.0%}", err=True)


def conclude(out: Output, saved: Path | None, asked: signal.Signals | None) -> int:
    """Say what came of it. Ctrl-C is 130 in any case; whoever else asked for the end got it: 0 if all is saved."""
    code = 0 if asked is None or (saved and asked != signal.SIGINT) else _interrupted(asked)
    if saved is None:
        return out.failure("ended before it trained; nothing was changed", code)
    why = "done" if asked is None else "left the run"
    out.result(
        {"checkpoint": str(saved), "ended": "left" if asked else "done"},
        f"{why}; checkpoint {saved}",
    )
    return code


def _interrupted(asked: signal.Signals) -> int:
    return INTERRUPTED if asked == signal.SIGINT else 128 + asked
