"""The yardstick of training: a plain PyTorch loop that takes the same steps."""

import torch
from torch import nn
from torch.nn import functional

from farflock.node.data.samples import Text
from farflock.node.data.shard_order import SampleStream
from farflock.node.model.data import Batches
from farflock.node.model.device import Device
from farflock.node.model.llama import PRESETS, build
from farflock.node.model.step_options import StepOptions
from farflock.node.run.terms import RunPlan
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.schedule import Schedule

RATE = 3e-3
SEED = 20_261_121


def schedule_at(rate: float) -> Schedule:
    """Return a constant rate after a short warm-up."""
    return Schedule(rate, total_tokens=1 << 40, warmup_tokens=1 << 14, floor=1.0)


def plan_of(preset: str, batch: int, seq: int, method: str, **options: object) -> RunPlan:
    """Return the plan of both loops: a preset model at a constant rate after a short warm-up."""
    return RunPlan(
        SEED,
        PRESETS[preset],
        InnerConfig(lr=RATE),
        schedule_at(RATE),
        method,
        dict(options),
        batch=batch,
        seq=seq,
    )


class Bare:
    """One replica: model, inner optimizer, clipped gradients, schedule, and one peer's batches.

    On a device (None: the CPU) it is a loop written for speed: it does not wait for each step's
    loss, its optimizer is fused, and where nodes compile layers, it compiles the model as a whole,
    the loss included."""

    def __init__(self, plan: RunPlan, text: Text, peer: str, device: Device | None = None) -> None:
        self._plan, self._device = plan, device or Device()
        self._model = build(plan.model, plan.run_seed).to(self._device.place)
        self._inner = plan.inner.build(self._model, fused=self._device.has_fused_adamw)
        self._loss_of = self._loss
        if StepOptions().compiles_on(self._device):
            self._loss_of = torch.compile(self._loss, dynamic=False)
        self._batches = Batches(
            text, SampleStream(plan.run_seed, peer), plan.batch, plan.seq, plan.samples
        )
        self._step = 0
        self.loss = float("nan")

    def train(self, steps: int) -> None:
        """Take `steps` more steps; `loss` is that of the last one, in nats per token."""
        plan, place = self._plan, self._device.place
        loss = torch.tensor(self.loss)
        for _ in range(steps):
            x, y = (
                tokens.to(place, non_blocking=True) for tokens in self._batches.batch(self._step)
            )
            with self._device.autocast():
                loss = self._loss_of(x, y)
            self._inner.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if plan.clip_norm is not None:
                nn.utils.clip_grad_norm_(self._model.parameters(), plan.clip_norm)
            for group in self._inner.param_groups:
                group["lr"] = plan.schedule.rate(self._step * plan.batch * plan.seq, self._step)
            self._inner.step()
            if place.type == "cpu":
                self.loss = loss.item()
            self._step += 1
        self.loss = loss.item()

    def _loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = self._model(x).float()
        return functional.cross_entropy(logits.flatten(0, 1), y.flatten())
