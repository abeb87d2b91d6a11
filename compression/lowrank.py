"""A matrix as a few outer products: for updates whose energy lies mostly in a few directions, such
as those of attention matrices.

The best directions come from subspace iteration (Halko, Martinsson and Tropp, SIAM Review 53, 2011,
algorithm 4.4; PowerSGD, Vogels et al., arXiv:1905.13727, takes one such iteration per step and
starts it where the last one ended). DiLoCoX (arXiv:2506.21263) sends both factors in four bits.
Deviations: eight bits, because in four the left factor's error is as large as the contribution of
many directions; each payload starts from scratch, because a codec is stateless; the right factor is
fitted to the left one as sent. Error feedback delivers later what the few directions miss.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from farflock.compression.codec import Buffer, Context, CorruptPayload, require_length
from farflock.compression.floats import Half
from farflock.compression.payload import append, values_at, within

LARGEST = 2.0**100  # magnitudes are clamped to it, so that sums of products stay finite
SMALLEST = 2.0**-100  # smaller scales count as 0
ITERATIONS = 3
_LEVELS = 127
_PLAIN = Half("bf16")


@dataclass(frozen=True, slots=True)
class LowRank:
    """`rank` outer products of a column and a row of int8, each with a scale: rank · (rows +
    columns + 4) bytes.

    The context gives the length of a row. If the values are not whole rows, or bf16 takes no more
    bytes (vectors, small matrices), all values are sent as bf16. Otherwise the error's Frobenius
    norm is at most that of the values, plus a little for rounding. Biased: a mean needs error
    feedback. Magnitudes above 2^100 are first clamped.

    The payload is the scales (float32), all left factors, then all right factors. The decoder adds
    up scale · (left · right) product by product, in order.
    """

    rank: int = 4

    biased: ClassVar[bool] = True
    on_device: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= 256:
            raise ValueError(
                f"a low rank of {self.rank} is not allowed; choose 1 to 256, usually 4"
            )

    @property
    def name(self) -> str:
        """`lowrank:RANK`."""
        return f"lowrank:{self.rank}"

    def granule(self, shape: tuple[int, ...]) -> int:
        """Return the length of a row."""
        return max(shape[-1], 1) if len(shape) > 1 else 1

    def max_bytes(self, count: int) -> int:
        """Return the length of bf16: products are sent only where they take less."""
        return _PLAIN.max_bytes(count)

    def encode(self, x: Tensor, ctx: Context, out: bytearray) -> int:
        """Append scales and factors, or plain bf16 where those would not be smaller."""
        rank, rows, columns = self._shape(x.numel(), ctx)
        if not rank:
            return _PLAIN.encode(x, ctx, out)
        values_MN = within(within(x), LARGEST).view(rows, columns)
        left_MK, _ = _quantised(leading(values_MN, rank))
        right_NK, scales_K = _quantised(fitted(values_MN, left_MK))
        return (
            append(out, scales_K)
            + append(out, left_MK.T.to(torch.int8))
            + append(out, right_NK.T.to(torch.int8))
        )

    def decode(self, payload: Buffer, ctx: Context, out: Tensor) -> None:
        """Add up the products; refuse scales outside their limits and the code -128."""
        rank, rows, columns = self._shape(out.numel(), ctx)
        if not rank:
            _PLAIN.decode(payload, ctx, out)
            return
        size = rank * (rows + columns)
        require_length(payload, 4 * rank + size, f"{self.name} for {rows} x {columns} values")
        scales = values_at(payload, 0, rank, torch.float32, out.device)
        usable = (scales == 0) | ((scales >= SMALLEST) & (scales <= LARGEST))
        codes = values_at(payload, 4 * rank, size, torch.int8, out.device)
        if not bool(usable.all()) or int(codes.amin()) < -_LEVELS:
            raise CorruptPayload(f"a scale or a code of {self.name} is outside its limits")
        left_KM = codes[: rank * rows].view(rank, rows).to(torch.float32)
        right_KN = codes[rank * rows :].view(rank, columns).to(torch.float32)
        out.zero_()
        values_MN = out.view(rows, columns)
        for scale, left_M, right_N in zip(scales, left_KM, right_KN, strict=True):
            values_MN.add_((left_M[:, None] * right_N).mul_(scale))

    def _shape(self, count: int, ctx: Context) -> tuple[int, int, int]:
        """Return the rank (0 if the values are sent as bf16) and the numbers of rows and
        columns."""
        rows, rest = divmod(count, max(ctx.columns, 1))
        rank = min(self.rank, rows, ctx.columns)
        smaller = not rest and rank * (rows + ctx.columns + 4) < _PLAIN.max_bytes(count)
        return (rank if smaller else 0), rows, ctx.columns


def leading(values_MN: Tensor, rank: int) -> Tensor:
    """Return approximately the leading left singular vectors (M, K); K = rank <= min(M, N)."""
    columns, scale = values_MN.shape[1], float(values_MN.abs().amax())
    scaled_MN = values_MN / scale if scale > 0 else values_MN
    right_NK = torch.randn(
        columns, rank, generator=torch.Generator().manual_seed(rank), dtype=torch.float32
    ).to(values_MN.device)
    left_MK: Tensor = torch.linalg.qr(scaled_MN @ right_NK).Q
    for _ in range(ITERATIONS):
        left_MK = torch.linalg.qr(scaled_MN @ torch.linalg.qr(scaled_MN.T @ left_MK).Q).Q
    return left_MK


def fitted(values_MN: Tensor, left_MK: Tensor) -> Tensor:
    """Return `right` (N, K) such that left @ right.T is the least-squares fit to the values."""
    scale = float(values_MN.abs().amax()) or 1.0
    right_KN: Tensor = torch.linalg.lstsq(left_MK.double(), (values_MN / scale).double()).solution
    return (right_KN.T * scale).float()


def _quantised(columns_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Return each column's codes, and its step: the largest magnitude / 127, or 0 if that is below
    `SMALLEST`. A column is its codes times its step."""
    steps_K = columns_MK.abs().amax(dim=0) / _LEVELS
    steps_K = torch.where(steps_K >= SMALLEST, steps_K.clamp(max=LARGEST), 0.0)
    safe_K = torch.where(steps_K > 0, steps_K, 1.0)
    codes_MK = torch.where(steps_K > 0, columns_MK / safe_K, 0.0).round().clamp(-_LEVELS, _LEVELS)
    return codes_MK, steps_K
