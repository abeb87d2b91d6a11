"""The start of `farflock join` and of `farflock status INVITE`: seconds to the first byte that a
user sees, processor seconds and imported modules until then; for `status`, until its end.

A founder trains a tiny model over loopback. Each repeat starts both commands as users do, in
processes of their own; the joiner is killed once it has said something. What comes beside (the
directory's daemon) is not counted. The first run, which fills the disk's cache, does not count.
"""

import contextlib
import json
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from farflock.experiments.measure.metric import Metric, NotMeasured, Options, load

WORKER = "farflock.experiments.bench.workers.started_command"
FOUNDED_TIMEOUT_S = 180.0
SAID_TIMEOUT_S = 120.0
ALLOWED_S = 1.5  # the goal of each value
RUN = """
[run]
name = "start"
total_tokens = 100_000_000_000
[model]
preset = "tiny"
[train]
batch = 2
seq = 16
[exchange]
view_s = 1.0
"""


class Start(NamedTuple):
    """One start: seconds on the wall and of the processor, imported modules, and whether torch was
    among them."""

    wall_s: float
    cpu_s: float
    modules: int
    torch: bool


def run(options: Options) -> Iterator[Metric]:
    """Yield seconds and processor seconds of both commands."""
    joins, looks = [], []
    with tempfile.TemporaryDirectory(prefix="farflock-bench-") as name:
        folder = Path(name)
        with _founder(folder) as invite:
            for number in range(1 + options.repeats):
                joins.append(_first_byte(folder / f"join-{number}", invite))
                looks.append(_whole(folder / f"look-{number}", invite))
    yield from _metrics("start.join", joins[1:], "to the first byte")
    yield from _metrics("start.status", looks[1:], "in all")


@contextlib.contextmanager
def _founder(folder: Path) -> Iterator[str]:
    """Train while the block runs, and yield the run's invite."""
    manifest, place = folder / "run.toml", folder / "founder"
    manifest.write_text(RUN)
    command = [sys.executable, "-m", "farflock.node.cli", "run", str(manifest)]
    command += ["--folder", str(place)]
    with (folder / "founder.txt").open("wb") as log:
        founder = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield _invite(founder, place / "status.json")
        finally:
            founder.terminate()
            founder.wait()


def _invite(founder: subprocess.Popen[bytes], status: Path) -> str:
    ends_s = time.monotonic() + FOUNDED_TIMEOUT_S
    while time.monotonic() < ends_s and founder.poll() is None:
        with contextlib.suppress(OSError, ValueError):
            if (said := json.loads(status.read_text()))["step"]:
                return str(said["invite"])
        time.sleep(0.1)
    raise NotMeasured("the founder of the run did not start to train")


def _first_byte(folder: Path, invite: str) -> Start:
    """Join until the command says something; then kill it."""
    command, notes = _command(folder, "join", invite)
    began_s = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as joiner:
        assert joiner.stdout is not None
        said, _, _ = select.select([joiner.stdout], [], [], SAID_TIMEOUT_S)
        wall_s = time.monotonic() - began_s
        joiner.send_signal(signal.SIGKILL)
    if not said:
        raise NotMeasured("`farflock join` said nothing")
    return Start(wall_s, *json.loads(notes.read_text().splitlines()[0]))


def _whole(folder: Path, invite: str) -> Start:
    """Look at the run from outside, to the end."""
    command, notes = _command(folder, "status", invite)
    began_s = time.monotonic()
    done = subprocess.run(command, capture_output=True, timeout=SAID_TIMEOUT_S, check=False)
    wall_s = time.monotonic() - began_s
    if done.returncode:
        raise NotMeasured(f"`farflock status INVITE` failed: {done.stderr.decode()[-200:]}")
    return Start(wall_s, *json.loads(notes.read_text().splitlines()[-1]))


def _command(folder: Path, name: str, invite: str) -> tuple[list[str], Path]:
    """Return a command that notes what it takes, and the file of these notes."""
    folder.mkdir()
    notes = folder / "notes.json"
    arguments = [str(notes), name, invite, "--folder", str(folder / "node")]
    return [sys.executable, "-m", WORKER, *arguments], notes


def _metrics(name: str, starts: Sequence[Start], until: str) -> Iterator[Metric]:
    """Yield the medians of both times."""
    torch = "with" if any(one.torch for one in starts) else "without"
    modules = statistics.median(one.modules for one in starts)
    note = f"{until}; {modules:.0f} modules, {torch} torch; the goal beside it"
    times = {
        name: [one.wall_s for one in starts],
        f"{name}_cpu": [one.cpu_s for one in starts],
    }
    for metric, seen in times.items():
        value = statistics.median(seen)
        ratio = round(value / ALLOWED_S, 4)
        yield Metric(metric, value, ALLOWED_S, ratio, len(seen), load(), "s", note)
