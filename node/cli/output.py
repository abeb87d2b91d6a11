"""The only module that prints: plain lines for people, and one JSON object as the last line for
programs.

A terminal gets tables and bars from rich, which is not imported otherwise; files, pipes and logs
get plain lines.

Text may be a peer's, and to a terminal control characters are commands: `clean` removes them from
everything that is printed, shown in the live view (node/cli/live.py) or logged.
"""

import contextlib
import logging
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import click

from farflock.node.errors import INTERRUPTED

# Sequences of the standard ECMA-48, first those with a text of their own, such as a window's title.
# None goes past the end of a line, so that two of them cannot hide honest lines in between.
_SEQUENCE = re.compile(
    r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\n\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|\x1b[ -/]*[0-~]"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and line feed
_UNESCAPED = re.compile(r"[\x7f-\x9f]")  # control characters that JSON need not escape


def clean(text: str) -> str:
    """Return text without escape sequences and control characters, but with its lines and tabs."""
    return _CONTROL.sub("", _SEQUENCE.sub("", text))


class CleanRecord(logging.LogRecord):
    """A log record whose message and traceback hold no control characters: names, addresses and
    errors in them may be a peer's."""

    def __init__(self, *arguments: Any, **more: Any) -> None:  # noqa: ANN401 - logging's own types
        super().__init__(*arguments, **more)
        if self.exc_info:  # handlers take a text that is there already
            self.exc_text = clean(logging.Formatter().formatException(self.exc_info))

    def getMessage(self) -> str:
        """Return the message with its arguments."""
        return clean(super().getMessage())


@contextlib.contextmanager
def clean_logs() -> Iterator[None]:
    """Log without control characters while the block runs."""
    before = logging.getLogRecordFactory()
    logging.setLogRecordFactory(CleanRecord)
    try:
        yield
    finally:
        logging.setLogRecordFactory(before)


class Output:
    """The output of one command.

    With `as_json`, text goes to standard error, and standard output holds nothing but JSON.
    """

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def line(self, text: str) -> None:
        """Print a line of text while the command runs."""
        click.echo(clean(text), err=self._as_json)

    def piece(self, text: str) -> None:
        """Print a part of a text that has no end yet. A terminal gets no control characters, which
        could be commands to it: the text may be a model's."""
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
        click.echo(one_line(facts) if self._as_json else clean(text))

    def failure(self, sentence: str, exit_code: int) -> int:
        """Print an error as one sentence, and as JSON if that was asked for; return `exit_code`."""
        click.echo(clean(f"farflock: {sentence}"), err=True)
        if self._as_json:
            click.echo(one_line({"error": sentence, "exit_code": exit_code}))
        return exit_code

    @contextlib.contextmanager
    def progress(self, what: str) -> Iterator[Callable[[float], None]]:
        """Yield a function that takes the share done so far, and show it on standard error.

        A terminal gets a bar, everything else a line for each tenth.
        """
        if not sys.stderr.isatty():
            yield _Tenths(clean(what))
            return
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(escape(clean(what)), total=1.0)
            yield lambda share: bar.update(task, completed=share)

    def _words(self) -> TextIO:
        return sys.stderr if self._as_json else sys.stdout


def one_line(facts: Mapping[str, Any]) -> str:
    """Return facts as one line of JSON, with control characters escaped; raise `TypeError` for a
    value that JSON cannot hold."""
    import msgspec

    text = msgspec.json.encode(facts, enc_hook=_plain).decode()
    return _UNESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


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
        table.add_column(
            Text(clean(name)), justify="right" if _all_numbers(rows, place) else "left"
        )
    for row in rows:
        table.add_row(*(Text(clean(str(cell))) for cell in row))  # Text: cells are never markup
    Console(file=stream).print(table)


def _all_numbers(rows: Sequence[Sequence[object]], place: int) -> bool:
    return bool(rows) and all(isinstance(row[place], int | float) for row in rows)


def _plain(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not a JSON value; convert it first")


class _Tenths:
    """Progress without a terminal: one line per tenth."""

    def __init__(self, what: str) -> None:
        self._what, self._told = what, 0

    def __call__(self, share: float) -> None:
        if int(share * 10) > self._told:
            self._told = int(share * 10)
            click.echo(f"{self._what}: {share:.0%}", err=True)


def conclude(
    out: Output, saved: Path | None, asked: signal.Signals | None, trained: bool = False
) -> int:
    """Print how the command ended and return its exit code.

    Ctrl-C always gives 130. Any other request to stop has succeeded if a checkpoint was saved, so
    it gives 0. `trained` says that the node was in its run when it had to stop without saving.
    """
    code = 0 if asked is None or (saved and asked != signal.SIGINT) else _interrupted(asked)
    if saved is None:
        return out.failure(_UNSAVED if trained else _UNTRAINED, code)
    done = "done" if asked is None else "left the run"
    out.result(
        {"checkpoint": str(saved), "ended": "left" if asked else "done"},
        f"{done}; the checkpoint is in {saved}",
    )
    return code


_UNTRAINED = "stopped before it began to train; nothing was changed"
_UNSAVED = (
    "stopped without a final checkpoint: the node did not finish in time;"
    " run the same command again to continue from the last checkpoint or the other members' state"
)


def _interrupted(asked: signal.Signals) -> int:
    return INTERRUPTED if asked == signal.SIGINT else 128 + asked
