"""Chunked top-k: of each chunk of values the k largest magnitudes travel, as position and fp16 value.

Payload: for each chunk its kept positions, rising, 16 bits each, then all values as fp16, in the same order. The last,
shorter chunk keeps min(k, its length). Biased: what is not kept is lost, so a mean of these needs feedback.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from farflock.compression.codec import Buffer, Context, CorruptPayload, require_finite, require_length
from farflock.compression.raw import append, view


@dataclass(frozen=True, slots=True)
class TopK:
    """Kept values are within fp16's rounding of x; all others decode to 0. Ties go to the lower position."""

    k: int = 64
    chunk: int = 4096

    biased: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 1 <= self.k <= self.chunk <= 32768:
            raise ValueError(f"top {self.k} of {self.chunk} makes no sense; choose 1 <= k <= chunk <= 32768")

    @property
    def name(self) -> str:
        """topk:K/CHUNK."""
        return f"topk:{self.k}/{self.chunk}"

    def granule(self, shape: tuple[int, ...]) -> int:
        """Whole chunks."""
        return self.chunk

    def max_bytes(self, count: int) -> int:
        """Exactly this."""
        return 4 * self._kept(count)

    def encode(self, x: Tensor, ctx: Context, out: bytearray) -> int:
        """Append positions and values of the largest."""
        count = require_finite(x).numel()
        whole = count // self.chunk * self.chunk
        places = torch.cat((self._largest(x[:whole], self.chunk, 0), self._largest(x[whole:], count - whole, whole)))
        values = x[places].clamp(-65504, 65504).to(torch.float16)
        return append(out, (places % self.chunk).to(torch.int16)) + append(out, values.view(torch.int16))

    def decode(self, payload: Buffer, ctx: Context, out: Tensor) -> None:
        """Scatter the values; positions that do not rise or leave their chunk are refused."""
        count = out.numel()
        kept = self._kept(count)
        require_length(payload, 4 * kept, f"{self.name} for {count} values")
        inside = view(payload, 0, kept, torch.int16).to(torch.int64)
        values = view(payload, 2 * kept, kept, torch.int16).view(torch.float16).to(torch.float32)
        whole = count // self.chunk
        chunk_of = torch.arange(kept) // self.k if whole else torch.zeros(kept, dtype=torch.int64)
        chunk_of = chunk_of.clamp(max=max(-(-count // self.chunk) - 1, 0))
        places = chunk_of * self.chunk + inside
        rising = bool((places[1:] > places[:-1]).all())
        if not rising or bool(((inside < 0) | (inside >= self.chunk) | (places >= count)).any()):
            raise CorruptPayload(f"positions of {self.name} must rise and stay in their chunk")
        if not bool(torch.isfinite(values).all()):
            raise CorruptPayload("a value is NaN or infinite")
        out.zero_()
        out[places] = values

    def _kept(self, count: int) -> int:
        return count // self.chunk * self.k + min(self.k, count % self.chunk)

    def _largest(self, x: Tensor, width: int, offset: int) -> Tensor:
        """Flat positions, rising, of the k largest magnitudes in each row of `width`; a stable sort settles ties for the
        lower one."""
        if not x.numel():
            return torch.empty(0, dtype=torch.int64)
        rows = x.reshape(-1, width)
        order = torch.sort(rows.abs(), dim=1, descending=True, stable=True).indices
        kept = order[:, : self.k].sort(dim=1).values
        return (kept + torch.arange(rows.shape[0])[:, None] * width).reshape(-1) + offset
