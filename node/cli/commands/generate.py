"""`farflock generate`: sample text from a checkpoint."""

from pathlib import Path

import click

from farflock.node.cli.commands.options import device_option
from farflock.node.cli.output import Output


@click.command("generate")
@click.argument("folder", metavar="CHECKPOINT", type=click.Path(path_type=Path))
@click.option("--prompt", default="\n", help="Text to continue (default: a new line).")
@click.option(
    "--tokens",
    type=click.IntRange(1, 100_000),
    default=200,
    show_default=True,
    help="Number of tokens to sample.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(0, 100),
    default=0.8,
    show_default=True,
    help="Randomness; 0 always takes the likeliest token.",
)
@click.option(
    "--top-k",
    type=click.IntRange(0),
    default=40,
    show_default=True,
    help="Sample among the K likeliest tokens (0: all).",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**31 - 1),
    default=0,
    show_default=True,
    help="The same seed gives the same text.",
)
@device_option()
@click.option("--json", "as_json", is_flag=True, help="End standard output with one line of JSON.")
def command(
    folder: Path,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    device: str,
    as_json: bool,
) -> None:
    """Sample text from CHECKPOINT.

    CHECKPOINT is a folder `step-N`, a folder of those (the newest is taken), or a folder with one
    of those for each stage of the model: `stage-0`, `stage-1`, …
    """
    from farflock.node.model.device import choose
    from farflock.node.model.generate import generate
    from farflock.node.state.saved_model import open_model

    place = choose(device).place
    saved = open_model(folder)
    text = generate(
        saved.model.to(place),
        saved.tokenizer,
        prompt,
        tokens,
        temperature=temperature,
        top_k=top_k or None,
        seed=seed,
    )
    Output(as_json).result(
        {"checkpoint": str(saved.folder), "prompt": prompt, "text": text}, prompt + text
    )
