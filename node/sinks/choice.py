"""The sinks of a node, opened before it is in its run."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from farflock.node.sinks.csv_file import CsvFile
from farflock.node.sinks.feed import Feeds

EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class LogOptions:
    """The seconds between two measures."""

    every_s: float = EVERY_S


@contextlib.contextmanager
def feeds(options: LogOptions) -> Iterator[Feeds]:
    """Yield the sinks' feeds, and close them as the block ends."""
    made = Feeds({"measures.csv": CsvFile}, options.every_s)
    with contextlib.closing(made):
        yield made
