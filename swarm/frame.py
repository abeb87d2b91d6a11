"""One frame on the wire: a fixed head, one typed message, and the bytes of a chunk piece, if any.

Head, little endian, 24 bytes: magic `FF`, version, flags (0), sender's incarnation (8), message
length (4), body length (4), CRC-32 of the head so far and the message (4). The links authenticate
the sender; the checksum only catches faults. It leaves out the body, which is verified by the
chunk's digest.
"""

import math
import struct
import zlib
from dataclasses import dataclass

import msgspec

from farflock.swarm.links import MAX_FRAME_BYTES, joined, size_of
from farflock.swarm.messages import Message, Offer, PairAccept, PairPropose, Piece, Ping, Pong

VERSION = 15
_HEAD = struct.Struct("<2sBBQII")
_CHECKSUM = struct.Struct("<I")
_FIXED_BYTES = _HEAD.size + _CHECKSUM.size
_MAGIC = b"FF"

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class ProtocolViolation(Exception):
    """A frame that no correct peer sends; the receiver drops and counts it."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame's content; `incarnation` is the sender's, and only a `Piece` has a `body`."""

    incarnation: int
    message: Message
    body: bytes | memoryview = b""


def pack(frame: Frame) -> bytes:
    """Encode a frame; assert that it is within our own limits."""
    return joined(pack_buffers(frame))


def pack_buffers(frame: Frame) -> tuple[bytes, memoryview]:
    """Encode a frame without a copy of its body, which comes second."""
    message = _encoder.encode(frame.message)
    head = _HEAD.pack(_MAGIC, VERSION, 0, frame.incarnation, len(message), len(frame.body))
    checksum = zlib.crc32(message, zlib.crc32(head))
    buffers = b"".join((head, _CHECKSUM.pack(checksum), message)), memoryview(frame.body)
    assert size_of(buffers) <= MAX_FRAME_BYTES, (
        f"a frame of {size_of(buffers)} bytes is over the limit of {MAX_FRAME_BYTES}"
    )
    return buffers


def unpack(packed: bytes | memoryview) -> Frame:
    """Decode arbitrary bytes, or raise `ProtocolViolation`; allocates no more than it was given."""
    if not _FIXED_BYTES <= len(packed) <= MAX_FRAME_BYTES:
        raise ProtocolViolation(
            f"a frame has {_FIXED_BYTES} to {MAX_FRAME_BYTES} bytes, got {len(packed)}"
        )
    magic, version, flags, incarnation, message_bytes, body_bytes = _HEAD.unpack_from(packed)
    if magic != _MAGIC or flags != 0:
        raise ProtocolViolation(f"not one of our frames: begins with {bytes(packed[:4]).hex()}")
    if version != VERSION:
        raise ProtocolViolation(f"frame version {version}; this build speaks {VERSION}")
    if _FIXED_BYTES + message_bytes + body_bytes != len(packed):
        raise ProtocolViolation(
            f"lengths {message_bytes} + {body_bytes} do not fit a frame of {len(packed)} bytes"
        )
    whole, middle = memoryview(packed), _FIXED_BYTES + message_bytes
    checksum = zlib.crc32(whole[_FIXED_BYTES:middle], zlib.crc32(whole[: _HEAD.size]))
    if _CHECKSUM.unpack_from(packed, _HEAD.size) != (checksum,):
        raise ProtocolViolation("checksum differs")
    try:
        message = _decoder.decode(whole[_FIXED_BYTES:middle])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolViolation(f"not a message: {error}") from None
    if body_bytes and not isinstance(message, Piece):
        raise ProtocolViolation(f"{type(message).__name__} carries no body, got {body_bytes} bytes")
    _require_sane(message)
    return Frame(incarnation, message, whole[middle:])


def message_kind(packed: bytes) -> bytes:
    """Return the tag of the message in a frame made by `pack`, decoding and verifying nothing.

    A message is an array of fewer than 16 fields that begins with a tag of fewer than 32
    characters, so one byte holds the number of fields and one the length of the tag."""
    begins = _FIXED_BYTES + 2
    return packed[begins : begins + (packed[begins - 1] & 0x1F)]


def _require_sane(message: Message) -> None:
    """Check what msgspec's limits cannot express: finite floats, lists of equal length."""
    match message:
        case Offer():
            _require_sane_offer(message)
        case PairPropose(offer=offer) | PairAccept(offer=offer):
            _require_sane_offer(offer)
        case Ping(sent_s=sent_s):
            _require_finite(sent_s)
        case Pong(sent_s=sent_s, run_s=run_s):
            _require_finite(sent_s)
            _require_finite(run_s)


def _require_sane_offer(offer: Offer) -> None:
    if len(offer.digests) != len(offer.sizes):
        raise ProtocolViolation(f"{len(offer.digests)} digests with {len(offer.sizes)} sizes")
    _require_finite(offer.weight)


def _require_finite(value: float) -> None:
    if not math.isfinite(value):
        raise ProtocolViolation(f"a number is {value}")
