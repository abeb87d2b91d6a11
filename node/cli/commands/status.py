"""`farflock status`: what the node on this machine is doing, or a run as seen from outside."""

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from farflock.node.cli import words
from farflock.node.cli.output import Output, conclude
from farflock.node.cli.own_runs import last_folder
from farflock.node.errors import Failure
from farflock.node.process.status import Status, is_node, read_status

if TYPE_CHECKING:
    from farflock.node.process.inspect_run import RunInspection

LOOK_TIMEOUT_S = 30.0


@click.command("status")
@click.argument("invite", required=False)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="The node's folder (default: that of the node that runs, or ran last).",
)
@click.option("--json", "as_json", is_flag=True, help="End standard output with one line of JSON.")
def command(invite: str | None, folder: Path | None, as_json: bool) -> int:
    """Show what the node on this machine is doing and which members it waits for.

    With INVITE, show that run and its members instead, without joining it.
    """
    if invite is not None:
        return _look(Output(as_json), invite)
    status = _last_status(folder or last_folder().path)
    lives = is_node(status.pid)
    facts = {**msgspec.to_builtins(status), "running": lives}
    Output(as_json).result(facts, _text(status, lives))
    return 0


def _last_status(folder: Path) -> Status:
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


def _look(out: Output, word: str) -> int:
    """Print a run's manifest and members, as the members report them."""
    import hashlib
    import time

    from farflock.node.process.inspect_run import inspect_run
    from farflock.node.process.signals import GracefulStop, run_until_asked
    from farflock.node.run.invite import parse

    invite, ending = parse(word, time.time()), GracefulStop()
    sight = run_until_asked(ending, lambda: inspect_run(invite, LOOK_TIMEOUT_S))
    if sight is None:
        return conclude(out, None, ending.asked)
    facts = {
        "run": invite.run,
        "founder": sight.founder,
        "manifest": sight.manifest,
        "hash": hashlib.sha256(sight.manifest.encode()).hexdigest(),
    }
    said = msgspec.to_builtins((sight.view, sight.branch, sight.members, sight.evaluation))
    facts |= dict(zip(("view", "branch", "members", "evaluation"), said, strict=True))
    out.result(facts, _seen(invite.run, sight))
    return 0


def _seen(run: str, sight: "RunInspection") -> str:
    branch = f", on branch {sight.branch}" if sight.branch else ""
    here = sum(member.answers for member in sight.members)
    lines = [
        f"run {run}: {sight.terms.said()}",
        f"members: {len(sight.members)}, answering: {here} (view {sight.view}{branch})",
    ]
    if sight.evaluation is not None:
        lines += sight.evaluation.lines()
    for member in sight.members:
        how = "does not answer" if not member.answers else _ms(member.rtt_ms) or "answers"
        where = member.addresses[0] if member.addresses else "accepts no connections"
        lines.append(f"  {member.peer[-8:]}  {how:15}  {where}")
    return "\n".join(lines)


def _ms(rtt_ms: float | None) -> str:
    return "" if rtt_ms is None else f"{rtt_ms:.0f} ms"


def _text(status: Status, lives: bool) -> str:
    step = "no step yet" if status.loss is None else f"step {status.step:,}, loss {status.loss:.3f}"
    pace = "" if status.tokens_per_s is None else f", {status.tokens_per_s:,.0f} tokens/s"
    busy = "" if status.busy_share is None else f", computing {status.busy_share:.0%} of the time"
    rounds = ", ".join(f"{count} {kind}" for kind, count in sorted(status.rounds.items()))
    yet = " (this node is not a member yet)" if lives and not status.is_member else ""
    lines = [
        f"process {status.pid} {status.doing}"
        if lives
        else "the node is not running; this is its last status",
        f"run {status.run}: {status.tokens / status.total_tokens:.1%}"
        f" of {status.total_tokens:,} tokens",
        f"{step}{pace}{busy}",
        f"rounds applied: {rounds}; the last is number {status.last_round}"
        if rounds
        else "no round applied yet",
        f"members: {len(status.members)}{yet}",
        f"sent {status.sent_bytes:,} bytes, received {status.received_bytes:,}",
    ]
    if status.evaluation is not None:
        lines += status.evaluation.lines()
    if status.data is not None:
        lines += [f"data: {words.data(status.data)}", f"data: {words.copies(status.data)}"]
        if status.data.waits_for:
            lines.append(f"waits for {status.data.waits_for}")
    if status.exchanges:
        lines.append(f"outer state and exchanges: {status.exchanges}")
    if status.branch is not None:
        name, since = status.branch
        lines.append(
            f"on branch {name} since round {since}: most members cannot be reached,"
            " and those here continue without them"
        )
    lines += [
        f"  {partner.peer[-8:]}  {partner.life:8} {partner.road:9} {_ms(partner.rtt_ms)}"
        + ("  draws the same data as this node" if partner.twin else "")
        + (f"  sent {partner.sent_bytes / 1e6:,.1f} MB" if partner.sent_bytes else "")
        + (f", forwarded {partner.relayed_bytes / 1e6:,.1f} MB" if partner.relayed_bytes else "")
        + (f"  is slower than it was: its {partner.slow}" if partner.slow else "")
        for partner in status.partners
    ]
    for wait in status.waits:
        lines.append(f"waits for {wait.said({})}")
    return "\n".join(lines)
