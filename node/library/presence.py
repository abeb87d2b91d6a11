"""A user's own loop as a part in a run: what runs in the background thread, whatever the entry
point.

It has the same core as a node (node/assembly/core.py); only the training step stays with the user's
program. Entry points: node/library/door.py over the real network, node/library/local_swarm.py over
links in memory."""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from farflock.node.assembly.checkpoints import CheckpointManager
from farflock.node.assembly.coming_back import admitted, come_back, recall, while_there
from farflock.node.assembly.core import Core
from farflock.node.assembly.leaving import STALL_S
from farflock.node.assembly.part import WholePart
from farflock.node.assembly.resume import load_moments, load_state
from farflock.node.assembly.session import Session
from farflock.node.errors import Failure, RefusedByRun
from farflock.node.library.averaged_buffers import AveragedBuffers, with_buffers
from farflock.node.library.background import BackgroundContext
from farflock.node.library.join_progress import tell_listener
from farflock.node.loop import Loop
from farflock.node.reporting import Report
from farflock.node.run.manifest import Manifest
from farflock.node.run.user_terms import TomlTable
from farflock.node.state.checkpoint import Checkpoint, CheckpointError
from farflock.node.train.driver import Driver
from farflock.node.train.ending import drop
from farflock.node.train.state_sync import Spool, StateSync
from farflock.node.train.task import Loss
from farflock.optimizers.method import Progress
from farflock.swarm.compute import Compute
from farflock.swarm.peer.peer import OpenWait, Peer
from farflock.swarm.peer.snapshots import DownloadProgress, SnapshotUnavailable
from farflock.swarm.peer.state_download import SILENT_S
from farflock.swarm.tasks import cancel

if TYPE_CHECKING:
    from farflock.node.model.replica import PlainReplica
    from farflock.node.model.replica_fsdp import FsdpReplica

ANSWER_TIMEOUT_S = 120.0  # for the run's views, from members that are there
POLL_S = 0.05
TELL_EVERY_S = 10.0
LINGER_S = 5.0  # after the last step, for peers that still need the last round

log = logging.getLogger(__name__)

StepGate = Callable[[], Awaitable[None]]


async def open_gate() -> None:
    """Return at once: ask for admission without a wait."""


@dataclass(slots=True)
class ExternalStep:
    """A step of a user's loop as a training task: the gradients are already there, or `closure`
    computes them."""

    tokens_per_step: int = 1
    closure: Callable[[], Any] | None = None
    returned: Any = None
    trained_tokens: int = 0  # of all steps, whatever each of them counted for
    joined_at: int = 0  # as in a checkpoint; the program warms up as it likes

    @property
    def weight(self) -> float:
        """Always 1: each step counts once."""
        return 1.0

    def forward_backward(self, step: int, progress: Progress) -> float:
        """Call the closure, if any, and return its loss, or NaN if it is unknown."""
        self.returned = None
        self.trained_tokens += self.tokens_per_step
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
    """An optimizer's request to an entry point: the terms it named, its model, its reports, the
    list of its tensors (node/run/tensor_list.py), which others may ask for, and the buffers to
    average, if any."""

    wished: TomlTable
    replica: "PlainReplica | FsdpReplica"
    training_task: ExternalStep
    report: Report
    listed: bytes = b""
    buffers: AveragedBuffers | None = None


@dataclass(slots=True)
class OptimizerNode(WholePart):
    """The `Part` (node/assembly/part.py) of a user's own loop: the program makes the steps. Only
    the background loop may use it, except for `invite` and plain reads."""

    terms: Manifest
    peer: Peer
    loop: Loop
    training_task: ExternalStep
    invite: Callable[[], str]
    founder: bool
    before: Checkpoint | None = None  # of its last life in this run, until it has gone on from it
    keeper: CheckpointManager | None = None  # None: nothing is kept on the disk
    began_at: int = 0  # the step of the loop at which this life began
    watch: None = None  # programs do not evaluate the run
    evaluates: bool = False
    patient: bool = False  # on leaving, wait for peers that still need the last round
    gate: StepGate = open_gate  # passed before it asks for admission

    @classmethod
    def assemble(
        cls,
        join_request: JoinRequest,
        terms: Manifest,
        peer: Peer,
        compute: Compute,
        invite: Callable[[], str],
        founder: bool,
        spool: Spool | None = None,
    ) -> "OptimizerNode":
        """Assemble the method and its core over this peer."""
        method = with_buffers(terms.build(), join_request.buffers)
        driver = Driver(method, join_request.replica)
        training_task, report = join_request.training_task, join_request.report
        core = Core.over(peer, driver, training_task, compute, compute, report, spool=spool)
        return cls(terms, peer, core.loop, training_task, invite, founder)

    @property
    def trained_tokens(self) -> int:
        """The tokens of the program's steps."""
        return self.training_task.trained_tokens

    def waits(self) -> list[OpenWait]:
        """Return the open rounds."""
        return self.peer.waits()

    async def run(self, total_tokens: int) -> None:
        """Stay, while the program makes its steps, until the run has its tokens or `stop` is
        called."""
        await self.until(lambda: self.stopping or self.tokens >= total_tokens, None)

    @property
    def state_sync(self) -> StateSync:
        """The state that the members share."""
        return self.loop.state_sync

    async def end_step(self, loss: Loss) -> None:
        """Let the loop end a step, and write a checkpoint if one is due."""
        await self.loop.end_step(loss)
        if self.keeper is not None:
            await self.keeper.pause()

    async def save(self) -> None:
        """Write a checkpoint of the last step for the next life, as long as the disk takes it; say
        why if there is none."""
        if self.keeper is None:
            return
        saving, progress, seen = asyncio.create_task(self.keeper.save()), self.keeper.progress, -1
        while not (await asyncio.wait((saving,), timeout=STALL_S))[0] and progress.passed != seen:
            seen = progress.passed
        if not saving.done():
            progress.give_up()
            await cancel(saving)
            log.warning("the program's state is not kept: the disk takes nothing any more")
        elif isinstance(error := saving.exception(), CheckpointError):
            log.warning("the program's state is not kept: %s", error)
        else:
            saving.result()

    async def resume(self, saved: Checkpoint) -> None:
        """Start the run again where this program's checkpoint ends; raise `CheckpointCorrupt` if it
        does not fit."""
        self.peer.found()
        load_state(self, saved)
        self.began_at, self.before = self.step, None  # or its files stay mapped
        log.warning("this program goes on from its folder's state, after step %d", self.step)

    async def join(
        self,
        records: Sequence[bytes],
        timeout_s: float,
        downloaded: DownloadProgress = lambda here, total: None,
    ) -> None:
        """Join the run through the members with these records: learn the views, adopt the state,
        of which the listener of `join_progress` hears too, or go on from that of the last life,
        pass the gate, and be admitted, for which it waits as long as a member is there. Raise
        `RefusedByRun` once none has been for `timeout_s`, and `Failure` once nothing of the state
        comes any more."""

        def verified(here_bytes: int, total_bytes: int) -> None:
            downloaded(here_bytes, total_bytes)
            tell_listener(self.peer.snapshots)

        if self.before is not None:
            load_moments(self, self.before)
            await recall(self, self.before)
            self.began_at, self.before = self.step, None  # or its files stay mapped
        try:
            async with while_there(self.peer, timeout_s):
                await self.peer.meet(records, ANSWER_TIMEOUT_S)
                await self.peer.membership.admission.find_room()
            async with _told(self.peer):
                await come_back(self.peer, self.loop.state_sync, verified)
            await self.gate()
            self.peer.ask_in()
            await admitted(self.peer, timeout_s)
        except TimeoutError:
            raise RefusedByRun(
                "the run cannot be joined",
                "its members do not answer",
                "check that a member is running, or ask for a new invite",
            ) from None

    async def until(self, there: Callable[[], bool], timeout_s: float | None) -> None:
        """Wait until a condition holds; raise `TimeoutError` after `timeout_s`, if any."""
        async with asyncio.timeout(timeout_s):
            while not there():  # noqa: ASYNC110 - conditions of several parts, now and then
                await asyncio.sleep(POLL_S)

    async def eval_params(self) -> dict[str, torch.Tensor]:
        """Return the parameters to evaluate, on the CPU."""
        driver = self.loop.driver
        found = await self.loop.compute(lambda: driver.method.eval_params(driver.replica))
        return {name: x.cpu() for name, x in found.items()}

    async def end(self) -> None:
        """Stay for peers that need the last round if `patient`."""
        await drop(self.loop.under_way)
        if self.patient:
            with contextlib.suppress(TimeoutError):
                await self.until(lambda: self.peer.alone, LINGER_S)


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


@contextlib.asynccontextmanager
async def present(session: Session, here: OptimizerNode) -> AsyncIterator[None]:
    """Take part in the run; say goodbye at the end, whatever ended it."""
    if not here.founder:
        await session.join(here, SILENT_S)
    elif here.before is None:
        session.start(here)
    else:
        await session.resume(here, here.before)
    try:
        yield
    finally:
        await here.end()
        await session.leave()
