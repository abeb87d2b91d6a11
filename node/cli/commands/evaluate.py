"""`farflock evaluate`: measure a model on held-out text, or run tasks of the
lm-evaluation-harness on it."""

import contextlib
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from farflock.node.cli.commands.options import device_option
from farflock.node.cli.output import Output
from farflock.node.errors import Failure, Usage
from farflock.node.extras import line_for, require

if TYPE_CHECKING:
    from farflock.node.model.evaluation import HeldOutLoss
    from farflock.node.state.saved_model import SavedModel
    from farflock.node.use.held_out import HeldOutText
    from farflock.node.use.tasks import TaskScore


@click.command("evaluate")
@click.argument("folder", metavar="MODEL", type=click.Path(path_type=Path))
@click.option(
    "--data",
    type=click.Path(exists=True, path_type=Path),
    metavar="PATH",
    help="A folder of prepared data, of which the held-out part is taken, or a text file."
    "  [default: the held-out part of the run's text]",
)
@click.option(
    "--sequences",
    type=click.IntRange(min=0),
    metavar="N",
    help="Sequences to measure, spread over the text (0: all).  [default: 256]",
)
@click.option(
    "--seq",
    type=click.IntRange(min=1),
    metavar="N",
    help="Tokens of a sequence.  [default: as the run trains, or 1024]",
)
@click.option(
    "--tasks",
    metavar="NAMES",
    help="Instead, tasks of the lm-evaluation-harness, as in arc_easy,hellaswag. It downloads"
    " their data.",
)
@click.option(
    "--include-path",
    "include",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with tasks of your own (.yaml), which may run code that is in it.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Take the first N examples of each task.")
@click.option("--fewshot", type=click.IntRange(min=0), help="Solved examples in front of each.")
@device_option()
@click.option("--json", "as_json", is_flag=True, help="End standard output with one line of JSON.")
def command(
    folder: Path,
    data: Path | None,
    sequences: int | None,
    seq: int | None,
    tasks: str | None,
    include: Path | None,
    limit: int | None,
    fewshot: int | None,
    device: str,
    as_json: bool,
) -> None:
    """Measure MODEL on text that it was not trained on: the loss with its standard error over
    sequences, and bits a byte, by which models of different tokenizers compare. Or score it on
    tasks.

    MODEL is a checkpoint, a folder with checkpoints, or an export.

    \b
    Examples:
      farflock evaluate home
      farflock evaluate my-model --data prepared --sequences 0
      farflock evaluate my-model --tasks arc_easy,hellaswag --limit 200
    """
    out = Output(as_json)
    if tasks is None:
        of_tasks = {"--include-path": include, "--limit": limit, "--fewshot": fewshot}
        _refuse(of_tasks, "it is for tasks, and none are named", "name them with --tasks")
        _measure(out, folder, data, sequences, seq, device)
        return
    of_text = {"--data": data, "--sequences": sequences, "--seq": seq}
    _refuse(of_text, "tasks have a text of their own", "leave out one of it and --tasks")
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise Usage("--tasks", "it names no task", "write it as arc_easy,hellaswag")
    _score(out, folder, names, device, include=include, limit=limit, fewshot=fewshot)


def _refuse(given: Mapping[str, object], why: str, remedy: str) -> None:
    for name, value in given.items():
        if value is not None:
            raise Usage(name, why, remedy)


def _measure(
    out: Output,
    folder: Path,
    data: Path | None,
    sequences: int | None,
    seq: int | None,
    device: str,
) -> None:
    from farflock.node.model.device import choose
    from farflock.node.model.evaluation import SEQUENCES, measure
    from farflock.node.model.step_options import logits_on
    from farflock.node.state.saved_model import open_model
    from farflock.node.tokens.token_bytes import bytes_of_tokens
    from farflock.node.use.held_out import held_out_text

    chosen, saved = choose(device), open_model(folder)
    count = SEQUENCES if sequences is None else sequences
    text = held_out_text(saved, data, seq=seq, sequences=count or None)
    model = saved.model.to(chosen.place)
    model.logits_at_once = logits_on(chosen)
    with out.progress("evaluating") as progress:
        found = measure(model, text.rows, bytes_of_tokens(saved.tokenizer), progress)
    out.result(_facts(saved, text, found), _words(text, found))


def _facts(saved: "SavedModel", text: "HeldOutText", found: "HeldOutLoss") -> dict[str, Any]:
    estimate = found.estimate
    return {
        "model": str(saved.folder),
        "data": text.name,
        "loss": estimate.mean,
        "standard_error": estimate.standard_error,
        "bits_per_byte": found.bits_per_byte,
        "perplexity": found.perplexity,
        "tokens": found.tokens,
        "sequences": estimate.sequences,
        "seq": text.seq,
    }


def _words(text: "HeldOutText", found: "HeldOutLoss") -> str:
    estimate = found.estimate
    error = f" ± {estimate.standard_error:.4f}" if math.isfinite(estimate.standard_error) else ""
    bits = "" if found.bits_per_byte is None else f", {found.bits_per_byte:.4f} bits a byte"
    return (
        f"loss {estimate.mean:.4f}{error} nats a token{bits}, perplexity {found.perplexity:,.2f}\n"
        f"measured on {found.tokens:,} tokens, in {estimate.sequences:,} sequences of"
        f" {text.seq:,}, of {text.name}"
    )


def _score(
    out: Output,
    folder: Path,
    names: list[str],
    device: str,
    *,
    include: Path | None,
    limit: int | None,
    fewshot: int | None,
) -> None:
    """Run tasks; what the harness prints goes to standard error."""
    require("--tasks", "lm_eval")
    from farflock.node.model.device import choose
    from farflock.node.state.saved_model import open_model

    place, saved = choose(device).place, open_model(folder)
    with contextlib.redirect_stdout(sys.stderr):
        try:
            from farflock.node.use.harness import evaluate_tasks
        except ImportError as error:
            raise Failure(
                "tasks are run by the package lm_eval",
                str(error),
                f"run {line_for('lm_eval')}",
            ) from None
        model = saved.model.to(place)
        scores = evaluate_tasks(
            model, saved.tokenizer, names, include=include, limit=limit, fewshot=fewshot
        )
    _show_scores(out, saved, scores)


def _show_scores(out: Output, saved: "SavedModel", scores: "list[TaskScore]") -> None:
    errors = ["" if one.error is None else f"± {one.error:.4f}" for one in scores]
    rows = [
        (one.task, one.metric, f"{one.value:.4f}", error)
        for one, error in zip(scores, errors, strict=True)
    ]
    out.table(("task", "metric", "value", "error"), rows)
    facts = [
        {"task": one.task, "metric": one.metric, "value": one.value, "error": one.error}
        for one in scores
    ]
    out.result({"model": str(saved.folder), "scores": facts}, f"scored {saved.folder}")
