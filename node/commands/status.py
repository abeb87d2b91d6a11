"""`farflock status`: what the node of a folder does now, and whom it waits for."""

from pathlib import Path

import click
import msgspec

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
    Output(as_json).result(msgspec.to_builtins(status), _text(status))


def _text(status: Status) -> str:
    lines = [
        f"run {status.run}: {status.tokens / status.total_tokens:.1%} of {status.total_tokens:,} tokens",
        f"step {status.step}, loss {status.loss if status.loss is None else format(status.loss, '.3f')}",
        f"view {status.view}: {len(status.members)} members" + ("" if status.is_member else " (not a member yet)"),
        f"sent {status.sent_bytes:,} bytes, received {status.received_bytes:,}",
    ]
    lines += [
        f"  {partner.peer[-8:]}  {partner.life:8} {partner.road:9} "
        + ("" if partner.rtt_ms is None else f"{partner.rtt_ms:.0f} ms")
        for partner in status.partners
    ]
    for wait in status.waits:
        whom = ", ".join(peer[-8:] for peer in wait.whom) or "the decision"
        lines.append(f"waits for {whom} ({wait.stream}, round {wait.round}, {wait.left_s:.0f} s left)")
    return "\n".join(lines)
