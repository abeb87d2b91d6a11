"""Chunked top-k: of each chunk of values only the k largest magnitudes travel, as positions and int8 values.

Chunks keep the positions short (12 bits for 4096) and spread what is kept over the whole tensor, as in SparseLoCo
(arXiv:2508.15706) and DeMo (arXiv:2411.19870). The values of a chunk share a scale: shorter than fp16, and no
pseudo-gradient is too small for it.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from farflock.compression.blocks import blocks_of
from farflock.compression.codec import Buffer, Context, CorruptPayload, require_length
from farflock.compression.int8 import Int8
from farflock.compression.payload import append, values_at, within


@dataclass(frozen=True, slots=True)
class TopK:
    """Kept values are as exact as `Int8` in blocks of k; all others decode to 0. Of equal magnitudes the first is kept.

    Biased: what is not kept is lost, so a mean of these needs feedback. A last, shorter chunk keeps min(k, its length).
    The payload is all positions inside their chunks, rising, in as few bits as chunk - 1 needs, then the values.
    """

    k: int = 64
    chunk: int = 4096

    biased: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 1 <= self.k <= self.chunk // 2 or self.chunk > 65536:
            raise ValueError(
                f"top {self.k} of {self.chunk} is not possible; choose 1 <= k <= chunk/2 and chunk <= 65536"
            )

    @property
    def name(self) -> str:
        """`topk:K/CHUNK`."""
        return f"topk:{self.k}/{self.chunk}"

    def granule(self, shape: tuple[int, ...]) -> int:
        """Whole chunks."""
        return self.chunk

    def max_bytes(self, count: int) -> int:
        """Exactly this."""
        kept = self._kept(count)
        return blocks_of(kept * self._bits, 8) + Int8(self.k).max_bytes(kept)

    def encode(self, x: Tensor, ctx: Context, out: bytearray) -> int:
        """Append positions and values of the largest."""
        whole = within(x).numel() // self.chunk * self.chunk
        places = torch.cat((self._largest(x[:whole], self.chunk), self._largest(x[whole:], x.numel() - whole) + whole))
        written = append(out, _pack((places % self.chunk).to(torch.int32), self._bits))
        return written + Int8(self.k).encode(x[places], ctx, out)

    def decode(self, payload: Buffer, ctx: Context, out: Tensor) -> None:
        """Scatter the values over zeros; positions that do not rise or leave their chunk are refused."""
        count, kept = out.numel(), self._kept(out.numel())
        require_length(payload, self.max_bytes(count), f"{self.name} for {count} values")
        at = blocks_of(kept * self._bits, 8)
        inside = _unpack(values_at(payload, 0, at, torch.uint8), kept, self._bits)
        places = torch.arange(kept).div_(self.k, rounding_mode="floor").mul_(self.chunk).add_(inside)
        outside = (inside >= self.chunk) | (places >= count)
        if bool(outside.any()) or not bool((places[1:] > places[:-1]).all()):
            raise CorruptPayload(f"positions of {self.name} for {count} values must rise and stay in their chunk")
        values = torch.empty(kept)
        Int8(self.k).decode(memoryview(payload)[at:], ctx, values)
        out.zero_()
        out[places] = values

    @property
    def _bits(self) -> int:
        return (self.chunk - 1).bit_length()

    def _kept(self, count: int) -> int:
        return count // self.chunk * self.k + min(self.k, count % self.chunk)

    def _largest(self, x: Tensor, width: int) -> Tensor:
        """Flat positions, rising, of the k largest magnitudes in each row of `width` values.

        torch.topk promises no order among equals. Here none are: a key is the magnitude's bits, which order as the
        magnitude does, over the position counted from the row's end.
        """
        if not x.numel():
            return torch.empty(0, dtype=torch.int64)
        rows = x.reshape(-1, width)
        from_end = torch.arange(width - 1, -1, -1)
        keys = (rows.abs().view(torch.int32).to(torch.int64) << 16) | from_end
        best = keys.topk(min(self.k, width), dim=1, sorted=False).values
        inside = (width - 1 - (best & 0xFFFF)).sort(dim=1).values
        return (inside + torch.arange(rows.shape[0])[:, None] * width).reshape(-1)


def _pack(numbers: Tensor, bits: int) -> Tensor:
    """The numbers' low `bits` bits, lowest first, one after the other, eight to a byte; the last byte filled with 0."""
    stream = ((numbers[:, None] >> torch.arange(bits)) & 1).to(torch.uint8).reshape(-1)
    padded = torch.cat((stream, stream.new_zeros(-len(stream) % 8)))
    return (padded.view(-1, 8) << torch.arange(8, dtype=torch.uint8)).sum(dim=1, dtype=torch.uint8)


def _unpack(packed: Tensor, count: int, bits: int) -> Tensor:
    """The first `count` numbers that `_pack` wrote; `CorruptPayload` if a filling bit is set."""
    if count * bits % 8 and int(packed[-1]) >> (count * bits % 8):
        raise CorruptPayload("a bit after the last position is set")
    start = torch.arange(count) * bits
    at, shift = start >> 3, start & 7
    wide = torch.cat((packed, packed.new_zeros(2))).to(torch.int32)  # a number of 16 bits lies in at most 3 bytes
    return ((wide[at] | (wide[at + 1] << 8) | (wide[at + 2] << 16)) >> shift) & ((1 << bits) - 1)
