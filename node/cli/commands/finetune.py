"""`farflock finetune`: train adapters for a model on conversations, alone or with others."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from farflock.node.cli.commands.data import available_cores
from farflock.node.cli.commands.options import machine_of, own_machine_options, with_folders
from farflock.node.cli.output import Output
from farflock.node.errors import Usage

if TYPE_CHECKING:
    from farflock.node.data.index import DataIndex
    from farflock.node.run.finetuning import Finetuning


@click.command("finetune")
@click.argument("base", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--data",
    "sources",
    multiple=True,
    required=True,
    metavar="SOURCE",
    help="JSON lines of conversations, or a folder that `farflock data prepare` made; files may be"
    " given several times.",
)
@click.option(
    "--chat-template",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write conversations with the template in this file (Jinja).  [default: BASE's]",
)
@click.option("--name", default="finetune", show_default=True, help="Name of the run.")
@click.option("--rank", type=int, default=16, show_default=True, help="Rank of the adapters.")
@click.option("--alpha", type=float, help="Their factor is alpha / rank.  [default: 2 · rank]")
@click.option(
    "--targets",
    metavar="A,B",
    help="The matrices that have adapters, as in q_proj,v_proj.  [default: all that can]",
)
@click.option(
    "--epochs",
    type=click.FloatRange(0, 10_000, min_open=True),
    default=1.0,
    show_default=True,
    help="Passes over the data, of all peers together.",
)
@click.option("--batch", type=click.IntRange(1), default=8, show_default=True, help="Sequences.")
@click.option("--seq", type=click.IntRange(1), help="Tokens of a sequence.  [default: up to 1024]")
@click.option("--lr", type=float, default=2e-4, show_default=True, help="The learning rate.")
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="A.B=C",
    help="Change one value of the manifest, as in train.clip=0.5.",
)
@click.option("--dry-run", is_flag=True, help="Write and print the manifest; start nothing.")
@own_machine_options
@click.option("--json", "as_json", is_flag=True, help="End standard output with one line of JSON.")
def command(
    base: Path,
    sources: tuple[str, ...],
    chat_template: Path | None,
    name: str,
    rank: int,
    alpha: float | None,
    targets: str | None,
    epochs: float,
    batch: int,
    seq: int | None,
    lr: float,
    assignments: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
    **machine: Any,  # noqa: ANN401 - click's
) -> int:
    """Train adapters (LoRA) for the model in BASE, a Hugging Face folder, on conversations.

    Only the answers count in the loss. The command prints an invite: whoever joins trains the same
    adapters, and gets BASE from you. Each line of the data is {"messages": [{"role": ...,
    "content": ...}, ...]}, or {"prompt": ..., "completion": ...}.

    The prepared data and the manifest, finetune.toml, come into this node's folder. The same
    command in the same folder goes on after a stop; `farflock export` then writes the adapters.

    \b
    Examples:
      farflock finetune llama/ --data chats.jsonl --folder tuned
      farflock finetune llama/ --data chats.jsonl --base-precision nf4 --host 192.0.2.7
    """
    from farflock.node.cli.commands.run import start_run
    from farflock.node.run.finetuning import Finetuning
    from farflock.node.run.manifest import load

    out, node = Output(as_json), machine_of({**machine, "data": (), "base": ()})
    named = tuple(targets.split(",")) if targets else None
    terms = Finetuning(name, rank, alpha, named, epochs, batch, seq, lr)
    data, index = _prepared(out, base, sources, chat_template, node.folder.path)
    path = _written(terms, base, data, index, node.folder.path)
    described = load(path, assignments)
    if dry_run:
        text = described.canonical().decode()
        facts = {"manifest": text, "hash": described.hash(), "file": str(path)}
        out.result(facts, f"{text}\nhash {described.hash()}\nwritten to {path}")
        return 0
    return start_run(out, "farflock finetune", with_folders(node, data, base), described)


def _prepared(
    out: Output, base: Path, sources: tuple[str, ...], template: Path | None, folder: Path
) -> tuple[Path, "DataIndex"]:
    """Return the folder of prepared data and its index, after preparing conversations."""
    from farflock.node.data.verify import FolderContent

    given = Path(sources[0])
    if len(sources) == 1 and given.is_dir() and (given / "index.json").is_file():
        if template is not None:
            raise Usage("--chat-template", "the data are prepared already", "leave it out")
        return given, FolderContent(given).index
    from farflock.node.data.prepare import chat_preparation
    from farflock.node.tokens.chat import read_template, template_beside
    from farflock.node.tokens.json_tokenizer import read_tokenizer

    tokenizer = read_tokenizer(str(base), None)
    written = template_beside(base) if template is None else read_template(template)
    _, preparation = chat_preparation(sources, tokenizer, written, folder / "data")
    with out.progress("preparing the conversations") as progress:
        made = preparation.run(
            threads=available_cores(), clock=time.monotonic, progress=progress, say=out.line
        )
    return made.folder, made.index


def _written(terms: "Finetuning", base: Path, data: Path, index: "DataIndex", folder: Path) -> Path:
    """Write the manifest into the node's folder; return its path."""
    from farflock.node.model.hf_config import config_in
    from farflock.node.run.finetuning import finetuning_tables
    from farflock.node.run.toml import to_toml
    from farflock.node.state.paths import RunFolder, write_whole

    places = base.absolute(), config_in(base), data.absolute(), index
    tables = finetuning_tables(terms, *places)
    RunFolder(folder).make()
    path = folder / "finetune.toml"
    write_whole(path, to_toml(tables).encode())
    return path
