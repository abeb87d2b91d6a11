"""The only module that prints: plain lines for people, and one JSON object as the last line for
programs.

A terminal gets tables and bars from rich, which is not imported otherwise; files, pipes and logs
get plain lines.
"""

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import click

from farflock.node.errors import INTERRUPTED

SAY_EVERY_S = 30.0  # of a download that is slow


class Output:
    """The output of one command.

    With `as_json`, text goes to standard error, and standard output holds nothing but JSON.
    """

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def line(self, text: str) -> None:
        """Print a line of text while the command runs."""
        click.echo(text, err=self._as_json)

    def piece(self, text: str) -> None:
        """Print a part of a line while the command runs. A terminal gets no control characters but
        new lines and tabs: in a model's text they could be commands to it."""
        if self._words().isatty():
            text = "".join(char if char.isprintable() or char in "\n\t" else "�" for char in text)
        click.echo(text, nl=False, err=self._as_json, color=True)  # or click would drop some

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print a table while the command runs; columns of numbers are aligned to the right."""
        stream = self._words()
        if stream.isatty():
            _print_rich(stream, columns, rows)
        else:
            self.line(plain_table(columns, rows))

    def result(self, facts: Mapping[str, Any], text: str) -> None:
        """Print a result: `facts` as one line of JSON (NaN and infinity become null), or `text`.

        A command with several results calls this once for each.
        """
        click.echo(one_line(facts) if self._as_json else text)

    def failure(self, sentence: str, exit_code: int) -> int:
        """Print an error as one sentence, and as JSON if that was asked for; return `exit_code`."""
        click.echo(f"farflock: {sentence}", err=True)
        if self._as_json:
            click.echo(one_line({"error": sentence, "exit_code": exit_code}))
        return exit_code

    @contextlib.contextmanager
    def progress(self, what: str, size_bytes: int = 0) -> Iterator[Callable[[float], None]]:
        """Yield a function that takes the share done so far, and show it on standard error; with
        the size of the whole, also the rate and the time that is left.

        A terminal gets a bar, everything else a line for each tenth.
        """
        if not sys.stderr.isatty():
            yield _Tenths(what, size_bytes)
            return
        from rich.console import Console
        from rich.progress import Progress, TransferSpeedColumn

        more = (TransferSpeedColumn(),) if size_bytes else ()
        columns = (*Progress.get_default_columns(), *more)
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            total = size_bytes or 1
            task = bar.add_task(what, total=total)
            yield lambda share: bar.update(task, completed=share * total)

    @contextlib.contextmanager
    def download(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """Yield a function that takes the bytes that are here and all, and show them with the rate
        and the time that is left on standard error.

        A terminal gets a bar, everything else a line for each tenth, and one every half minute."""
        if not sys.stderr.isatty():
            yield _Arrivals(what)
            return
        from rich.console import Console
        from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

        columns = (*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=None)
            yield lambda here, total: bar.update(task, completed=here, total=total)

    def _words(self) -> TextIO:
        return sys.stderr if self._as_json else sys.stdout


def one_line(facts: Mapping[str, Any]) -> str:
    """Return facts as one line of JSON; raise `TypeError` for a value that JSON cannot hold."""
    import msgspec

    return msgspec.json.encode(facts, enc_hook=_plain).decode()


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return the rows below their column names, with two spaces between columns."""
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
    raise TypeError(f"{type(value).__name__} is not a JSON value; convert it first")


class _Tenths:
    """Progress without a terminal: one line per tenth."""

    def __init__(self, what: str, size_bytes: int = 0) -> None:
        self._what, self._size_bytes, self._told = what, size_bytes, 0
        self._began: tuple[float, float] | None = None  # time in s, and the share done before

    def __call__(self, share: float) -> None:
        self._began = self._began or (time.monotonic(), share)
        if int(share * 10) > self._told:
            self._told = int(share * 10)
            pace = _pace(self._size_bytes, *self._began, share)
            click.echo(f"{self._what}: {share:.0%}{pace}", err=True)


class _Arrivals:
    """A download without a terminal: one line per tenth, and one every `SAY_EVERY_S`."""

    def __init__(self, what: str) -> None:
        self._what, self._total_bytes = what, -1
        self._began = (0.0, 0.0)  # time in s, and the share that was here then
        self._tenth, self._told_s = 0, 0.0

    def __call__(self, here_bytes: int, total_bytes: int) -> None:
        share, now_s = here_bytes / max(total_bytes, 1), time.monotonic()
        if total_bytes != self._total_bytes:
            self._total_bytes, self._began = total_bytes, (now_s, share)
            self._tenth, self._told_s = int(share * 10), now_s
        if int(share * 10) > self._tenth or now_s - self._told_s >= SAY_EVERY_S:
            self._tenth, self._told_s = int(share * 10), now_s
            of, pace = f"of {total_bytes / 1e6:,.1f} MB", _pace(total_bytes, *self._began, share)
            click.echo(f"{self._what}: {share:.0%} {of}{pace}", err=True)


def _pace(size_bytes: int, began_s: float, before: float, share: float) -> str:
    """Return the rate and the time that is left, if there is anything to tell them by."""
    took_s = time.monotonic() - began_s
    if not size_bytes or took_s <= 0 or share <= before:
        return ""
    left_s = took_s * (1 - share) / (share - before)
    rate = size_bytes * (share - before) / took_s / 1e6
    return f", {rate:,.1f} MB/s, about {timedelta(seconds=round(left_s))} left"


def conclude(
    out: Output,
    saved: Path | None,
    asked: signal.Signals | None,
    trained: bool = False,
    said: str = "",
) -> int:
    """Print how the command ended and return its exit code.

    Ctrl-C always gives 130. Any other request to stop has succeeded if a checkpoint was saved, so
    it gives 0. `trained` says that the node was in its run when it had to stop without saving, and
    `said` what its end came to, as a clause.
    """
    code = 0 if asked is None or (saved and asked != signal.SIGINT) else _interrupted(asked)
    if saved is None:
        return out.failure(said or (_UNSAVED if trained else _UNTRAINED), code or 1)
    done = "done" if asked is None else "left the run"
    out.result(
        {"checkpoint": str(saved), "ended": "left" if asked else "done"},
        f"{done}; {said or f'the checkpoint is in {saved}'}",
    )
    return code


_UNTRAINED = "stopped before it began to train; nothing was changed"
_UNSAVED = (
    "stopped without a final checkpoint;"
    " run the same command again to continue from the last checkpoint or the other members' state"
)


def _interrupted(asked: signal.Signals) -> int:
    return INTERRUPTED if asked == signal.SIGINT else 128 + asked
