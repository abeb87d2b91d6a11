"""`farflock status`: what the node on this machine is doing, or a run as seen from outside."""

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from farflock.node.cli.commands.invites import read_invite
from farflock.node.cli.output import Output, conclude
from farflock.node.errors import Failure
from farflock.node.process.status import Status, read_status
from farflock.node.state.node_lock import NodeHere, node_in
from farflock.node.state.paths import RunFolder

if TYPE_CHECKING:
    from farflock.node.process.inspect_run import RunInspection

LOOK_TIMEOUT_S = 30.0
SHOWN_STATEMENTS = 8  # the newest; `--json` has all


@click.command("status")
@click.argument("invite", required=False, metavar="INVITE")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="The node's folder (default: the one that `run` and `join` use).",
)
@click.option(
    "--suspects",
    "only_suspects",
    is_flag=True,
    help="Show only the peers that made false statements, and which.",
)
@click.option("--json", "as_json", is_flag=True, help="End standard output with one line of JSON.")
def command(invite: str | None, folder: Path | None, only_suspects: bool, as_json: bool) -> int:
    """Show what the node on this machine is doing and which members it waits for.

    With INVITE, show that run and its members instead, without joining it. As with `farflock
    join`, that is the invite, a file with it, or `-` for standard input.
    """
    if invite is not None and only_suspects:
        raise click.UsageError("--suspects is about the node on this machine; leave INVITE out")
    if invite is not None:
        return _look(Output(as_json), read_invite(invite), folder)
    place = RunFolder.at(folder).path
    status, here = last_status(place), node_in(place)
    if only_suspects:
        suspects = msgspec.to_builtins(status.suspects)
        Output(as_json).result({"suspects": suspects}, _suspects(status))
        return 0
    facts = {**msgspec.to_builtins(status), "running": here is not None}
    Output(as_json).result(facts, _text(status, here))
    return 0


def _suspects(status: Status) -> str:
    lines = [
        f"{each.said()}, last {_clock(each.last_s)}"
        for each in sorted(status.suspects, key=lambda each: -each.last_s)
    ]
    return "\n".join(lines) or "no peer has made a false statement"


def _clock(unix_s: int) -> str:
    """Return a moment as local date and time."""
    import time

    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def last_status(folder: Path) -> Status:
    """Return the status that the node in this folder wrote last; raise `Failure` if there is
    none."""
    path = folder / "status.json"
    try:
        return read_status(path)
    except FileNotFoundError:
        remedy = "start one with `farflock join INVITE`, or name its --folder"
        raise Failure(f"no node has run in {folder}", "", remedy) from None
    except OSError as error:
        why = str(error.strerror)
    except msgspec.MsgspecError:
        why = "it is not a status file"
    raise Failure(f"{path} cannot be read", why, "name the --folder of a node")


def _look(out: Output, word: str, folder: Path | None) -> int:
    """Print a run's manifest and members, as the members report them."""
    import time

    from farflock.node.process.inspect_run import inspect_run
    from farflock.node.process.network import MachineOptions
    from farflock.node.process.signals import GracefulStop, run_until_asked
    from farflock.node.run.invite import parse

    invite, ending = parse(word, time.time()), GracefulStop()
    sight = run_until_asked(
        ending, lambda: inspect_run(MachineOptions(RunFolder.at(folder)), invite, LOOK_TIMEOUT_S)
    )
    if sight is None:
        return conclude(out, None, ending.asked)
    text = sight.manifest.canonical().decode()
    facts = {
        "run": invite.run,
        "founder": invite.founder,
        "manifest": text,
        "hash": sight.manifest.hash(),
    }
    said = msgspec.to_builtins((sight.view, sight.branch, sight.members))
    facts |= dict(zip(("view", "branch", "members"), said, strict=True))
    facts["evaluations"] = msgspec.to_builtins(sight.evaluations)
    out.result(facts, _seen(invite.run, sight))
    return 0


def _seen(run: str, sight: "RunInspection") -> str:
    manifest, branch = sight.manifest, f", on branch {sight.branch}" if sight.branch else ""
    here = sum(member.answers for member in sight.members)
    lines = [
        f"run {run}: {manifest.run.name}, method {manifest.method.name},"
        f" {manifest.run.total_tokens:,} tokens",
        f"members: {len(sight.members)}, answering: {here} (view {sight.view}{branch})",
    ]
    lines += [f"held-out loss: {each.said()}, by {each.by[-8:]}" for each in sight.evaluations]
    for member in sight.members:
        how = "does not answer" if not member.answers else _ms(member.rtt_ms) or "answers"
        where = member.addresses[0] if member.addresses else "accepts no connections"
        lines.append(f"  {member.peer[-8:]}  {how:15}  {where}")
    return "\n".join(lines)


def _ms(rtt_ms: float | None) -> str:
    return "" if rtt_ms is None else f"{rtt_ms:.0f} ms"


def _process(status: Status, here: NodeHere | None) -> str:
    if here is None:
        return "the node is not running; this is its last status"
    if here.pid not in (None, status.pid):
        return f"process {here.pid} is starting; this is the last status of the node before it"
    return f"process {status.pid} {status.doing}"


def _text(status: Status, here: NodeHere | None) -> str:
    step = "no step yet" if status.loss is None else f"step {status.step:,}, loss {status.loss:.3f}"
    pace = "" if status.tokens_per_s is None else f", {status.tokens_per_s:,.0f} tokens/s"
    pace += "" if status.busy is None else f", busy {status.busy:.0%} of the time"
    pace += "" if status.mfu is None else f", MFU {status.mfu:.0%}"
    rounds = ", ".join(f"{count} {kind}" for kind, count in sorted(status.rounds.items()))
    relayed = f", forwarded {status.relayed_bytes:,} for others" if status.relayed_bytes else ""
    lines = [
        _process(status, here),
        f"run {status.run}: {status.tokens / status.total_tokens:.1%}"
        f" of {status.total_tokens:,} tokens",
        f"{step}{pace}",
        f"rounds applied: {rounds}; the last is number {status.last_round}"
        if rounds
        else "no round applied yet",
        f"members: {len(status.members)}, {len(status.voters)} with a vote"
        + ("" if status.is_member else " (this node is not a member yet)"),
        f"sent {status.sent_bytes:,} bytes, received {status.received_bytes:,}{relayed}",
    ]
    if status.fragile:
        lines.append(status.fragile)
    if status.evaluation is not None:
        by = status.evaluation.by[-8:]
        lines.append(f"held-out loss: {status.evaluation.said()}, measured by {by}")
    if status.no_evaluation:
        lines.append(f"this node does not evaluate: {status.no_evaluation}")
    if status.guard:
        lines.append(f"the training may have gone wrong: {status.guard}")
    lines += [f"lies: {each.said()}" for each in status.suspects]
    if status.exchanges:
        lines.append(f"outer state and exchanges: {status.exchanges}")
    lines += [f"the founder states, {words}" for words in status.statements[-SHOWN_STATEMENTS:]]
    if status.branch is not None:
        name, since = status.branch
        lines.append(
            f"on branch {name} since round {since}: most members cannot be reached,"
            " and those here continue without them"
        )
    lines += [
        f"  {partner.peer[-8:]}  {partner.life:8} {partner.road:9} " + _ms(partner.rtt_ms)
        for partner in status.partners
    ]
    for wait in status.waits:
        lines.append(f"waits for {wait.said({})}")
    return "\n".join(lines)
