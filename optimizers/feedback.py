"""Error feedback as plain functions: what a lossy codec or a missed round did not deliver is added to the next message.

a = beta·e + x is sent; once the result is known, e = a - sent where it was taken. Elsewhere e stays and so does the
local work x, which the next message contains again. Settling happens when the result is known, never when the payload
is encoded: a payload that nobody took must not count.
"""

from torch import Tensor

from farflock.optimizers.method import Ranges
from farflock.optimizers.outer import scaled


def message(x: Tensor, residual: Tensor | None, beta: float) -> Tensor:
    """What to send: the new value plus the decayed residual."""
    return x.clone() if residual is None else scaled(residual, beta) + x


def choose(ranges: Ranges, inside: Tensor, outside: Tensor) -> Tensor:
    """`inside` in these flat ranges, `outside` elsewhere; same shape, copied unless one covers everything."""
    if list(ranges) == [(0, inside.numel())]:
        return inside
    if not ranges:
        return outside
    mixed = outside.clone().reshape(-1)
    flat = inside.reshape(-1)
    for start, stop in ranges:
        mixed[start:stop] = flat[start:stop]
    return mixed.reshape(inside.shape)
