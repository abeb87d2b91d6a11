"""Unchanged float32, 4 bytes a value, the baseline; and half precision, 2 bytes a value: fp16 (11
significant bits, up to 65504) and bf16 (8, and the range of float32).

fp16 is finer for values between 2^-14 and 65504; bf16 keeps its 8 bits everywhere, and zstd can
shrink it.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from farflock.compression.payload import FloatCodec


@dataclass(frozen=True, slots=True)
class Raw(FloatCodec):
    """Unchanged float32: decode(encode(x)) has the bits of x."""

    name: ClassVar[str] = "fp32"


@dataclass(frozen=True, slots=True)
class Half(FloatCodec):
    """Half precision, rounded to nearest, ties to even: |x - decode(encode(x))| <= max(2^-11·|x|,
    2^-25) (fp16), max(2^-8·|x|, 2^-134) (bf16).

    The bound of fp16 holds up to 65504. Larger magnitudes are deliberately sent as 65504: the
    update keeps its sign and is far too large anyway, and a peer that refused to send would lose
    its whole round. bf16 has no such limit in practice: what would round to infinity (above
    3.39e38) becomes its largest number, within the bound.
    """

    name: Literal["fp16", "bf16"] = "fp16"

    def __post_init__(self) -> None:
        if self.name not in ("fp16", "bf16"):
            raise ValueError(f"half precision {self.name!r} is not known; choose fp16 or bf16")
