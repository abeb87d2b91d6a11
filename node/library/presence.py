"""An optimizer's part in a run: what runs in the background thread, whatever the entry point.

It has the same driver, exchange client, state sync and loop as a node; only the training step
stays with the user's program. Entry points: node/library/door.py over the real network,
node/library/local_swarm.py over links in memory."""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from farflock.node.errors import Failure, RefusedByRun
from farflock.node.library.background import BackgroundContext
from farflock.node.loop import Loop
from farflock.node.reporting import Report
from farflock.node.run.user_terms import TomlTable, UserTerms
from farflock.node.train.driver import Driver
from farflock.node.train.ending import drop
from farflock.node.train.exchange_client import ExchangeClient
from farflock.node.train.state_sync import Spool, StateSync
from farflock.optimizers.method import Progress
from farflock.optimizers.parts.stateful import live_state
from farflock.swarm.compute import Compute
from farflock.swarm.peer.peer import Peer
from farflock.swarm.peer.snapshots import SnapshotUnavailable
from farflock.swarm.tasks import cancel

if TYPE_CHECKING:
    from farflock.node.model.replica import PlainReplica
    from farflock.node.model.replica_fsdp import FsdpReplica

JOIN_TIMEOUT_S = 120.0
POLL_S = 0.05
TELL_EVERY_S = 10.0
LINGER_S = 5.0  # after the last step, for peers that still need the last round

log = logging.getLogger(__name__)

StepGate = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class ExternalStep:
    """A step of a user's loop as a training task: the gradients are already there, or `closure`
    computes them."""

    tokens_per_step: int = 1
    closure: Callable[[], Any] | None = None
    returned: Any = None

    @property
    def weight(self) -> float:
        """Always 1: each step counts once."""
        return 1.0

    def forward_backward(self, step: int, progress: Progress) -> float:
        """Call the closure, if any, and return its loss, or NaN if it is unknown."""
        self.returned = None
        if self.closure is None:
            return math.nan
        with torch.enable_grad():
            self.returned = self.closure()
        loss = self.returned.detach() if isinstance(self.returned, torch.Tensor) else self.returned
        return math.nan if loss is None else float(loss)

    def set_rate(self, tokens: int) -> None:
        """Do nothing: the program or its scheduler sets the rate."""


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """An optimizer's request to an entry point: the terms it named, its model, and its reports."""

    wished: TomlTable
    replica: "PlainReplica | FsdpReplica"
    training_task: ExternalStep
    report: Report


@dataclass(slots=True)
class OptimizerNode:
    """An optimizer's part in its run. Only the background loop may use it, except for `invite`
    and plain reads."""

    terms: UserTerms
    peer: Peer
    loop: Loop
    invite: Callable[[], str]
    founder: bool
    patient: bool = False  # on leaving, wait for peers that still need the last round
    last: bool = False  # no other member stays, so there is nobody to say goodbye to

    @classmethod
    def assemble(
        cls,
        join_request: JoinRequest,
        terms: UserTerms,
        peer: Peer,
        compute: Compute,
        invite: Callable[[], str],
        founder: bool,
        spool: Spool | None = None,
    ) -> "OptimizerNode":
        """Assemble the method, driver, exchange client, state sync and loop over this peer."""
        driver = Driver(terms.build(), join_request.replica)
        client = ExchangeClient(peer, terms.run.seed, home=join_request.replica.home)
        state_sync = StateSync(peer, driver, client, compute, spool)
        loop = Loop(
            driver,
            client,
            state_sync,
            join_request.training_task,
            compute,
            compute,
            join_request.report,
        )
        return cls(terms, peer, loop, invite, founder)

    async def begin(self, records: Sequence[bytes], gate: StepGate) -> None:
        """Start the run with this peer's weights, or join it through these members: learn the
        views, adopt the state, pass `gate`, and be admitted. Raise `RefusedByRun` on a timeout, and
        `Failure` once nothing of the state comes any more."""
        state_sync, driver = self.loop.state_sync, self.loop.driver
        if self.founder:
            # fixes the round's start before a joiner can ask for it
            await self.loop.compute(lambda: live_state(driver.method, driver.replica))
            self.peer.found()
            state_sync.open()
            return
        try:
            await self.peer.meet(records, JOIN_TIMEOUT_S)
            async with _told(self.peer):
                await state_sync.adopt()
            await gate()
            self.peer.ask_in()
            await self.until(lambda: self.peer.membership.is_member, JOIN_TIMEOUT_S)
        except TimeoutError:
            why = f"its members did not admit this peer within {JOIN_TIMEOUT_S:.0f} s"
            raise RefusedByRun(
                "the run cannot be joined",
                why,
                "check that a member is running, or ask for a new invite",
            ) from None

    async def until(self, there: Callable[[], bool], timeout_s: float) -> None:
        """Wait until a condition holds; raise `TimeoutError` after `timeout_s`."""
        async with asyncio.timeout(timeout_s):
            while not there():  # noqa: ASYNC110 - conditions of several parts, now and then
                await asyncio.sleep(POLL_S)

    async def tokens(self) -> int:
        """Return the run's progress."""
        return self.loop.driver.tokens

    async def eval_params(self) -> dict[str, torch.Tensor]:
        """Return the parameters to evaluate, on the CPU."""
        driver = self.loop.driver
        found = await self.loop.compute(lambda: driver.method.eval_params(driver.replica))
        return {name: x.cpu() for name, x in found.items()}

    async def end(self) -> None:
        """Stay for peers that need the last round if `patient`; say goodbye unless `last`."""
        await drop(self.loop.under_way)
        if self.patient:
            with contextlib.suppress(TimeoutError):
                await self.until(lambda: self.peer.alone, LINGER_S)
        if not self.last:
            await self.peer.part()


@contextlib.asynccontextmanager
async def _told(peer: Peer) -> AsyncIterator[None]:
    """Log how far the download of the state is while the block runs; say why it ended."""

    async def tell() -> None:
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            if (coming := peer.snapshots.coming) is not None:
                log.info("downloading the run's state: %s", coming)

    telling = asyncio.create_task(tell())
    try:
        yield
    except SnapshotUnavailable as reason:
        what = "the run's state could not be downloaded"
        raise Failure(what, reason.why or str(reason), reason.remedy) from None
    finally:
        await cancel(telling)


class EntryPoint(Protocol):
    """A way into a run."""

    def enter(
        self, join_request: JoinRequest
    ) -> tuple[BackgroundContext[OptimizerNode], Callable[[], None]]:
        """Enter the run; return the node's context and a function that ends it (safe to call
        twice)."""
        ...


async def open_gate() -> None:
    """Return at once: ask for admission without a wait."""


@contextlib.asynccontextmanager
async def present(
    here: OptimizerNode, records: Sequence[bytes], gate: StepGate = open_gate
) -> AsyncIterator[None]:
    """Run the peer as part of the run; say goodbye at the end."""
    async with here.peer.running():
        await here.begin(records, gate)
        try:
            yield
        finally:
            await here.end()
