"""`farflock export`: convert a checkpoint to a Hugging Face folder."""

from pathlib import Path

import click

from farflock.node.cli.output import Output


@click.command("export")
@click.argument("folder", metavar="CHECKPOINT", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(file_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Overwrite files in TARGET.")
@click.option("--json", "as_json", is_flag=True, help="End standard output with one line of JSON.")
def command(folder: Path, target: Path, force: bool, as_json: bool) -> None:
    """Convert CHECKPOINT to a Hugging Face folder, TARGET, that transformers can load.

    CHECKPOINT is a folder `step-N`, a folder of those (the newest is taken), or a folder with one
    of those for each stage of the model: `stage-0`, `stage-1`, …
    """
    from farflock.node.model.export import export
    from farflock.node.state.saved_model import open_model
    from farflock.node.use.model_card import facts_of, model_card

    saved = open_model(folder)
    facts = facts_of(saved.meta, "fp32")
    card = model_card(target.absolute().name, saved.model.config, facts)
    export(target, saved.model.config, saved.model.state_dict(), saved.tokenizer, card, force=force)
    Output(as_json).result(
        {"checkpoint": str(saved.folder), "folder": str(target)},
        f"exported {saved.folder} to {target}",
    )
