"""A peer's training task: the model, its batches, the accumulated gradient, and the learning
rate."""

import contextlib
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch
from torch import nn

from farflock.node.model.compiled import CompiledLayers
from farflock.node.model.data import Batches
from farflock.node.model.device import Device
from farflock.node.model.replica import PlainReplica
from farflock.optimizers.method import Progress
from farflock.optimizers.parts.schedule import Schedule


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

    def forward_backward(self, step: int, progress: Progress) -> float:
        """Run batch number `step`, leave its gradients on the model, and return its loss in nats
        per token."""
        ...

    def set_rate(self, tokens: int) -> None:
        """Set the learning rate that the schedule gives at the run's `tokens`, equal on every
        peer."""
        ...


@dataclass(slots=True)
class LanguageModelTask:
    """A causal language model on one peer's stream of batches. `module` returns the mean loss of
    tokens and targets, as `Llama` does.

    A step's gradient is the mean of `accumulate` batches. Matrix products run in the device's
    precision, or with `autocast` in bf16; master weights and gradients stay fp32. The rate follows
    the run's progress, not this peer's steps.
    """

    module: nn.Module
    replica: PlainReplica
    batches: Batches
    schedule: Schedule
    accumulate: int = 1
    autocast: bool = False
    device: Device = field(default_factory=Device)
    compiled: CompiledLayers | None = None
    joined_at: int = 0  # step at which this peer joined, with empty moments

    @property
    def tokens_per_step(self) -> int:
        """The tokens of one step."""
        return self.accumulate * self.batches.batch_size * self.batches.seq

    @property
    def weight(self) -> float:
        """Always 1: each step counts once."""
        return 1.0

    def forward_backward(self, step: int, progress: Progress) -> float:
        """Add this step's mean gradient to the model's; return the mean loss in nats per token."""
        self.replica.lr = self.schedule.rate(progress.tokens, step - self.joined_at)
        losses: list[torch.Tensor] = []
        for part in range(self.accumulate):
            batch = self.batches.batch(step * self.accumulate + part)
            x, y = (tokens.to(self.device.place, non_blocking=True) for tokens in batch)
            if self.compiled is not None:
                self.compiled.settle(partial(self._loss, x, y))
            loss = self._loss(x, y)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        # Read only here: until then the device is not waited for.
        return sum(torch.stack(losses).tolist(), 0.0)

    def set_rate(self, tokens: int) -> None:
        """Set the schedule's rate at the run's `tokens`. All peers take this step, so there is
        no joiner's warm-up."""
        self.replica.lr = replace(self.schedule, joiner_steps=0).rate(tokens, 0)

    def _loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with self._precision():
            loss: torch.Tensor = self.module(x, y) / self.accumulate
        return loss

    def _precision(self) -> contextlib.AbstractContextManager[object]:
        if self.autocast and self.device.place.type == "cpu":
            return torch.autocast("cpu", dtype=torch.bfloat16)
        return self.device.autocast()
