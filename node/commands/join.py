"""`farflock join`: take part in somebody's run."""

import asyncio

import click

from farflock.node.commands.options import machine_of, machine_options
from farflock.node.output import Output


@click.command("join")
@click.argument("invite")
@machine_options
@click.option("--dry-run", is_flag=True, help="Read the invite, print what it says, and do nothing.")
@click.option("--json", "as_json", is_flag=True, help="The last line of standard output is one JSON object.")
def command(invite: str, dry_run: bool, as_json: bool, **machine: object) -> None:
    """Join the run of INVITE: download its state, train, and leave with Ctrl-C whenever you like."""
    import time

    from farflock.node.invite import parse

    out = Output(as_json)
    invited = parse(invite, time.time())
    if dry_run:
        facts = {"run": invited.run, "founder": invited.founder, "addresses": list(invited.addresses)}
        out.result(facts, "\n".join(f"{name}: {value}" for name, value in facts.items()))
        return
    from farflock.node.process import Node, join

    def started(node: Node) -> None:
        members = len(node.participant.peer.port.views.newest.peers)
        out.line(f"joined run {node.run}: {node.manifest.run.name}, {members} members")

    saved = asyncio.run(join(machine_of(machine), invited, started))
    out.result({"checkpoint": str(saved)}, f"done; checkpoint {saved}")
