"""The baselines of a swarm's result, trained in one process on exactly its peers' streams.

`ddp` is synchronous data parallelism as one model: each step takes the union of the peers' batches.
`none` is one replica that never communicates. Both have the swarm's data, initial weights, tokens
per peer and schedule.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from farflock.node.data.samples import Text
from farflock.node.data.shard_order import SampleStream
from farflock.node.model.data import Batches
from farflock.node.model.llama import Llama, build, next_token_loss
from farflock.node.run.terms import RunPlan


def train_baseline(
    plan: RunPlan,
    text: Text,
    streams: Sequence[str],
    peers: int,
    steps: int,
    progress: Callable[[float], None],
) -> Llama:
    """Train one model for `steps` steps on these streams' batches, with the learning rate of a
    run of `peers` peers."""
    model = build(plan.model, plan.run_seed)
    inner = plan.inner.build(model)
    sources = [
        Batches(text, SampleStream(plan.run_seed, stream), plan.batch, plan.seq, plan.samples)
        for stream in streams
    ]
    run_tokens_per_step = peers * plan.batch * plan.seq * plan.accumulate
    for step in range(steps):
        for group in inner.param_groups:
            group["lr"] = plan.schedule.rate(step * run_tokens_per_step, step)
        for number in range(plan.accumulate):
            batches = [source.batch(step * plan.accumulate + number) for source in sources]
            x, y = (torch.cat(column) for column in zip(*batches, strict=True))
            (next_token_loss(model(x), y) / plan.accumulate).backward()  # type: ignore[no-untyped-call]
        if plan.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), plan.clip_norm)
        inner.step()
        inner.zero_grad()
        progress((step + 1) / steps)
    return model


@dataclass(frozen=True, slots=True)
class Comparison:
    """Held-out losses of the swarm and its two baselines, and the gain from `none` to `ddp`."""

    swarm: float
    swarm_error: float
    ddp: float
    ddp_error: float
    none: float
    none_error: float
    gain: float
    gain_error: float

    @property
    def share_of_gain(self) -> float | None:
        """The share of data parallelism's gain over no communication that the swarm kept. None
        if that gain is within 4 standard errors of 0: the run is then too short to tell."""
        if self.gain <= 4 * self.gain_error:
            return None
        return (self.none - self.swarm) / self.gain


def compare(swarm: Tensor, ddp: Tensor, none: Tensor) -> Comparison:
    """Compare losses per held-out sequence, in nats, for the same sequences in the same order, so
    that errors of the gain are paired."""
    gain = none - ddp
    means = [float(losses.mean()) for losses in (swarm, ddp, none, gain)]
    errors = [float(losses.std() / len(losses) ** 0.5) for losses in (swarm, ddp, none, gain)]
    return Comparison(
        means[0], errors[0], means[1], errors[1], means[2], errors[2], means[3], errors[3]
    )
