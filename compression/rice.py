"""Rice coding: a few bits for each of many small non-negative numbers, without a Python loop over
them.

A number is split at a width w: the low w bits are sent as they are, the rest in unary (that many
zeros, then a one). Golomb (1966) and Rice (1979) write a number's parts side by side, which only a
loop can read. Here all low bits come first and all unary parts after them, so both sides are a few
array operations. The number of bits is the same: for gaps between randomly scattered positions, up
to 5 % more than their entropy.
"""

import numpy as np
from numpy.typing import NDArray

from farflock.compression.blocks import blocks_of
from farflock.compression.codec import Buffer, CorruptPayload

Numbers = NDArray[np.int64]

MAX_WIDTH = 16


def max_bits(count: int, total: int) -> int:
    """Return the most bits of `count` numbers whose sum is at most `total`."""
    return (
        min(count * (width + 1) + (total >> width) for width in range(MAX_WIDTH + 1))
        if count
        else 0
    )


def max_bytes(count: int, total: int) -> int:
    """Return the most bytes that `write` appends for them: the width and two bit streams."""
    return 1 + (max_bits(count, total) + 14) // 8 if count else 0


def write(numbers: Numbers, out: bytearray) -> int:
    """Append the width in one byte, the low bits and the unary parts, or nothing if there are no
    numbers; return the number of bytes appended. The width is the one that takes the fewest bits,
    the smallest of equal ones. Numbers are at least 0."""
    if not len(numbers):
        return 0
    width = _best_width(numbers)
    ends = np.cumsum((numbers >> width) + 1) - 1
    unary = np.zeros(int(ends[-1]) + 1, dtype=np.uint8)
    unary[ends] = 1
    written = (
        bytes([width]) + pack(numbers, width) + np.packbits(unary, bitorder="little").tobytes()
    )
    out += written
    return len(written)


def read(payload: Buffer, start: int, count: int) -> tuple[Numbers, int]:
    """Return the `count` numbers that `write` put at byte `start`, and the position after them.

    Raise `CorruptPayload` for a width above 16, too few ones before the payload ends, or a padding
    bit that is set. Memory is proportional to the payload, which has at least one bit per number.
    Numbers are below 2^19 times the payload's bytes.
    """
    if not count:
        return np.empty(0, dtype=np.int64), start
    width = payload[start] if start < len(payload) else 0
    unary_at = start + 1 + blocks_of(count * width, 8)
    if width > MAX_WIDTH or len(payload) < unary_at + blocks_of(count, 8):
        raise CorruptPayload(
            f"{len(payload) - start} bytes cannot hold {count} numbers with low parts of {width} "
            "bits"
        )
    low = unpack(payload, start + 1, count, width)
    unary = np.frombuffer(payload, dtype=np.uint8, offset=unary_at)
    ones = np.bitwise_count(unary).cumsum(dtype=np.int64)
    last = int(np.searchsorted(ones, count))  # the byte in which the last number ends
    if last == len(ones) or ones[last] != count:
        raise CorruptPayload(f"the unary parts of {count} numbers do not end with their last one")
    ends = np.flatnonzero(np.unpackbits(unary[: last + 1], bitorder="little").view(np.bool_))
    high = np.diff(ends, prepend=-1) - 1
    return (high << width) | low, unary_at + last + 1


def pack(numbers: Numbers, width: int) -> bytes:
    """Return the low `width` bits of all numbers, plane by plane from the lowest, padded with 0."""
    planes = [((numbers >> plane) & 1).astype(np.uint8) for plane in range(width)]
    return np.packbits(np.concatenate(planes), bitorder="little").tobytes() if planes else b""


def unpack(payload: Buffer, start: int, count: int, width: int) -> Numbers:
    """Return what `pack` wrote at byte `start` (checked by the caller); refuse set padding bits."""
    numbers = np.zeros(count, dtype=np.int64)
    if not count * width:
        return numbers
    packed = np.frombuffer(payload, dtype=np.uint8, count=blocks_of(count * width, 8), offset=start)
    used = count * width % 8
    if used and int(packed[-1]) >> used:
        raise CorruptPayload(f"a bit after the last of {count} numbers is set")
    planes = np.unpackbits(packed, count=count * width, bitorder="little").reshape(width, count)
    for plane, bits in enumerate(planes):
        numbers |= bits.astype(np.int64) << plane
    return numbers


def _best_width(numbers: Numbers) -> int:
    """Return the width that takes the fewest bits. As the width grows, the total first falls and
    then rises: each step costs one bit per number and saves ever fewer."""
    width, bits = 0, len(numbers) + int(numbers.sum())
    while width < MAX_WIDTH:
        wider = len(numbers) * (width + 2) + int((numbers >> (width + 1)).sum())
        if wider >= bits:
            break
        width, bits = width + 1, wider
    return width
