"""A stage as the ordinary loop trains it: a step ends when the stage's group has taken in a batch,
however much came here.

So all members of a stage step together although some are faster, and every method of the seam syncs
a stage as it would a whole model. A method that exchanges gradients themselves gets the sum, to be
weighed by the microbatches in it; one that steps in between gets the mean of what this server took
in."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import torch

from farflock.node.model.replica import PlainReplica
from farflock.node.pipeline.passes.stage import Stage
from farflock.node.pipeline.recovery.rebuild import GradientScale
from farflock.node.pipeline.server.accounts import StageAccounts
from farflock.optimizers.method import Progress
from farflock.optimizers.parts.schedule import Schedule
from farflock.swarm.peer.rounds import Rounds
from farflock.swarm.peer.tallies import Tallies

LOOK_EVERY_S = 0.5  # for what has no event: another member's offer, a request to stop


@dataclass(slots=True)
class StageTask:
    """Steps made of what a stage server has merged, by its `accounts`. `tokens` are those of a
    microbatch."""

    accounts: StageAccounts
    stage: Stage
    replica: PlainReplica
    schedule: Schedule
    tokens: int
    summing: bool
    joined_at: int = 0
    rate_factor: Callable[[], float] = lambda: 1.0  # a stage that was made from its neighbours learns faster
    scale: GradientScale = field(default_factory=GradientScale)
    tokens_per_step: int = 0  # of the last step
    weight: float = 1.0
    last_loss: float = math.nan

    def forward_backward(self, step: int, progress: Progress) -> float:
        """Add what was merged to the stage's gradients; the loss in nats a token, as far as this
        stage knows one."""
        self.replica.lr = self.rate_factor() * self.schedule.rate(progress.tokens, step - self.joined_at)
        taken = self.accounts.take()
        self.tokens_per_step = taken.staged.tokens - taken.discarded * self.tokens
        self.weight = self.tokens_per_step / self.tokens if self.summing else 1.0
        divisor = self.tokens if self.summing else max(taken.staged.tokens, 1)
        for name, parameter in self.stage.model.named_parameters():
            if parameter.grad is None or taken.discarded:
                parameter.grad = torch.zeros_like(parameter)
            if name in taken.staged.gradients:
                parameter.grad += taken.staged.gradients[name] / divisor
        if taken.staged.tokens:
            tokens = taken.staged.tokens
            self.scale = self.scale.after({name: x / tokens for name, x in taken.staged.gradients.items()})
        self.last_loss = taken.loss if taken.loss is not None else self.last_loss
        return self.last_loss

    def set_rate(self, tokens: int) -> None:
        """The schedule's rate at the run's `tokens`; everybody takes this step."""
        self.replica.lr = self.rate_factor() * replace(self.schedule, joiner_steps=0).rate(tokens, 0)


@dataclass(slots=True)
class BatchTrigger:
    """When a step is due: the group has `tokens` more than at the step before, or others bring
    theirs to the round already."""

    accounts: StageAccounts
    rounds: Rounds
    tallies: Tallies
    stream: str
    stage: int
    tokens: int
    stopping: Callable[[], bool]
    steps: int = 0  # since the last round
    _round: int = -1

    async def full(self) -> bool:
        """Wait until a step is due; False if there is to be none any more."""
        while not self.stopping():
            self.accounts.merged.clear()
            self.tallies.changed.clear()
            self._tell()
            if self._has_enough() or self.rounds.called(self.stream):
                self.steps += 1
                return True
            await _either(self.accounts.merged, self.tallies.changed)
        return False

    def is_full(self) -> bool:
        """Whether the next step has all that it waits for. Asked by who would bring more, also
        while a round is open, and tells the others what has come here since; a round that is just
        over is for `full` to take in first."""
        if self.rounds.newest(self.stream) == self._round:
            self.tallies.say(self.stream, self.stage, max(self._round + 1, 0), self.accounts.tokens)
        return self._has_enough()

    def is_over(self) -> bool:
        """Say that to this node the run is over; whether it is to all who serve the stage, and none
        has brought to a round what this node has not."""
        self.tallies.end(self.stream, self.stage)
        return self.tallies.is_over(self.stream) and not self.rounds.called(self.stream)

    def _has_enough(self) -> bool:
        return self.tallies.total(self.stream) >= self.tokens * (self.steps + 1)

    def _tell(self) -> None:
        self.accounts.absorb()
        newest = self.rounds.newest(self.stream)
        if newest != self._round:
            self._round, self.steps = newest, 0
        self.tallies.say(self.stream, self.stage, max(newest + 1, 0), self.accounts.tokens)


async def _either(*events: asyncio.Event) -> None:
    """Until one of them is set, or `LOOK_EVERY_S`."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def gated(
    batch: BatchTrigger, train: Callable[[Callable[[], float]], Awaitable[float]]
) -> Callable[[Callable[[], float]], Awaitable[float | None]]:
    """`train` for the loop: the step, once it is due; None if there is to be none any more."""

    async def step(work: Callable[[], float]) -> float | None:
        return await train(work) if await batch.full() else None

    return step
