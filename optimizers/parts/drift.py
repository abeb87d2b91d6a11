"""Detection of replicas that have diverged, for methods whose arithmetic differs between machines
(equality `close`).

Now and then all members gather a sketch of their parameters: 64 sums of values with random signs,
256 bytes however large the model is. The distance of two sketches is an unbiased estimate of the
parameters' distance: the expected square of a sum with independent signs is the sum of squares
(Alon, Matias and Szegedy, "The space complexity of approximating the frequency moments", STOC
1996); 64 sums are right to about a tenth. Signs come from the round, so that a difference that
cancels in one round shows in the next.

All members compare themselves with the one that is nearest to most, by the median of its distances:
unlike a mean, no minority can move it, and among two it is the first, so that only the other one
yields.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from farflock.optimizers.method import Tensors
from farflock.optimizers.parts.philox import words

SUMS = 64
_SEED = 0x64726966
_ROWS = 1 << 14  # of `SUMS` values, processed together
_BITS = torch.arange(32)


def sketch(tensors: Tensors, round_number: int) -> Tensor:
    """Return `SUMS` float32 sums; sum i adds every 64th value from i on, with the round's signs."""
    total = torch.zeros(SUMS, dtype=torch.float64)
    for place, x in enumerate(tensors.values()):
        flat = x.reshape(-1)
        signs = words(_SEED, place, round_number, 2 * -(-len(flat) // SUMS))
        for row in range(0, len(signs) // 2, _ROWS):
            piece = flat[row * SUMS : (row + _ROWS) * SUMS].double()
            drawn = signs[2 * row : 2 * (row + _ROWS), None] >> _BITS & 1
            negative = (drawn.view(-1)[: len(piece)] == 1).to(piece.device)
            signed = torch.where(negative, -piece, piece)
            padded = torch.nn.functional.pad(signed, (0, -len(piece) % SUMS))
            total += padded.view(-1, SUMS).sum(0).cpu()
    return total.float()


def parted(own: Tensor, sketches: Sequence[Tensor]) -> float:
    """Return the distance of `own` from the members' median sketch, relative to its norm: 0.01 is
    1 %. `sketches` are all members', `own` included, in an order that is the same for all."""
    every = torch.stack([one.cpu() for one in sketches]).double()
    middle = every[int(torch.cdist(every, every).median(1).values.argmin())]
    size = float(middle.norm())
    apart = float((own.double() - middle).norm())
    return apart / size if size else float("inf") if apart else 0.0
