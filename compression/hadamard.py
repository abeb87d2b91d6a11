"""Hadamard tiles: each tile is rotated so that no value is much larger than the others, then sent
in 4 or 8 bits.

A large value makes all others of its block coarse; activations have such values, always in the same
channels. The rotation spreads it over its tile, as TAH-Quant (arXiv:2506.01352) and QuaRot
(arXiv:2404.00456) do, with signs drawn from the run's seed so that no pattern of values is bad for
all runs. Deviations from TAH-Quant: all tiles have the same number of bits, and no pivot is
swapped; both would make the length of a payload depend on its values.

The transform is not normalised: H·H is the identity times the tile's length, a power of two. So
only sums and differences of two values are rounded, each in its own call, and every machine reads
the same bits. Scales so small that such a difference could be denormal are not used.

Shapes: T tiles, G values per tile.
"""

import hashlib
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from farflock.compression.blocks import blocks_of, padded
from farflock.compression.codec import Buffer, Context, CorruptPayload, require_length
from farflock.compression.int4 import Int4
from farflock.compression.int8 import Int8
from farflock.compression.payload import within

LARGEST = 2.0**100  # magnitudes are clamped to it, so that sums over a tile stay finite
SMALLEST = 2.0**-76  # a tile whose rotated values are all below is sent as zeros
LARGEST_READ = 2.0**111  # no encoder exceeds it: 1024 times the largest, and rounding
SMALLEST_READ = 2.0**-84  # no encoder goes below it: SMALLEST / 127


@dataclass(frozen=True, slots=True)
class Hadamard:
    """In each tile ‖x - decode(encode(x))‖ <= absmax(H·S·x) / (2·levels) · (1 + 2^-12) + 2^-76, by
    the Euclidean norm.

    levels is 7 for 4 bits, 127 for 8. absmax(H·S·x), S the signs, is at most √G·‖x‖; where no
    direction stands out it is near √(2·ln G)·‖x‖. Magnitudes above 2^100 are first clamped; tiles
    whose rotated values are all below 2^-76 become 0. The payload is that of `int4:TILE` or
    `int8:TILE` for the rotated tiles, the last one padded with 0.
    """

    bits: Literal[4, 8] = 4
    tile: int = 64

    biased: ClassVar[bool] = False
    on_device: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.bits not in (4, 8) or not 2 <= self.tile <= 1024 or self.tile.bit_count() != 1:
            raise ValueError(
                f"Hadamard tiles of {self.tile} values in {self.bits} bits are not allowed; "
                "choose 4 or 8 bits and a power of two from 2 to 1024, usually 64"
            )

    @property
    def name(self) -> str:
        """`hadamard4`, `hadamard8`, or `hadamard4:TILE`."""
        return f"hadamard{self.bits}" + ("" if self.tile == 64 else f":{self.tile}")

    def granule(self, shape: tuple[int, ...]) -> int:
        """Return the length of a tile."""
        return self.tile

    def max_bytes(self, count: int) -> int:
        """Return the exact length."""
        return self._inner.max_bytes(blocks_of(count, self.tile) * self.tile)

    def encode(self, x: Tensor, ctx: Context, out: bytearray) -> int:
        """Append the scales and codes of the rotated tiles."""
        cut_TG = padded(within(within(x), LARGEST), self.tile)
        rotated_TG = butterflies(cut_TG * signs(ctx.run_seed, self.tile).to(x.device))
        tiny_T1 = rotated_TG.abs().amax(dim=1, keepdim=True) < SMALLEST
        return self._inner.encode(rotated_TG.masked_fill_(tiny_T1, 0.0).view(-1), ctx, out)

    def decode(self, payload: Buffer, ctx: Context, out: Tensor) -> None:
        """Decode and rotate back; refuse rotated values that no encoder writes."""
        require_length(
            payload, self.max_bytes(out.numel()), f"{self.name} for {out.numel()} values"
        )
        rotated = out.new_empty(blocks_of(out.numel(), self.tile) * self.tile)
        self._inner.decode(payload, ctx, rotated)
        size = rotated.abs()
        if bool(((size > LARGEST_READ) | ((size > 0) & (size < SMALLEST_READ))).any()):
            raise CorruptPayload(f"a rotated value of {self.name} is outside its limits")
        scaled_G = signs(ctx.run_seed, self.tile) / self.tile
        tiles_TG = butterflies(rotated.view(-1, self.tile)).mul_(scaled_G.to(out.device))
        out.copy_(tiles_TG.view(-1)[: out.numel()])

    @property
    def _inner(self) -> Int4 | Int8:
        return Int4(self.tile) if self.bits == 4 else Int8(self.tile)


def signs(seed: int, tile: int) -> Tensor:
    """Return 1 or -1 for each place in a tile (G): the bits of SHAKE-128 of `hadamard SEED`, lowest
    first; a set bit is -1."""
    drawn = hashlib.shake_128(f"hadamard {seed}".encode()).digest(blocks_of(tile, 8))
    bits = np.unpackbits(np.frombuffer(drawn, dtype=np.uint8), count=tile, bitorder="little")
    return torch.from_numpy(1.0 - 2.0 * bits.astype(np.float32))


def butterflies(tiles_TG: Tensor) -> Tensor:
    """Return each row times the unnormalised Hadamard matrix in Sylvester's order; G is a power of
    two. There are log2 G passes, from neighbours to halves; each replaces two values by their sum
    and their difference."""
    now = tiles_TG.clone(memory_format=torch.contiguous_format)
    then = torch.empty_like(now)
    tiles, length = tiles_TG.shape
    half = 1
    while half < length:
        old, new = (x.view(tiles, length // (2 * half), 2, half) for x in (now, then))
        torch.add(old[:, :, 0], old[:, :, 1], out=new[:, :, 0])
        torch.sub(old[:, :, 0], old[:, :, 1], out=new[:, :, 1])
        now, then, half = then, now, 2 * half
    return now
