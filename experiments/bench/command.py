"""`farflock bench`: measurements, one JSON object per line on standard output.

A benchmark is a module with `run(options) -> Iterator[Metric]`, imported only when asked for.
"""

import re
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from farflock.experiments.measure.metric import COLUMNS
from farflock.node.cli.commands.options import MAX_CODEC_THREADS
from farflock.node.cli.output import Output
from farflock.node.errors import Failure, Usage, nearest

if TYPE_CHECKING:
    from farflock.experiments.measure.metric import Metric, Options

BENCHMARKS = {
    "codec": "farflock.experiments.bench.codec",
    "loop": "farflock.experiments.bench.loop",
    "sim": "farflock.experiments.bench.sim",
    "memory": "farflock.experiments.bench.memory",
    "sync": "farflock.experiments.bench.sync",
    "overlap": "farflock.experiments.bench.overlap",
    "control": "farflock.experiments.bench.control",
    "kill": "farflock.experiments.bench.kill",
    "planner": "farflock.experiments.bench.planner",
    "round": "farflock.experiments.bench.round",
    "whole": "farflock.experiments.bench.whole",
    "checkpoint": "farflock.experiments.bench.checkpoint",
    "idle": "farflock.experiments.bench.idle",
    "start": "farflock.experiments.bench.start",
    "join": "farflock.experiments.bench.join",
    "faults": "farflock.experiments.bench.faults",
    "pipeline": "farflock.experiments.bench.pipeline",
    "data": "farflock.experiments.bench.data",
    "generate": "farflock.experiments.bench.generate",
    "gpu": "farflock.experiments.bench.gpu",
}
EVERYWHERE = tuple(name for name in BENCHMARKS if name != "gpu")
MIN_PARAMETERS, MAX_PARAMETERS = 1_000_000, 1_000_000_000_000
SHOWN = COLUMNS[:-1]  # in the table; notes are long


def _rate(ctx: click.Context, option: click.Parameter, text: str | None) -> float | None:
    from farflock.node.process.host import rate_bits  # late: it loads the network

    try:
        return None if text is None else rate_bits(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _count(ctx: click.Context, option: click.Parameter, text: str | None) -> int | None:
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([mb]?)", (text or "").strip().lower())
    count = int(float(match[1]) * {"": 1, "m": 1e6, "b": 1e9}[match[2]]) if match else 0
    if text is not None and not MIN_PARAMETERS <= count <= MAX_PARAMETERS:
        raise click.BadParameter(
            f"{text!r} is not a size from {MIN_PARAMETERS:,} to {MAX_PARAMETERS:,} parameters; "
            "write a number, perhaps with m or b, such as 100m"
        )
    return None if text is None else count


def _known(
    ctx: click.Context, argument: click.Parameter, names: tuple[str, ...]
) -> tuple[str, ...]:
    for name in names:
        if _benchmark(name) not in BENCHMARKS:
            raise click.BadParameter(
                f"there is no benchmark {name!r}; {nearest(_benchmark(name), BENCHMARKS)}"
            )
    return names


def _benchmark(name: str) -> str:
    """Return `codec` for `codec` and for `codec.int8`."""
    return name.partition(".")[0]


class _Scoreboard(click.Command):
    """A command that passes `bench quality` on: it takes hours, and runs only by its name."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,  # noqa: ANN401 - click's
    ) -> click.Context:
        if any(_benchmark(argument) == "quality" for argument in args):
            from farflock.experiments.quality.command import command

            return command.make_context(info_name, args, parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command("bench", cls=_Scoreboard)
@click.argument("names", nargs=-1, metavar="[NAME]...", callback=_known)
@click.option(
    "--repeats",
    type=click.IntRange(1, 1000),
    default=5,
    show_default=True,
    help="Runs of each metric, each next to a run of its baseline.",
)
@click.option(
    "--rate",
    "rate",
    callback=_rate,
    metavar="RATE",
    help="Bandwidth of each link in sync, overlap and control, and of a newcomer's in join, such "
    "as 100mbit.",
)
@click.option(
    "--parameters",
    callback=_count,
    metavar="N",
    help="Size of the model in round, such as 100m; in checkpoint, 124m or 308m; in whole, also "
    "1.2b.",
)
@click.option(
    "--method",
    metavar="METHOD",
    help="The only method to measure in round and whole: diloco, sparseloco or lean.",
)
@click.option(
    "--codec-threads",
    type=click.IntRange(1, MAX_CODEC_THREADS),
    default=1,
    show_default=True,
    help="Threads that encode and decode in round, compared with one.",
)
@click.option(
    "--device",
    default="auto",
    show_default=True,
    metavar="DEVICE",
    help="Device of the gpu benchmark, such as cuda:1.",
)
@click.option(
    "--quick",
    is_flag=True,
    help="Use small sizes, to check that the benchmarks run; the numbers mean little.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Leave out the table at the end; the JSON lines are always printed.",
)
def command(
    names: tuple[str, ...],
    repeats: int,
    rate: float | None,
    parameters: int | None,
    method: str | None,
    codec_threads: int,
    device: str,
    quick: bool,
    as_json: bool,
) -> None:
    """Measure speed, memory and bytes, each next to a baseline. Without NAME, run all benchmarks
    but gpu.

    NAME is codec, loop, sim, memory, sync, overlap, control, kill, planner, round, whole,
    checkpoint, idle, start, join, faults, pipeline, data, generate, gpu, or one metric such as
    codec.int8. `farflock bench quality` takes hours and has its own options: see `farflock bench
    quality --help`.

    Each line is one JSON object: metric, value, yardstick (the baseline; its runs alternate with
    those of the metric), ratio, n, load (of the machine, per core; above 1 the numbers are noisy),
    unit, note.
    """
    from farflock.experiments.measure.metric import NotMeasured, Options

    out, rows, failed = Output(as_json=True), [], []
    for name in names or EVERYWHERE:
        only = name if "." in name else None
        out.line(f"measuring {name}")
        try:
            options = Options(repeats, rate, quick, only, parameters, method, codec_threads, device)
            for metric in measured(_benchmark(name), options):
                out.result(asdict(metric), "")
                rows.append([_short(getattr(metric, name)) for name in SHOWN])
        except NotMeasured as reason:
            failed.append(name)
            out.line(f"{name} could not be measured: {reason}")
    if not as_json:
        out.table(SHOWN, rows)
    if failed:
        raise Failure(
            f"{', '.join(failed)} could not be measured",
            "the reasons are printed above",
            "remove them and measure these again; the other results are valid",
        )


def measured(benchmark: str, options: "Options") -> Iterator["Metric"]:
    """Yield a benchmark's metrics, or only the requested one; raise `Usage` for an unknown one."""
    run = import_module(BENCHMARKS[benchmark]).run
    seen = []
    for metric in run(options):
        seen.append(metric.metric)
        if options.wants(metric.metric):
            yield metric
    if options.only is not None and options.only not in seen:
        remedy = (
            nearest(options.only, seen)
            if seen
            else f"`farflock bench {benchmark}` measures all of them"
        )
        raise Usage(f"bench {options.only}", f"{benchmark} has no metric with this name", remedy)


def _short(value: object) -> object:
    return float(f"{value:.4g}") if isinstance(value, float) else value
