"""`farflock data`: turn texts into data to train on, and look at such data."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from farflock.node.cli.commands.options import size_in_bytes
from farflock.node.cli.output import Output
from farflock.node.errors import Terminated, Usage

if TYPE_CHECKING:
    from farflock.node.data.prepare import Preparation
    from farflock.node.data.sources import FoundFiles
    from farflock.node.data.verify import FolderContent

SHARD_BYTES, FIELD = 64 << 20, "text"
_RESUMES = "what was done so far is in {}; the same command goes on from there"


@click.group("data")
def command() -> None:
    """Turn texts into data to train on, and look at such data."""


@command.command("prepare")
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True)
@click.option(
    "--tokenizer",
    metavar="FILE",
    default="bytes",
    show_default=True,
    help="A tokenizer.json, a folder with one, a sentencepiece .model, or the word bytes.",
)
@click.option("--end-of-text", metavar="TOKEN", help="The token that ends a document.")
@click.option(
    "-o",
    "--output",
    "target",
    metavar="NAME",
    required=True,
    type=click.Path(path_type=Path),
    help="The folder to make.",
)
@click.option(
    "--field", default=FIELD, show_default=True, help="The field or column with the text; a.b"
)
@click.option(
    "--chat", is_flag=True, help="Read conversations (JSON lines); only answers count in the loss."
)
@click.option(
    "--chat-template",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write conversations with the template in this file (Jinja).  [default: the tokenizer's]",
)
@click.option(
    "--errors",
    type=click.Choice(["stop", "skip"]),
    default="stop",
    show_default=True,
    help="What to do about a document that cannot be read; skipped ones are counted.",
)
@click.option(
    "--text-endings",
    metavar="LIST",
    default=".txt,.md,.rst",
    show_default=True,
    help="Endings of files of plain text, each a document.",
)
@click.option("--split", default="train", show_default=True, help="Of a Hugging Face data set.")
@click.option(
    "--token-bytes",
    type=click.Choice(["2", "4"]),
    default="2",
    show_default=True,
    help="The size of a token in .bin and .ds files.",
)
@click.option(
    "--held-out",
    type=click.FloatRange(0, 0.5),
    default=0.005,
    show_default=True,
    help="The share of documents that is not trained on, at most a shard of each source.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the documents' order.")
@click.option(
    "--shard-bytes",
    metavar="SIZE",
    default=f"{SHARD_BYTES}",
    show_default="64 MiB",
    callback=size_in_bytes,
    help="The size of a shard, as in 16MB.",
)
@click.option("--threads", type=click.IntRange(1), help="Threads that tokenize.  [default: all]")
@click.option("--force", is_flag=True, help="Start over, and replace prepared data in NAME.")
@click.option("--json", "as_json", is_flag=True, help="End standard output with one line of JSON.")
def prepare(
    sources: tuple[str, ...],
    target: Path,
    threads: int | None,
    force: bool,
    as_json: bool,
    **given: Any,  # noqa: ANN401 - options of several types
) -> None:
    """Tokenize and shuffle documents, and write them to a folder that a run can name.

    SOURCE is [NAME=]PATH. PATH is a file or a folder: plain text, JSON with an object a line
    (.jsonl, also .gz and .zst), parquet, a folder that `datasets` saved, tokens of nanoGPT (.bin)
    or datatrove (.ds); or hf:NAME on the Hugging Face hub; or the word shakespeare. NAME groups
    what belongs to one source, so that a run can weigh sources.

    With --chat each line of JSON is {"messages": [{"role": ..., "content": ...}, ...]}, or
    {"prompt": ..., "completion": ...}. Without a template only the latter can be read.

    The command can be interrupted: the same command goes on where it stopped.

    \b
    Examples:
      farflock data prepare books/ -o prepared
      farflock data prepare web=crawl/ code=repos.jsonl.zst --field content \\
        --tokenizer tokenizer.json -o prepared
      farflock data prepare chats.jsonl --chat --tokenizer model/ -o prepared
    """
    import time

    out = Output(as_json)
    cores = threads or available_cores()
    if threads is not None:
        os.environ["RAYON_NUM_THREADS"] = str(threads)  # of `tokenizers`, which reads it once
    found, preparation = _preparation(sources, target, given)
    _tell_found(out, found)
    try:
        with out.progress("preparing") as progress:
            made = preparation.run(
                threads=cores, clock=time.monotonic, progress=progress, say=out.line, force=force
            )
    except (KeyboardInterrupt, Terminated):
        if preparation.partial.exists():
            out.line(_RESUMES.format(preparation.partial))
        raise
    from farflock.node.data.verify import FolderContent

    _show(out, FolderContent(made.folder), made.skipped, {})


@command.command("show")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--verify", is_flag=True, help="Compare every file with its hash.")
@click.option("--json", "as_json", is_flag=True, help="End standard output with one line of JSON.")
def show(folder: Path, verify: bool, as_json: bool) -> None:
    """Show what is in a FOLDER of prepared data."""
    from farflock.node.data.verify import FolderContent

    out, more = Output(as_json), dict[str, object]()
    content = FolderContent(folder)
    if verify:
        with out.progress("verifying") as progress:
            more["verified_files"] = content.verify(progress)
    _show(out, content, {}, more)


def _preparation(
    sources: tuple[str, ...],
    target: Path,
    given: dict[str, Any],
) -> tuple["FoundFiles", "Preparation"]:
    from farflock.node.data.documents import ReadingOptions
    from farflock.node.data.prepare import Preparation
    from farflock.node.data.sorting import SortingOptions
    from farflock.node.data.sources import find_files
    from farflock.node.tokens.json_tokenizer import read_tokenizer

    if given["chat"] or given["chat_template"] is not None:
        return _chat_preparation(sources, target, given)
    found = find_files(sources, _endings(given["text_endings"]), given["split"])
    tokenizer = read_tokenizer(given["tokenizer"], given["end_of_text"])
    reading = ReadingOptions(
        field=given["field"],
        skip=given["errors"] == "skip",
        split=given["split"],
        token_bytes=int(given["token_bytes"]),
        vocabulary=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
    )
    options = SortingOptions(
        seed=given["seed"],
        held_out=given["held_out"],
        shard_bytes=given["shard_bytes"],
        reading=reading,
    )
    return found, Preparation(found.files, tokenizer, options, target)


def _chat_preparation(
    sources: tuple[str, ...], target: Path, given: dict[str, Any]
) -> tuple["FoundFiles", "Preparation"]:
    from farflock.node.data.prepare import chat_preparation
    from farflock.node.tokens.chat import read_template, template_beside
    from farflock.node.tokens.json_tokenizer import read_tokenizer
    from farflock.node.tokens.tokenizer import BYTES

    if given["field"] != FIELD:
        raise Usage(
            "--field",
            "a conversation is in messages, or in prompt and completion",
            "leave it out, or leave out --chat",
        )
    named, template = given["tokenizer"], None
    tokenizer = read_tokenizer(named, given["end_of_text"])
    if given["chat_template"] is not None:
        template = read_template(given["chat_template"])
    elif named != BYTES:
        template = template_beside(Path(named))
    return chat_preparation(
        sources,
        tokenizer,
        template,
        target,
        held_out=given["held_out"],
        shard_bytes=given["shard_bytes"],
        seed=given["seed"],
        skip=given["errors"] == "skip",
    )


def _endings(listed: str) -> tuple[str, ...]:
    endings = tuple(each.strip() for each in listed.split(",") if each.strip())
    if wrong := [each for each in endings if not each.startswith(".") or "." in each[1:]]:
        raise Usage("--text-endings", f"{wrong[0]!r} is no ending", "write .txt,.md")
    return endings


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def _tell_found(out: Output, found: "FoundFiles") -> None:
    size = sum(file.size for file in found.files)
    out.line(f"{len(found.files):,} files with {size / 1e6:,.1f} MB")
    if found.ignored:
        kinds = ", ".join(f"{count:,} {ending}" for ending, count in found.ignored.items())
        out.line(f"left alone for their endings: {kinds}")


def _show(
    out: Output, content: "FolderContent", skipped: dict[str, int], more: dict[str, object]
) -> None:
    """Print a table of the sources, and the root."""
    from farflock.node.data.verify import held_out_tokens

    index = content.index
    sources = {
        name: {
            "documents": source.documents,
            "tokens": source.tokens,
            "shards": len(content.shards[name]),
            "held_out_tokens": held_out_tokens(source),
            "skipped": skipped.get(name, 0),
        }
        for name, source in index.sources.items()
    }
    sums = {
        key: sum(each[key] for each in sources.values())
        for key in ("documents", "tokens", "shards", "held_out_tokens", "skipped")
    }
    columns = ("source", "documents", "tokens", "shards", "held-out tokens", "skipped")
    out.table(columns, [(name, *each.values()) for name, each in sources.items()])
    answers = {"answer_tokens": content.answer_tokens()} if index.counts_answers else {}
    facts = {
        "root": content.root,
        "folder": content.folder,
        "vocabulary": index.vocabulary,
        "tokenizer": index.tokenizer.sha256 if index.tokenizer else "bytes",
        **sums,
        "bytes": content.bytes,
        "sources": sources,
        **answers,
        **more,
    }
    verified = f"\nall {more['verified_files']:,} files are whole" if more else ""
    counted = "".join(
        f"the loss counts answers only: {count / sums['tokens']:.1%} of the tokens\n"
        for count in answers.values()
    )
    out.result(
        facts,
        f"{counted}vocabulary of {index.vocabulary:,} tokens, {content.bytes / 1e6:,.1f} MB in"
        f" {content.folder}{verified}\nroot {content.root}",
    )
