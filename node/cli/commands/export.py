"""`farflock export`: convert a checkpoint to a Hugging Face folder."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from farflock.node.cli.commands.options import base_option, size_in_bytes
from farflock.node.cli.output import Output
from farflock.node.errors import Usage

if TYPE_CHECKING:
    from farflock.node.model.export import WeightType
    from farflock.node.state.saved_model import SavedModel


@click.command("export")
@click.argument("folder", metavar="CHECKPOINT", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="Type of the weights. Checkpoints have float32, which takes twice the space.",
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
    "--gguf", is_flag=True, help="Also write model.gguf, which llama.cpp and others read."
)
@click.option(
    "--base-model", metavar="NAME", help="Hub's name of the model that training started from."
)
@click.option(
    "--merge",
    is_flag=True,
    help="Of a run of adapters, write the whole model with them, not the adapters alone.",
)
@base_option
@click.option("--force", is_flag=True, help="Overwrite files in TARGET.")
@click.option("--json", "as_json", is_flag=True, help="End standard output with one line of JSON.")
def command(
    folder: Path,
    target: Path,
    dtype: "WeightType",
    shard_bytes: int,
    gguf: bool,
    base_model: str | None,
    merge: bool,
    base: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Convert CHECKPOINT to a Hugging Face folder, TARGET, that transformers can load.

    Adapters become a folder that peft can load, unless they are merged.

    CHECKPOINT is a folder `step-N`, a folder of those (the newest is taken), or a folder with one
    of those for each stage of the model: `stage-0`, `stage-1`, …
    """
    from farflock.node.model.export import GGUF_NAME, ExportForm, export
    from farflock.node.state.saved_model import open_model
    from farflock.node.use.gguf_file import gguf_writer
    from farflock.node.use.model_card import CardFacts, model_card

    saved = open_model(folder, base)
    if saved.base is not None and not merge:
        _export_adapters(saved, target, base_model, gguf, force)
        Output(as_json).result(
            {"checkpoint": str(saved.folder), "folder": str(target)},
            f"exported the adapters of {saved.folder} to {target}",
        )
        return
    card = model_card(
        target.absolute().name, saved.config, CardFacts(saved.meta, dtype, base_model)
    )
    more = {}
    if gguf:
        more[GGUF_NAME] = gguf_writer(
            *(saved.config, saved.whole, saved.tokenizer, dtype),
            name=target.absolute().name,
            template=saved.chat_template,
        )
    export(
        *(target, saved.config, saved.whole, saved.tokenizer, card),
        force=force,
        form=ExportForm(dtype, shard_bytes),
        chat_template=saved.chat_template,
        more=more,
    )
    Output(as_json).result(
        {"checkpoint": str(saved.folder), "folder": str(target)},
        f"exported {saved.folder} to {target}",
    )


def _export_adapters(
    saved: "SavedModel", target: Path, base_model: str | None, gguf: bool, force: bool
) -> None:
    from farflock.node.use.adapter_file import write_adapters
    from farflock.node.use.model_card import CardFacts, model_card

    if gguf:
        raise Usage("--gguf", "it holds whole models, and these are adapters", "add --merge")
    base = saved.base
    assert base is not None, "there are adapters"
    facts = CardFacts(saved.meta, "float32", base_model, base.lora)
    card = model_card(target.absolute().name, saved.config, facts)
    named = base_model or str(base.weights.folder.absolute())
    terms = saved.config, base.lora, saved.weights, named
    write_adapters(target, *terms, card=card, force=force)
