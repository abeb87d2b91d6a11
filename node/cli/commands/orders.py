"""`farflock anchor`, `ban`, `close`, `open` and `promote`: the founder's statements on its run.

Each is signed with the founder's key and left in its folder, where the node takes it in and tells
all members; a node that is not running does so once it is started.
"""

from pathlib import Path

import click

from farflock.node.cli.commands.status import last_status
from farflock.node.cli.output import Output
from farflock.node.errors import Failure, Usage
from farflock.node.process.status import Status
from farflock.node.run.invite import parse
from farflock.node.state.paths import RunFolder
from farflock.swarm.identity import Identity, is_peer_id
from farflock.swarm.messages import MAX_MEMBERS
from farflock.swarm.statements import AnchoredView, BadStatement, StatementKind, StatementLog, seal

SHORTEST_SUFFIX = 6  # characters of a peer's id that name it, as far as they name one member

_folder_option = click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="The founder's folder (default: the one that `run` uses).",
)
_json_option = click.option(
    "--json", "as_json", is_flag=True, help="End standard output with one line of JSON."
)


@click.command("anchor")
@_folder_option
@_json_option
def anchor(folder: Path | None, as_json: bool) -> None:
    """State that the run is on the line of views that this node is on. If it has parted into
    several lines, all others give theirs up for this one, with what they trained on it, and
    newcomers follow it.

    What is stated is the newest view that the node knows. Only the run's founder can anchor, and
    the newest anchor holds.

    \b
    Examples:
      farflock anchor
    """
    _state(folder, as_json, "anchor")


@click.command("ban")
@click.argument("peer")
@_folder_option
@_json_option
def ban(peer: str, folder: Path | None, as_json: bool) -> None:
    """Put PEER out of the run for good: all members cut their links to it, and the next change of
    members leaves it out.

    PEER is a peer's id, or the end of a member's, as `farflock status` shows it. Only the run's
    founder can ban, and a ban cannot be taken back.

    \b
    Examples:
      farflock ban 3f9KXw2b
    """
    _state(folder, as_json, "ban", peer)


@click.command("close")
@_folder_option
@_json_option
def close(folder: Path | None, as_json: bool) -> None:
    """Let nobody new into the run, whatever invites there are. Members may come back.

    Only the run's founder can close it. `farflock open` takes that back.

    \b
    Examples:
      farflock close
    """
    _state(folder, as_json, "close")


@click.command("open")
@_folder_option
@_json_option
def reopen(folder: Path | None, as_json: bool) -> None:
    """Let new peers in again after `farflock close`.

    \b
    Examples:
      farflock open
    """
    _state(folder, as_json, "open")


@click.command("promote")
@click.argument("peer")
@click.option("--votes", type=click.IntRange(0, MAX_MEMBERS), default=1, show_default=True)
@_folder_option
@_json_option
def promote(peer: str, votes: int, folder: Path | None, as_json: bool) -> None:
    """State that PEER has this many votes. In this version every member has one vote, whatever
    is stated; the statement is kept and passed on.

    \b
    Examples:
      farflock promote 3f9KXw2b --votes 1
    """
    _state(folder, as_json, "promote", peer, votes)


def _state(
    folder: Path | None, as_json: bool, kind: StatementKind, peer: str = "", votes: int = 0
) -> None:
    """Sign a statement and leave it in the founder's folder."""
    from farflock.node.process.statement_files import StatementFiles

    place = RunFolder.at(folder)
    status = last_status(place.path)
    founder = _founder(place, status)
    key = _named(peer, status) if kind in ("ban", "promote") else ""
    if key == founder.peer:
        raise Usage("PEER", "it is the founder itself", "name another peer")
    files, known = StatementFiles(place, status.run), StatementLog(status.run, (founder.peer,))
    for blob in files.read():
        known.add(blob)
    view = _newest_view(status) if kind == "anchor" else None
    statement = known.next(founder.peer, kind, key, votes, view)
    try:
        files.order(known, seal(founder, statement))
    except (OSError, BadStatement) as error:
        raise Failure("the statement cannot be made", str(error), "see the folder") from None
    Output(as_json).result(
        {"number": statement.number, "kind": kind, "peer": key, "votes": votes} | _said_of(view),
        f"stated, {statement.said}; the node tells the members within seconds, or once it runs",
    )


def _newest_view(status: Status) -> AnchoredView:
    """Return number and hash of the newest view that the node knows."""
    if not status.view_hash:
        raise Failure(
            "there is no view to anchor",
            "the node of this folder has not written which one it knows",
            "start it with `farflock run`, and state this again",
        )
    return status.view, bytes.fromhex(status.view_hash)


def _said_of(view: AnchoredView | None) -> dict[str, int | str]:
    return {} if view is None else {"view": view[0], "view_hash": view[1].hex()}


def _founder(place: RunFolder, status: Status) -> Identity:
    """Return the founder's key; raise `Failure` if the folder is another node's."""
    identity = Identity.load(place.identity)
    if not status.invite or parse(status.invite, 0.0).founder != identity.peer:
        raise Failure(
            "only the run's founder can state this",
            "the node of this folder joined the run",
            "use the folder in which the run was started, or ask the founder",
        )
    return identity


def _named(text: str, status: Status) -> str:
    """Return the peer that was named, by its id or by the end of a member's."""
    if is_peer_id(text):
        return text
    found = [member for member in status.members if member.endswith(text)]
    if len(text) < SHORTEST_SUFFIX or len(found) != 1:
        raise Usage(
            "PEER",
            f"{text[:64]!a} is no peer's id, and not the end of one member's",
            f"give the whole id, or the last {SHORTEST_SUFFIX} characters or more of a member's",
        )
    return found[0]
