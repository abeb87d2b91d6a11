"""The head of a run, and its id: by them a newcomer verifies the run's terms before it reads them.

Nothing here needs the parts of a manifest, which know every method and model.
"""

import hashlib
from typing import Annotated

import msgspec

from farflock.node.errors import RefusedByRun
from farflock.swarm.frame import VERSION as FRAME_VERSION
from farflock.swarm.identity import SIGNATURE_BYTES, Identity, verify
from farflock.swarm.links import PeerId
from farflock.swarm.messages import MAX_HEAD_BYTES

# one number covers all that peers exchange; a peer with another is refused before it dials
PROTOCOL = FRAME_VERSION
MAX_LIST_BYTES = 2 * 1024 * 1024  # of tensors; of more nobody says more than that they differ
_DOMAIN = b"head"


class BadHead(ValueError):
    """Bytes that are not a head, or a head not signed by the founder that it names."""


class Head(msgspec.Struct, frozen=True, array_like=True):
    """The founder's statement of which manifest is the run's; every member re-publishes it. Wire
    format: signature (64 bytes) and msgpack array [run, founder, digest, size, sequence, protocol,
    listed, listed_bytes].

    `digest` and `size` (bytes) are those of the canonical manifest; a higher `sequence` replaces a
    lower one. A head of a later `protocol` may have more fields: it is still read, to explain why
    the run cannot be joined. If the model is a user's own, `listed` and `listed_bytes` are digest
    and size of the list of its tensors (tensor_list.py), for joiners whose model is another one;
    heads of other runs end before them."""

    run: Annotated[str, msgspec.Meta(max_length=64)]
    founder: Annotated[str, msgspec.Meta(max_length=64)]
    digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    size: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    sequence: Annotated[int, msgspec.Meta(ge=0, le=2**31)]
    protocol: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = PROTOCOL
    listed: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    listed_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_LIST_BYTES)] = 0


def seal_head(identity: Identity, head: Head) -> bytes:
    """Return signature and head; raise `BadHead` if others would refuse it."""
    if head.founder != identity.peer:
        raise BadHead(f"{identity.peer} cannot sign a head of {head.founder}'s run")
    fields = msgspec.structs.astuple(head)
    body = msgspec.msgpack.encode(fields if head.listed else fields[:-2])
    blob = identity.sign(_DOMAIN, body) + body
    unseal_head(blob)
    return blob


def unseal_head(blob: bytes) -> Head:
    """Return a head that its founder signed; raise `BadHead` if it is invalid."""
    if not SIGNATURE_BYTES < len(blob) <= MAX_HEAD_BYTES:
        raise BadHead(
            f"a head has {SIGNATURE_BYTES + 1} to {MAX_HEAD_BYTES} bytes, got {len(blob)}"
        )
    signature, body = blob[:SIGNATURE_BYTES], blob[SIGNATURE_BYTES:]
    try:
        head = msgspec.msgpack.decode(body, type=Head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadHead(f"not a head: {error}") from None
    if not verify(head.founder, _DOMAIN, body, signature):
        raise BadHead(f"not signed by {head.founder}")
    return head


def run_id(terms: bytes, founder: PeerId) -> str:
    """Return the 32 hex digits that identify the run with these terms by this founder."""
    return hashlib.sha256(terms + b"\x00" + founder.encode()).hexdigest()[:32]


def require_same_protocol(protocol: object) -> None:
    """Raise `RefusedByRun` if the run's peers speak another protocol."""
    if protocol != PROTOCOL:
        remedy = (
            "update farflock"
            if isinstance(protocol, int) and protocol > PROTOCOL
            else "use the version of farflock that made it"
        )
        why = f"it speaks version {protocol!r}, this program version {PROTOCOL}"
        raise RefusedByRun("the run has another protocol", why, remedy)
