"""`farflock data`: turn texts into data to train on, and look at such data."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from farflock.node.cli.output import Output, conclude
from farflock.node.errors import Terminated, Usage

if TYPE_CHECKING:
    from farflock.node.data.folder import PreparedFolder
    from farflock.node.data.prepare import Preparation
    from farflock.node.data.shard_table import ShardTable
    from farflock.node.data.sources import FoundFiles
    from farflock.node.run.manifest import Manifest
    from farflock.node.tokens.tokenizer import Tokenizer

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_INVITE = "farflock:"
LOOK_TIMEOUT_S = 30.0
_RESUMES = "what was done so far is in {}; the same command goes on from there"


@click.group("data")
def command() -> None:
    """Turn texts into data to train on, and look at such data."""


@command.command("prepare")
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    "target",
    metavar="FOLDER",
    required=True,
    type=click.Path(path_type=Path),
    help="The folder to make.",
)
@click.option(
    "--tokenizer",
    metavar="FILE",
    help="A tokenizer.json, or a folder with one.  [default: bytes, or that of --add]",
)
@click.option("--end-of-text", metavar="TOKEN", help="The token that ends a document.")
@click.option(
    "--field",
    default="text",
    show_default=True,
    help="The field of JSON lines, or the column, with the text; a.b for nested ones.",
)
@click.option(
    "--held-out",
    type=click.FloatRange(0, 0.5),
    help="The share of documents that is not trained on.  [default: 0.005, or that of --add]",
)
@click.option("--keep-duplicates", is_flag=True, help="Keep equal documents.")
@click.option("--strict", is_flag=True, help="Refuse a document that cannot be read.")
@click.option("--add", is_flag=True, help="Add to the prepared data in FOLDER.")
@click.option("--cores", type=click.IntRange(1), help="Cores that tokenize.  [default: all]")
@click.option("--json", "as_json", is_flag=True, help="End standard output with one line of JSON.")
def prepare_command(
    sources: tuple[str, ...],
    target: Path,
    tokenizer: str | None,
    end_of_text: str | None,
    field: str,
    held_out: float | None,
    keep_duplicates: bool,
    strict: bool,
    add: bool,
    cores: int | None,
    as_json: bool,
) -> None:
    """Tokenize and shuffle documents, and write them to a FOLDER.

    SOURCE is a file, a folder of .txt, .md and .jsonl files, or a pattern in quotes. A file is one
    document, and so is each line of JSON; text beyond 1 MiB is cut into several. Equal documents
    are dropped, and those that cannot be read are skipped; both are counted. With the extra `data`,
    folders may have .parquet, and the .arrow files that `Dataset.save_to_disk` writes.

    The same texts give the same root on any machine. The command can be interrupted: the same
    command goes on where it stopped. With --add the shards that are there stay, and the root
    changes.

    \b
    Examples:
      farflock data prepare books/ -o prepared
      farflock data prepare notes/ "src/**/*.py" chats.jsonl --field content \\
        --tokenizer tok.json -o prepared
      farflock data prepare more/ --add -o prepared
    """
    import time

    from farflock.node.data.prepare import Preparation, PrepareOptions
    from farflock.node.data.sources import find_files
    from farflock.node.machine import usable_cores

    out = Output(as_json)
    cores = cores or usable_cores()
    os.environ["RAYON_NUM_THREADS"] = str(cores)  # of `tokenizers`, which reads it once
    found = find_files(sources)
    _tell_found(out, found)
    read, share = _terms(target, add, tokenizer, end_of_text, held_out)
    options = PrepareOptions(
        field=field, held_out=share, keep_duplicates=keep_duplicates, strict=strict
    )
    preparation = Preparation(found.files, read, options, target, add)
    try:
        size = sum(file.size for file in found.files)
        with out.progress("preparing", size) as progress:
            made = preparation.run(
                cores=cores,
                clock=time.monotonic,
                progress=progress,
                say=out.line,
            )
    except (KeyboardInterrupt, Terminated):
        _tell_resumed(out, preparation)
        raise
    for fault in made.named:
        out.line(f"skipped: {fault}")
    counted = {"skipped": made.skipped, "duplicates": made.duplicates}
    _show(out, made.content, counted)


@command.command("index")
@click.argument("files", metavar="TOKENS...", nargs=-1, required=True, type=_FILE)
@click.option(
    "-o",
    "--output",
    "target",
    metavar="FOLDER",
    required=True,
    type=click.Path(path_type=Path),
    help="The folder to make.",
)
@click.option(
    "--tokenizer",
    metavar="FILE",
    required=True,
    help="The tokenizer.json that the tokens are of, or a folder with one.",
)
@click.option("--end-of-text", metavar="TOKEN", help="The token that ends a document.")
@click.option(
    "--held-out",
    metavar="TOKENS",
    multiple=True,
    type=_FILE,
    help="A file that is not trained on, as val.bin.  [default: 0.005 of the shards]",
)
@click.option("--json", "as_json", is_flag=True, help="End standard output with one line of JSON.")
def index_command(
    files: tuple[Path, ...],
    target: Path,
    tokenizer: str,
    end_of_text: str | None,
    held_out: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Use files of TOKENS where they are: nanoGPT's .bin, datatrove's .ds, llm.c's .bin.

    They are read once, and not copied. They have 16 bits for each token if the tokenizer has up to
    65,536, or else 32, and the end of text between documents. These keep their order within the
    files: if they are not shuffled, prepare the texts instead.

    \b
    Examples:
      farflock data index train.bin --held-out val.bin --tokenizer gpt2/ -o owt
    """
    from farflock.node.data.folder import PreparedFolder
    from farflock.node.data.in_place import InPlace
    from farflock.node.tokens.json_tokenizer import JsonTokenizer, read_tokenizer

    out = Output(as_json)
    read = read_tokenizer(tokenizer, end_of_text)
    if not isinstance(read, JsonTokenizer):
        raise Usage("--tokenizer", "bytes need no index", "prepare the texts instead")
    with out.progress("indexing") as progress:
        left = InPlace(files, held_out, read).make(target, progress)
    counted = {"documents_too_long": left.documents, "tokens_after_the_last_end": left.tokens}
    _show(out, PreparedFolder(target), counted)


@command.command("show")
@click.argument("what", metavar="FOLDER|INVITE")
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Draws the documents that are shown.",
)
@click.option("--verify", is_flag=True, help="Read all shards, and compare them with their hashes.")
@click.option("--json", "as_json", is_flag=True, help="End standard output with one line of JSON.")
def show_command(what: str, seed: int, verify: bool, as_json: bool) -> int:
    """Show what a FOLDER of prepared data has, with the beginning of a few documents.

    With INVITE, show the data of that run instead, without joining it. The list of their shards
    comes from its members, and so do those with the documents that are shown.
    """
    from farflock.node.data.folder import PreparedFolder
    from farflock.node.data.index import SPLITS

    out = Output(as_json)
    if what.startswith(_INVITE):
        return _show_run(out, what, seed)
    content = PreparedFolder(Path(what))
    if verify:
        shards = [(split, place) for split in SPLITS for place in range(content.shards(split))]
        with out.progress("verifying") as progress:
            for done, (split, place) in enumerate(shards, 1):
                content.read(split, place)
                progress(done / len(shards))
    _show(out, content, {}, _documents_of(content, seed))
    return 0


def _documents_of(content: "PreparedFolder", seed: int) -> list[str]:
    """Return the beginning of a few documents of a folder."""
    from farflock.node.data.excerpts import EXCERPTS, document_around, drawn_places, shown

    index, tokenizer = content.index, _tokenizer_of(content)
    found = list[str]()
    for place in drawn_places([content.sizes("train")], seed, EXCERPTS):
        tokens = content.read("train", place.shard)
        document = document_around(tokens, index.end_of_text, place.token)
        found.append(shown(tokenizer.decode(document.tolist())))
    return found


def _tokenizer_of(content: "PreparedFolder") -> "Tokenizer":
    """Return the tokenizer with which a folder was prepared."""
    from farflock.node.data.index import TOKENIZER_NAME
    from farflock.node.tokens.json_tokenizer import JsonTokenizer, read_definition
    from farflock.node.tokens.tokenizer import ByteTokenizer

    if content.index.tokenizer is None:
        return ByteTokenizer()
    raw = read_definition(content.folder / TOKENIZER_NAME)
    return JsonTokenizer(raw, content.index.end_of_text)


def _show_run(out: Output, word: str, seed: int) -> int:
    """Print the sizes of the prepared data of a run, and a few documents."""
    import time

    import msgspec

    from farflock.node.process.data_look import look_at_data
    from farflock.node.process.network import MachineOptions
    from farflock.node.process.signals import GracefulStop, run_until_asked
    from farflock.node.run.invite import parse
    from farflock.node.state.paths import RunFolder

    invite, ending = parse(word, time.time()), GracefulStop()
    machine = MachineOptions(RunFolder.at(None))
    found = run_until_asked(ending, lambda: look_at_data(machine, invite, LOOK_TIMEOUT_S, seed))
    if found is None:
        return conclude(out, None, ending.asked)
    known, data, excerpts = found
    manifest = known.manifest
    if data is None:
        corpus = {"corpus": manifest.data.corpus, "sha256": manifest.data.sha256}
        text = f"run {invite.run} trains on the corpus {manifest.data.corpus}"
        out.result({"run": invite.run, **corpus}, text)
        return 0
    sources = [_source(local.table, manifest) for local in data.shards]
    rows = [list(each.values()) for each in sources]
    rows = [[f"{root:.16}…", f"{share:.1%}", *counts] for root, share, *counts in rows]
    out.table(("source", "of samples", "shards", "tokens", "documents", "held-out tokens"), rows)
    for each in excerpts:
        out.line(f"- {each.text or f'no member sent the shard {each.shard:.16}…'}")
    facts = {"run": invite.run, "sources": sources, "samples": msgspec.to_builtins(excerpts)}
    out.result(facts, f"run {invite.run}: {manifest.run.name}")
    return 0


def _source(table: "ShardTable", manifest: "Manifest") -> dict[str, Any]:
    """Return the sizes of one source of a run's data, and its share of the samples."""
    weights = manifest.data.weights
    share = weights[table.root] / sum(weights.values())
    train, held_out = table.index.totals("train"), table.index.totals("held-out")
    return {
        "root": table.root,
        "share": share,
        **train._asdict(),
        "held_out_tokens": held_out.tokens,
    }


def _terms(
    target: Path, add: bool, named: str | None, end_of_text: str | None, held_out: float | None
) -> "tuple[Tokenizer, float]":
    """Return the tokenizer and the held-out share: those of the folder if one is added to."""
    from farflock.node.data.folder import PreparedFolder
    from farflock.node.data.prepare import HELD_OUT
    from farflock.node.tokens.json_tokenizer import read_tokenizer
    from farflock.node.tokens.tokenizer import BYTES

    share = HELD_OUT
    if add and target.exists():
        content = PreparedFolder(target)
        share = content.index.held_out
        if named is None and content.index.tokenizer is not None:
            return _tokenizer_of(content), share if held_out is None else held_out
    return read_tokenizer(named or BYTES, end_of_text), share if held_out is None else held_out


def _tell_found(out: Output, found: "FoundFiles") -> None:
    size = sum(file.size for file in found.files)
    out.line(f"{len(found.files):,} files with {size / 1e6:,.1f} MB")
    if found.ignored:
        kinds = ", ".join(f"{count:,} {ending}" for ending, count in found.ignored.items())
        out.line(f"left alone for their endings: {kinds}")


def _tell_resumed(out: Output, preparation: "Preparation") -> None:
    if preparation.partial.exists():
        out.line(_RESUMES.format(preparation.partial))


def _show(
    out: Output, content: "PreparedFolder", counted: dict[str, int], documents: Sequence[str] = ()
) -> None:
    """Print the sizes of prepared data, the beginning of a few documents, and their root."""
    index = content.index
    train, held_out = index.totals("train"), index.totals("held-out")
    facts = {
        "root": content.root,
        "folder": content.folder,
        "shards": train.shards,
        "tokens": train.tokens,
        "vocabulary": index.vocabulary,
        "documents": train.documents,
        "held_out_shards": held_out.shards,
        "held_out_tokens": held_out.tokens,
        "held_out_documents": held_out.documents,
        "tokenizer": index.tokenizer.hash if index.tokenizer else "bytes",
        "parts": len(index.increments),
        **counted,
        **({"samples": documents} if documents else {}),
    }
    rows = [("to train on", *train), ("held out", *held_out)]
    out.table(("", *train._fields), rows)
    for text in documents:
        out.line(f"- {text}")
    more = "".join(f", {count:,} {name}" for name, count in counted.items())
    out.result(
        facts,
        f"vocabulary of {index.vocabulary:,} tokens, {len(index.increments)} parts{more}\n"
        f"root {content.root}",
    )
