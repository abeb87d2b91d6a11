"""The yardstick of training: a plain PyTorch loop that takes the same steps."""

from torch import nn
from torch.nn import functional

from farflock.node.model.data import Batches
from farflock.node.model.llama import PRESETS, build
from farflock.node.model.tokenizer import TokenIds
from farflock.node.run.terms import RunPlan
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.schedule import Schedule

RATE = 3e-3
SEED = 20_261_121


def plan_of(preset: str, batch: int, seq: int, method: str, **options: object) -> RunPlan:
    """Return the plan of both loops: a preset model at a constant rate after a short warm-up."""
    schedule = Schedule(RATE, total_tokens=1 << 40, warmup_tokens=1 << 14, floor=1.0)
    return RunPlan(
        SEED,
        PRESETS[preset],
        InnerConfig(lr=RATE),
        schedule,
        method,
        dict(options),
        batch=batch,
        seq=seq,
    )


class Bare:
    """One replica: model, inner optimizer, clipped gradients, schedule, and one peer's batches."""

    def __init__(self, plan: RunPlan, tokens: TokenIds, peer: str) -> None:
        self._plan = plan
        self._model = build(plan.model, plan.run_seed)
        self._inner = plan.inner.build(self._model)
        self._batches = Batches(
            tokens, plan.run_seed, peer, plan.batch, plan.seq, recurring=plan.samples
        )
        self._step = 0
        self.loss = float("nan")

    def train(self, steps: int) -> None:
        """Take `steps` more steps; `loss` is that of the last one, in nats per token."""
        plan = self._plan
        for _ in range(steps):
            x, y = self._batches.batch(self._step)
            loss = functional.cross_entropy(self._model(x).flatten(0, 1), y.flatten())
            self._inner.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if plan.clip_norm is not None:
                nn.utils.clip_grad_norm_(self._model.parameters(), plan.clip_norm)
            for group in self._inner.param_groups:
                group["lr"] = plan.schedule.rate(self._step * plan.batch * plan.seq, self._step)
            self._inner.step()
            self.loss = loss.item()
            self._step += 1
