"""A run as a peer knows it before it takes part: made by its founder, or learned by an invite.

Terms that were learned are those of the invite: their hash is the run's id. The directory only
introduces members, which send the terms.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from farflock.node.assembly.peer_world import PeerWorld
from farflock.node.errors import RefusedByRun
from farflock.node.run.invite import Invite
from farflock.node.run.manifest import Head, Manifest, parse, seal_head, unseal_head
from farflock.node.run.model_section import ModelKind, ModelSection
from farflock.node.run.sections import require_same_protocol
from farflock.swarm.chunk_store import digest_of
from farflock.swarm.identity import Identity
from farflock.swarm.links import Links, PeerId
from farflock.swarm.peer.bootstrap import fetch_chunk
from farflock.swarm.peer.peer import RunTerms
from farflock.swarm.record import BadRecord, unseal

LEARN_TIMEOUT_S = 120.0
FETCH_TIMEOUT_S = 20.0
LOOK_EVERY_S = 0.5
MAX_TERMS_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class KnownRun:
    """A run's id and founder, its verified manifest, and the head with which the founder signed it.

    A joiner also has `records` of members, and the `addresses` by which it found them."""

    run: str
    founder: PeerId
    manifest: Manifest
    head: bytes
    records: Sequence[bytes] = ()
    addresses: tuple[str, ...] = ()

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
    """Return the run of an invite, verified against it; raise `RefusedByRun` if no member answers,
    or if the run's model is of another kind."""
    links, directory = world.links, world.directory
    assert directory is not None, "a directory introduces members"
    run, now = invite.run, asyncio.get_running_loop().time
    ends_s = now() + timeout_s
    while now() < ends_s:
        blobs = await directory.heads(run)
        heads = {blob: head for blob in blobs if (head := _head_of(blob, invite))}
        records = await directory.peers(run)
        members = known_members(links, records, run)
        if heads:
            newest = max(heads, key=lambda blob: heads[blob].sequence)
            require_same_protocol(heads[newest].protocol)
        if heads and members:
            digest, size = heads[newest].digest, heads[newest].size
            raw = await fetch_chunk(links, run, digest, size, members, FETCH_TIMEOUT_S)
            if raw is not None:
                manifest = _verified(raw, invite, model)
                return KnownRun(run, invite.founder, manifest, newest, records, invite.addresses)
        await asyncio.sleep(LOOK_EVERY_S)
    raise RefusedByRun(
        f"run {run} cannot be joined",
        f"none of its members answered within {timeout_s:.0f} s",
        "check that a member is running, and ask for a new invite",
    )


async def listed_by_members(links: Links, known: KnownRun, ours: bytes) -> bytes:
    """Return the list of the tensors of the run's model (node/run/tensor_list.py) from a member, if
    it is not ours; empty if there is none, or nobody sends it."""
    head, members = unseal_head(known.head), known_members(links, known.records, known.run)
    if not (head.listed and members) or head.listed == digest_of(ours):
        return b""
    wanted = (links, known.run, head.listed, head.listed_bytes, members)
    return await fetch_chunk(*wanted, FETCH_TIMEOUT_S) or b""


def _verified(raw: bytes, invite: Invite, model: ModelKind) -> Manifest:
    manifest = parse(raw, model)
    if manifest.run_id(invite.founder) == invite.run:
        return manifest
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
    fits = (
        head.run == invite.run and head.founder == invite.founder and head.size <= MAX_TERMS_BYTES
    )
    return head if fits else None


def known_members(links: Links, records: Sequence[bytes], run: str) -> list[PeerId]:
    """Pass records to the links and return their owners, but for this peer itself."""
    owners = []
    for blob in records:
        with contextlib.suppress(BadRecord):
            owners.append(unseal(blob, run).peer)
            links.learn(blob)
    return [owner for owner in owners if owner != links.me]
