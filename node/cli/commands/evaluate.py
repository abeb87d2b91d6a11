"""`farflock evaluate`: measure a checkpoint on held-out text, or run tasks of the
lm-evaluation-harness on it."""

import contextlib
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from farflock.node.cli.commands.options import base_option, device_option
from farflock.node.cli.output import Output
from farflock.node.errors import Failure, Usage

if TYPE_CHECKING:
    from farflock.node.state.saved_model import SavedModel
    from farflock.node.use.tasks import TaskScore

QUIET_S = 2.0  # without a word of how far it has come


@click.command("evaluate")
@click.argument("folder", metavar="CHECKPOINT", type=click.Path(path_type=Path))
@click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder of prepared data, whose held-out part is measured on (default: the run's own).",
)
@click.option(
    "--sequences",
    metavar="N",
    help="Sequences of held-out text, or all (default: as many as the run takes).",
)
@click.option(
    "--seq", type=click.IntRange(min=1), help="Tokens of a sequence (default: as the run takes)."
)
@click.option(
    "--tasks",
    metavar="NAMES",
    help="Instead, tasks of the lm-evaluation-harness, as in arc_easy,hellaswag. It downloads"
    " their data.",
)
@click.option(
    "--include-path",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with tasks of your own (.yaml), which may run code that is in it.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Take the first N examples of each task.")
@click.option("--fewshot", type=click.IntRange(min=0), help="Solved examples in front of each.")
@base_option
@device_option()
@click.option("--json", "as_json", is_flag=True, help="End standard output with one line of JSON.")
def command(
    folder: Path,
    data: Path | None,
    sequences: str | None,
    seq: int | None,
    tasks: str | None,
    include_path: Path | None,
    limit: int | None,
    fewshot: int | None,
    base: Path | None,
    device: str,
    as_json: bool,
) -> None:
    """Measure CHECKPOINT on the held-out text of its run, as the run does, or score it on tasks.

    CHECKPOINT is a folder `step-N`, a folder of those (the newest is taken), or a folder with one
    of those for each stage of the model: `stage-0`, `stage-1`, …; or a Hugging Face folder.
    """
    of_tasks = {"--include-path": include_path, "--limit": limit, "--fewshot": fewshot}
    of_text = {"--data": data, "--sequences": sequences, "--seq": seq}
    if tasks is None:
        _refuse(of_tasks, "it is for tasks, and none are named", "name them with --tasks")
        _measure(folder, base, data, sequences, seq, device, Output(as_json))
    else:
        _refuse(of_text, "tasks have a text of their own", "leave out one of it and --tasks")
        _score(folder, base, tasks, include_path, limit, fewshot, device, as_json)


def _refuse(given: Mapping[str, object], why: str, remedy: str) -> None:
    for name, value in given.items():
        if value is not None:
            raise Usage(name, why, remedy)


def _opened(folder: Path, base: Path | None) -> "SavedModel":
    from farflock.node.state.saved_model import open_model
    from farflock.node.use.held_out_loss import is_export, open_export

    return open_export(folder) if is_export(folder) else open_model(folder, base)


def _measure(
    folder: Path,
    base: Path | None,
    data: Path | None,
    sequences: str | None,
    seq: int | None,
    device: str,
    out: Output,
) -> None:
    from farflock.node.cli.commands import evaluate_held_out as held_out

    saved = _opened(folder, base)
    text = held_out.held_out_text(saved, data, seq, sequences)
    began_s = time.monotonic()
    with out.progress("evaluating") as progress:

        def tell(share: float) -> None:
            if time.monotonic() - began_s > QUIET_S:
                progress(share)

        found = held_out.held_out_loss(saved, text, device, tell)
    seconds = time.monotonic() - began_s
    facts = held_out.facts_of(saved, text, found, seconds)
    out.result(facts, held_out.words_of(text, found, seconds))


def _score(
    folder: Path,
    base: Path | None,
    tasks: str,
    include: Path | None,
    limit: int | None,
    fewshot: int | None,
    device: str,
    as_json: bool,
) -> None:
    from farflock.node.model.device import choose

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise Usage("--tasks", "it names no task", "write it as arc_easy,hellaswag")
    place = choose(device).place
    saved = _opened(folder, base)
    saved.model.to(place)
    scores = _scores(saved, names, include, limit, fewshot)
    rows = [
        (score.task, score.metric, f"{score.value:.4f}", _error(score.error)) for score in scores
    ]
    out = Output(as_json)
    out.table(("task", "metric", "value", "error"), rows)
    facts = [
        {"task": one.task, "metric": one.metric, "value": one.value, "error": one.error}
        for one in scores
    ]
    if as_json:
        out.result({"checkpoint": str(saved.folder), "scores": facts}, "")


def _scores(
    saved: "SavedModel",
    names: list[str],
    include: Path | None,
    limit: int | None,
    fewshot: int | None,
) -> "list[TaskScore]":
    """Return the scores; what the harness prints goes to standard error."""
    with contextlib.redirect_stdout(sys.stderr):
        try:
            from farflock.node.use.harness import evaluate_tasks
        except ImportError as error:
            raise Failure(
                "tasks are run by the package lm_eval",
                str(error),
                'pip install "farflock[eval]"',
            ) from None
        return evaluate_tasks(
            saved.model, saved.tokenizer, names, include=include, limit=limit, fewshot=fewshot
        )


def _error(value: float | None) -> str:
    return "" if value is None else f"± {value:.4f}"
