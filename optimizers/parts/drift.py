"""Finding replicas that have parted, for methods whose arithmetic is not the same on every machine (equality `close`).

Now and then all members gather a sketch of their parameters: 64 sums of values with random signs, 256 bytes however large the
model is. The distance between two sketches estimates, without bias, that of the parameters: the square of a sum of values
with independent signs is expected to be the sum of their squares (Alon, Matias and Szegedy, "The space complexity of
approximating the frequency moments", STOC 1996); with 64 sums it is right to about a tenth. Signs come from the round, so
that a difference which cancels in one round shows in the next.

All compare themselves with one of them, the member that is nearest to most, by the median of its distances: unlike a mean, no
minority can move it, and among two it is the first, so that only the other one gives way.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from farflock.optimizers.method import Tensors
from farflock.optimizers.parts.philox import words

SUMS = 64
_SEED = 0x64726966
_ROWS = 1 << 14  # of `SUMS` values, looked at together
_BITS = torch.arange(32)


def sketch(tensors: Tensors, round_number: int) -> Tensor:
    """`SUMS` float32 numbers: the i-th sums every 64th value from the i-th on, of all tensors, with signs of this round."""
    total = torch.zeros(SUMS, dtype=torch.float64)
    for place, x in enumerate(tensors.values()):
        flat = x.reshape(-1)
        signs = words(_SEED, place, round_number, 2 * -(-len(flat) // SUMS))
        for row in range(0, len(signs) // 2, _ROWS):
            part = flat[row * SUMS : (row + _ROWS) * SUMS].double()
            negative = (signs[2 * row : 2 * (row + _ROWS), None] >> _BITS & 1).view(-1)
            signed = torch.where(negative[: len(part)] == 1, -part, part)
            total += torch.nn.functional.pad(signed, (0, -len(part) % SUMS)).view(-1, SUMS).sum(0)
    return total.float()


def parted(own: Tensor, sketches: Sequence[Tensor]) -> float:
    """How far the owner of a sketch is from the members, as a share of the size of the one in their middle: 0.01 is 1 %.

    `sketches` are all members', one's own among them, in an order that is the same for all.
    """
    every = torch.stack(list(sketches)).double()
    middle = every[int(torch.cdist(every, every).median(1).values.argmin())]
    size = float(middle.norm())
    apart = float((own.double() - middle).norm())
    return apart / size if size else float("inf") if apart else 0.0
