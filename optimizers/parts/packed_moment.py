"""A moment in one byte a value: blockwise dynamic quantisation (Dettmers et al., "8-bit Optimizers
via Block-wise Quantization", arXiv:2110.02861, sections 2.1 and 2.2).

256 values share a float32 scale, their largest magnitude. A value is the nearest of the codes of a
dynamic tree, times the scale: seven decades, with more codes the higher the decade. Deviations:

- Each sign's largest code is 1, so that packing what was unpacked changes nothing: a node resumes
  with the bits that it had. (The paper's signed tree ends at -0.993.)
- Second moments are packed as their roots, which span half as many decades. A root above zero never
  becomes zero, as steps divide by it.
- A step rounds up or down by a threshold that passes through all of [0, 1) from step to step.
  To the nearest, a moment that changes by less than half the distance of two codes would stay as it
  is for ever: far below a block's largest value, codes lie a factor of two apart.
- Blocks of 256 values, for 2,048: a large value coarsens fewer others.

It takes plain operations of torch, and runs on any device.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

BLOCK = 256  # values that share a scale
DECADES = 7
BYTES = 1 + 4 / BLOCK  # a value
TURN = 65_536  # steps in which a value's threshold takes each of as many places in [0, 1)


class PackedMoment:
    """A moment of this shape, at first zero; `is_square` for one that is never negative, and
    kept as its root."""

    def __init__(self, shape: Sequence[int], device: torch.device, is_square: bool) -> None:
        self.shape, self._is_square = torch.Size(shape), is_square
        self._count = self.shape.numel()
        zero = len(codes_of(True)) // 2 if not is_square else 0
        blocks = -(-self._count // BLOCK)
        self._codes = torch.full((self._count,), zero, dtype=torch.uint8, device=device)
        self._scales = torch.zeros(blocks, dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        """The bytes that it takes."""
        return self._codes.nbytes + self._scales.nbytes

    def whole(self) -> Tensor:
        """Return all values in float32, in their shape."""
        return self.read(0, self._count).view(self.shape)

    def read(self, start: int, stop: int) -> Tensor:
        """Return the flat values [start, stop) in new float32 memory."""
        codes = codes_on(self._codes.device, not self._is_square)
        units = codes.index_select(0, self._codes[start:stop].int())
        first, last = start // BLOCK, -(-stop // BLOCK)
        scales = self._scales[first:last].repeat_interleave(BLOCK)
        values = units.mul_(scales[start - first * BLOCK :][: stop - start])
        return values.mul_(values) if self._is_square else values

    def write(self, start: int, values: Tensor, turn: int | None = None) -> None:
        """Set the flat values from `start` on, to the nearest codes or, in a step, to those of its
        `turn`. Blocks are written whole: `start` is a multiple of `BLOCK`, and the end too, or the
        moment's own."""
        stop = start + values.numel()
        assert start % BLOCK == 0, "a moment is written in whole blocks"
        assert stop % BLOCK == 0 or stop == self._count, "a moment is written in whole blocks"
        values = values.sqrt() if self._is_square else values
        short = -values.numel() % BLOCK
        rows = torch.nn.functional.pad(values, (0, short)).view(-1, BLOCK)
        scales = torch.maximum(rows.amax(1), -rows.amin(1))
        self._scales[start // BLOCK : start // BLOCK + len(scales)] = scales
        units = rows / torch.where(scales == 0, 1.0, scales)[:, None]
        units = units.view(-1)[: values.numel()]
        self._codes[start:stop] = self._chosen(units, turn)

    def _chosen(self, units: Tensor, turn: int | None) -> Tensor:
        codes = codes_on(units.device, not self._is_square)
        if turn is None:
            middles = (codes[1:] + codes[:-1]) / 2
            chosen = torch.bucketize(units, middles, out_int32=True)
        else:
            chosen = torch.bucketize(units, codes, out_int32=True).clamp_(1, len(codes) - 1)
            low, high = (codes.index_select(0, chosen - less) for less in (1, 0))
            share = units.sub(low).div_(high.sub_(low))
            chosen -= (share <= thresholds(units, turn)).int()
        if self._is_square:
            chosen = torch.maximum(chosen, (units > 0).int())
        return chosen.to(torch.uint8)


def thresholds(like: Tensor, turn: int) -> Tensor:
    """Return a threshold in [0, 1) for each value; over `TURN` turns, each value's are spread
    evenly, and so are those of any few turns in a row (a Weyl sequence of the golden ratio)."""
    places = torch.arange(like.numel(), dtype=torch.int32, device=like.device)
    low_bits = torch.tensor(TURN - 1, dtype=torch.int32)
    places.bitwise_and_(low_bits).mul_(25_173).add_(turn % TURN * 40_503 % TURN)
    return places.bitwise_and_(low_bits).to(torch.float32).div_(TURN)


@cache
def codes_on(device: torch.device, signed: bool) -> Tensor:
    """Return the codes, ascending, on a device."""
    return torch.tensor(codes_of(signed), dtype=torch.float32).to(device)


@cache
def codes_of(signed: bool) -> tuple[float, ...]:
    """Return the codes of the dynamic tree, ascending: 255 from -1 to 1, or 256 from 0 to 1.

    A decade has twice as many codes as the one below it, at even distances, 64 (128 without signs)
    in the highest."""
    positive = []
    for decade in range(DECADES):
        count = 2**decade if signed else 2 ** (decade + 1)
        width = 0.9 / count
        middles = [0.1 + width * (place + 0.5) for place in range(count)]
        positive += [10.0 ** (decade - DECADES + 1) * middle for middle in middles]
    if signed:
        positive[-1] = 1.0
        return (*(-code for code in reversed(positive)), 0.0, *positive)
    return (0.0, *positive, 1.0)
