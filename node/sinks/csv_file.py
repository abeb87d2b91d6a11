"""Measures as rows of `measures.csv` in the node's folder, which every node writes."""

import csv
import io
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from farflock.node.sinks.feed import Origin
from farflock.node.sinks.measures import NAMES, Measures
from farflock.node.state.line_file import LineFile

FILE = "measures.csv"


class CsvFile:
    """The sink: a row of `NAMES` for each measures, empty where one is not known. The file is
    bounded, and its older one is `measures.1.csv`."""

    def __init__(self, origin: Origin) -> None:
        self._lines = _lines_in(origin.folder)
        self._lines.mend()

    def write(self, measures: Measures) -> None:
        """Append one row."""
        self._lines.append(f"{row_of(measures)}\n".encode())

    def close(self) -> None:
        """Do nothing: each row is in the file."""


def head() -> str:
    """Return the first line of such a file."""
    return _joined(NAMES)


def row_of(measures: Measures) -> str:
    """Return the line of these measures, without the line break."""
    values = (getattr(measures, name) for name in NAMES)
    return _joined("" if value is None else value for value in values)


def read_measures(folder: Path) -> list[Measures]:
    """Return the measures in a node's folder, oldest first, without rows that a crash has spoilt.
    Raise `OSError` if a file cannot be read."""
    lines = (line.decode(errors="replace") for line in _lines_in(folder).lines())
    return list(_parsed(lines))


def _parsed(lines: Iterator[str]) -> Iterator[Measures]:
    names: list[str] = []
    for row in csv.reader(lines):
        if row and row[0] == NAMES[0]:
            names = row  # those of the version that wrote what follows
        elif (found := _converted(names, row)) is not None:
            yield found


def _converted(names: list[str], row: list[str]) -> Measures | None:
    if len(row) != len(names):
        return None
    known = {name: value or None for name, value in zip(names, row, strict=True)}
    try:
        return msgspec.convert(known, Measures, strict=False)
    except msgspec.ValidationError:
        return None


def _lines_in(folder: Path) -> LineFile:
    return LineFile(folder / FILE, f"{head()}\n".encode())


def _joined(values: Iterable[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(values)
    return text.getvalue()
