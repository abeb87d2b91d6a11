"""Chunked top-k in about 9.5 bits per kept value: Rice-coded positions, a sign, and one of two
magnitudes of the chunk.

SparseLoCo (arXiv:2508.15706) quantises kept values to 2 bits. Deviation from its code: the four
levels are symmetric and minimise the chunk's squared error, instead of being evenly spaced around
the tensor's mean. Kept values are never small, so with a mean near 0 the levels next to it would be
close to none of them. Positions ascend, so only the gaps between them are sent.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farflock.compression import native, rice
from farflock.compression.blocks import blocks_of
from farflock.compression.codec import Buffer, Context, CorruptPayload, require_length
from farflock.compression.payload import BF16_MAX_BITS, bf16_bits, from_bf16, to_device, to_host
from farflock.compression.topk import ChunkedTopK


@dataclass(frozen=True, slots=True)
class TopK2(ChunkedTopK):
    """Kept values keep their sign and err by less than the largest kept magnitude of their chunk;
    others decode to 0.

    A last, shorter chunk of c values keeps max(1, c·k/chunk), rounded to nearest, halves up; among
    equal magnitudes the first is kept. The payload is two levels per chunk (bf16), a bit plane of
    signs, one of levels, then the Rice-coded gaps.
    """

    kind: ClassVar[str] = "topk2"
    on_device: ClassVar[bool] = True  # the kept values travel; levels and gaps are coded on the CPU

    def max_bytes(self, count: int) -> int:
        """Return the length for the worst case; scattered positions take a few bytes less."""
        kept = self._kept(count)
        return self._gaps_at(count) + rice.max_bytes(kept, count - kept)

    def encode(self, x: Tensor, ctx: Context, out: bytearray) -> int:
        """Append the levels, the codes and the gaps between positions."""
        before = len(out)
        if native.encode(self.kind, x, out, self.k, self.chunk):
            return len(out) - before
        places = self.places(x, self._kept(x.numel() % self.chunk))
        levels, codes = _quantised(to_host(x[places]).numpy(), self.k)
        out += levels.tobytes() + rice.pack(codes, 2)
        inside = to_host(places).numpy() % self.chunk
        previous = np.concatenate(([-1], inside[:-1]))
        previous[:: self.k] = -1
        rice.write(inside - previous - 1, out)
        return len(out) - before

    def decode(self, payload: Buffer, ctx: Context, out: Tensor) -> None:
        """Scatter the values over zeros; refuse positions and levels outside their limits."""
        if native.decode(self.kind, payload, out, self.k, self.chunk):
            return
        count, kept, gaps_at = out.numel(), self._kept(out.numel()), self._gaps_at(out.numel())
        require_length(
            payload, gaps_at, f"{self.name} for {count} values", max_length=self.max_bytes(count)
        )
        chunks = blocks_of(count, self.chunk)
        levels = np.frombuffer(payload, dtype="<u2", count=2 * chunks)
        if len(levels) and int(levels.max()) > BF16_MAX_BITS:
            raise CorruptPayload(
                f"{self.name} payload holds a level that is negative or not finite"
            )
        codes = rice.unpack(payload, 4 * chunks, kept, 2)
        gaps, end = rice.read(payload, gaps_at, kept)
        if end != len(payload):
            raise CorruptPayload(
                f"{self.name} payload of {len(payload)} bytes goes on after its {end}"
            )
        places = self._places(gaps, count)
        sizes = from_bf16(levels[2 * (np.arange(kept) // self.k) + (codes >> 1)])
        values = torch.from_numpy(np.where(codes & 1, -sizes, sizes))
        out.zero_()
        there = to_device(torch.from_numpy(places), out.device)
        out[there] = to_device(values, out.device)

    def _places(self, gaps: rice.Numbers, count: int) -> rice.Numbers:
        """Return flat positions from the gaps before them, which restart with each chunk."""
        chunk_of: rice.Numbers = np.arange(len(gaps)) // self.k
        reached = np.cumsum(gaps + 1)
        starts = np.concatenate(([0], reached))[: -1 : self.k]
        inside: rice.Numbers = reached - 1 - starts[chunk_of]
        places: rice.Numbers = inside + chunk_of * self.chunk
        if len(gaps) and (int(inside.max()) >= self.chunk or int(places.max()) >= count):
            raise CorruptPayload(
                f"positions of {self.name} for {count} values must stay in their chunk"
            )
        return places

    def _kept(self, count: int) -> int:
        whole, rest = divmod(count, self.chunk)
        return whole * self.k + (
            max(1, (2 * rest * self.k + self.chunk) // (2 * self.chunk)) if rest else 0
        )

    def _gaps_at(self, count: int) -> int:
        return 4 * blocks_of(count, self.chunk) + blocks_of(self._kept(count), 4)


def _quantised(values: NDArray[np.float32], k: int) -> tuple[NDArray[np.uint16], rice.Numbers]:
    """Return two levels for every k values (fewer at the end), and each value's code: 1 if the
    value is negative, plus 2 if it takes the upper level."""
    sizes, whole = np.abs(values).astype(np.float64), len(values) // k * k
    found = [
        _two_means(group)
        for group in (sizes[:whole].reshape(-1, k), sizes[None, whole:])
        if group.size
    ]
    if not found:
        return np.empty(0, dtype=np.uint16), np.empty(0, dtype=np.int64)
    levels = np.concatenate([level.reshape(-1) for level, _ in found])
    upper = np.concatenate([flag.reshape(-1) for _, flag in found])
    return bf16_bits(levels.astype(np.float32)), (values < 0) + 2 * upper.astype(np.int64)


def _two_means(sizes_RK: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return each row's two means of least squared error (R, 2), and which values belong to the
    upper one (R, K).

    The sorted row is cut where the two groups' sum²/count, added up, is largest. Sums run from the
    smallest value to the largest, one after the other, so the bits are the same on every machine.
    """
    size = sizes_RK.shape[1]
    sorted_RK = np.sort(sizes_RK, axis=1)
    below_RK = np.cumsum(sorted_RK, axis=1)
    above_RK = below_RK[:, -1:] - below_RK
    low_K = np.arange(1, size + 1)
    high_K = np.maximum(size - low_K, 1)
    cut_R1 = np.argmax(below_RK * below_RK / low_K + above_RK * above_RK / high_K, axis=1)[:, None]
    means_RK = (below_RK / low_K, above_RK / high_K)
    levels_R2 = np.concatenate(
        [np.take_along_axis(mean_RK, cut_R1, axis=1) for mean_RK in means_RK], axis=1
    )
    return levels_R2, sizes_RK > np.take_along_axis(sorted_RK, cut_R1, axis=1)
