"""`farflock status`: what the node of a folder does now, and whom it waits for."""

from pathlib import Path

import click
import msgspec
import psutil

from farflock.node.errors import Failure
from farflock.node.output import Output
from farflock.node.paths import RunFolder
from farflock.node.status import Status, read_status


@click.command("status")
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="The node's folder.")
@click.option("--json", "as_json", is_flag=True, help="The last line of standard output is one JSON object.")
def command(folder: Path | None, as_json: bool) -> None:
    """Show what the local node does now."""
    path = RunFolder.at(folder).path / "status.json"
    try:
        status = read_status(path)
    except (OSError, msgspec.MsgspecError) as error:
        raise Failure(
            "there is no status", f"{path} cannot be read ({error})", "start a node there, or name its --folder"
        ) from None
    lives = is_node(status.pid)
    facts = {**msgspec.to_builtins(status), "running": lives}
    Output(as_json).result(facts, _text(status, lives))


def is_node(pid: int) -> bool:
    """Whether a process of ours has this number; another program may have it by now."""
    try:
        return "farflock" in " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


def _text(status: Status, lives: bool) -> str:
    step = "no step yet" if status.loss is None else f"step {status.step:,}, loss {status.loss:.3f}"
    pace = "" if status.tokens_per_s is None else f", {status.tokens_per_s:,.0f} tokens/s"
    rounds = ", ".join(f"{count} {kind}" for kind, count in sorted(status.rounds.items()))
    lines = [
        f"process {status.pid} {status.doing}" if lives else "the node does not run; this is what it wrote last",
        f"run {status.run}: {status.tokens / status.total_tokens:.1%} of {status.total_tokens:,} tokens",
        f"{step}{pace}",
        f"rounds applied: {rounds}; the last is {status.last_round}" if rounds else "no round applied yet",
        f"view {status.view}: {len(status.members)} members" + ("" if status.is_member else " (not a member yet)"),
        f"sent {status.sent_bytes:,} bytes, received {status.received_bytes:,}",
    ]
    lines += [
        f"  {partner.peer[-8:]}  {partner.life:8} {partner.road:9} "
        + ("" if partner.rtt_ms is None else f"{partner.rtt_ms:.0f} ms")
        for partner in status.partners
    ]
    for wait in status.waits:
        lines.append(f"waits for {wait.said({})}")
    return "\n".join(lines)
