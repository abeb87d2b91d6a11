"""`farflock join`: take part in another peer's run."""

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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
from farflock.node.cli.commands.options import (
    grace_of,
    logs_of,
    machine_of,
    machine_options,
    place_of,
)
from farflock.node.cli.output import Output, conclude

if TYPE_CHECKING:
    from farflock.node.process.network import MachineOptions
    from farflock.node.process.node_process import NodeProcess
    from farflock.node.run.invite import Invite

LOOK_TIMEOUT_S = 30.0
ANSWER_S = 3.0  # for members to answer before anything else is known of the run
HEAVY = ("farflock.node.cli.commands.training", "farflock.node.process.entering")


@click.command("join")
@click.argument("invite", required=False, metavar="INVITE")
@machine_options
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the run's manifest and what it needs; join nothing.",
)
@click.option(
    "--no-wait",
    is_flag=True,
    help="End with exit code 3 if the run is full, instead of waiting until a member leaves.",
)
@size_options
@click.option("--json", "as_json", is_flag=True, help="End standard output with one line of JSON.")
def command(
    invite: str | None,
    dry_run: bool,
    no_wait: bool,
    uplink: float,
    peers: int | None,
    step_s: float,
    as_json: bool,
    **machine: Any,  # noqa: ANN401 - click gives each its type
) -> int:
    """Join the run of INVITE: download its state and train until the run ends or you leave.

    INVITE is the word that begins with `farflock:`. You need no account and no open port: a
    machine behind NAT can join too. Without an INVITE, the last run is gone on with.

    Ctrl-C saves a checkpoint, leaves the run and exits with code 130; press it again to quit
    immediately. `farflock leave` (SIGTERM) does the same and exits with 0.

    \b
    Examples:
      farflock join farflock:k5cBx… --dry-run
      farflock join farflock:k5cBx… --threads 4
    """
    import time

    from farflock.node.assembly.session import parse_own
    from farflock.node.cli.own_runs import folder_of, last_invite
    from farflock.node.run.invite import parse
    from farflock.node.state.paths import RunFolder

    out = Output(as_json)
    if invite is None:
        own, invited = last_invite()
        machine["folder"] = machine["folder"] or own.folder.path
        out.line(f"going on with the last run, {own.run} {own.name}".rstrip())
    else:
        run = parse(invite, 0.0).run
        machine["folder"] = machine["folder"] or folder_of(run).path
        invited = parse_own(invite, RunFolder(machine["folder"]), time.time())
    if dry_run:
        return _look(out, machine_of(machine), invited, (peers, uplink, step_s))
    _require_startable(machine)
    if (stopped := _show(out, invited)) is not None:
        return stopped
    from farflock.node.assembly.learnt import LEARN_TIMEOUT_S
    from farflock.node.cli.commands.training import train
    from farflock.node.process.entering import join

    def greet(node: "NodeProcess") -> None:
        stack.close()  # the bar makes room for the live view
        members = len(node.member.peer.context.views.newest.peers)
        out.line(f"joined run {node.run}: {node.manifest.run.name}, {members} members")
        out.line(node.says_device())
        out.line(node.says_disk())
        node.tell_reach(lambda said: out.line(f"who can reach this node: {said}"))

    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(out.download("downloading the run's state"))
        return train(
            out,
            "farflock join",
            machine_of(machine),
            logs_of(machine),
            lambda placed, started: join(
                placed, invited, started, LEARN_TIMEOUT_S, progress, waits_for_room=not no_wait
            ),
            greet,
            grace_of(machine),
        )


def _require_startable(machine: Mapping[str, Any]) -> None:
    """Refuse options with which the node could not start, before anything is opened."""
    from farflock.node.assembly.own_world import require_startable
    from farflock.node.state.paths import RunFolder

    if machine["device"] not in ("auto", "cpu") or machine["outer"] == "device":
        machine_of(machine)  # only torch knows what devices there are
    place = place_of(machine)
    require_startable(RunFolder.at(machine["folder"]).path, place.hosts(), *place.ports)


def _show(out: Output, invited: "Invite") -> int | None:
    """Show the run that members of the invite tell of, while what trains is imported; return the
    exit code if the user stops meanwhile.

    If none answers yet, joining goes on: it has more ways and more time."""
    import os

    from farflock.node.cli.importing import importing
    from farflock.node.errors import RefusedByRun
    from farflock.node.process.inspect_run import show_run
    from farflock.node.process.signals import GracefulStop, run_until_asked

    if os.environ.get("RANK", "0") != "0":  # of several processes of one peer, one speaks
        return None
    ending = GracefulStop()
    with importing(*HEAVY):
        try:
            said = run_until_asked(ending, lambda: show_run(invited, ANSWER_S))
        except RefusedByRun:
            out.line("no member of the invite has answered yet; others are looked for")
            return None
        if said is None:
            return conclude(out, None, ending.asked)
        out.line(f"run {invited.run}: {said}")
    return None


def _look(
    out: Output,
    machine: "MachineOptions",
    invited: "Invite",
    assumed: tuple[int | None, float, float],
) -> int:
    """Print what a joiner would train, as the run's members tell a throwaway identity."""
    from farflock.node.process.data_look import look_at_data
    from farflock.node.process.signals import GracefulStop, run_until_asked

    ending = GracefulStop()
    found = run_until_asked(ending, lambda: look_at_data(machine, invited, LOOK_TIMEOUT_S))
    if found is None:
        return conclude(out, None, ending.asked)
    known, data, _ = found
    manifest = known.manifest
    peers, uplink, step_s = assumed
    text = manifest.canonical().decode()
    sizes = size_facts(manifest, Line(peers or members_of(manifest), uplink, step_s))
    facts = {
        "run": invited.run,
        "founder": known.founder,
        "addresses": [member.endpoints[0] for member in invited.members],
        "manifest": text,
        "hash": manifest.hash(),
        **sizes,
        "disk": (disk := disk_facts(manifest, machine)),
        "data": None if data is None else data_facts([each.table for each in data.shards]),
    }
    out.result(
        facts,
        f"{text}\nrun {invited.run}, started by {known.founder}\n"
        f"hash {manifest.hash()}\n\n{size_text(sizes)}\n" + disk_text(disk, facts["data"], machine),
    )
    return 0
