"""One peer's training loop; start reading here.

    batch -> forward and backward -> local step -> due -> encode -> exchange -> decode -> apply

Long work goes through `compute`: a worker thread in a process, inline in the simulator.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial

from farflock.node.reporting import Report
from farflock.node.train.driver import Apply, Driver, EncodedExchange
from farflock.node.train.ending import Barrier, drop, end, is_over, start_over, take_in_missed
from farflock.node.train.exchange_client import ExchangeClient, OutOfStep, StopRequest, UnderWay
from farflock.node.train.losses import Losses
from farflock.node.train.state_sync import StateSync
from farflock.node.train.task import Loss, Train, TrainingTask
from farflock.optimizers.method import Drifted, Exchange, Progress, Result
from farflock.swarm.compute import Compute


@dataclass(slots=True)
class Loop:
    """A peer's training loop from its current step on. `train` is `compute` for the local step: in
    it simulations charge time and stages wait until the step is due; None ends training."""

    driver: Driver
    client: ExchangeClient
    state_sync: StateSync
    training_task: TrainingTask
    compute: Compute
    train: Train
    report: Report = lambda kind, fields: None
    adopt: Callable[[str], Awaitable[None]] | None = None  # in place of `state_sync.adopt`
    pause: Callable[[], Awaitable[None]] | None = None  # awaited between steps
    # awaited after each result of an exchange, with the step at which that was asked for
    counted: Callable[[Result, int], Awaitable[None]] | None = None
    step: int = 0
    losses: Losses = field(default_factory=Losses)
    stop: StopRequest = field(default_factory=StopRequest)
    under_way: UnderWay = field(default_factory=dict)

    async def run(
        self, total_tokens: int, drain_s: float = 0.0, barrier: Barrier | None = None
    ) -> None:
        """Train until the run has its tokens or `stop` is called, then drain for up to
        `drain_s`. With a barrier, all peers end after the same round."""
        try:
            while not self.stop.requested and not is_over(self, total_tokens, barrier):
                loss = await self.train(partial(self.train_one, await self.begin_step()))
                if loss is None:
                    break
                await self.end_step(loss)
                if self.pause is not None:
                    await self.pause()
            await end(self, barrier, drain_s)
        finally:
            await drop(self.under_way)

    @property
    def progress(self) -> Progress:
        """The run's progress, as far as this peer knows."""
        return self.driver.progress(self.step, self.client.run_s())

    async def begin_step(self) -> Progress:
        """Apply the rounds that were decided without this peer; local work stays."""
        await take_in_missed(self)
        return self.progress

    def train_one(self, progress: Progress) -> Loss:
        """Take one local step and return its loss; in the worker, so it reads no clock."""
        loss = self.training_task.forward_backward(self.step, progress)
        self.driver.local_step(replace(progress, weight=self.training_task.weight))
        self.losses.read()  # of the step before: a device computes this one meanwhile
        return loss

    async def end_step(self, loss: Loss) -> None:
        """Count a local step, start the exchanges that are due, and settle before the next step."""
        self.step += 1
        self.driver.trained(self.training_task.tokens_per_step, self.client.members())
        self.losses.step_ended(self.step, loss, self.report)
        await self._start(self.driver.after_step(self.progress))
        await self.settle()

    async def _start(self, exchanges: list[Exchange]) -> None:
        """Encode exchanges before anything changes their tensors, and start them."""
        for each in exchanges:
            encode = partial(self.driver.encoded, each, self.driver.claim(each), self.client.offer)
            offer = await self.compute(encode)  # claimed here: a server changes its leases
            self.under_way[each.key] = asyncio.create_task(self._exchange(offer))

    async def _exchange(self, offer: EncodedExchange) -> Result:
        """Run an encoded exchange over the swarm, and decode its outcome."""
        outcome, key = await self.client.exchange(offer), offer.exchange.key
        return await self.compute(lambda: self.client.decode(key, outcome, offer.payloads))

    async def settle(self, *, last: bool = False) -> None:
        """Apply the results that are due; but for the `last` time, wait for those needed next."""
        try:
            self._collect()
            while (action := self.driver.next(self.progress, last=last)) is not None:
                if isinstance(action, Apply):
                    await self.apply(action)
                    if self.counted is not None:
                        await self.counted(action.result, self.step - action.result.steps_since)
                elif last or await self.stop.ends(self.under_way[action.key], action.timeout_s):
                    return self._collect()
                else:
                    self._collect()
        except (OutOfStep, Drifted) as reason:  # the group has left this peer behind
            await start_over(self, str(reason))

    def _collect(self) -> None:
        for key in [key for key, task in self.under_way.items() if task.done()]:
            self.driver.resolve(key, self.under_way.pop(key).result())

    async def apply(self, action: Apply) -> None:
        """Let the method apply a result; inner steps that it takes (DDP) use the round's rate."""
        apply = partial(self.driver.apply, action, self.progress, self.training_task.set_rate)
        await self._start(await self.compute(apply))
        self.report("round", action.summary)
