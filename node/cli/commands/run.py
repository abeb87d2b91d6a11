"""`farflock run`: start a new run from a manifest, and train in it."""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from farflock.node.cli.commands.dry_run import (
    Line,
    data_facts,
    disk_facts,
    disk_text,
    members_of,
    size_facts,
    size_options,
    size_text,
)
from farflock.node.cli.commands.options import grace_of, logs_of, machine_of, machine_options
from farflock.node.cli.output import Output

if TYPE_CHECKING:
    from farflock.node.process.network import MachineOptions
    from farflock.node.process.node_process import NodeProcess
    from farflock.node.run.manifest import Manifest


@click.command("run")
@click.argument("manifest", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="A.B=C",
    help="Change one value of the manifest, as in train.lr=0.01.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the complete manifest, its hash, and what the run needs; start nothing.",
)
@size_options
@machine_options
@click.option("--json", "as_json", is_flag=True, help="End standard output with one line of JSON.")
def command(
    manifest: Path,
    assignments: tuple[str, ...],
    dry_run: bool,
    uplink: float,
    peers: int | None,
    step_s: float,
    data: tuple[Path, ...],
    as_json: bool,
    **machine: object,
) -> int:
    """Start the run that MANIFEST (a TOML file) describes, and print the invite for others.

    The same command resumes the run after a stop.

    Ctrl-C saves a checkpoint, leaves the run and exits with code 130; press it again to quit
    immediately. `farflock leave` (SIGTERM) does the same and exits with 0.

    \b
    Examples:
      farflock run plays.toml --dry-run --uplink 50mbit --peers 8
      farflock run plays.toml --host 192.0.2.7
      farflock run plays.toml --set run.total_tokens=2M --threads 4
      farflock run books.toml --data prepared
    """
    from farflock.node.run.manifest import load, model_folder

    out = Output(as_json)
    described, folder = load(manifest, assignments, data), model_folder(manifest, assignments)
    if dry_run:
        from farflock.node.data.folder import PreparedFolder
        from farflock.node.data.local_shards import table_of
        from farflock.node.model.weights_folder import WeightsFolder

        placed = machine_of({**machine, "data": data})
        shape = described.plan().model
        stored = None if folder is None else WeightsFolder(folder, shape).stored_bytes
        facts = size_facts(described, Line(peers or members_of(described), uplink, step_s), stored)
        tables = [table_of(PreparedFolder(each)) for each in data]
        sizes = data_facts(tables) if described.data.weights else None
        disk, text = disk_facts(described, placed), described.canonical().decode()
        out.result(
            {"manifest": text, "hash": described.hash(), **facts, "disk": disk, "data": sizes},
            f"{text}\nhash {described.hash()}\n\n{size_text(facts)}\n"
            + disk_text(disk, sizes, placed),
        )
        return 0
    from farflock.node.cli.commands.training import train
    from farflock.node.process.entering import found
    from farflock.node.state.paths import write_whole

    def greet(node: "NodeProcess") -> None:
        invite = node.invite()
        write_whole(
            node.machine.folder.path / "invite.txt", f"{invite}\n".encode()
        )  # scripts wait for it
        out.line(f"run {node.run} has started; others join with:\n\n  farflock join {invite}\n")
        out.line(f"{node.says_device()}\n{node.says_disk()}\n")
        node.tell_reach(lambda said: out.line(f"who can join: {said}\n"))

    return train(
        out,
        "farflock run",
        replace(_machine_of({**machine, "data": data}, described), model=folder),
        logs_of(machine),
        lambda placed, started: found(placed, described, started),
        *(greet, grace_of(machine)),
    )


def _machine_of(options: dict[str, object], described: "Manifest") -> "MachineOptions":
    """Return the machine's contribution, in the run's own folder if none is named."""
    from farflock.node.cli.own_runs import folder_to_found

    machine = machine_of(options)  # refuses what cannot be before a folder is made
    if options["folder"] is None and os.environ.get("RANK", "0") == "0":  # of several, one leads
        return replace(machine, folder=folder_to_found(described.run_id))
    return machine
