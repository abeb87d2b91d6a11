"""A worker of the faults benchmark: `farflock` itself, which ends with the process that started it.

`python -m farflock.experiments.bench.workers.hosted_node ARGUMENTS…`. Its wall clock is off by the
seconds in the file that the environment names, while there is one, and its disk takes as many bytes
a second as another file says: a step of a machine's clock and a slow disk, which cannot be had for
one process alone.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from farflock.experiments.measure.parent import end_with_parent

CLOCK_FILE, DISK_FILE = "FARFLOCK_BENCH_CLOCK", "FARFLOCK_BENCH_DISK"
PIECE_S, PAGE_BYTES = 0.25, 4096  # of what a slow disk takes at once
Write = Callable[[int, bytes | memoryview], int]


def stepped(clock: Callable[[], float], file: Path) -> Callable[[], float]:
    """Return the clock, off by the seconds in the file."""

    def now_s() -> float:
        with contextlib.suppress(OSError, ValueError):
            return clock() + float(file.read_text())
        return clock()

    return now_s


def paced(write: Write, file: Path) -> Write:
    """Return `write`, which takes as many bytes a second as the file says, while there is one, and
    only a part of them at once, as the system's may."""

    def slow(descriptor: int, data: bytes | memoryview) -> int:
        rate = 0.0
        with contextlib.suppress(OSError, ValueError):
            rate = float(file.read_text())
        if rate <= 0.0:
            return write(descriptor, data)
        pages = max(1, int(rate * PIECE_S) // PAGE_BYTES)
        part = memoryview(data).cast("B")[: pages * PAGE_BYTES]
        time.sleep(len(part) / rate)
        return write(descriptor, part)

    return slow


if __name__ == "__main__":
    end_with_parent()
    if (named := os.environ.get(DISK_FILE)) is not None:
        os.write = paced(os.write, Path(named))  # type: ignore[assignment]
    if (named := os.environ.get(CLOCK_FILE)) is not None:
        time.time = stepped(time.time, Path(named))
    from farflock.node.cli.main import main  # only now: modules may import the clock by its name

    main(sys.argv[1:])
