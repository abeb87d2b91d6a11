"""A worker of the faults benchmark: `farflock` itself, which ends with the process that started it.

`python -m farflock.experiments.bench.workers.hosted_node ARGUMENTS…`. Its wall clock is off by the
seconds in the file that the environment names, while there is one: a step of a machine's clock,
which cannot be had for one process alone.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from farflock.experiments.measure.parent import end_with_parent

CLOCK_FILE = "FARFLOCK_BENCH_CLOCK"


def stepped(clock: Callable[[], float], file: Path) -> Callable[[], float]:
    """Return the clock, off by the seconds in the file."""

    def now_s() -> float:
        with contextlib.suppress(OSError, ValueError):
            return clock() + float(file.read_text())
        return clock()

    return now_s


if __name__ == "__main__":
    end_with_parent()
    if (named := os.environ.get(CLOCK_FILE)) is not None:
        time.time = stepped(time.time, Path(named))
    from farflock.node.cli.main import main  # only now: modules may import the clock by its name

    main(sys.argv[1:])
