"""`farflock evaluate`: measure a model on held-out text."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from farflock.node.cli.commands.options import device_option
from farflock.node.cli.output import Output

if TYPE_CHECKING:
    from farflock.node.model.evaluation import HeldOutLoss
    from farflock.node.state.saved_model import SavedModel
    from farflock.node.use.held_out import HeldOutText


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
@device_option()
@click.option("--json", "as_json", is_flag=True, help="End standard output with one line of JSON.")
def command(
    folder: Path,
    data: Path | None,
    sequences: int | None,
    seq: int | None,
    device: str,
    as_json: bool,
) -> None:
    """Measure MODEL on text that it was not trained on: the loss with its standard error over
    sequences, and bits a byte, by which models of different tokenizers compare.

    MODEL is a checkpoint, a folder with checkpoints, or an export.

    \b
    Examples:
      farflock evaluate home
      farflock evaluate my-model --data prepared --sequences 0
    """
    from farflock.node.model.device import choose
    from farflock.node.model.evaluation import SEQUENCES, measure
    from farflock.node.model.step_options import logits_on
    from farflock.node.state.saved_model import open_model
    from farflock.node.tokens.token_bytes import bytes_of_tokens
    from farflock.node.use.held_out import held_out_text

    chosen, saved = choose(device), open_model(folder)
    out, count = Output(as_json), SEQUENCES if sequences is None else sequences
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
