"""Chunked top-k: of each chunk, only the values of the k largest magnitudes are sent, as positions
and int8.

Chunks keep positions short (12 bits for 4096) and spread the kept values over the whole tensor, as
in SparseLoCo (arXiv:2508.15706) and DeMo (arXiv:2411.19870). A chunk's values share a scale, which
takes less than fp16, and no pseudo-gradient is too small for it.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from farflock.compression import native
from farflock.compression.blocks import blocks_of
from farflock.compression.codec import Buffer, Context, CorruptPayload
from farflock.compression.int8 import Int8
from farflock.compression.payload import ExactCodec, append, packed_bits, values_at, within

_PLACE_BITS = 16  # of a place in a chunk


@dataclass(frozen=True, slots=True)
class ChunkedTopK:
    """Base of codecs that keep the largest `k` of each `chunk` values. Biased: the rest is lost, so
    a mean needs error feedback."""

    k: int = 64
    chunk: int = 4096

    kind: ClassVar[str]
    biased: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 1 <= self.k <= self.chunk // 2 or self.chunk > 65536:
            raise ValueError(
                f"top {self.k} of {self.chunk} is not allowed; "
                "choose 1 <= k <= chunk/2 and chunk <= 65536"
            )

    @property
    def name(self) -> str:
        """`KIND:K/CHUNK`."""
        return f"{self.kind}:{self.k}/{self.chunk}"

    def granule(self, shape: tuple[int, ...]) -> int:
        """Return the length of a chunk."""
        return self.chunk

    def places(self, x: Tensor, rest: int) -> Tensor:
        """Return ascending flat positions of kept values, `rest` of them in a short last chunk."""
        whole = within(x).numel() // self.chunk * self.chunk
        last = places_of_largest(x[whole:], rest, x.numel() - whole) + whole
        return torch.cat((places_of_largest(x[:whole], self.k, self.chunk), last))


@dataclass(frozen=True, slots=True)
class TopK(ChunkedTopK, ExactCodec):
    """The `k` largest of each `chunk` values. Kept values are as exact as `Int8` with blocks of k;
    all others decode to 0. Among equal magnitudes the first is kept. A shorter last chunk keeps
    min(k, its length). The payload is the positions within their chunks, ascending, each in as few
    bits as chunk - 1 needs, then the values."""

    kind: ClassVar[str] = "topk"
    kernel: ClassVar[bool] = True

    @property
    def numbers(self) -> tuple[int, int]:
        """`k` and the chunk's length, as in the codec's name."""
        return self.k, self.chunk

    def max_bytes(self, count: int) -> int:
        """Return the exact length."""
        kept = self._kept(count)
        return blocks_of(kept * self._bits, 8) + Int8(self.k).max_bytes(kept)

    def write(self, x: Tensor, ctx: Context, out: bytearray) -> int:
        """Append the positions of the largest values, then the values."""
        places = self.places(x, self.k)
        written = append(out, _pack(places % self.chunk, self._bits))
        return written + Int8(self.k).encode(x[places], ctx, out)

    def read(self, payload: Buffer, ctx: Context, out: Tensor) -> None:
        """Scatter the values over zeros; refuse positions that do not ascend or that leave their
        chunk."""
        count, kept = out.numel(), self._kept(out.numel())
        at = blocks_of(kept * self._bits, 8)
        packed = values_at(payload, 0, at, torch.uint8, out.device)
        inside = _unpack(packed, kept, self._bits)
        chunk_of = torch.arange(kept, device=out.device).div_(self.k, rounding_mode="floor")
        places = chunk_of.mul_(self.chunk).add_(inside)
        outside = (inside >= self.chunk) | (places >= count)
        if bool(outside.any()) or not bool((places[1:] > places[:-1]).all()):
            raise CorruptPayload(
                f"positions of {self.name} for {count} values must rise and stay in their chunk"
            )
        values = out.new_empty(kept)
        Int8(self.k).decode(memoryview(payload)[at:], ctx, values)
        out.zero_()
        out[places] = values

    @property
    def _bits(self) -> int:
        return (self.chunk - 1).bit_length()

    def _kept(self, count: int) -> int:
        return count // self.chunk * self.k + min(self.k, count % self.chunk)


def places_of_largest(x: Tensor, k: int, width: int) -> Tensor:
    """Return the ascending flat positions of the k largest magnitudes in each row of `width`; the
    first win among equals.

    A row shorter than k keeps all. Magnitudes order as their bits do. numpy finds each row's k-th
    largest several times faster than torch.topk, which promises no order among equals either. All
    larger values are kept, then the first ones that equal it.
    """
    if not x.numel():
        return torch.empty(0, dtype=torch.int64, device=x.device)
    if not x.is_cpu:
        return _places_on_device(x, min(k, width), width)
    payload = bytearray()
    if 2 * k <= width and native.encode("topk", x, payload, k, width):  # positions come first
        count, bits = x.numel() // width * k, (width - 1).bit_length()
        inside = _unpack(
            values_at(payload, 0, blocks_of(count * bits, 8), torch.uint8), count, bits
        )
        return (inside.view(-1, k) + torch.arange(0, x.numel(), width)[:, None]).view(-1)
    sizes = x.abs().view(torch.int32).view(-1, width).numpy()
    k = min(k, width)
    least = np.partition(sizes, width - k, axis=1)[:, width - k, None]
    kept = sizes >= least
    places = np.flatnonzero(kept)
    if len(places) > k * len(sizes):
        equal = sizes == least
        room = k - (sizes > least).sum(axis=1, keepdims=True)
        places = np.flatnonzero(kept & ~(equal & (equal.cumsum(axis=1) > room)))
    return torch.from_numpy(places)


def _places_on_device(x: Tensor, k: int, width: int) -> Tensor:
    """Return the same places, found by torch.topk. Equal magnitudes are told apart by how early
    they come, so no order among equals is left to the device."""
    early = torch.arange(width - 1, -1, -1, device=x.device)
    ranks = (x.abs().view(torch.int32).view(-1, width).to(torch.int64) << _PLACE_BITS) | early
    inside = torch.topk(ranks, k, dim=1, sorted=False).indices.sort(dim=1).values
    return (inside + torch.arange(0, x.numel(), width, device=x.device)[:, None]).view(-1)


def _pack(numbers: Tensor, bits: int) -> Tensor:
    """Return the numbers' low `bits` bits, lowest first, as one stream of bytes padded with 0."""
    return packed_bits(
        ((numbers[:, None] >> torch.arange(bits, device=numbers.device)) & 1).view(-1)
    )


def _unpack(packed: Tensor, count: int, bits: int) -> Tensor:
    """Return the first `count` numbers of `_pack`; raise `CorruptPayload` for a set padding bit."""
    if count * bits % 8 and int(packed[-1]) >> (count * bits % 8):
        raise CorruptPayload("a bit after the last position is set")
    start = torch.arange(count, device=packed.device) * bits
    at, shift = start >> 3, start & 7
    # a number of 16 bits lies in at most 3 bytes
    wide = torch.cat((packed, packed.new_zeros(2))).to(torch.int32)
    return ((wide[at] | (wide[at + 1] << 8) | (wide[at + 2] << 16)) >> shift) & ((1 << bits) - 1)
