"""The outer state of most methods: the outer parameters phi, each with a momentum."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from farflock.optimizers.method import Replica, Result, TensorBlock, Tensors
from farflock.optimizers.parts.blocks import (
    LazyTensors,
    block_length,
    blocks,
    parameters,
    read,
)
from farflock.optimizers.parts.feedback import SenderFeedback, choose
from farflock.optimizers.parts.outer import Outer, scaled
from farflock.optimizers.parts.round_book import RoundBook
from farflock.optimizers.parts.state_fields import shared


class Feedback(NamedTuple):
    """A sender's memory of what its messages did not bring, and its decay."""

    memory: SenderFeedback
    beta: float


@dataclass(slots=True)
class Anchor:
    """phi, at first the replica's parameters."""

    phi: dict[str, Tensor] = shared(dict)

    def begin(self, replica: Replica) -> bool:
        """Set phi to the replica's parameters unless it is set; return whether it was set now."""
        if self.phi:
            return False
        self.phi = parameters(replica, replica.names)
        return True

    def pseudo_gradient(
        self, replica: Replica, names: Sequence[str], feedback: Feedback | None = None
    ) -> LazyTensors:
        """Return start minus end, phi - theta, of these parameters, with the feedback added."""

        def compute(name: str, start: int, stop: int) -> Tensor:
            block = TensorBlock(name, start, stop)
            return self.work(block, replica.block(name, "param", start, stop), feedback)

        return LazyTensors({name: tuple(self.phi[name].shape) for name in names}, compute)

    def work(self, block: TensorBlock, theta: Tensor, feedback: Feedback | None = None) -> Tensor:
        """Return one block of the pseudo-gradient of a replica at `theta`."""
        work = block.of(self.phi[block.name]) - theta
        return work if feedback is None else feedback.memory.message(block, work, feedback.beta)

    def move(self, replica: Replica, new: "Anchor", mode: Literal["adopt", "carry"]) -> bool:
        """Move the replica to `new`; `carry` puts its work since phi on top. Return whether there
        was work to carry."""
        carried = mode == "carry" and bool(self.phi)

        def change(block: TensorBlock, theta: Tensor) -> tuple[Tensor]:
            after = block.of(new.phi[block.name])
            before = block.of(self.phi[block.name]) if carried else theta
            return (after + (theta - before) if carried else after,)

        replica.update(replica.names, ("param",), change)
        return carried


@dataclass(slots=True)
class OuterState(Anchor):
    """phi and its momentum, at first zero; in a state `MOMENTUM.NAME`, after `momentum_name`."""

    momentum_name: str = "momentum"
    momentum: dict[str, Tensor] = shared(dict, "{0.momentum_name}")

    def begin(self, replica: Replica) -> bool:
        """Set phi to the replica's parameters unless it is set; return whether it was set now."""
        begun = Anchor.begin(self, replica)
        if begun:
            self.momentum = {name: replica.allocate(x.shape) for name, x in self.phi.items()}
        return begun

    def step(self, name: str, outer: Outer, pseudo_grad: Tensor) -> Tensor:
        """Replace one tensor's phi and momentum by those after an outer step; return its phi."""
        self.phi[name], self.momentum[name] = outer.step(
            self.phi[name], pseudo_grad, self.momentum[name]
        )
        return self.phi[name]

    def advance(
        self,
        replica: Replica,
        names: Sequence[str],
        outer: Outer,
        mean: Tensors,
        result: Result,
        book: RoundBook,
        merge: "Merge",
    ) -> bool:
        """Make the outer step of these parameters, in place and block by block. The replica follows
        where its work was taken, as `merge` says; return whether it moved."""
        feedback = merge.feedback
        moved = [name for name in names if result.taken.get(name)]
        if moved and feedback is not None:
            feedback.memory.begin(replica, names)

        def step(block: TensorBlock) -> tuple[Tensor, Tensor]:
            phi = block.of(self.phi[block.name])
            before = phi.clone()
            outer.step_(phi, read(mean, block), block.of(self.momentum[block.name]))
            return before, phi

        def change(block: TensorBlock, theta: Tensor) -> tuple[Tensor | None]:
            then = book.started(block, theta)
            message = self.work(block, then, feedback) if feedback is not None else None
            before, after = step(block)
            return (merge.landed(block, result, Positions(theta, then, before, after), message),)

        for name in names:
            if name in moved:
                replica.update((name,), ("param",), change)
            else:
                phi = self.phi[name]
                for block in blocks(name, phi.shape, block_length(phi)):
                    step(block)
        return bool(moved)


class Positions(NamedTuple):
    """One block of a replica now and at its message, and of phi before and after an outer step."""

    theta: Tensor
    then: Tensor
    before: Tensor
    after: Tensor


@dataclass(frozen=True, slots=True)
class Merge:
    """The way a replica follows phi where its work was taken: it restarts at the new phi, plus the
    steps made since the message if more than `overlap`, mixed with a share `mix` of the local
    value."""

    feedback: Feedback | None = None
    overlap: int = 0
    mix: float = 0.0

    def landed(
        self, block: TensorBlock, result: Result, at: Positions, message: Tensor | None
    ) -> Tensor | None:
        """Return one block of the replica after an outer step, None where it stays; `feedback`
        settles the block's message."""
        if not (taken := block.within(result.taken.get(block.name, ()))):
            return None
        assert result.sent is not None
        after, late = at.after, result.steps_since > self.overlap
        sent = read(result.sent, block) if late or message is not None else after
        if message is not None:
            assert self.feedback is not None
            self.feedback.memory.settle(block, message, sent, taken)
        if late:
            then = at.before - sent if message is None else at.then
            after = after + (at.theta - then)
        mixed = scaled(at.theta, self.mix) + scaled(after, 1 - self.mix) if self.mix else after
        return choose(taken, mixed, at.theta)
