"""A peer's training task: the model, its batches, the accumulated gradient, and the learning
rate."""

import contextlib
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, SupportsFloat

import torch
from torch import nn

from farflock.node.errors import Failure
from farflock.node.model.compiled import CompiledLayers
from farflock.node.model.data import Batches
from farflock.node.model.device import Device, is_out_of_memory
from farflock.node.model.replica import PlainReplica
from farflock.node.train.loss_scale import LossScale, unscale
from farflock.node.train.micro_batches import MicroBatches, drop_gradients, set_aside
from farflock.optimizers.method import Progress
from farflock.optimizers.parts.schedule import Schedule

log = logging.getLogger(__name__)


Loss = SupportsFloat  # of a step, in nats per token; a device may still compute it
Train = Callable[[Callable[[], Loss]], Awaitable[Loss | None]]


class TrainingTask(Protocol):
    """Batches, a model and its gradients, as the loop trains them."""

    @property
    def tokens_per_step(self) -> int:
        """The tokens of one step."""
        ...

    @property
    def weight(self) -> float:
        """The weight with which the last step's gradient counts."""
        ...

    def forward_backward(self, step: int, progress: Progress) -> Loss:
        """Run batch number `step`, leave its gradients on the model, and return its loss."""
        ...

    def set_rate(self, tokens: int) -> None:
        """Set the learning rate that the schedule gives at the run's `tokens`, equal on every
        peer."""
        ...


@dataclass(frozen=True, slots=True)
class _Sum:
    """The sum of losses on a device, which is waited for only where it is read: meanwhile the inner
    step is asked for."""

    losses: list[torch.Tensor]

    def __float__(self) -> float:
        return sum(torch.stack(self.losses).tolist(), 0.0)


class StepImpossible(Failure):
    """This machine cannot take the step; the model is as it was before it."""


class NoRoom(StepImpossible):
    """The device has no room for a step, even with one sequence at a time."""


@dataclass(slots=True)
class LanguageModelTask:
    """A causal language model on one peer's stream of batches. `module` returns the mean loss of
    tokens and targets, as `Llama` does.

    A step's gradient is the mean of `accumulate` batches, each computed in parts if the device has
    no room for all of it. Matrix products run in the device's precision, or with `autocast` in
    bf16; master weights and gradients stay fp32. The rate follows the run's progress, not this
    peer's steps.
    """

    module: nn.Module
    replica: PlainReplica
    batches: Batches
    schedule: Schedule
    accumulate: int = 1
    autocast: bool = False
    device: Device = field(default_factory=Device)
    micro_batch: int | None = None  # sequences computed at once, at first; None: a batch
    compiled: CompiledLayers | None = None
    trial: bool = False  # to find out what fits: a failure is no news
    joined_at: int = 0  # step at which this peer joined, with empty moments
    micro_batches: MicroBatches = field(init=False)
    loss_scale: LossScale = field(default_factory=LossScale, init=False)

    def __post_init__(self) -> None:
        self.micro_batches = MicroBatches(self.batches.batch_size, self.micro_batch)

    @property
    def tokens_per_step(self) -> int:
        """The tokens of one step."""
        return self.accumulate * self.batches.batch_size * self.batches.seq

    @property
    def weight(self) -> float:
        """Always 1: each step counts once."""
        return 1.0

    def forward_backward(self, step: int, progress: Progress) -> Loss:
        """Add this step's mean gradient to the model's; return the mean loss in nats per token.

        Where a device runs out of memory, or fp16 overflows, the step is taken again with the same
        samples. Raise `StepImpossible` if it cannot be taken at all."""
        self.replica.lr = self.schedule.rate(progress.tokens, step - self.joined_at)
        if self.device.place.type == "cpu":  # where neither happens
            return float(_Sum(self._passes(step, 1.0)))
        with set_aside(self.module.parameters()):
            while (loss := self._try(step)) is None:
                drop_gradients(self.module.parameters())
            return loss

    def _try(self, step: int) -> Loss | None:
        """Take the step; return its loss, or None if it has to be taken again."""
        scaled = self.device.precision == "fp16"
        scale = self.loss_scale.value if scaled else 1.0
        try:
            losses = self._passes(step, scale)
            if not scaled:
                return _Sum(losses)
            return self._settled(losses, unscale(self.module.parameters(), scale))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error)
        # Here, not above: the error holds the frames of the pass, and these its tensors.
        self._compute_less(step, reason)
        return None

    def _passes(self, step: int, scale: float) -> list[torch.Tensor]:
        """Run the step's passes; return each one's share of the loss."""
        losses: list[torch.Tensor] = []
        for number in range(self.accumulate):
            batch = self.batches.batch(step * self.accumulate + number)
            x, y = map(self.device.bring, batch)
            for rows in self.micro_batches:
                share = self.accumulate * len(x) / len(x[rows])
                loss_of = partial(self._loss, x[rows], y[rows], share)
                if self.compiled is not None:
                    self.compiled.settle(len(x[rows]), loss_of)
                loss = loss_of()
                (loss if scale == 1.0 else loss * scale).backward()  # type: ignore[no-untyped-call]
                losses.append(loss.detach())
        return losses

    def _settled(self, losses: list[torch.Tensor], largest: torch.Tensor) -> float | None:
        """Return the loss if the gradients are finite; else halve the scale and return None. Both
        are read at once, so the device is waited for once."""
        *read, gradient = torch.stack([*losses, largest]).tolist()
        if math.isfinite(gradient):
            self.loss_scale.stepped()
            return sum(read, 0.0)
        if not self.loss_scale.overflowed():
            raise StepImpossible(
                "the gradients are not finite",
                f"{self.device.name} computes in fp16, and they overflow even without loss scaling",
                "lower the run's learning rate, or train on another device (--device cpu)",
            )
        return None

    def _compute_less(self, step: int, reason: str) -> None:
        """Halve what is computed at once, and say so."""
        before = self.micro_batches.at_once
        if not self.micro_batches.halve():
            raise NoRoom(
                f"{self.device.name} has no room for a step with one sequence at a time",
                reason,
                "close programs that use it, or train on another device (--device cpu)",
            )
        log.log(
            logging.DEBUG if self.trial else logging.WARNING,
            "%s ran out of memory with %d sequences at once: step %d is taken again with %d",
            self.device.name,
            before,
            step,
            self.micro_batches.at_once,
        )
        drop_gradients(self.module.parameters())
        self.device.release()

    def set_rate(self, tokens: int) -> None:
        """Set the schedule's rate at the run's `tokens`. All peers take this step, so there is
        no joiner's warm-up."""
        self.replica.lr = replace(self.schedule, joiner_steps=0).rate(tokens, 0)

    def _loss(self, x: torch.Tensor, y: torch.Tensor, share: float) -> torch.Tensor:
        with self._precision():
            loss: torch.Tensor = self.module(x, y) / share
        return loss

    def _precision(self) -> contextlib.AbstractContextManager[object]:
        if self.autocast and self.device.place.type == "cpu":
            return torch.autocast("cpu", dtype=torch.bfloat16)
        return self.device.autocast()
