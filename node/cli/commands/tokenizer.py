"""`farflock tokenizer`: train, convert or look at a tokenizer."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from farflock.node.cli.output import Output
from farflock.node.errors import Failure, Usage

if TYPE_CHECKING:
    from farflock.node.tokens.tokenizer import Tokenizer

_READ_CHARS = 1 << 20
_ENDINGS = (".txt", ".md")
_SAMPLE = "The quick brown fox, 1234 — déjà vu."

_output_option = click.option(
    "-o", "--output", required=True, metavar="FILE", type=click.Path(dir_okay=False, path_type=Path)
)
_force_option = click.option("--force", is_flag=True, help="Overwrite FILE.")
_json_option = click.option(
    "--json", "as_json", is_flag=True, help="End standard output with one line of JSON."
)


def _end_option(help_text: str) -> Callable[[click.decorators.FC], click.decorators.FC]:
    return click.option("--end-of-text", metavar="TOKEN", help=help_text)


@click.group("tokenizer")
def command() -> None:
    """Train, convert or look at a tokenizer.

    Farflock takes any tokenizer.json of Hugging Face's `tokenizers`, or bytes.
    """


@command.command("train")
@click.argument(
    "sources", metavar="SOURCE...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@_output_option
@click.option(
    "--vocabulary",
    type=click.IntRange(258, 2**20),
    default=32_768,
    show_default=True,
    help="Number of tokens: the 256 bytes, the end of text, and pieces of words.",
)
@_force_option
@_json_option
def train_command(
    sources: tuple[Path, ...], output: Path, vocabulary: int, force: bool, as_json: bool
) -> None:
    """Learn a tokenizer from texts: SOURCE is a text file, or a folder of .txt and .md files.

    It is byte-level BPE, so it encodes any text. The same texts give the same file.
    """
    from farflock.node.tokens.tokenizer_training import train_tokenizer

    _require_free(output, force)
    out = Output(as_json)
    with out.progress("reading texts") as advance:
        raw = train_tokenizer(_texts(sources, advance), vocabulary)
    _finish(out, output, raw, None)


@command.command("convert")
@click.argument("model", type=click.Path(path_type=Path))
@_output_option
@_end_option("The token that ends a document, where no usual name tells.")
@_force_option
@_json_option
def convert_command(
    model: Path, output: Path, end_of_text: str | None, force: bool, as_json: bool
) -> None:
    """Convert MODEL, a .model file of sentencepiece, to a tokenizer.json that gives equal ids."""
    from farflock.node.tokens.json_tokenizer import read_definition

    _require_free(output, force)
    _finish(Output(as_json), output, read_definition(model), end_of_text)


@command.command("show")
@click.argument("file", type=click.Path(path_type=Path))
@_end_option("The token that ends a document, where no usual name tells.")
@click.option("--text", default=_SAMPLE, show_default=True, help="A text to tokenize.")
@_json_option
def show_command(file: Path, end_of_text: str | None, text: str, as_json: bool) -> None:
    """Print the vocabulary, the end of text and the SHA-256 of FILE, and tokenize a text.

    FILE is a tokenizer.json, a folder that holds one, a .model of sentencepiece, or `bytes`.
    """
    from farflock.node.tokens.json_tokenizer import read_tokenizer

    tokenizer = read_tokenizer(file, end_of_text)
    ids = [int(token) for token in tokenizer.encode(text)]
    pieces = [tokenizer.decode([token]) for token in ids]
    facts = _facts(tokenizer)
    shown = [
        *_lines(facts),
        f"sample         {' '.join(map(repr, pieces))}",
        f"ids            {ids}",
    ]
    Output(as_json).result({**facts, "text": text, "ids": ids}, "\n".join(shown))


def _facts(tokenizer: "Tokenizer") -> dict[str, object]:
    """Return what identifies a tokenizer."""
    from farflock.node.tokens.json_tokenizer import JsonTokenizer

    from_file = tokenizer if isinstance(tokenizer, JsonTokenizer) else None
    return {
        "vocabulary": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "end_of_text_name": from_file and from_file.end_name,
        "sha256": from_file and from_file.sha256,
    }


def _lines(facts: dict[str, object]) -> list[str]:
    name = facts["end_of_text_name"]
    return [
        f"vocabulary     {facts['vocabulary']:,}",
        f"end of text    {facts['end_of_text']}{'' if name is None else f' ({name})'}",
        f"SHA-256        {facts['sha256'] or 'none: bytes need no file'}",
    ]


def _finish(out: Output, output: Path, raw: bytes, end_of_text: str | None) -> None:
    """Write the file, once it proves to be a tokenizer."""
    from farflock.node.state.paths import write_whole
    from farflock.node.tokens.json_tokenizer import JsonTokenizer

    facts = _facts(JsonTokenizer(raw, end_of_text, str(output)))
    write_whole(output, raw)
    out.result({"file": str(output), **facts}, "\n".join([f"wrote {output}", *_lines(facts)]))


def _require_free(output: Path, force: bool) -> None:
    if output.exists() and not force:
        raise Usage(str(output), "exists", "name another file, or use --force to overwrite it")
    if not output.absolute().parent.is_dir():
        raise Usage(str(output), "its folder does not exist", "make the folder, or name another")


def _texts(sources: Sequence[Path], advance: Callable[[float], None]) -> Iterator[str]:
    """Yield the texts of files piece by piece, each up to the end of a line if it has one."""
    files = [file for source in sources for file in _files(source)]
    total, done = sum(file.stat().st_size for file in files), 0
    for file in files:
        with file.open(encoding="utf-8", errors="replace", newline="") as text:
            while piece := text.read(_READ_CHARS):
                piece += text.readline(_READ_CHARS)
                done += len(piece.encode())
                yield piece
                advance(min(done / max(total, 1), 1.0))  # replaced bytes may take more


def _files(source: Path) -> list[Path]:
    """Return a file, or the texts in a folder in the order of their paths."""
    if not source.is_dir():
        return [source]
    found = sorted(path for path in source.rglob("*") if path.suffix in _ENDINGS and path.is_file())
    if not found:
        raise Failure(
            str(source), f"it holds no {' or '.join(_ENDINGS)} files", "name the files themselves"
        )
    return found
