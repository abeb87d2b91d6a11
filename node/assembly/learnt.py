"""A run's terms as members send them to a newcomer: verified against its invite, and not read yet.

Reading them needs every method and model; this module needs neither, so a run can be shown while
those are imported.
"""

import asyncio
import contextlib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import msgspec

from farflock.node.assembly.peer_world import PeerWorld
from farflock.node.errors import RefusedByRun
from farflock.node.run.head import Head, require_same_protocol, run_id, unseal_head
from farflock.node.run.invite import Invite, founder_of
from farflock.swarm.contact import Contact
from farflock.swarm.links import Links, PeerId
from farflock.swarm.messages import Terms
from farflock.swarm.peer.bootstrap import ask_terms, fetch_chunk
from farflock.swarm.peer.peer import RunTerms
from farflock.swarm.record import BadRecord, unseal

LEARN_TIMEOUT_S = 120.0
MEMBERS_S = 3.0  # for members of the invite to answer, before the directory is asked
FETCH_TIMEOUT_S = 20.0
LOOK_EVERY_S = 0.5
MAX_TERMS_BYTES = 256 * 1024
MAX_LINE_BYTES = 4096

Plain = Annotated[str, msgspec.Meta(max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$")]


@dataclass(frozen=True, slots=True)
class LearntTerms:
    """The bytes of a run's terms and the head with which the founder signed them; the records of
    members, and those by which they were found."""

    run: str
    founder: PeerId
    text: bytes
    head: bytes
    records: Sequence[bytes]
    contacts: tuple[Contact, ...] = ()


class _Run(msgspec.Struct):
    name: Plain
    seed: int
    total_tokens: int = 0  # the program alone knows it, if the run trains a model of its own


class _Named(msgspec.Struct):
    name: Plain


class _Exchange(msgspec.Struct):
    view_s: float
    branch_after_s: float


class ShownTerms(msgspec.Struct):
    """The part of the terms that a newcomer shows, and that its peer needs."""

    run: _Run
    method: _Named
    exchange: _Exchange
    pipeline: dict[str, object] | None = None

    def said(self) -> str:
        """Return the run's name, method and size, as a phrase."""
        tokens = f", {self.run.total_tokens:,} tokens" if self.run.total_tokens else ""
        return f"{self.run.name}, method {self.method.name}{tokens}"

    def for_peers(self, run: str) -> RunTerms:
        """Return the terms that a peer of the run needs."""
        return RunTerms(run, self.run.seed, self.exchange.view_s, self.exchange.branch_after_s)


def shown(learnt: LearntTerms) -> ShownTerms:
    """Return what can be shown of verified terms; raise `RefusedByRun` if they are none."""
    try:
        # parsing TOML takes time quadratic in a dotted key's length
        if max(map(len, learnt.text.splitlines()), default=0) > MAX_LINE_BYTES:
            raise ValueError(f"a line has more than {MAX_LINE_BYTES} bytes")
        return msgspec.convert(tomllib.loads(learnt.text.decode()), ShownTerms)
    except (ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:120]
        raise RefusedByRun("the run's terms cannot be read", why, "tell its founder") from None


class _Told(NamedTuple):
    """A run as a newcomer has heard of it: its head, sealed and read, and records of members."""

    blob: bytes
    head: Head
    records: Sequence[bytes]


async def learn_terms(
    world: PeerWorld, invite: Invite, timeout_s: float = LEARN_TIMEOUT_S
) -> LearntTerms:
    """Return the terms of an invite's run: from its members, or from those that the directory
    names. Raise `RefusedByRun` if none answers, or the terms are of another run, and what keeps the
    directory from opening (swarm/dht) if that is asked."""
    now = asyncio.get_running_loop().time
    ends_s = now() + timeout_s
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while now() < ends_s:
                told = await _asked(world, invite, ends_s - now())
                text = None if told is None else await _fetched(world.links, invite.run, told)
                if told is not None and text is not None:
                    _require_run(text, told.head)
                    return LearntTerms(
                        invite.run, told.head.founder, text, told.blob, told.records, invite.members
                    )
                await asyncio.sleep(LOOK_EVERY_S)
    raise RefusedByRun(
        f"run {invite.run} cannot be joined",
        f"none of its members answered within {timeout_s:.0f} s",
        "check that a member is running, and ask for a new invite",
    )


async def _asked(world: PeerWorld, invite: Invite, left_s: float) -> _Told | None:
    """Return what members of the invite say, or else the directory."""
    named = dict.fromkeys(member.peer for member in invite.members)
    members = [member for member in named if member != world.links.me]
    if members:
        patience_s = left_s if world.directory is None else min(MEMBERS_S, left_s)

        def fits(sender: PeerId, said: Terms) -> bool:
            owners = _owners(said.records, invite.run)
            return sender in owners and _head_of(said.head, invite) is not None

        answer = await ask_terms(world.links, invite.run, members, fits, patience_s)
        if answer is not None and (head := _head_of(answer[1].head, invite)) is not None:
            return _Told(answer[1].head, head, answer[1].records)
    return None if world.directory is None else await _looked_up(world, invite)


async def _looked_up(world: PeerWorld, invite: Invite) -> _Told | None:
    """Return what the directory says."""
    assert world.directory is not None
    blobs = await world.directory.heads(invite.run)
    heads = {blob: head for blob in blobs if (head := _head_of(blob, invite))}
    records = await world.directory.peers(invite.run)
    if not heads:
        return None
    newest = max(heads, key=lambda blob: heads[blob].sequence)
    require_same_protocol(heads[newest].protocol)
    return _Told(newest, heads[newest], records)


async def _fetched(links: Links, run: str, told: _Told) -> bytes | None:
    """Return the bytes of the terms; None if no member sends them."""
    require_same_protocol(told.head.protocol)
    members = known_members(links, told.records, run)
    if not members:
        return None
    digest, size = told.head.digest, told.head.size
    return await fetch_chunk(links, run, digest, size, members, FETCH_TIMEOUT_S)


def _require_run(text: bytes, head: Head) -> None:
    if run_id(text, head.founder) != head.run:
        raise RefusedByRun(
            "the members sent the manifest of another run",
            "its hash does not match the invite",
            "ask for a new invite",
        )


def _head_of(blob: bytes, invite: Invite) -> Head | None:
    """Return a head signed by the run's founder, else None."""
    try:
        head = unseal_head(blob)
    except ValueError:
        return None
    same = head.run == invite.run and founder_of(head.founder) == invite.founder
    return head if same and head.size <= MAX_TERMS_BYTES else None


def known_members(links: Links, records: Sequence[bytes], run: str) -> list[PeerId]:
    """Pass records to the links and return their owners, but for this peer itself."""
    for blob in records:
        links.learn(blob)
    return [owner for owner in _owners(records, run) if owner != links.me]


def _owners(records: Sequence[bytes], run: str) -> list[PeerId]:
    owners = []
    for blob in records:
        with contextlib.suppress(BadRecord):
            owners.append(unseal(blob, run).peer)
    return owners
