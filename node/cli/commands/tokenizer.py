"""`farflock tokenizer`: learn a tokenizer from texts."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click

from farflock.node.cli.output import Output
from farflock.node.errors import Failure, Usage

_READ_CHARS = 1 << 20
_ENDINGS = (".txt", ".md")


@click.group("tokenizer")
def command() -> None:
    """Learn a tokenizer from texts.

    Farflock takes any tokenizer.json of Hugging Face's `tokenizers`, or bytes.
    """


@command.command("train")
@click.argument(
    "sources", metavar="SOURCE...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The tokenizer.json to write.",
)
@click.option(
    "--vocab",
    type=click.IntRange(258, 2**20),
    default=32_768,
    show_default=True,
    help="Number of tokens: the 256 bytes, the end of text, and pieces of words.",
)
@click.option("--force", is_flag=True, help="Overwrite FILE.")
@click.option("--json", "as_json", is_flag=True, help="End standard output with one line of JSON.")
def train_command(
    sources: tuple[Path, ...], output: Path, vocab: int, force: bool, as_json: bool
) -> None:
    """Learn a tokenizer from texts: SOURCE is a text file, or a folder of .txt and .md files.

    It is byte-level BPE, so it encodes any text. The same texts give the same file.

    \b
    Examples:
      farflock tokenizer train plays/ --vocab 8192 -o tok.json
    """
    from farflock.node.state.paths import write_whole
    from farflock.node.tokens.json_tokenizer import JsonTokenizer
    from farflock.node.tokens.tokenizer_training import train_tokenizer

    _require_free(output, force)
    out = Output(as_json)
    with out.progress("reading texts") as advance:
        raw = train_tokenizer(_texts(sources, advance, out), vocab)
    made = JsonTokenizer(raw)
    write_whole(output, raw)
    facts = {
        "file": str(output),
        "vocabulary": made.vocab_size,
        "end_of_text": made.end_name,
        "hash": made.hash,
        "bytes": len(raw),
    }
    out.result(
        facts,
        f"wrote {output}: {made.vocab_size:,} tokens, {made.end_name} ends a text,"
        f" BLAKE3 {made.hash}",
    )


def _require_free(output: Path, force: bool) -> None:
    if output.exists() and not force:
        raise Usage(str(output), "it exists", "name another file, or use --force to overwrite it")
    if not output.absolute().parent.is_dir():
        raise Usage(str(output), "its folder does not exist", "make the folder, or name another")


def _texts(sources: Sequence[Path], advance: Callable[[float], None], out: Output) -> Iterator[str]:
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
    out.line(f"learning from {done:,} bytes of text")


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
