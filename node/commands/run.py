"""`farflock run`: found a run from a manifest, and train in it."""

import asyncio
from pathlib import Path

import click

from farflock.node.commands.options import machine_of, machine_options
from farflock.node.output import Output


@click.command("run")
@click.argument("manifest", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--set", "assignments", multiple=True, metavar="A.B=C", help="Override one value of the manifest.")
@click.option("--dry-run", is_flag=True, help="Print the resolved manifest and its hash, and do nothing.")
@machine_options
@click.option("--json", "as_json", is_flag=True, help="The last line of standard output is one JSON object.")
def command(manifest: Path, assignments: tuple[str, ...], dry_run: bool, as_json: bool, **machine: object) -> None:
    """Found the run that MANIFEST (a TOML file) describes; prints the invite that lets others join."""
    from farflock.node.manifest import load

    out = Output(as_json)
    described = load(manifest, assignments)
    if dry_run:
        text = described.canonical().decode()
        out.result({"manifest": text, "hash": described.hash()}, f"{text}\nhash {described.hash()}")
        return
    from farflock.node.process import Node, found

    def started(node: Node) -> None:
        (node.machine.folder.path / "invite.txt").write_text(node.invite() + "\n")
        out.line(f"run {node.run} is founded; others join with:\n\n  farflock join {node.invite()}\n")

    saved = asyncio.run(found(machine_of(machine), described, started))
    out.result({"checkpoint": str(saved)}, f"done; checkpoint {saved}")
