"""`farflock invite`: make an invite of its own for some peers, which a status shows to nobody."""

import re
import secrets
import time
from pathlib import Path

import click
import msgspec

from farflock.node.cli.commands.status import last_status
from farflock.node.cli.output import Output
from farflock.node.errors import Failure, Usage
from farflock.node.run.invite import grant_of, mint, parse
from farflock.node.state.paths import RunFolder
from farflock.swarm.capability import MAX_USES, SECRET_BYTES
from farflock.swarm.identity import Identity
from farflock.swarm.messages import MAX_MEMBERS

_UNITS = {"m": 60, "h": 3600, "d": 24 * 3600}
LAST_S = 365 * 24 * 3600  # from now: what nobody remembers should let nobody in
_USUAL_VOTES = {1: 1}  # by uses: one peer brings its vote, several bring none unless it is said


def _lifetime(ctx: click.Context, option: click.Parameter, text: str) -> float:
    """Return the seconds of a time as in 30m, 12h or 7d."""
    found = re.fullmatch(r"([0-9]{1,6})([mhd])", text)
    seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 0 < seconds <= LAST_S:
        raise click.BadParameter(
            f"{text[:40]!a} is not a time of up to a year; write it as 12h or 7d"
        )
    return seconds


@click.command("invite")
@click.option(
    "--uses",
    type=click.IntRange(0, MAX_USES),
    default=1,
    show_default=True,
    help="Let in this many peers; 0: any number.",
)
@click.option(
    "--votes",
    type=click.IntRange(0, MAX_MEMBERS),
    help="Votes that they bring together (default: 1 with one use, else none).",
)
@click.option(
    "--expires",
    "lasts_s",
    callback=_lifetime,
    default="7d",
    show_default=True,
    help="Let nobody new in after this time, as in 30m, 12h or 7d.",
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="The node's folder (default: the one that `run` and `join` use).",
)
@click.option("--json", "as_json", is_flag=True, help="End standard output with one line of JSON.")
def command(
    uses: int, votes: int | None, lasts_s: float, folder: Path | None, as_json: bool
) -> None:
    """Print an invite that lets in so many peers, until it expires.

    It is signed with the key of the node in the folder, which must have been a member of its run.
    A peer that came in stays a member after the invite is used up or has expired, and may come
    back.

    \b
    Examples:
      farflock invite
      farflock invite --uses 10 --expires 12h
    """
    place = RunFolder.at(folder)
    standing = last_status(place.path).invite
    if not standing:
        raise Failure(
            "this node may not invite",
            "it is not a member of its run yet, or only the run's founder lets peers in",
            "try again in a minute, or ask the founder",
        )
    known = parse(standing, 0.0)
    if uses and (votes or 0) > uses:
        raise Usage("--votes", f"{votes} is more than {uses} peers can have", "lower it")
    gives_votes = known.grant is not None and known.grant.votes > 0
    if votes and not gives_votes:
        raise Usage("--votes", "only the run's founder can give votes", "leave it out")
    usual = _USUAL_VOTES.get(uses, 0) if gives_votes else 0
    wanted = usual if votes is None else votes
    ends = int(time.time() + lasts_s)
    bare = msgspec.structs.replace(known, expires=ends, grant=None)
    issuer, secret = Identity.load(place.identity), secrets.token_bytes(SECRET_BYTES)
    invite = mint(grant_of(issuer, bare, uses, wanted, secret))
    facts = {"invite": invite, "uses": uses, "votes": wanted, "expires": ends}
    Output(as_json).result(facts, invite)
