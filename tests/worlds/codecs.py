"""Payloads for tests of any codec: written after other bytes, and read into a tensor of NaNs, so
that a codec that overwrites or skips a position is found."""

import torch

from farflock.compression.codec import Context

BEFORE = b"before"


def encoded(codec, x, ctx=None):
    """The payload of a flat tensor."""
    out = bytearray(BEFORE)
    assert codec.encode(x, ctx or Context(), out) == len(out) - len(BEFORE)
    assert out.startswith(BEFORE), "the codec wrote over what another one had written"
    return out[len(BEFORE) :]


def decoded(codec, payload, count, ctx=None):
    """The `count` values of a payload."""
    out = torch.full((count,), float("nan"))
    codec.decode(payload, ctx or Context(), out)
    return out


def round_trip(codec, x):
    """A flat tensor as its receiver decodes it."""
    return decoded(codec, encoded(codec, x), len(x))
