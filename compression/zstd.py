"""Another codec's payload, compressed once more by zstandard at level 1.

MEASURED
"""

from dataclasses import dataclass

import zstandard
from torch import Tensor

from farflock.compression.codec import Buffer, Codec, Context, CorruptPayload

_MIN_WINDOW_BYTES = 1024  # zstd's own least


@dataclass(frozen=True, slots=True)
class Zstd:
    """The inner codec's values and bound, in fewer bytes where they repeat themselves.

    The payload is one zstd frame with its content size, no dictionary, nothing after it. Receivers get the same values
    from every zstd version; the bytes that a sender writes may differ between versions.
    """

    inner: Codec

    @property
    def name(self) -> str:
        """`INNER+zstd`."""
        return f"{self.inner.name}+zstd"

    @property
    def biased(self) -> bool:
        """As the inner codec."""
        return self.inner.biased

    def granule(self, shape: tuple[int, ...]) -> int:
        """As the inner codec."""
        return self.inner.granule(shape)

    def max_bytes(self, count: int) -> int:
        """The most that zstd makes of incompressible bytes (ZSTD_compressBound)."""
        inner = self.inner.max_bytes(count)
        return inner + inner // 256 + 64

    def encode(self, x: Tensor, ctx: Context, out: bytearray) -> int:
        """Append the compressed inner payload."""
        payload = bytearray()
        self.inner.encode(x, ctx, payload)
        packed = zstandard.ZstdCompressor(level=1, write_content_size=True).compress(payload)
        out += packed
        return len(packed)

    def decode(self, payload: Buffer, ctx: Context, out: Tensor) -> None:
        """Decompress if the frame claims no more than the inner codec can have written, then decode."""
        count = out.numel()
        if len(payload) > self.max_bytes(count):
            raise CorruptPayload(
                f"{self.name} for {count} values needs at most {self.max_bytes(count)} bytes, got {len(payload)}"
            )
        self.inner.decode(_decompress(payload, self.inner.max_bytes(count)), ctx, out)


def _decompress(payload: Buffer, limit_bytes: int) -> bytes:
    """The content of the one frame that the payload is; its claims are checked before memory is taken for them."""
    window_bytes_max = max(2 * limit_bytes, _MIN_WINDOW_BYTES)  # zstd rounds the content's size up to a power of two
    try:
        frame = zstandard.get_frame_parameters(payload)
        if frame.content_size > limit_bytes or frame.window_size > window_bytes_max:
            raise CorruptPayload(
                f"zstd frame claims {frame.content_size} bytes in a window of {frame.window_size}; at most {limit_bytes}"
            )
        return zstandard.ZstdDecompressor().decompress(payload, max_output_size=limit_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptPayload(f"not a zstd frame: {error}") from None
