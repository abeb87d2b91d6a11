"""`farflock export`: a checkpoint as a Hugging Face folder."""

from pathlib import Path

import click

from farflock.node.cli.output import Output


@click.command("export")
@click.argument("folder", metavar="CHECKPOINT", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(file_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Replace files of the same names in TARGET.")
@click.option(
    "--json", "as_json", is_flag=True, help="The last line of standard output is one JSON object."
)
def command(folder: Path, target: Path, force: bool, as_json: bool) -> None:
    """Write the model of CHECKPOINT to TARGET for transformers: a folder `step-N`, one that holds such folders, or one with a
    folder of them for each stage, `stage-0`, `stage-1`, …"""
    from farflock.node.model.export import export, model_card
    from farflock.node.model.tokenizer import ByteTokenizer
    from farflock.node.state.saved_model import open_model

    saved = open_model(folder)
    card = model_card(target.absolute().name, saved.model.config, saved.facts())
    export(target, saved.model.config, saved.model.state_dict(), ByteTokenizer(), card, force=force)
    Output(as_json).result(
        {"checkpoint": str(saved.folder), "folder": str(target)},
        f"{saved.folder} is now in {target}",
    )
