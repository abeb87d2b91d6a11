"""Pieces of chunks, compressed for slow lines: a state in fp32 gets 8 % shorter, one in bf16 25 %.

A chunk is named by the hash of its plain bytes, so that whoever receives it verifies those.
"""

import zstandard

LEVEL = 1  # 0.7 GB/s of a core: nothing beside a line that is slow
WORTH = 0.97  # a piece that hardly gets shorter is sent as it is


def packed(body: memoryview) -> bytes | None:
    """Return shorter bytes for these; None if they would hardly be shorter."""
    made = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True).compress(body)
    return made if len(made) < WORTH * len(body) else None


def unpacked(body: memoryview | bytes, limit_bytes: int) -> bytes:
    """Return the plain bytes; none for anything but one frame that says that it has `limit_bytes`
    at most: memory is taken for no more."""
    try:
        frame = zstandard.get_frame_parameters(body)
        # zstd rounds the content's size up to a power of two, and has windows of 1 KiB at least
        if frame.content_size > limit_bytes or frame.window_size > max(2 * limit_bytes, 1024):
            return b""
        return zstandard.ZstdDecompressor().decompress(
            body, max_output_size=limit_bytes, allow_extra_data=False
        )
    except zstandard.ZstdError:
        return b""
