"""`farflock generate`: sample text from a checkpoint."""

from pathlib import Path

import click

from farflock.node.cli.output import Output


@click.command("generate")
@click.argument("folder", metavar="CHECKPOINT", type=click.Path(path_type=Path))
@click.option("--prompt", default="\n", help="What the text begins with (default: a new line).")
@click.option(
    "--tokens",
    type=click.IntRange(1, 100_000),
    default=200,
    show_default=True,
    help="How much to sample.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(0, 100),
    default=0.8,
    show_default=True,
    help="0: the likeliest.",
)
@click.option(
    "--top-k",
    type=click.IntRange(0),
    default=40,
    show_default=True,
    help="Among how many (0: all).",
)
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True)
@click.option(
    "--json", "as_json", is_flag=True, help="The last line of standard output is one JSON object."
)
def command(
    folder: Path, prompt: str, tokens: int, temperature: float, top_k: int, seed: int, as_json: bool
) -> None:
    """Sample text from CHECKPOINT: a folder `step-N`, one that holds such folders (then from the newest), or one with a folder
    of them for each stage, `stage-0`, `stage-1`, …"""
    from farflock.node.model.generate import generate
    from farflock.node.model.tokenizer import ByteTokenizer
    from farflock.node.state.saved_model import open_model

    saved = open_model(folder)
    text = generate(
        saved.model,
        ByteTokenizer(),
        prompt,
        tokens,
        temperature=temperature,
        top_k=top_k or None,
        seed=seed,
    )
    Output(as_json).result(
        {"checkpoint": str(saved.folder), "prompt": prompt, "text": text}, prompt + text
    )
