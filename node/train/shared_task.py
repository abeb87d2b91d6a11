"""A peer's training task when several processes share the model: each takes its rows of a batch.

The peer's batches are the same however many processes it has, so its stream of samples is still a
function of (run seed, peer, number), and its tokens count once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from farflock.node.model.data import Batches
from farflock.node.model.device import Device
from farflock.node.model.ranks import Order
from farflock.node.model.replica_fsdp import FsdpReplica
from farflock.optimizers.method import Progress
from farflock.optimizers.parts.schedule import Schedule


@dataclass(slots=True)
class SharedTask:
    """One rank's part of the training of a sharded causal language model, whose `module` returns
    the mean loss of tokens and targets.

    The loop of the leader calls `forward_backward`, which lets the followers `take_part`. FSDP
    gives each rank its shard of the mean gradient over ranks; losses are weighted so that this is
    the mean over the batch, whatever number of rows a rank has.
    """

    module: nn.Module
    replica: FsdpReplica
    batches: Batches
    schedule: Schedule
    accumulate: int
    device: Device
    micro_batch: int | None = None  # sequences that a rank computes at once; None: all of its rows
    joined_at: int = 0  # step at which this peer joined, with empty moments

    @property
    def tokens_per_step(self) -> int:
        """The tokens of one step, of all ranks together."""
        return self.accumulate * self.batches.batch_size * self.batches.seq

    @property
    def weight(self) -> float:
        """Always 1: each step counts once."""
        return 1.0

    def forward_backward(self, step: int, progress: Progress) -> float:
        """Add this step's mean gradient to the shards of all ranks; return the mean loss in nats
        per token. Only the leader calls this."""
        self.replica.lr = self.schedule.rate(progress.tokens, step - self.joined_at)
        with self.replica.ranks.call(Order("train", start=step)):
            return self.take_part(step)

    def take_part(self, step: int) -> float:
        """Do this rank's part of a step; return the mean loss over the whole batch."""
        ranks, size = self.replica.ranks, self.batches.batch_size
        losses: list[torch.Tensor] = []
        for number in range(self.accumulate):
            batch = self.batches.batch(step * self.accumulate + number)
            for rows, share in shares_of(size, self.micro_batch or size, ranks.rank, ranks.count):
                x, y = (self.device.bring(tokens[rows]) for tokens in batch)
                loss = self.module(x, y) * share / self.accumulate
                (loss * ranks.count).backward()
                losses.append(loss.detach())
        # Read only here: until then the device is not waited for.
        return ranks.sum(sum(torch.stack(losses).tolist(), 0.0))

    def set_rate(self, tokens: int) -> None:
        """Set the schedule's rate at the run's `tokens`. All peers take this step, so there is
        no joiner's warm-up."""
        self.replica.lr = replace(self.schedule, joiner_steps=0).rate(tokens, 0)


def shares_of(batch: int, at_once: int, rank: int, count: int) -> Iterator[tuple[slice, float]]:
    """Yield a rank's rows of a batch, at most `at_once` of them at a time, and which part of the
    batch they are. All ranks must take part in each pass, so all have as many: one without further
    rows computes the first row, which counts for nothing."""
    begin, end = rank * batch // count, (rank + 1) * batch // count
    most = -(-batch // count)
    for start in range(begin, begin + most, at_once):
        rows = slice(start, min(start + at_once, end))
        share = (rows.stop - rows.start) / batch
        yield (rows, share) if share > 0 else (slice(0, 1), 0.0)
