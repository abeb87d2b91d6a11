"""`farflock export`: convert a checkpoint to a Hugging Face folder."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from farflock.node.cli.commands.options import size_in_bytes
from farflock.node.cli.output import Output
from farflock.node.errors import Usage

if TYPE_CHECKING:
    from farflock.node.model.export import WeightType
    from farflock.node.tokens.tokenizer import Tokenizer


@click.command("export")
@click.argument("folder", metavar="CHECKPOINT", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp32"]),
    default="bf16",
    show_default=True,
    help="Type of the weights. Checkpoints have fp32, which takes twice the space.",
)
@click.option(
    "--shard-size",
    "shard_bytes",
    default="5GB",
    show_default=True,
    metavar="SIZE",
    callback=size_in_bytes,
    help="Largest size of a file of weights.",
)
@click.option(
    "--end-of-text",
    metavar="TOKEN",
    help="The token that ends a text, if the tokenizer does not say it.",
)
@click.option("--force", is_flag=True, help="Replace an earlier export in TARGET.")
@click.option("--json", "as_json", is_flag=True, help="End standard output with one line of JSON.")
def command(
    folder: Path,
    target: Path,
    dtype: "WeightType",
    shard_bytes: int,
    end_of_text: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Convert CHECKPOINT to a Hugging Face folder, TARGET, that transformers can load.

    CHECKPOINT is a folder `step-N`, a folder of those (the newest is taken), or a folder with one
    of those for each stage of the model: `stage-0`, `stage-1`, …

    TARGET appears as a whole or not at all. A folder that holds anything is refused; --force
    replaces an earlier export, and no other files.
    """
    from farflock.node.model.export import ExportForm, export
    from farflock.node.state.saved_model import open_model
    from farflock.node.use.curve_picture import curve_picture
    from farflock.node.use.model_card import facts_of, model_card

    out, saved = Output(as_json), open_model(folder)
    tokenizer = _ended(out, saved.tokenizer, end_of_text)
    about = facts_of(saved.meta, dtype)
    card = model_card(target.absolute().name, saved.config, about)
    form = ExportForm(dtype, shard_bytes, curve_picture(about.curve) if about.curve else b"")
    with out.progress("exporting") as progress:
        written_bytes = export(
            target,
            saved.config,
            saved.weights,
            tokenizer,
            card,
            form=form,
            force=force,
            progress=progress,
        )
    facts = {
        "checkpoint": str(saved.folder),
        "folder": str(target),
        "dtype": dtype,
        "bytes": written_bytes,
    }
    out.result(
        facts,
        f"exported {saved.folder} to {target}: {saved.config.parameters():,} parameters in {dtype}",
    )


def _ended(out: Output, tokenizer: "Tokenizer", end_of_text: str | None) -> "Tokenizer":
    """Return the tokenizer with the token that ends a text, or say that nothing names one."""
    from farflock.node.tokens.json_tokenizer import JsonTokenizer

    if end_of_text is not None:
        if not isinstance(tokenizer, JsonTokenizer):
            raise Usage(
                "--end-of-text", "the model reads bytes, and 255 ends a text", "leave it out"
            )
        return JsonTokenizer(tokenizer.raw, end_of_text, "the model's tokenizer")
    if tokenizer.end_of_text is None:
        out.line(
            "the tokenizer does not say which token ends a text, so generation will not stop, and "
            "evaluations may fail; name it with --end-of-text"
        )
    return tokenizer
