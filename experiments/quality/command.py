"""`farflock bench quality`: the longest benchmark, with its own options; it runs only by name.

Every run is kept: after Ctrl-C the same command resumes where it stopped.
"""

import datetime
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from farflock.node.cli.commands.options import device_option
from farflock.node.cli.output import Output
from farflock.node.errors import Usage, nearest

if TYPE_CHECKING:
    from farflock.experiments.quality.arms import Arms
    from farflock.experiments.quality.score import Scores
    from farflock.experiments.quality.screen import Bench, Size
    from farflock.experiments.reproduce.shelf import Kept

PREFIX = "quality.share."
CHOICES = {"100": (100,), "500": (500,), "all": (100, 500)}


@click.command("quality")
@click.argument("names", nargs=-1, metavar="[METRIC]...")
@click.option(
    "--budget",
    type=click.Choice(list(CHOICES)),
    default="100",
    show_default=True,
    help="Byte budget: 1/100 or 1/500 of DDP's bytes, or both.",
)
@click.option(
    "--steps",
    type=click.IntRange(1, 1_000_000),
    help="Training steps per run in the final (default: 2000).",
)
@click.option(
    "--screen-steps",
    type=click.IntRange(1, 1_000_000),
    help="Training steps per run in the screening (default: 400).",
)
@click.option("--seeds", type=click.IntRange(1, 64), help="Seeds in the final (default: 3).")
@click.option(
    "--finalists", type=click.IntRange(1, 64), help="Methods per budget in the final (default: 5)."
)
@click.option(
    "--quick",
    is_flag=True,
    help="Run one short trial per method, in a minute or two; the numbers mean little.",
)
@click.option(
    "--tier",
    type=click.Choice(["cpu", "gpu"]),
    default="cpu",
    show_default=True,
    help="Size of the model and its batches: for a desk, or for one GPU.",
)
@click.option(
    "--workers",
    type=click.IntRange(1, 256),
    help="Parallel processes (default: one per core; on a GPU, one).",
)
@device_option(None, " (default: the CPU, and in tier gpu the best GPU)")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder that keeps the runs.",
)
@click.option(
    "--runs",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep the runs in this file of JSON lines instead; runs found in it are not repeated.",
)
@click.option(
    "--record",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the tables into this page.",
)
@click.option("--dry-run", is_flag=True, help="Print an estimate of the duration; run nothing.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Leave out the tables; the JSON lines are always printed.",
)
def command(
    names: tuple[str, ...],
    budget: str,
    steps: int | None,
    screen_steps: int | None,
    seeds: int | None,
    finalists: int | None,
    quick: bool,
    tier: str,
    workers: int | None,
    device: str | None,
    folder: Path | None,
    runs: Path | None,
    record: Path | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Measure how much of DDP's quality methods keep at 1/100 or 1/500 of its bytes.

    The measure is the share of DDP's gain over no communication. All methods are screened, and the
    best go into a final over several seeds. With METRIC, such as quality.share.diloco.100, only
    that method is measured. A budget takes about two hours on two cores; earlier runs are reused.
    """
    from farflock.experiments.measure.threads import one_thread
    from farflock.experiments.quality import arms as quality_arms
    from farflock.experiments.quality import screen as quality
    from farflock.experiments.quality.runs import RunsFile
    from farflock.experiments.reproduce.shelf import Shelf
    from farflock.experiments.reproduce.text import device_for
    from farflock.node.state.paths import home

    sizes = quality.GPU if tier == "gpu" else quality.Size()
    place = device_for(device, sizes.device, f"bench quality, tier {tier}")
    size = _sized(quality.QUICK if quick else sizes, steps, screen_steps, seeds, finalists)
    size = replace(size, device=place)
    arms = quality_arms.load()
    only = _only(names, arms)
    budgets = tuple(sorted({int(name.rpartition(".")[2]) for name in only})) or CHOICES[budget]
    if record is not None and (quick or only):
        raise Usage(
            "--record", "a page holds only complete measurements", "leave out --quick and METRIC"
        )
    if runs is not None and folder is not None:
        raise Usage(
            "--runs", "runs are kept in a file or in a folder, not both", "leave out --folder"
        )
    out = Output(as_json=True)
    shelf = Shelf(folder or home() / "reproduce") if runs is None else RunsFile(runs)
    bench = quality.Bench(size, arms, budgets, only)
    with one_thread():  # like the workers
        at_once = workers or (os.cpu_count() or 1 if place == "cpu" else 1)
        scores = _run(out, bench, shelf, at_once, dry_run)
    if scores is None:
        return
    for one in budgets:
        _say(out, scores, one, as_json)
    if record is not None:
        _record(record, bench, shelf, scores)


def _sized(
    size: "Size",
    steps: int | None,
    screen_steps: int | None,
    seeds: int | None,
    finalists: int | None,
) -> "Size":
    given = {"steps": steps, "screen_steps": screen_steps, "finalists": finalists}
    changed = {name: value for name, value in given.items() if value is not None}
    if seeds is not None:
        size = replace(size, seeds=tuple(range(1, seeds + 1)))
    return replace(size, **changed)  # type: ignore[arg-type]


def _only(names: tuple[str, ...], arms: "Arms") -> tuple[str, ...]:
    """Return `diloco.100` for `quality.share.diloco.100`; raise `Usage` for an unknown metric."""
    from farflock.experiments.quality.arms import BUDGETS

    known = [f"{PREFIX}{arm}.{budget}" for budget in BUDGETS for arm in arms.arms]
    for name in names:
        if name != "quality" and name not in known:
            raise Usage(
                f"bench {name[:64]}", "quality has no metric with this name", nearest(name, known)
            )
    return tuple(name.removeprefix(PREFIX) for name in names if name != "quality")


def _run(
    out: Output, bench: "Bench", shelf: "Kept", workers: int, dry_run: bool
) -> "Scores | None":
    """Print an estimate of the time, then run; return None after a dry run."""
    from farflock.experiments.measure.metric import load
    from farflock.experiments.quality import pace as quality_pace

    unit_s = quality_pace.unit_s(bench.probe())
    left_s = bench.foreseen(shelf, unit_s, workers)
    size = bench.size
    out.line(
        f"quality: {len(bench.screened())} runs of {size.screen_steps} steps, then finals of"
        f" {size.steps} steps; about {quality_pace.duration(left_s)} with {workers} workers, each"
        f" on its own core (the load per core is {load()} now). Ctrl-C loses only the running jobs"
    )
    if dry_run:
        return None
    with _progress(out) as told:
        return bench.run(
            shelf, workers, quality_pace.Pace(bench.efforts()[1], workers, unit_s, told)
        )


@contextmanager
def _progress(out: Output) -> Iterator[Callable[[float, float], None]]:
    """Show a progress bar on a terminal; elsewhere, print a line for each twentieth."""
    from farflock.experiments.quality.pace import Lines

    if not sys.stderr.isatty():
        yield Lines(out.line)
        return
    with out.progress("quality") as bar:
        yield lambda share, left_s: bar(share)


def _say(out: Output, scores: "Scores", budget: int, as_json: bool) -> None:
    from farflock.experiments.quality import report as quality_report

    if not as_json:
        for title, table in (
            ("lines, screen", quality_report.grid_table(scores)),
            (f"screen at 1/{budget}", quality_report.screen_table(scores, budget)),
            (f"final at 1/{budget}", quality_report.final_table(scores, budget)),
        ):
            out.line(f"\n{title}")
            out.table(*table)
    for metric in quality_report.metrics(scores, budget):
        out.result(asdict(metric), "")


def _record(page: Path, bench: "Bench", shelf: "Kept", scores: "Scores") -> None:
    from farflock.experiments.quality import report as quality_report

    date = (
        datetime.datetime.fromtimestamp(bench.measured_at(shelf, scores), datetime.UTC)
        .date()
        .isoformat()
    )
    sections = {
        budget: quality_report.section(scores, bench.size, budget, date) for budget in bench.budgets
    }
    quality_report.record(page, sections)
