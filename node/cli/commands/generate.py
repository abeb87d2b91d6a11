"""`farflock generate`: sample text from a checkpoint."""

from collections.abc import Iterator
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
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="Sample among the fewest tokens that make up this share of the probability.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**31 - 1),
    default=0,
    show_default=True,
    help="The same seed gives the same text.",
)
@click.option("--stream", "as_drawn", is_flag=True, help="Print the text as it is sampled.")
@device_option()
@click.option("--json", "as_json", is_flag=True, help="End standard output with one line of JSON.")
def command(
    folder: Path,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    as_drawn: bool,
    device: str,
    as_json: bool,
) -> None:
    """Sample text from CHECKPOINT.

    CHECKPOINT is a folder `step-N`, a folder of those (the newest is taken), or a folder with one
    of those for each stage of the model: `stage-0`, `stage-1`, …

    Text may be longer than the model's context: whenever that is full, the model goes on with the
    newer half of it. A prompt that is longer loses its beginning.
    """
    from farflock.node.model.device import choose
    from farflock.node.model.generate import Sampling, stream
    from farflock.node.state.saved_model import open_model

    place = choose(device).place
    sampling = Sampling(temperature, top_k or None, top_p)
    saved = open_model(folder)
    model = saved.model.to(place)
    out = Output(as_json)
    drawn = stream(
        model,
        saved.tokenizer,
        prompt,
        tokens,
        sampling=sampling,
        seed=seed,
        end=saved.tokenizer.end_of_text,
    )
    text = "".join(_shown(out, prompt, drawn) if as_drawn else drawn)
    if as_json or not as_drawn:
        facts = {"checkpoint": str(saved.folder), "prompt": prompt, "text": text}
        out.result(facts, prompt + text)


def _shown(out: Output, prompt: str, pieces: Iterator[str]) -> Iterator[str]:
    """Print the prompt and each piece before yielding it."""
    out.piece(prompt)
    for piece in pieces:
        out.piece(piece)
        yield piece
    out.line("")
