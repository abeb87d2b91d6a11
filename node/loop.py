"""Start reading here: one peer's training loop.

    batch -> forward and backward -> local step -> due -> encode -> links -> decode -> apply

What computes goes through `compute` (a worker thread in a process, inline plus a virtual sleep in the simulator), what
waits through asyncio; nothing here knows which of the two worlds it runs in.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from farflock.node.train.driver import Apply, Driver, Wait
from farflock.node.train.end_barrier import EndBarrier
from farflock.node.train.exchange_client import OutOfStep
from farflock.node.train.state_sync import StateSync
from farflock.optimizers.method import Drifted, Exchange, ExchangeKey, Progress, Result

ADOPT_TIMEOUT_S = 300.0
STOPPING_WAIT_S = 2.0  # for an answer on its way: who trains alone stops at the same state whenever it is asked to
LEAST_WAIT_S = 0.001  # a wait shorter than the clock can tell would never end in virtual time
LOOK_EVERY_S = 0.05  # for a content that is on its way


class TrainingTask(Protocol):
    """What is trained (node/train/task.py): batches, a model, gradients."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step."""
        ...

    @property
    def weight(self) -> float:
        """How often the gradient that the last step left counts."""
        ...

    def forward_backward(self, step: int, progress: Progress) -> float:
        """Run this peer's batch number `step` through the model, leave its gradients, return its loss in nats."""
        ...

    def set_rate(self, tokens: int) -> None:
        """Set the learning rate to the schedule's at the run's `tokens`, alike on every peer."""
        ...


@dataclass(slots=True)
class Loop:
    """A peer's training from its current step on. `train` is `compute` for the step itself: simulations charge time, stages
    wait until it is due. It returns None if there is to be no step any more."""

    driver: Driver
    state_sync: StateSync
    training_task: TrainingTask
    compute: Callable[[Callable[[], Any]], Awaitable[Any]]
    train: Callable[[Callable[[], float]], Awaitable[float | None]]
    report: Callable[[str, dict[str, object]], None] = lambda kind, fields: None
    pause: Callable[[], Awaitable[None]] | None = None  # called between steps: checkpoints are written there
    step: int = 0
    stopping: bool = False
    adopt: Callable[[str], Awaitable[None]] | None = (
        None  # what to do where the group is out of reach; None: its snapshot
    )
    last_loss: float | None = None
    _carrying: dict[ExchangeKey, asyncio.Task[Result]] = field(default_factory=dict)
    _drain_s: float = 0.0
    _halt: asyncio.Future[None] | None = None  # done once `stop` was called

    def stop(self, drain_s: float = 0.0) -> None:
        """End after the step that is running; who is waited for then is waited for `STOPPING_WAIT_S` longer, and what is on its
        way after that up to `drain_s`."""
        self.stopping = True
        self._drain_s = max(self._drain_s, drain_s)
        if self._halt is not None and not self._halt.done():
            self._halt.set_result(None)

    async def run(self, total_tokens: int, drain_s: float = 0.0, together: EndBarrier | None = None) -> None:
        """Train until the run has its tokens, or until `stop` is called; then wait for open exchanges up to `drain_s`. With
        `together` all who train end after the same round."""
        self._halt, self._drain_s = asyncio.get_running_loop().create_future(), max(self._drain_s, drain_s)
        try:
            while not self.stopping and not self._is_over(total_tokens, together):
                progress = await self.begin_step()
                loss = await self.train(partial(self.train_one, progress))
                if loss is None:
                    break
                await self.end_step(loss)
                if self.pause is not None:
                    await self.pause()
            if together is not None:
                await together.end(self._take_in_last, lambda: self.stopping)
            await self.drain(self._drain_s)
        finally:
            await self.drop()

    def _is_over(self, total_tokens: int, together: EndBarrier | None) -> bool:
        if together is None:
            return self.state_sync.progress(self.step).tokens >= total_tokens
        return together.is_due(total_tokens)

    async def _take_in_last(self) -> None:
        """Apply whatever is known of the last rounds, without waiting for more, or for steps that there will not be."""
        await self._collect()
        while isinstance(action := self.driver.next(self.state_sync.progress(self.step), last=True), Apply):
            await self._apply(action)
        await self._replay_missed()

    async def begin_step(self) -> Progress:
        """What comes before a step: the rounds that were decided without this peer."""
        await self._replay_missed()
        return self.state_sync.progress(self.step)

    async def end_step(self, loss: float) -> None:
        """What comes after a step: start the exchanges that are due, apply results, wait where the driver says so."""
        self.step, self.last_loss = self.step + 1, loss
        self.state_sync.trained(self.training_task.tokens_per_step)
        self._start(self.driver.after_step(self.state_sync.progress(self.step)))
        self.report("step", {"step": self.step, "loss": loss})
        await self._settle()

    def train_one(self, progress: Progress) -> float:
        """One local step; runs in the worker, so it reads no clock and no swarm."""
        loss = self.training_task.forward_backward(self.step, progress)
        self.driver.method.local_step(self.driver.replica, replace(progress, weight=self.training_task.weight))
        return loss

    def _start(self, exchanges: list[Exchange]) -> None:
        for exchange in exchanges:
            self._carrying[exchange.key] = asyncio.create_task(self.state_sync.run_exchange(exchange))

    async def _settle(self) -> None:
        """Apply what is due, and wait for what must be waited for, before the next step."""
        await self._collect()
        while (action := self.driver.next(self.state_sync.progress(self.step))) is not None:
            if isinstance(action, Wait):
                left_s = max(action.until_s - self.state_sync.progress(self.step).run_time_s, LEAST_WAIT_S)
                await self._wait(self._carrying[action.key], left_s)
                await self._collect()
                if self.stopping and action.key in self._carrying:
                    return
            else:
                await self._apply(action)

    async def _wait(self, answer: asyncio.Task[Result], left_s: float) -> None:
        """Wait for an answer; once this node is to stop, only as long as an answer takes that depends on nobody's patience."""
        if self._halt is not None:
            either: list[asyncio.Future[Any]] = [answer, self._halt]
            await asyncio.wait(either, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            left_s = STOPPING_WAIT_S if self.stopping else 0.0
        if left_s:
            await asyncio.wait([answer], timeout=left_s)

    async def _apply(self, action: Apply) -> None:
        key, progress = action.exchange.key, self.state_sync.progress(self.step)
        apply = partial(self.driver.apply, action, progress)
        try:
            self._start(await self.compute(partial(self._take_in, key, action.result, apply)))
        except Drifted as reason:
            await self._adopt(str(reason))
            return
        self._report_round(key, action.result)

    def _take_in(self, key: ExchangeKey, result: Result, apply: Callable[[], list[Exchange]]) -> list[Exchange]:
        """A method may step the inner optimizer in `apply` (DDP): at the rate of the round, however late this peer is."""
        if result.tokens:
            self.training_task.set_rate(result.tokens)
        self.state_sync.applying(key, result)
        second_phase = apply()
        self.state_sync.applied(key, result)
        return second_phase

    async def _replay_missed(self) -> None:
        """Rounds that were decided without this peer move its outer state before its next sync; local work stays."""
        while (missed := self.state_sync.missed()) is not None:
            key, result = missed
            progress = self.state_sync.progress(self.step)
            replay = partial(self.driver.replay, key, result, progress)
            self._start(await self.compute(partial(self._take_in, key, result, replay)))
            self._report_round(key, result)

    async def _collect(self) -> None:
        """Take the answers of finished exchanges to the driver; adopt a snapshot if the group has left us behind."""
        for key, task in [(key, task) for key, task in self._carrying.items() if task.done()]:
            del self._carrying[key]
            try:
                self.driver.resolve(key, task.result())
            except OutOfStep as reason:
                await self._adopt(str(reason))
                return

    async def _adopt(self, reason: str) -> None:
        """Give up what is on its way and this replica's state, for the run's."""
        await self.drop()
        self.report("adopt", {"reason": reason})
        await (self.adopt(reason) if self.adopt is not None else self.state_sync.adopt(ADOPT_TIMEOUT_S))

    async def drain(self, timeout_s: float) -> None:
        """Take in what is still on its way, so that nothing is in doubt afterwards."""
        if timeout_s > 0:
            until_s = asyncio.get_running_loop().time() + timeout_s
            if self._carrying:
                await asyncio.wait(self._carrying.values(), timeout=timeout_s)
            await self._settle()
            await self._replay_missed()
            while self.state_sync.is_behind and asyncio.get_running_loop().time() < until_s:
                await asyncio.sleep(LOOK_EVERY_S)  # for the content of a last round that was decided without this peer
                await self._replay_missed()

    async def drop(self) -> None:
        """End the exchanges that are still on their way; their results will not come."""
        for task in self._carrying.values():
            task.cancel()
        await asyncio.gather(*self._carrying.values(), return_exceptions=True)
        self._carrying.clear()

    def _report_round(self, key: ExchangeKey, result: Result) -> None:
        who = list(result.participants)
        fields = {"stream": key.stream, "round": key.round, "status": result.status, "peers": len(who)}
        self.report("round", {**fields, "participants": who, "tokens": result.tokens})
