"""`farflock push`: upload an exported folder to the Hugging Face hub."""

from pathlib import Path

import click

from farflock.node.cli.output import Output
from farflock.node.cli.words import several, size


@click.command("push")
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("repository", metavar="REPOSITORY")
@click.option("--public", is_flag=True, help="Let everybody see a repository that is new.")
@click.option("--dry-run", is_flag=True, help="List the files, and upload nothing.")
@click.option("--json", "as_json", is_flag=True, help="End standard output with one line of JSON.")
def command(folder: Path, repository: str, public: bool, dry_run: bool, as_json: bool) -> None:
    """Upload FOLDER, which `farflock export` made, to REPOSITORY (organisation/model).

    A new repository is private. The token is the one of `hf auth login`, or of the environment
    variable HF_TOKEN.
    """
    from farflock.node.use.hub import exported_files, push, require_repository

    require_repository(repository)
    files = exported_files(folder)
    out, total = Output(as_json), sum(each.size_bytes for each in files)
    out.table(("file", "size"), [(each.path.name, size(each.size_bytes)) for each in files])
    facts = {"folder": str(folder), "repository": repository, "bytes": total}
    facts |= {"files": [each.path.name for each in files]}
    what = f"{several(len(files), 'file')}, {size(total)}"
    if dry_run:
        out.result({**facts, "commit": None}, f"{what}; nothing was uploaded")
        return
    commit = push(files, repository, public=public)
    out.result({**facts, "commit": commit}, f"uploaded {what}: {commit}")
