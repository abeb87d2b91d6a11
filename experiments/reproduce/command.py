"""`farflock reproduce`: paper experiments, scaled to this machine, next to the paper's numbers."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from farflock.node.cli.commands.options import device_option
from farflock.node.cli.output import Output, one_line
from farflock.node.errors import Failure, FarflockError, Usage

if TYPE_CHECKING:
    from farflock.experiments.reproduce.shelf import Shelf
    from farflock.experiments.reproduce.study import Study

TIERS = ("ci", "cpu", "gpu")
LISTED = ("recipe", "method", "tiers", "last verdict", "claim")


@click.command("reproduce")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--all", "everything", is_flag=True, help="Run every recipe; earlier runs are reused."
)
@click.option(
    "--tier",
    type=click.Choice(TIERS),
    default="cpu",
    show_default=True,
    help="Size of the experiment; see above.",
)
@click.option(
    "--list",
    "only_list",
    is_flag=True,
    help="List the recipes and their last verdicts (as without NAME).",
)
@click.option(
    "--workers",
    type=click.IntRange(1, 256),
    help="Parallel processes (default: one per core; in tier ci or on a GPU, one).",
)
@device_option(None, " (default: the CPU, and in tier gpu the best GPU)")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder that keeps runs and results.",
)
@click.option(
    "--record",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the last verdict of every recipe into this page.",
)
@click.option(
    "--dry-run", is_flag=True, help="Print the resolved configuration and its hash; run nothing."
)
@click.option("--json", "as_json", is_flag=True, help="Print only JSON, one line per recipe.")
def command(
    names: tuple[str, ...],
    everything: bool,
    tier: str,
    only_list: bool,
    workers: int | None,
    device: str | None,
    folder: Path | None,
    record: Path | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Re-run experiments from papers and compare the results; without NAME, list the recipes.

    Tier ci takes seconds and only checks that a recipe runs, cpu takes up to ten minutes per
    recipe, and gpu is sized for one large GPU. All runs are kept: after Ctrl-C the same command
    resumes where it stopped.
    """
    from farflock.experiments.reproduce import recipe
    from farflock.experiments.reproduce.shelf import Shelf
    from farflock.experiments.reproduce.text import device_for
    from farflock.node.state.paths import home

    out, shelf = Output(as_json), Shelf(folder or home() / "reproduce")
    if names and everything:
        raise Usage("reproduce", f"--all includes {', '.join(names)}", "leave out --all or NAME")
    chosen = recipe.names() if everything else list(names)
    if only_list or not chosen:
        _list(out, shelf)
        if record:
            _record(record, shelf)
        return
    loaded = [recipe.load(name) for name in chosen]
    if dry_run:
        for one in loaded:
            _describe(out, one, tier, device)
        return
    places = [  # all, before anything runs
        device_for(device, "gpu" if one.needs_gpu(tier) else "cpu", f"{one.name}, tier {tier}")
        for one in loaded
    ]
    failed = []
    for one, place in zip(loaded, places, strict=True):
        try:
            _reproduce(out, shelf, one, tier, place, workers)
        except FarflockError as error:
            if not everything:
                raise
            failed.append(one.name)
            out.line(f"{one.name}: {error}")
        if record:
            _record(record, shelf)
    if failed:
        raise Failure(
            f"{len(failed)} of {len(loaded)} recipes failed",
            ", ".join(failed),
            "the reasons are above",
        )


def _list(out: Output, shelf: "Shelf") -> None:
    """Print the recipes with their last verdicts."""
    from farflock.experiments.reproduce import recipe

    rows, listed = [], []
    for name in recipe.names():
        one = recipe.load(name)
        said = {tier: shelf.said(name, tier) for tier in TIERS}
        verdicts = {tier: told.get("verdict") for tier, told in said.items() if told is not None}
        lacking = recipe.missing(one)
        last = f"needs method {', '.join(lacking)}" if lacking else _verdicts(verdicts)
        rows.append((name, one.method, " ".join(one.tiers), last, one.claim))
        listed.append(
            {
                "recipe": name,
                "method": one.method,
                "claim": one.claim,
                "source": one.source,
                "tiers": list(one.tiers),
                "last_verdict": verdicts,
                "missing_methods": lacking,
            }
        )
    out.table(LISTED, rows)
    out.result(
        {"recipes": listed},
        "run one with `farflock reproduce NAME`, all with `farflock reproduce --all`",
    )


def _verdicts(by_tier: dict[str, Any]) -> str:
    return ", ".join(f"{tier}: {word or 'ran'}" for tier, word in by_tier.items()) or "never run"


def _describe(out: Output, one: Any, tier: str, device: str | None) -> None:  # noqa: ANN401 - a Recipe: a heavy import
    from farflock.experiments.reproduce.computation import Computation
    from farflock.experiments.reproduce.recipe import explanation
    from farflock.experiments.reproduce.study import Study

    described = (
        one.described(tier)
        if isinstance(one, Computation)
        else Study(one, tier, device).described()
    )
    digest = hashlib.sha256(one_line(described).encode()).hexdigest()
    out.result(
        {**described, "hash": digest},
        f"{explanation(one.name)}\n{one_line(described)}\nhash {digest}",
    )


def _reproduce(
    out: Output,
    shelf: "Shelf",
    one: Any,  # noqa: ANN401 - a Recipe
    tier: str,
    device: str,
    workers: int | None,
) -> None:
    """Run a recipe; write its table, plot and JSON; print the result."""
    import torch

    from farflock.experiments.reproduce import report
    from farflock.experiments.reproduce.computation import Computation
    from farflock.experiments.reproduce.shelf import write
    from farflock.experiments.reproduce.study import Study
    from farflock.node.demo.figure import warn_of_no_figure

    if not isinstance(one, Computation):
        warn_of_no_figure(out.line)
    torch.set_num_threads(1)
    # A run of tier ci ends before a worker process would have started, and a GPU's memory is one.
    workers = workers or (1 if tier == "ci" or device != "cpu" else os.cpu_count() or 1)
    with out.progress(f"{one.name} ({tier})") as progress:
        if isinstance(one, Computation):
            found = one.table(tier, shelf, progress)
            told = report.computed(one, tier, found, one.judged(found))
        else:
            told = _trained(shelf, Study(one, tier, device), workers, progress)
    place = shelf.place(one.name, tier)
    write(place / "table.md", report.markdown(told).encode())
    write(place / "result.json", one_line(told).encode())
    out.line(f"\n{one.name} ({tier}): {one.question}")
    out.table(*report.arm_rows(told))
    out.table(report.RULES, report.rule_rows(told))
    short = {name: value for name, value in told.items() if name != "arms"}
    if "arms" in told:
        short["arms"] = [
            {name: value for name, value in arm.items() if name != "curves"} for arm in told["arms"]
        ]
    kept = "plot and JSON" if "plot" in told else "JSON"
    out.result(short, f"{told['verdict'] or told['reason']}; {kept} in {place}")


def _trained(
    shelf: "Shelf", study: "Study", workers: int, progress: Callable[[float], None]
) -> dict[str, Any]:
    """Run the arms of a recipe that trains, and plot them."""
    from farflock.experiments.reproduce import report
    from farflock.experiments.reproduce.labels import figure_labels
    from farflock.experiments.reproduce.plot import draw
    from farflock.node.demo.figure import can_draw

    results = study.run(shelf, workers, progress)
    told = report.facts(study, results, study.judged(results))
    name, tier = study.recipe.name, study.tier
    plot = shelf.place(name, tier) / "loss.png"
    title = f"{name} ({tier}): {told['verdict'] or 'no verdict'}"
    draw(results, title, plot, figure_labels(study, results))
    return {**told, "plot": str(plot)} if can_draw() else told


def _record(page: Path, shelf: "Shelf") -> None:
    from farflock.experiments.reproduce.pages import record

    record(page, shelf.sections())
