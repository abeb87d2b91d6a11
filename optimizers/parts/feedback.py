"""Error feedback, as plain functions and as one sender's memory: what a lossy codec did not deliver goes with the next
message.

a = beta·e + x is sent; where it was taken, e = a - sent. Elsewhere e stays as it is, and so does the local work x, which
the replica keeps and the next message therefore contains again: e = a there would count x twice. Settling happens when
the result is known, never when the payload is encoded: a payload that nobody took must not count.
"""

from dataclasses import dataclass, field

from torch import Tensor

from farflock.optimizers.method import Ranges, State, Tensors
from farflock.optimizers.parts.outer import scaled
from farflock.optimizers.parts.state import Shapes, tables, unnamed


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


@dataclass(slots=True)
class SenderFeedback:
    """One sender's error feedback, by tensor: the residual, what the pending message was encoded from, and where the replica
    stood then. In a state they are `residual.NAME`, `message.NAME` and `start.NAME`."""

    residual: dict[str, Tensor] = field(default_factory=dict)
    message: dict[str, Tensor] = field(default_factory=dict)
    start: dict[str, Tensor] = field(default_factory=dict)

    def compose(self, work: Tensors, theta: Tensors, beta: float) -> dict[str, Tensor]:
        """The message for this work of a replica at `theta`: it is kept until its result is known."""
        tensors = {name: message(x, self.residual.get(name), beta) for name, x in work.items()}
        self.message.update(tensors)
        self.start.update(theta)
        return tensors

    def settle(self, name: str, sent: Tensor, taken: Ranges) -> None:
        """Keep what the message held beyond `sent` in the taken ranges of one tensor."""
        self.residual[name] = settle(self.message[name], sent, taken, self.residual.get(name))

    def forget_message(self) -> None:
        """Drop the pending message; the residual stays."""
        self.message, self.start = {}, {}

    def personal(self) -> State:
        """A copy of all of it."""
        return tables({"residual": self.residual, "message": self.message, "start": self.start})

    def resume(self, state: State, *groups: Shapes) -> None:
        """Go on from `personal`. Tensors of one group travel together, so a state holds all of them or none; `WrongState`
        otherwise."""
        self.residual, self.message, self.start = (
            {name: x for shapes in groups for name, x in _whole(what, state, shapes).items()} for what in _HELD
        )


_HELD = ("residual", "message", "start")


def _whole(prefix: str, state: State, shapes: Shapes) -> dict[str, Tensor]:
    return unnamed(prefix, state, shapes) if any(f"{prefix}.{name}" in state for name in shapes) else {}
