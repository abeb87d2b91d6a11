"""A stage as the ordinary loop trains it.

A step ends when the stage's group has taken in a batch, no matter how little of it came to this
server. So all members of a stage step together, although some are faster, and every method syncs
a stage like a whole model. A method that exchanges gradients gets the sum, weighted by the
number of microbatches in it; one with local steps gets the mean of what this server took in."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import torch

from farflock.node.model.replica import PlainReplica
from farflock.node.pipeline.passes.stage import Stage
from farflock.node.pipeline.recovery.rebuild import GradientScale
from farflock.node.pipeline.server.accounts import StageAccounts
from farflock.node.train.task import Loss, Train
from farflock.optimizers.method import Progress
from farflock.optimizers.parts.schedule import Schedule
from farflock.swarm.peer.rounds import Rounds
from farflock.swarm.peer.tallies import Tallies

LOOK_EVERY_S = 0.5  # to poll for what has no event: another member's offer, a request to stop


@dataclass(slots=True)
class StageTask:
    """The steps of a stage server, made of the gradients that its `accounts` have merged.
    `tokens` is the number in one microbatch."""

    accounts: StageAccounts
    stage: Stage
    replica: PlainReplica
    schedule: Schedule
    tokens: int
    summing: bool
    joined_at: int = 0
    # above 1 for a stage that was rebuilt from its neighbours
    rate_factor: Callable[[], float] = lambda: 1.0
    scale: GradientScale = field(default_factory=GradientScale)
    tokens_per_step: int = 0  # of the last step
    weight: float = 1.0
    last_loss: float = math.nan

    def forward_backward(self, step: int, progress: Progress) -> float:
        """Add the merged gradients to the stage's. Return the last known loss in nats per token,
        or NaN if none is known."""
        scheduled = self.schedule.rate(progress.tokens, step - self.joined_at)
        self.replica.lr = self.rate_factor() * scheduled
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
            tokens, sums = taken.staged.tokens, taken.staged.gradients
            self.scale = self.scale.after({name: x / tokens for name, x in sums.items()})
        self.last_loss = taken.loss if taken.loss is not None else self.last_loss
        return self.last_loss

    def set_rate(self, tokens: int) -> None:
        """Set the learning rate at the run's `tokens`, without a joiner's warm-up: all peers
        take this step."""
        schedule = replace(self.schedule, joiner_steps=0)
        self.replica.lr = self.rate_factor() * schedule.rate(tokens, 0)


@dataclass(slots=True)
class BatchTrigger:
    """Decides when a step is due: when the group has merged `tokens` more than at the last step,
    or when other members have begun the round, unless an exchange of this server is open."""

    accounts: StageAccounts
    rounds: Rounds
    tallies: Tallies
    stream: str
    stage: int
    tokens: int
    stopping: Callable[[], bool]
    is_open: Callable[[], bool] = lambda: False
    # whether what is merged is to be given up: no more may come before that
    is_left_out: Callable[[], bool] = lambda: False
    steps: int = 0  # since the last round
    _round: int = -1

    async def full(self) -> bool:
        """Wait until a step is due, or what goes before one. Return False once `stopping()` is
        true."""
        while not self.stopping():
            if self.is_left_out():
                return True
            # cleared before the check, so that a change during the check is not missed
            self.accounts.merged.clear()
            self.tallies.changed.clear()
            self._tell()
            if self._has_enough() or self._is_called():
                self.steps += 1
                return True
            await _either(self.accounts.merged, self.tallies.changed)
        return False

    def _is_called(self) -> bool:
        """Return whether others have begun a round that a step can contribute to. While an exchange
        of this server is open, no step can, and steps without work would follow each other as fast
        as the machine takes them."""
        return self.rounds.called(self.stream) and not self.is_open()

    def is_full(self) -> bool:
        """Return whether the next step has its tokens; this also announces the tokens merged here.

        A node that could add more microbatches calls this, even while a round is open. A round
        that has just closed is left to `full`."""
        if self.rounds.newest(self.stream) == self._round:
            self.tallies.say(self.stream, self.stage, max(self._round + 1, 0), self.accounts.tokens)
        return self._has_enough()

    def is_over(self) -> bool:
        """Announce that this node is done. Return True once every server of the stage is done
        and no round waits for this node."""
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
    """Wait until one of the events is set, at most `LOOK_EVERY_S`."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def gated(
    batch: BatchTrigger, train: Train, before: Callable[[], Awaitable[bool]] | None = None
) -> Train:
    """Wrap `train` so that it waits until a step is due, and for what goes `before` it, which may
    put it off; it returns None once no more steps will be."""

    async def step(work: Callable[[], Loss]) -> Loss | None:
        while await batch.full():
            if before is None or await before():
                return await train(work)
        return None

    return step
