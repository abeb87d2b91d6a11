"""A run as a peer knows it before it takes part: made by its founder, or learned by an invite.

Terms that were learned are those of the invite: their hash is the run's id (node/assembly/learnt.py
asks members for them).
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec

from farflock.node.assembly.learnt import (
    FETCH_TIMEOUT_S,
    LEARN_TIMEOUT_S,
    MAX_TERMS_BYTES,
    LearntTerms,
    known_members,
    learn_terms,
)
from farflock.node.assembly.peer_world import PeerWorld
from farflock.node.durable import write_durably
from farflock.node.errors import RefusedByRun
from farflock.node.run.head import Head, run_id, seal_head, unseal_head
from farflock.node.run.invite import Invite, founder_of
from farflock.node.run.manifest import Manifest, parse
from farflock.node.run.model_section import ModelKind, ModelSection
from farflock.swarm.chunk_store import digest_of
from farflock.swarm.contact import Contact
from farflock.swarm.dht.greeting import DirectoryUnreachable
from farflock.swarm.identity import Identity
from farflock.swarm.links import Links, PeerId
from farflock.swarm.messages import MAX_HEAD_BYTES
from farflock.swarm.peer.bootstrap import fetch_chunk
from farflock.swarm.peer.peer import RunTerms

KNOWN_S = 8.0  # for members to answer a peer that has the run's terms


@dataclass(frozen=True, slots=True)
class KnownRun:
    """A run's id and founder, its verified manifest, and the head with which the founder signed it.

    A joiner also has `records` of members, and the `contacts` by which it found them."""

    run: str
    founder: PeerId
    manifest: Manifest
    head: bytes
    records: Sequence[bytes] = ()
    contacts: tuple[Contact, ...] = ()

    @property
    def terms(self) -> RunTerms:
        """The terms that its peers need."""
        exchange = self.manifest.exchange
        seed = self.manifest.run.seed
        return RunTerms(self.run, seed, exchange.view_s, exchange.branch_after_s)


def own_run(identity: Identity, manifest: Manifest, listed: bytes = b"") -> KnownRun:
    """Return the run of a founder, with its signed head, which names the list of the tensors of a
    user's own model."""
    run, terms = manifest.run_id(identity.peer), manifest.canonical()
    digest = digest_of(listed) if listed else b""
    head = Head(
        run, identity.peer, digest_of(terms), len(terms), 0, listed=digest, listed_bytes=len(listed)
    )
    return KnownRun(run, identity.peer, manifest, seal_head(identity, head))


async def learn_run(
    world: PeerWorld,
    invite: Invite,
    timeout_s: float = LEARN_TIMEOUT_S,
    model: ModelKind = ModelSection,
) -> KnownRun:
    """Return the run of an invite, verified against it; raise what `learn_terms` raises, and
    `RefusedByRun` if the run's model is of another kind.

    A peer that was in the run has its terms in its folder, so it needs nobody to answer now."""
    before = None if world.files.folder is None else kept_terms(world.files.folder.terms, invite)
    patience_s = timeout_s if before is None else min(timeout_s, KNOWN_S)
    try:
        return read_run(await learn_terms(world, invite, patience_s), model)
    except (RefusedByRun, DirectoryUnreachable):
        if before is None:
            raise
        return read_run(before, model)


class _Kept(msgspec.Struct, array_like=True):
    """The terms of a run and its head, as a file holds them."""

    terms: Annotated[bytes, msgspec.Meta(max_length=MAX_TERMS_BYTES)]
    head: Annotated[bytes, msgspec.Meta(max_length=MAX_HEAD_BYTES)]


def keep_terms(path: Path, known: KnownRun) -> None:
    """Write a run's terms for this peer's next start; a full disk must not end it."""
    with contextlib.suppress(OSError):
        write_durably(path, msgspec.msgpack.encode(_Kept(known.manifest.canonical(), known.head)))


def kept_terms(path: Path, invite: Invite) -> LearntTerms | None:
    """Return the terms of an invite's run from a file, verified as if a member had sent them; None
    if they are not there."""
    known = kept_run(path)
    if known is None or (known.run, founder_of(known.founder)) != (invite.run, invite.founder):
        return None
    return replace(known, contacts=invite.members)


def kept_run(path: Path) -> LearntTerms | None:
    """Return the terms in a file, of whichever run; None if they are not there, or not whole."""
    try:
        if path.stat().st_size > MAX_TERMS_BYTES + MAX_HEAD_BYTES + 64:
            return None
        kept = msgspec.msgpack.decode(path.read_bytes(), type=_Kept)
        head = unseal_head(kept.head)
    except (OSError, ValueError, RecursionError):
        return None
    is_whole = head.digest == digest_of(kept.terms) and run_id(kept.terms, head.founder) == head.run
    return LearntTerms(head.run, head.founder, kept.terms, kept.head, (), ()) if is_whole else None


def read_run(learnt: LearntTerms, model: ModelKind = ModelSection) -> KnownRun:
    """Return a run whose terms were learned; raise `RefusedByRun` if they make no sense here, or if
    the run's model is of another kind."""
    manifest = parse(learnt.text, model)
    if manifest.run_id(learnt.founder) != learnt.run:
        raise RefusedByRun(
            "the run's manifest is not in the form that is hashed",
            "read and written again, it has another hash",
            "tell the run's founder",
        )
    run, founder = learnt.run, learnt.founder
    return KnownRun(run, founder, manifest, learnt.head, learnt.records, learnt.contacts)


async def listed_by_members(links: Links, known: KnownRun, ours: bytes) -> bytes:
    """Return the list of the tensors of the run's model (node/run/tensor_list.py) from a member, if
    it is not ours; empty if there is none, or nobody sends it."""
    head, members = unseal_head(known.head), known_members(links, known.records, known.run)
    if not (head.listed and members) or head.listed == digest_of(ours):
        return b""
    wanted = (links, known.run, head.listed, head.listed_bytes, members)
    return await fetch_chunk(*wanted, FETCH_TIMEOUT_S) or b""
