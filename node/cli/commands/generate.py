"""`farflock generate`: sample text from a checkpoint."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from farflock.node.cli.commands.options import base_option, device_option
from farflock.node.cli.output import Output
from farflock.node.errors import Usage

if TYPE_CHECKING:
    from farflock.node.model.generate import Sampling
    from farflock.node.state.saved_model import SavedModel

_SAMPLING = (
    click.option(
        "--temperature",
        type=click.FloatRange(0, 100),
        default=0.8,
        show_default=True,
        help="Randomness; 0 always takes the likeliest token.",
    ),
    click.option(
        "--top-k",
        type=click.IntRange(0),
        default=40,
        show_default=True,
        help="Sample among the K likeliest tokens (0: all).",
    ),
    click.option(
        "--top-p",
        type=click.FloatRange(0, 1, min_open=True),
        default=1.0,
        show_default=True,
        help="Sample among the fewest tokens that make up this share of the probability.",
    ),
    click.option(
        "--min-p",
        type=click.FloatRange(0, 1),
        default=0.0,
        show_default=True,
        help="Leave out tokens with less than this share of the likeliest one's probability.",
    ),
    click.option(
        "--repetition-penalty",
        type=click.FloatRange(0, 100, min_open=True),
        default=1.0,
        show_default=True,
        help="Make tokens that occurred less likely; above 1, commonly up to 1.3.",
    ),
)


def _sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_SAMPLING):
        command = option(command)
    return command


@click.command("generate")
@click.argument("folder", metavar="CHECKPOINT", type=click.Path(path_type=Path))
@click.option("--prompt", default="\n", help="Text to continue (default: a new line).")
@click.option(
    "--tokens",
    type=click.IntRange(1, 100_000),
    default=200,
    show_default=True,
    help="Number of tokens to sample, unless the end of the text comes first.",
)
@_sampling_options
@click.option(
    "--seed",
    type=click.IntRange(0, 2**31 - 1),
    default=0,
    show_default=True,
    help="The same seed gives the same text.",
)
@click.option(
    "--stop",
    "stops",
    multiple=True,
    metavar="TEXT",
    help="End in front of this text; may be given several times.",
)
@click.option(
    "--chat", is_flag=True, help="Answer the prompt, with the chat template of the checkpoint."
)
@click.option(
    "--chat-template",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Chat with the template in this file (Jinja, as in chat_template.jinja).",
)
@base_option
@device_option()
@click.option("--json", "as_json", is_flag=True, help="End standard output with one line of JSON.")
def command(
    folder: Path,
    prompt: str,
    tokens: int,
    seed: int,
    stops: tuple[str, ...],
    chat: bool,
    chat_template: Path | None,
    base: Path | None,
    device: str,
    as_json: bool,
    **options: float,
) -> None:
    """Sample text from CHECKPOINT, and print it as it is sampled.

    CHECKPOINT is a folder `step-N`, a folder of those (the newest is taken), or a folder with one
    of those for each stage of the model: `stage-0`, `stage-1`, …
    """
    from farflock.node.model.device import choose
    from farflock.node.state.saved_model import open_model

    place = choose(device).place
    sampling = _sampling(**options)
    saved = open_model(folder, base)
    template = saved.chat_template if chat_template is None else _read(chat_template)
    in_chat = chat or chat_template is not None
    begun, ends = _beginning(saved, prompt, template if in_chat else None, in_chat)
    saved.model.to(place)
    said = _said(saved, begun, tokens, sampling, seed=seed, ends=ends, stops=stops)
    out, shown = Output(as_json), "" if in_chat else prompt
    if as_json:
        facts = {"checkpoint": str(saved.folder), "prompt": prompt, "text": "".join(said)}
        out.result(facts, "")
        return
    for piece in said:
        out.piece(shown + piece)
        shown = ""
    out.line(shown)


def _sampling(top_k: float, **options: float) -> "Sampling":
    from farflock.node.model.generate import Sampling

    return Sampling(top_k=int(top_k) or None, **options)


def _beginning(
    saved: "SavedModel", prompt: str, template: str | None, in_chat: bool
) -> tuple[str | list[int], tuple[int, ...]]:
    """Return the text or the tokens to continue, and the tokens at which to end."""
    from farflock.node.tokens.chat import chat_tokens, turn_ends

    if not in_chat:
        return prompt, (saved.tokenizer.end_of_text,)
    messages = [{"role": "user", "content": prompt}]
    return chat_tokens(saved.tokenizer, template, messages), turn_ends(saved.tokenizer)


def _said(
    saved: "SavedModel",
    begun: str | list[int],
    tokens: int,
    sampling: "Sampling",
    *,
    seed: int,
    ends: tuple[int, ...],
    stops: tuple[str, ...],
) -> Iterator[str]:
    """Return an iterator of the text's pieces."""
    from farflock.node.model.generate import continued, pieces, until

    model, tokenizer = saved.model, saved.tokenizer
    drawn = continued(model, tokenizer, begun, tokens, sampling=sampling, seed=seed, ends=ends)
    return until(pieces(tokenizer, drawn), stops)


def _read(path: Path) -> str:
    from farflock.node.tokens.chat import BadChat, read_template

    try:
        return read_template(path)
    except BadChat as error:
        raise Usage("--chat-template", str(error), "") from None
