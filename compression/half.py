"""Half precision, 2 bytes a value: fp16 (11 significant bits, up to 65504) and bf16 (8, and the range of float32).

fp16 is finer where values lie between 2^-14 and 65504; bf16 keeps its 8 bits everywhere, and zstd can shrink it.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from farflock.compression import native
from farflock.compression.codec import Buffer, Context, CorruptPayload, require_length
from farflock.compression.payload import append, values_at, within

_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_INFINITY_BITS = {"fp16": 0x7C00, "bf16": 0x7F80}


@dataclass(frozen=True, slots=True)
class Half:
    """Rounds to nearest, ties to even: |x - decode(encode(x))| <= max(2^-11·|x|, 2^-25) (fp16), max(2^-8·|x|, 2^-134) (bf16).

    The bound of fp16 holds up to 65504. Larger magnitudes are sent as 65504, by choice: the update keeps its sign and is
    far too large anyway, and a peer that refused to send would lose its whole round. bf16 has no such limit in practice:
    what would round to infinity (above 3.39e38) becomes its largest number, within the bound.
    """

    name: Literal["fp16", "bf16"] = "fp16"

    biased: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.name not in _TYPES:
            raise ValueError(f"half precision {self.name!r} is not known; choose fp16 or bf16")

    def granule(self, shape: tuple[int, ...]) -> int:
        """Any cut is fine."""
        return 1

    def max_bytes(self, count: int) -> int:
        """Exactly 2 a value."""
        return 2 * count

    def encode(self, x: Tensor, ctx: Context, out: bytearray) -> int:
        """Append the rounded values."""
        if native.encode(self.name, x, out):
            return self.max_bytes(x.numel())
        dtype = _TYPES[self.name]
        return append(out, within(x, torch.finfo(dtype).max).to(dtype))

    def decode(self, payload: Buffer, ctx: Context, out: Tensor) -> None:
        """Widen the values; NaN and infinity are refused."""
        if native.decode(self.name, payload, out):
            return
        count = out.numel()
        require_length(payload, self.max_bytes(count), f"{self.name} for {count} values")
        bits = values_at(payload, 0, count, torch.int16)
        if count and int((bits & 0x7FFF).amax()) >= _INFINITY_BITS[self.name]:
            raise CorruptPayload(f"{self.name} payload holds NaN or infinity")
        out.copy_(bits.view(_TYPES[self.name]))
