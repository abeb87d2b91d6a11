"""Error feedback as plain functions: what a lossy codec did not deliver is added to the next message.

a = beta·e + x is sent; where it was taken, e = a - sent. Elsewhere e stays as it is, and so does the local work x, which
the replica keeps and the next message therefore contains again: e = a there would count x twice. Settling happens when
the result is known, never when the payload is encoded: a payload that nobody took must not count.
"""

from torch import Tensor

from farflock.optimizers.method import Ranges
from farflock.optimizers.outer import scaled


def message(x: Tensor, residual: Tensor | None, beta: float) -> Tensor:
    """What to send: the new value plus the decayed residual."""
    return x.clone() if residual is None else scaled(residual, beta) + x


def settle(sent_from: Tensor, sent: Tensor, taken: Ranges, residual: Tensor | None) -> Tensor:
    """The new residual: what the message `sent_from` held beyond `sent` (as others decoded it) in the `taken` flat ranges,
    the old residual (None: zeros) elsewhere."""
    return choose(taken, sent_from - sent, sent_from.new_zeros(sent_from.shape) if residual is None else residual)


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
