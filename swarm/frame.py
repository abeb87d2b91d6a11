"""One frame on the wire: a fixed head, one typed message, and raw bytes for the messages that carry a piece of a chunk.

Head, little endian, 24 bytes: magic `FF`, version, flags (0), sender's incarnation (8), message length (4), body
length (4), CRC-32 of all the rest (4). The links authenticate the sender; the checksum only catches faults, and content
is verified by its digest.
"""

import math
import struct
import zlib
from dataclasses import dataclass

import msgspec

from farflock.swarm.links import MAX_FRAME_BYTES
from farflock.swarm.messages import Message, Offer, PairAccept, PairPropose, Piece, Ping, Pong

VERSION = 4
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
    """The content of a frame: the sender's incarnation, the message, and the body (empty unless it is a `Piece`)."""

    incarnation: int
    message: Message
    body: bytes | memoryview = b""


def pack(frame: Frame) -> bytes:
    """Encode a frame; asserts that it keeps our own limits."""
    message = _encoder.encode(frame.message)
    head = _HEAD.pack(_MAGIC, VERSION, 0, frame.incarnation, len(message), len(frame.body))
    checksum = zlib.crc32(frame.body, zlib.crc32(message, zlib.crc32(head)))
    packed = b"".join((head, _CHECKSUM.pack(checksum), message, frame.body))
    assert len(packed) <= MAX_FRAME_BYTES, f"a frame of {len(packed)} bytes is over the limit of {MAX_FRAME_BYTES}"
    return packed


def unpack(packed: bytes) -> Frame:
    """Decode any bytes at all: a `Frame`, or `ProtocolViolation` with the reason. Takes no more memory than it got."""
    if not _FIXED_BYTES <= len(packed) <= MAX_FRAME_BYTES:
        raise ProtocolViolation(f"a frame has {_FIXED_BYTES} to {MAX_FRAME_BYTES} bytes, got {len(packed)}")
    magic, version, flags, incarnation, message_bytes, body_bytes = _HEAD.unpack_from(packed)
    if magic != _MAGIC or flags != 0:
        raise ProtocolViolation(f"not one of our frames: begins with {packed[:4].hex()}")
    if version != VERSION:
        raise ProtocolViolation(f"frame version {version}; this build speaks {VERSION}")
    if _FIXED_BYTES + message_bytes + body_bytes != len(packed):
        raise ProtocolViolation(f"lengths {message_bytes} + {body_bytes} do not fit a frame of {len(packed)} bytes")
    whole = memoryview(packed)
    checksum = zlib.crc32(whole[_FIXED_BYTES:], zlib.crc32(whole[: _HEAD.size]))
    if _CHECKSUM.unpack_from(packed, _HEAD.size) != (checksum,):
        raise ProtocolViolation("checksum differs")
    middle = _FIXED_BYTES + message_bytes
    try:
        message = _decoder.decode(whole[_FIXED_BYTES:middle])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolViolation(f"not a message: {error}") from None
    if body_bytes and not isinstance(message, Piece):
        raise ProtocolViolation(f"{type(message).__name__} carries no body, got {body_bytes} bytes")
    _require_sane(message)
    return Frame(incarnation, message, whole[middle:])


def message_kind(packed: bytes) -> bytes:
    """The tag of the message in a frame that `pack` made; the rest is neither decoded nor verified.

    A message is an array of less than 16 fields that begins with a tag of less than 32 characters, so
    that one byte says how many fields there are, and one how long the tag is.
    """
    begins = _FIXED_BYTES + 2
    return packed[begins : begins + (packed[begins - 1] & 0x1F)]


def _require_sane(message: Message) -> None:
    """Check what msgspec's limits cannot say: finite floats, matching lists."""
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
