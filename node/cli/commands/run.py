"""`farflock run`: found a run from a manifest, and train in it."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from farflock.node.cli.commands.options import machine_of, machine_options
from farflock.node.cli.output import Output

if TYPE_CHECKING:
    from farflock.node.process.node_process import NodeProcess


@click.command("run")
@click.argument("manifest", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="A.B=C",
    help="Override one value of the manifest.",
)
@click.option(
    "--dry-run", is_flag=True, help="Print the resolved manifest and its hash, and do nothing."
)
@machine_options
@click.option(
    "--json", "as_json", is_flag=True, help="The last line of standard output is one JSON object."
)
def command(
    manifest: Path, assignments: tuple[str, ...], dry_run: bool, as_json: bool, **machine: object
) -> int:
    """Found the run that MANIFEST (a TOML file) describes; prints the invite that lets others join.

    Ctrl-C saves and leaves the run in good order, and exits with 130; a second one ends at once. SIGTERM, as from
    `farflock leave`, does the same and exits with 0."""
    from farflock.node.run.manifest import load

    out = Output(as_json)
    described = load(manifest, assignments)
    if dry_run:
        text = described.canonical().decode()
        out.result({"manifest": text, "hash": described.hash()}, f"{text}\nhash {described.hash()}")
        return 0
    from farflock.node.cli.commands.training import train
    from farflock.node.process.node_process import found
    from farflock.node.state.paths import write_whole

    def greet(node: "NodeProcess") -> None:
        invite = node.invite()
        write_whole(
            node.machine.folder.path / "invite.txt", f"{invite}\n".encode()
        )  # scripts wait for it
        out.line(f"run {node.run} is founded; others join with:\n\n  farflock join {invite}\n")

    return train(
        out, "farflock run", lambda started: found(machine_of(machine), described, started), greet
    )
