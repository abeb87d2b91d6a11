"""An optimizer's part in a run, as it lives in the background thread, whatever way it came in.

The same driver, exchange client, state sync and loop as a node's; only the training step itself stays with the program
that brought the model. The ways in: `node/library/door.py` over the real network, `node/library/local_swarm.py` over
links in memory."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from farflock.node.errors import RefusedByRun
from farflock.node.library.background import BackgroundContext
from farflock.node.loop import Loop
from farflock.node.reporting import Report
from farflock.node.run.user_terms import TomlTable, UserTerms
from farflock.node.train.driver import Driver
from farflock.node.train.exchange_client import ExchangeClient, drop
from farflock.node.train.state_sync import StateSync
from farflock.optimizers.method import Progress, Replica
from farflock.swarm.compute import Compute
from farflock.swarm.peer.peer import Peer

JOIN_TIMEOUT_S = 120.0
POLL_S = 0.05
LINGER_S = 5.0  # after the last step: others may still be on their way to the last round

StepGate = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class ExternalStep:
    """A step of somebody else's loop, seen as ours sees a trainee: gradients are there already, or `closure` makes them."""

    tokens_per_step: int = 1
    closure: Callable[[], Any] | None = None
    returned: Any = None

    @property
    def weight(self) -> float:
        """Each step counts once."""
        return 1.0

    def forward_backward(self, step: int, progress: Progress) -> float:
        """Call the closure if there is one; the loss is not known otherwise."""
        self.returned = None
        if self.closure is None:
            return math.nan
        with torch.enable_grad():
            self.returned = self.closure()
        loss = self.returned.detach() if isinstance(self.returned, torch.Tensor) else self.returned
        return math.nan if loss is None else float(loss)

    def set_rate(self, tokens: int) -> None:
        """The rate is the program's own, or its scheduler's."""


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """What an optimizer brings to the door: the terms it named, its model, and where to report rounds to."""

    wished: TomlTable
    replica: Replica
    training_task: ExternalStep
    report: Report


@dataclass(slots=True)
class OptimizerNode:
    """An optimizer's part in its run. Everything but `invite` and plain reads belongs to the background's event loop."""

    terms: UserTerms
    peer: Peer
    loop: Loop
    invite: Callable[[], str]
    founder: bool
    patient: bool = False  # on leaving, wait for those who are still on their way to the last round

    @classmethod
    def assemble(
        cls,
        join_request: JoinRequest,
        terms: UserTerms,
        peer: Peer,
        compute: Compute,
        invite: Callable[[], str],
        founder: bool,
    ) -> "OptimizerNode":
        """Put method, driver, exchange client, state sync and loop together on this peer."""
        driver = Driver(terms.build(), join_request.replica)
        client = ExchangeClient(peer, terms.run.seed)
        state_sync = StateSync(peer, driver, client, compute)
        loop = Loop(driver, client, state_sync, join_request.training_task, compute, compute, join_request.report)
        return cls(terms, peer, loop, invite, founder)

    async def begin(self, records: Sequence[bytes], gate: StepGate) -> None:
        """Found the run with my weights; or get to know it through these members, take its state over, and be let in, which
        is asked for once `gate` lets through."""
        state_sync, driver = self.loop.state_sync, self.loop.driver
        if self.founder:
            await self.loop.compute(lambda: driver.method.snapshot(driver.replica))  # where it begins is now fixed
            self.peer.found()
            state_sync.open()
            return
        try:
            await self.peer.meet(records, JOIN_TIMEOUT_S)
            await state_sync.adopt(JOIN_TIMEOUT_S)
            await gate()
            self.peer.ask_in()
            await self.until(lambda: self.peer.membership.is_member, JOIN_TIMEOUT_S)
        except TimeoutError:
            why = f"its members did not let this peer in within {JOIN_TIMEOUT_S:.0f} s"
            raise RefusedByRun(
                "the run cannot be joined", why, "check that somebody trains, or ask for a new invite"
            ) from None

    async def until(self, there: Callable[[], bool], timeout_s: float) -> None:
        """Return once a condition holds; `TimeoutError` if it does not in time."""
        async with asyncio.timeout(timeout_s):
            while not there():  # noqa: ASYNC110 - conditions of several parts, now and then
                await asyncio.sleep(POLL_S)

    async def end(self) -> None:
        """Stay for others if `patient`, then say goodbye."""
        await drop(self.loop.under_way)
        if self.patient:
            with contextlib.suppress(TimeoutError):
                await self.until(lambda: self.peer.alone, LINGER_S)
        await self.peer.part()


class EntryPoint(Protocol):
    """A way into a run."""

    def enter(self, join_request: JoinRequest) -> tuple[BackgroundContext[OptimizerNode], Callable[[], None]]:
        """Come in; returns the life inside, and what ends it with all that it needed (harmless when done twice)."""
        ...


async def open_gate() -> None:
    """Ask to be let in at once."""


@contextlib.asynccontextmanager
async def present(here: OptimizerNode, records: Sequence[bytes], gate: StepGate = open_gate) -> AsyncIterator[None]:
    """The peer runs and is in the run; it says goodbye at the end."""
    async with here.peer.running():
        await here.begin(records, gate)
        try:
            yield
        finally:
            await here.end()
