"""The seam between peers: frames addressed by peer id, and the liveness of each peer.

Implementations: `SimLinks` in swarm/sim (virtual time), `ZmqLinks` in swarm/zmq (CURVE over TCP,
also forwarded by other peers). Above this seam no code knows which route a frame took.
"""

from typing import Literal, Protocol

PeerId = str  # base58 libp2p id of an Ed25519 key, `12D3Koo…`

Liveness = Literal["alive", "suspect", "dead", "unknown"]
Transport = Literal["direct", "forwarded", "libp2p", "none"]
# A frame to be sent: whole, or its head and the long body after it, to be copied once.
Sendable = bytes | tuple[bytes, memoryview]

# one chunk piece and its header: nothing larger is ever sent or accepted
MAX_FRAME_BYTES = 9 * 64 * 1024 + 4096


def size_of(frame: Sendable) -> int:
    """Return the bytes of a frame."""
    return len(frame) if isinstance(frame, bytes) else len(frame[0]) + len(frame[1])


def joined(frame: Sendable, before: bytes = b"") -> bytes:
    """Return a frame in one piece, after `before`."""
    return b"".join((before, frame) if isinstance(frame, bytes) else (before, *frame))


class Links(Protocol):
    """Best-effort frames between authenticated peers.

    Law (tests/swarm/test_links_law.py): a frame arrives whole and unaltered or not at all, and its
    sender is authentic; it may be lost, late, duplicated or out of order. `send` never blocks.
    Queues are bounded in bytes per peer and in total; a frame above `MAX_FRAME_BYTES` raises
    `ValueError`, and no peer reaches itself. A cancelled `receive` loses nothing. `life` turns
    `suspect` within a second and `dead` about five seconds after a peer's end, and back to `alive`
    when it is heard again."""

    @property
    def me(self) -> PeerId: ...

    def send(self, peer: PeerId, frame: bytes) -> bool:
        """Queue a control frame; return False if it was refused (no route, or a full queue)."""
        ...

    async def send_bulk(self, peer: PeerId, frame: Sendable, timeout_s: float) -> bool:
        """Queue a bulk frame when there is room; False if the peer is gone or time is up.

        A body that is a view must not change: it is copied when the frame leaves."""
        ...

    async def receive(self) -> tuple[PeerId, bytes | memoryview]:
        """Return the next frame of any peer and its authenticated sender; long ones are views."""
        ...

    def life(self, peer: PeerId) -> Liveness: ...

    def road(self, peer: PeerId) -> Transport: ...

    def rtt_s(self, peer: PeerId) -> float | None:
        """Return the measured round trip in seconds; None before the first measurement."""
        ...

    def total_bytes(self) -> tuple[int, int]:
        """Return the bytes sent and received so far, over all peers."""
        ...

    def queued_bytes(self) -> int:
        """Return the bytes of bulk that wait for this peer's own line, as far as is known."""
        ...

    def learn(self, record: bytes) -> bool:
        """Take in a peer's signed record (swarm/record.py); False if it is bad or not newer."""
        ...

    async def close(self) -> None: ...
