"""A codec's payload, compressed once more by zstandard at level 1.

Payload: one zstd frame with its content size. Decompression never takes more than the inner codec's `max_bytes`.
"""

from dataclasses import dataclass

import zstandard
from torch import Tensor

from farflock.compression.codec import Buffer, Codec, Context, CorruptPayload

_OVERHEAD = 64  # bytes that zstd may add to incompressible input, besides 1/256 of it


@dataclass(frozen=True, slots=True)
class Zstd:
    """The inner codec's values in fewer bytes, where they have regular exponents or gaps."""

    inner: Codec

    @property
    def name(self) -> str:
        """INNER+zstd."""
        return f"{self.inner.name}+zstd"

    @property
    def biased(self) -> bool:
        """As the inner codec."""
        return self.inner.biased

    def granule(self, shape: tuple[int, ...]) -> int:
        """As the inner codec."""
        return self.inner.granule(shape)

    def max_bytes(self, count: int) -> int:
        """The worst case of zstd on the inner payload."""
        inner = self.inner.max_bytes(count)
        return inner + inner // 256 + _OVERHEAD

    def encode(self, x: Tensor, ctx: Context, out: bytearray) -> int:
        """Append the compressed inner payload."""
        payload = bytearray()
        self.inner.encode(x, ctx, payload)
        packed = zstandard.ZstdCompressor(level=1, write_content_size=True).compress(payload)
        out += packed
        return len(packed)

    def decode(self, payload: Buffer, ctx: Context, out: Tensor) -> None:
        """Decompress within bounds, then decode."""
        limit = self.inner.max_bytes(out.numel())
        if len(payload) > self.max_bytes(out.numel()):
            raise CorruptPayload(
                f"{self.name} for {out.numel()} values has at most {self.max_bytes(out.numel())} bytes"
            )
        try:
            size = zstandard.frame_content_size(payload)
            if not 0 <= size <= limit:
                raise CorruptPayload(f"a zstd frame claims {size} bytes where at most {limit} can be")
            unpacked = zstandard.ZstdDecompressor().decompress(payload, max_output_size=limit, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise CorruptPayload(f"not a zstd frame: {error}") from None
        self.inner.decode(unpacked, ctx, out)
