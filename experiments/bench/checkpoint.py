"""The time for which training stands still for a checkpoint, and the time that one takes.

`checkpoint.stall.SIZE` is the time in which a step does no work of its own: between the end of the
step before and its beginning, when the cut is taken, and before its update, when what the cut has
not read yet is copied or waited for. The value is the longest of the steps while a checkpoint is
written, less the median of the other steps in the same process; the goal is beside it. That steps
get slower while another thread writes is not part of it, but is in the note.

`checkpoint.SIZE` is the time from a checkpoint's beginning to its end, synced, hashed, and the one
before it removed. The yardstick is a plain file of as many bytes, written and synced.
"""

import statistics
from collections.abc import Iterator
from typing import Any

from farflock.experiments.bench.round import size_name
from farflock.experiments.bench.whole import CASES, case_of
from farflock.experiments.bench.workers.checkpoint_process import Settings
from farflock.experiments.measure.metric import Metric, Options, load
from farflock.experiments.measure.process import lines_of
from farflock.node.model.llama import PRESETS

WORKER = "farflock.experiments.bench.workers.checkpoint_process"
PARAMETERS = 300_000_000
SEQ, QUICK_SEQ = 256, 16
ALLOWED_STALL_MS = 50.0
TIMEOUT_S = 600.0
Lines = list[dict[str, Any]]


def run(options: Options) -> Iterator[Metric]:
    """Yield `checkpoint.stall.SIZE` and `checkpoint.SIZE`, from `options.repeats` checkpoints."""
    if options.quick:
        model, seq = PRESETS["demo"], QUICK_SEQ
    else:
        model = case_of(options.parameters or PARAMETERS, CASES[:2]).model
        seq = SEQ
    settings = Settings(model, seq, options.repeats)
    lines = lines_of("a node that writes checkpoints", WORKER, settings, TIMEOUT_S)
    size = size_name(model.parameters())
    yield stall(f"checkpoint.stall.{size}", lines)
    yield duration(f"checkpoint.{size}", lines)


def stall(metric: str, lines: Lines) -> Metric:
    """Return the longest stall of a step beside a checkpoint, above that of other steps."""
    quiet = statistics.median(map(_stood_ms, _of("quiet", lines)))
    longest = [max(map(_stood_ms, steps)) - quiet for steps in stretches(lines)]
    value = statistics.median(longest)
    writing = _of("writing", lines)
    cut_ms, saving_ms = (_longest_ms(writing, what) for what in ("between_s", "saving_s"))
    note = (
        f"worst {max(longest):.1f}; the cut {cut_ms:.1f}, copies and waits {saving_ms:.1f} at "
        f"most; other steps stand still for {quiet:.1f}, at most "
        f"{max(map(_stood_ms, _of('quiet', lines))):.1f}; a step takes {_median_s(writing):.2f} s "
        f"while one is written, {_median_s(_of('quiet', lines)):.2f} s otherwise"
    )
    ratio = round(value / ALLOWED_STALL_MS, 4)
    return Metric(metric, value, ALLOWED_STALL_MS, ratio, len(longest), load(), "ms", note)


def duration(metric: str, lines: Lines) -> Metric:
    """Return the time that a checkpoint takes."""
    checkpoints, (plain,) = _of("checkpoint", lines), _of("plain", lines)
    value = statistics.median(one["seconds"] for one in checkpoints)
    ratio = round(value / plain["seconds"], 2)
    note = f"{checkpoints[0]['bytes'] / 1e6:,.1f} MB"
    return Metric(metric, value, plain["seconds"], ratio, len(checkpoints), load(), "s", note)


def stretches(lines: Lines) -> list[Lines]:
    """Return the steps that each checkpoint was written beside."""
    found: list[Lines] = []
    quiet = True
    for line in (line for line in lines if line["kind"] in ("quiet", "writing")):
        if line["kind"] == "writing":
            if quiet:
                found.append([])
            found[-1].append(line)
        quiet = line["kind"] == "quiet"
    return found


def _of(kind: str, lines: Lines) -> Lines:
    return [line for line in lines if line["kind"] == kind]


def _stood_ms(step: dict[str, Any]) -> float:
    return float(step["between_s"] + step["saving_s"]) * 1000


def _longest_ms(steps: Lines, what: str) -> float:
    return float(max(step[what] for step in steps) * 1000)


def _median_s(steps: Lines) -> float:
    return float(statistics.median(step["step_s"] for step in steps))
