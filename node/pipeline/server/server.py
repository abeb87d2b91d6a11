"""A stage server: it computes a stage's passes for trainers, keeps their gradients aside until they
are confirmed, and gives what counts to the ordinary loop, which syncs the stage as it would a whole
model.

Requests wait in a queue, backward passes first; a trainer that finds it full asks another server.
One thing is computed at a time, so that no pass sees weights which a step is just changing.

A request goes through the parts of a server in this order: it is refused or not
(node/pipeline/server/passes.py), it waits (node/pipeline/server/queue.py), it is computed (node/pipeline/server/passes.py),
its gradient waits for a confirmation (node/pipeline/server/pending.py), and then it counts
(node/pipeline/server/accounts.py)."""

import asyncio
import collections
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from farflock.node.pipeline.passes.requests import (
    Backward,
    BadRequest,
    Busy,
    Confirm,
    Done,
    Forward,
    Merged,
    Refused,
    Revoke,
    StageAnswer,
    StageRequest,
    Unknown,
    decode_answer,
    decode_request,
    encode,
)
from farflock.node.pipeline.passes.stage import MicrobatchGradient, Stage
from farflock.node.pipeline.server.accounts import StageAccounts
from farflock.node.pipeline.server.edge_ends import EdgeEnds
from farflock.node.pipeline.server.passes import BackwardResult, PassRequest, StagePasses
from farflock.node.pipeline.server.pending import PendingGradient, PendingGradients
from farflock.node.pipeline.server.queue import StageQueue
from farflock.node.pipeline.server.weight_versions import WeightVersions
from farflock.node.run.terms import ServerTerms
from farflock.swarm.links import PeerId
from farflock.swarm.paths.round_robin import Ema
from farflock.swarm.peer.call_server import CallReply
from farflock.swarm.protocol.gradient_leases import GradientKey, GradientLeases

Pass = Callable[[Callable[[], Any], float], Awaitable[Any]]
BACKWARD_COST = 3.0  # forward passes: one that is done again, and twice as much for two gradients
EXPIRE_EVERY_S = 1.0
FIRST_RATE = 1.0


class Computing(Protocol):
    """Where a stage's tensors are touched. Law: one piece of work at a time, in the order in which
    they came."""

    @property
    def compute(self) -> Callable[[Callable[[], Any]], Awaitable[Any]]:
        """Do a piece of work."""
        ...

    @property
    def run_pass(self) -> Pass:
        """Do a pass, which is as much work as so many forward passes: simulations charge time for
        it."""
        ...


@dataclass(slots=True)
class _Job:
    """A pass that waits since `came_s`, and the reply that its caller waits for."""

    asked: PassRequest
    reply: asyncio.Future[CallReply]
    came_s: float = 0.0

    @property
    def is_backward(self) -> bool:
        return isinstance(self.asked.request, Backward)

    def resolve(self, answer: StageAnswer, payloads: tuple[bytes, ...] = ()) -> None:
        if not self.reply.done():
            self.reply.set_result(CallReply(encode(answer), payloads))


class StageServer:
    """One life of one server of stage `index`. `life` is its incarnation; `applied` says up to
    which round its weights are.

    Handlers of calls run on the event loop, and what touches tensors through `computing`. `ends`
    read inputs and write outputs; `versions` say which weights a pass computes with."""

    def __init__(
        self,
        index: int,
        stage: Stage,
        ends: EdgeEnds,
        terms: ServerTerms,
        computing: Computing,
        *,
        life: int,
        applied: Callable[[], int],
        versions: WeightVersions,
    ) -> None:
        staging = GradientLeases(terms.places, terms.lease_s)
        self._computing, self._life, self._applied = computing, life, applied
        self.passes = StagePasses(index, stage, ends, versions, applied, terms.staleness)
        self.pending = PendingGradients(staging)
        tokens, knows_loss = ends.edges.tokens, stage.is_last
        self.accounts = StageAccounts(staging, versions, applied, terms.staleness, tokens, knows_loss=knows_loss)
        self._queue: StageQueue[_Job] = StageQueue(terms.queue, terms.together)
        self._waiting = asyncio.Event()
        self._pass_s = Ema()
        self._served: collections.Counter[str] = collections.Counter()

    # the handler of calls

    def admit(self, caller: PeerId, request: bytes, sizes: tuple[int, ...]) -> bytes | None:
        """Refuse what makes no sense here, comes at the wrong time or finds no room."""
        try:
            asked = decode_request(request)
        except BadRequest as error:
            return encode(Refused(str(error)[:200]))
        refusal = self._refusal((caller, asked.number), asked, sizes)
        if refusal is not None:
            self._served[type(refusal).__name__.lower()] += 1
        return None if refusal is None else encode(refusal)

    def _refusal(self, key: GradientKey, asked: StageRequest, sizes: tuple[int, ...]) -> StageAnswer | None:
        known = isinstance(asked, Backward) and key in self.pending.replies
        refusal = self.passes.refusal(asked, sizes, known=known)
        if refusal is not None or known or isinstance(asked, Confirm | Revoke):
            return refusal
        return None if self._queue.has_room(backward=isinstance(asked, Backward)) else Busy()

    async def serve(self, caller: PeerId, request: bytes, payloads: tuple[bytes, ...]) -> CallReply:
        """Do what was admitted."""
        asked = decode_request(request)
        key = (caller, asked.number)
        match asked:
            case Forward():
                return await self._enqueue(_job(caller, asked, payloads))
            case Backward():
                return await self._backward(key, asked.attempt, _job(caller, asked, payloads))
            case Confirm(attempt=attempt):
                return CallReply(encode(await self._confirm(key, attempt)))
            case Revoke(attempt=attempt):
                self.pending.revoke(key, attempt)
                return CallReply(encode(Unknown()))

    async def _enqueue(self, job: _Job) -> CallReply:
        if not self._queue.has_room(backward=job.is_backward):
            return CallReply(encode(Busy()))  # others were quicker while its payloads came
        job.came_s = self._now()
        self._queue.put(job, backward=job.is_backward)
        self._waiting.set()
        return await job.reply

    async def _backward(self, key: GradientKey, attempt: int, job: _Job) -> CallReply:
        """Compute it once, however often it is asked for: a repeated request gets the same reply,
        under its own attempt."""
        match self.pending.begin(key, attempt, job.reply):
            case "busy":
                return CallReply(encode(Busy()))
            case "nothing":
                return CallReply(encode(Refused("it counts already, or was given up")))
            case "run":
                reply = await self._enqueue(job)
                if not job.reply.done():  # no room after all
                    self.pending.drop(key, attempt)
                    job.resolve(Busy())  # to whoever has asked again meanwhile
                return reply
            case "again":
                return _under(await asyncio.shield(self.pending.replies[key]), attempt)

    async def _confirm(self, key: GradientKey, attempt: int) -> StageAnswer:
        found = self.pending.confirm(key, attempt)
        if isinstance(found, PendingGradient):
            await self._merge(key, found)
        return Merged() if found else Unknown()

    async def contribute(self, key: GradientKey, staged: MicrobatchGradient, loss: float | None, number: int) -> None:
        """Merge the gradient of a microbatch that this node itself took through all stages, by the
        weights of round `number`: nobody was asked for it, and nobody else has it. `loss` is for
        the last stage, nats summed over tokens."""
        self.pending.staging.own(key)
        await self._merge(key, PendingGradient(staged, loss, number))

    async def _merge(self, key: GradientKey, found: PendingGradient) -> None:
        await self._computing.compute(lambda: self.accounts.sums.add(key, found.staged, found.loss_sum, found.round))
        self.accounts.count_merge()

    # computing

    async def run(self) -> None:
        """Compute what waits, for ever."""
        while True:
            self.pending.expire(self._now())
            jobs = self._queue.take()
            if jobs:
                await self._do(jobs)
                continue
            self._waiting.clear()
            try:
                async with asyncio.timeout(EXPIRE_EVERY_S):
                    await self._waiting.wait()
            except TimeoutError:
                continue

    async def _do(self, jobs: list[_Job]) -> None:
        started_s = self._now()
        if jobs[0].is_backward:
            (job,) = jobs
            await self._do_backward(job, started_s)
        else:
            await self._do_forward(jobs, started_s)

    async def _do_forward(self, jobs: list[_Job], started_s: float) -> None:
        asked = [job.asked for job in jobs]
        outputs, version = await self._computing.run_pass(lambda: self.passes.forward(asked), len(jobs))
        took_s = (self._now() - started_s) / len(jobs)
        for job, output in zip(jobs, outputs, strict=True):
            self._served["forward"] += 1
            if isinstance(output, bytes):
                done = Done(self._life, 0, took_s, waited_s=started_s - job.came_s, version=version)
                job.resolve(done, (output,))
            else:
                job.resolve(output)

    async def _do_backward(self, job: _Job, started_s: float) -> None:
        request, caller = job.asked.request, job.asked.caller
        assert isinstance(request, Backward)
        key = (caller, request.number)
        found, version = await self._computing.run_pass(lambda: self.passes.backward(job.asked), BACKWARD_COST)
        took_s = self._now() - started_s
        if not isinstance(found, BackwardResult):
            self.pending.drop(key, request.attempt)
            job.resolve(found)
            return
        gradient = PendingGradient(found.staged, found.loss_sum, 0 if version is None else version.round)
        attempt = self.pending.put_aside(key, gradient, self._now())
        if attempt is None:
            job.resolve(Refused("it was given up"))
            return
        self._served["backward"] += 1
        share = BACKWARD_COST / (BACKWARD_COST + (0.0 if self.stage.is_last else 1.0))
        self._pass_s.update(share, started_s, self._now())
        done = Done(self._life, attempt, took_s, found.loss_sum, started_s - job.came_s, version)
        job.resolve(done, found.payloads)

    # what others see of it

    @property
    def stage(self) -> Stage:
        """The stage that it computes with."""
        return self.passes.stage

    @property
    def applied(self) -> int:
        """Up to which round its weights are."""
        return self._applied()

    @property
    def waiting(self) -> int:
        """Passes that wait."""
        return len(self._queue)

    @property
    def rate(self) -> float:
        """Microbatches a second that this server does, there and back; 1 before the first."""
        return 1.0 / max(self._pass_s.seconds or 1.0 / FIRST_RATE, 1e-6)

    @property
    def served(self) -> collections.Counter[str]:
        """How many passes of each kind it has done, and requests it has refused, by the name of the
        answer; and how many microbatches it has merged, and left out as late."""
        return self._served + collections.Counter(merged=self.accounts.merges, late=self.accounts.left_out)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _job(caller: PeerId, asked: Forward | Backward, payloads: tuple[bytes, ...]) -> _Job:
    return _Job(PassRequest(caller, asked, payloads), asyncio.get_running_loop().create_future())


def _under(reply: CallReply, attempt: int) -> CallReply:
    """The reply to an earlier request for the same pass, for this attempt."""
    answer = decode_answer(reply.body)
    if not isinstance(answer, Done):
        return reply
    return CallReply(encode(msgspec.structs.replace(answer, attempt=attempt)), reply.payloads)
