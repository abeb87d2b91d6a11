"""A peer's signed record: who it is, where it can be reached, and which key its links use.

Wire: signature (64 bytes) + msgpack of `Record`, at most 4 kB. The signer is the peer id inside.
Sequence numbers increase, so an old record cannot replace a newer one. `lifetime_s` counts from the
moment a reader first sees the record, on the reader's own clock: wall clocks are never compared
between peers.

Strangers sign records too, and their texts travel on into invites, files and terminals. So every
text has a grammar that holds nothing but what the field means, and is checked before use.
"""

import re
from collections.abc import Callable
from typing import Annotated

import msgspec

from farflock.swarm.addresses import is_door, is_place
from farflock.swarm.directory import MAX_RECORD_AGE_S
from farflock.swarm.identity import SIGNATURE_BYTES, Identity, is_peer_id, verify
from farflock.swarm.links import PeerId
from farflock.swarm.messages import MAX_RECORD_BYTES
from farflock.swarm.roles import is_role

_DOMAIN = b"record"
_RUN = re.compile(r"[0-9a-z-]{1,64}")  # hexadecimal digits; simulations and tests use words
_SHOWN = 80

MAX_DOORS = 2

RecordText = Annotated[str, msgspec.Meta(max_length=128)]


class BadRecord(ValueError):
    """A record that its claimed owner did not make, or that exceeds a limit."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A peer's statement about itself.

    `endpoints` are its links' multiaddresses (`/ip4/192.0.2.7/tcp/4001`), empty if it cannot be
    dialled; `doors` its directory's, ending in `/p2p/` and its own id, through which others can
    join; `relays` the ids of peers that forward for it. `incarnation` is drawn again at every
    start: a restarted peer has forgotten its promises and must not be taken for the old one."""

    run: Annotated[str, msgspec.Meta(max_length=64)]
    peer: RecordText
    incarnation: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    sequence: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    curve: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    endpoints: Annotated[tuple[RecordText, ...], msgspec.Meta(max_length=8)] = ()
    relays: Annotated[tuple[RecordText, ...], msgspec.Meta(max_length=4)] = ()
    doors: Annotated[tuple[RecordText, ...], msgspec.Meta(max_length=MAX_DOORS)] = ()
    role: RecordText = "replica"
    speed: Annotated[float, msgspec.Meta(ge=0, le=1e12)] = 0.0  # tokens per second, self-measured
    lifetime_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_RECORD_AGE_S)] = 60.0


_decoder = msgspec.msgpack.Decoder(Record)
_encoder = msgspec.msgpack.Encoder()


def seal(identity: Identity, record: Record) -> bytes:
    """Sign this peer's record; raise `BadRecord` if others would refuse it."""
    if record.peer != identity.peer:
        raise BadRecord(f"{identity.peer} cannot sign a record of {record.peer}")
    body = _encoder.encode(record)
    blob = identity.sign(_DOMAIN, body) + body
    unseal(blob, record.run)
    return blob


def unseal(blob: bytes, run: str) -> Record:
    """Verify and decode a record of this run; raise `BadRecord` with the reason if it is bad: the
    field, if there is one to blame. Nothing in the reason can change a terminal."""
    if not SIGNATURE_BYTES < len(blob) <= MAX_RECORD_BYTES:
        raise BadRecord(
            f"a record has {SIGNATURE_BYTES + 1} to {MAX_RECORD_BYTES} bytes, got {len(blob)}"
        )
    signature, body = blob[:SIGNATURE_BYTES], blob[SIGNATURE_BYTES:]
    try:
        record = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRecord(f"not a record: {ascii(str(error))[1:-1]}") from None
    _require_grammars(record)
    if record.run != run:
        raise BadRecord(f"a record of run {record.run[:16]}, not of {run[:16]}")
    if not verify(record.peer, _DOMAIN, body, signature):
        raise BadRecord(f"not signed by {record.peer}")
    return record


def _require_grammars(record: Record) -> None:
    """Raise `BadRecord` with the first text that breaks its field's grammar."""
    texts: tuple[tuple[str, Callable[[str], object], tuple[str, ...]], ...] = (
        ("run", _RUN.fullmatch, (record.run,)),
        ("peer", is_peer_id, (record.peer,)),
        ("endpoints", is_place, record.endpoints),
        ("relays", is_peer_id, record.relays),
        ("doors", lambda text: is_door(text, record.peer), record.doors),
        ("role", is_role, (record.role,)),
    )
    for name, fits, values in texts:
        for value in values:
            if not fits(value):
                raise BadRecord(f"not a record: `{name}` must not be {value[:_SHOWN]!a}")


def newer(record: Record, known: Record | None) -> bool:
    """True if `record` replaces `known`: same owner, higher sequence number."""
    return known is None or (record.peer == known.peer and record.sequence > known.sequence)


def owner(blob: bytes, run: str) -> PeerId:
    """Return the verified owner of a record; raise `BadRecord` if it is bad."""
    return unseal(blob, run).peer
