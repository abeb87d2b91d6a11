"""`farflock join`: take part in somebody's run."""

import contextlib
from typing import TYPE_CHECKING

import click

from farflock.node.cli.commands.options import machine_of, machine_options
from farflock.node.cli.output import Output, conclude

if TYPE_CHECKING:
    from farflock.node.process.network import MachineOptions
    from farflock.node.process.node_process import NodeProcess
    from farflock.node.run.invite import Invite

LOOK_TIMEOUT_S = 30.0


@click.command("join")
@click.argument("invite")
@machine_options
@click.option(
    "--dry-run",
    is_flag=True,
    help="Look the run up, print its manifest and hash, and join nothing.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="The last line of standard output is one JSON object."
)
def command(invite: str, dry_run: bool, as_json: bool, **machine: object) -> int:
    """Join the run of INVITE: download its state, train, and leave with Ctrl-C whenever you like.

    Ctrl-C saves and leaves the run in good order, and exits with 130; a second one ends at once. SIGTERM, as from
    `farflock leave`, does the same and exits with 0."""
    import time

    from farflock.node.run.invite import parse

    out = Output(as_json)
    invited = parse(invite, time.time())
    if dry_run:
        return _look(out, machine_of(machine), invited)
    from farflock.node.cli.commands.training import train
    from farflock.node.process.network import LEARN_TIMEOUT_S
    from farflock.node.process.node_process import join

    def greet(node: "NodeProcess") -> None:
        stack.close()  # the bar makes room for the live view
        members = len(node.member.peer.context.views.newest.peers)
        out.line(f"joined run {node.run}: {node.manifest.run.name}, {members} members")

    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(out.progress("downloading the run's state"))
        return train(
            out,
            "farflock join",
            lambda started: join(
                machine_of(machine),
                invited,
                started,
                LEARN_TIMEOUT_S,
                lambda here, total: progress(here / total),
            ),
            greet,
        )


def _look(out: Output, machine: "MachineOptions", invited: "Invite") -> int:
    """Print what joining would train, read from the run's members under a throwaway identity."""
    from farflock.node.process.inspect_run import fetch_manifest
    from farflock.node.process.signals import GracefulStop, run_until_asked
    from farflock.node.run.memory import needed_bytes

    ending = GracefulStop()
    manifest = run_until_asked(ending, lambda: fetch_manifest(machine, invited, LOOK_TIMEOUT_S))
    if manifest is None:
        return conclude(out, None, ending.asked)
    text, needed = manifest.canonical().decode(), needed_bytes(manifest.plan())
    facts = {
        "run": invited.run,
        "founder": invited.founder,
        "addresses": list(invited.addresses),
        "memory_bytes": needed,
        "manifest": text,
        "hash": manifest.hash(),
    }
    memory = f"about {needed / 1e6:,.0f} MB of memory"
    out.result(
        facts,
        f"{text}\nrun {invited.run}, founded by {invited.founder}; {memory}\nhash {manifest.hash()}",
    )
    return 0
