"""Rounds of methods whose outer steps may come a round late, so that a whole round hides the
exchange."""

from abc import abstractmethod
from dataclasses import replace
from typing import Literal, Self

import torch
from torch import Tensor

from farflock.optimizers.method import (
    Exchange,
    Ranges,
    Replica,
    Result,
    State,
    TensorBlock,
    Tensors,
)
from farflock.optimizers.parts.feedback import choose
from farflock.optimizers.parts.options import require_options
from farflock.optimizers.parts.outer_state import Merge, Positions
from farflock.optimizers.parts.stateful import Mode, PeriodicMethod, mean_of

Delay = Literal[0, 1]


class LateMethod(PeriodicMethod):
    """A method with options `period`, `delay`, `codec`, `return_codec`, `deadline_s` and two fields
    that it declares.

    `_start` is where this peer's local steps began; `_work` is what no mean contains yet: what was
    sent, until its result is known, and then what must be sent again. With a delay, the replica
    follows an outer step at the next exchange; without, at once, as in DiLoCo.
    """

    delay: Delay
    _start: dict[str, Tensor]
    _work: dict[str, Tensor]

    @abstractmethod
    def _next_start(self, work: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return where the next round's steps start while this round's message is pending."""

    @abstractmethod
    def _outer_step(self, mean: Tensors, result: Result) -> None:
        """Make the outer step on phi and momentum."""

    def require_options(self, who: str) -> None:
        """Raise `ValueError` unless options make rounds and lose nothing; `who`: like "CO2 has"."""
        require_options(self, f"{who} no feedback; choose fp16, bf16 or int8")
        if self.delay not in (0, 1):
            raise ValueError(
                f"a delay of {self.delay} rounds is not known; "
                "choose 1, or 0 to wait for each exchange"
            )
        if self.delay and self.period < 2:
            raise ValueError(
                f"a period of {self.period} step is too short to hide an exchange; "
                "choose 2 or more, usually 30, or delay=0"
            )

    def begun(self, replica: Replica) -> None:
        """Start the next local steps at phi."""
        self._start = dict(self._state.phi)

    def _message(self, replica: Replica) -> Tensors:
        """Return the message of all work that is not in phi, and start the next round."""
        work = self.untold(replica.read(replica.names, "param"))
        self._work = dict(work) if self.delay else {}
        message = self._message_of(work)
        if self.delay:
            self._start = dict(self._next_start(work))
            replica.write(self._start, "param")
        return message

    def _message_of(self, work: dict[str, Tensor]) -> Tensors:
        """Return the work itself."""
        return work

    def apply(self, replica: Replica, exchange: Exchange, result: Result) -> list[Exchange]:
        """Make the outer step, and drop the work that was taken."""
        if exchange.tensors or result.sent is not None:
            self._work = {
                name: _left(x, result.taken.get(name, ())) for name, x in self._work.items()
            }
        return PeriodicMethod.apply(self, replica, exchange, result)

    def _take(self, replica: Replica, exchange: Exchange, result: Result) -> None:
        before = dict(self._state.phi)
        self._outer_step(mean_of(exchange, result), result)
        if not self.delay:
            after = self._start = dict(self._state.phi)

            def change(block: TensorBlock, theta: Tensor) -> tuple[Tensor | None]:
                phi = block.of(before[block.name]), block.of(after[block.name])
                return (Merge().landed(block, result, Positions(theta, theta, *phi), None),)

            replica.update(tuple(result.taken), ("param",), change)

    def untold(self, theta: Tensors) -> dict[str, Tensor]:
        """Return all work that is not in phi: start minus end of this round, plus older work."""
        work = {name: self._start[name] - x for name, x in theta.items()}
        return {name: x + self._work[name] for name, x in work.items()} if self._work else work

    def move(self, replica: Replica, state: State, new: Self, mode: Mode) -> bool:
        """Move to the new phi; `carry` puts all work that is in no mean yet on top."""
        carried = mode == "carry" and bool(self._state.phi)
        theta: Tensors = new._state.phi
        if carried:
            work = self.untold(replica.read(replica.names, "param"))
            theta = {name: x - work[name] for name, x in theta.items()}
        replica.write(theta, "param")
        return carried

    def _exchange(self, tensors: Tensors, weight: float = 1.0) -> Exchange:
        """Return an exchange whose result is wanted one step before the next one: rounds decided
        without this peer are replayed while its stream is idle."""
        return replace(
            PeriodicMethod._exchange(self, tensors, weight),
            apply_after=self.period - 1 if self.delay else 0,
        )


def _left(work: Tensor, taken: Ranges) -> Tensor:
    return choose(taken, torch.zeros_like(work), work)
