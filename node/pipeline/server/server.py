"""A stage server: it computes a stage's passes for trainers and holds the gradients until they are
confirmed. The confirmed ones go to the ordinary training loop, which syncs the stage like a whole
model.

Requests wait in a queue; a trainer that finds it full asks another server. Only one piece of work
runs at a time, so that no pass sees weights in the middle of a step.

In node/pipeline/server, a request is admitted or refused (passes.py), waits (queue.py) and is
computed (passes.py, or held_out.py); its gradient waits for a confirmation (pending.py), then
counts (accounts.py)."""

import asyncio
import collections
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

from farflock.node.pipeline.passes.requests import (
    Backward,
    BadRequest,
    Busy,
    Confirm,
    Done,
    Forward,
    HeldOutForward,
    Merged,
    Refused,
    Revoke,
    StageAnswer,
    StagePass,
    StageRequest,
    Unknown,
    Version,
    decode_answer,
    decode_request,
    encode,
)
from farflock.node.pipeline.passes.stage import MicrobatchGradient, Stage
from farflock.node.pipeline.server.accounts import StageAccounts
from farflock.node.pipeline.server.edge_ends import EdgeEnds
from farflock.node.pipeline.server.held_out import HeldOutPasses
from farflock.node.pipeline.server.passes import (
    BackwardReply,
    BackwardResult,
    PassRequest,
    StagePasses,
)
from farflock.node.pipeline.server.pending import PendingGradient, PendingGradients
from farflock.node.pipeline.server.queue import PassKind, StageQueue
from farflock.node.pipeline.server.weight_versions import WeightVersions
from farflock.node.run.terms import ServerTerms
from farflock.swarm.links import PeerId
from farflock.swarm.paths.round_robin import Ema
from farflock.swarm.peer.call_server import CallReply
from farflock.swarm.protocol.gradient_leases import GradientKey, GradientLeases

PassInput = TypeVar("PassInput")
Found = TypeVar("Found")
Pass = Callable[[Callable[[], Any], float], Awaitable[Any]]
Rest = Callable[[], Awaitable[None]]
BACKWARD_COST = 3.0  # in forward passes: one is redone, and two gradients cost one each
EXPIRE_EVERY_S = 1.0  # between two checks of the leases, which last much longer
FIRST_RATE = 1.0  # microbatches per second, before any pass is timed


class Computing(Protocol):
    """Runs all work on a stage's tensors. Law: one piece of work at a time, in order."""

    @property
    def compute(self) -> Callable[[Callable[[], Any]], Awaitable[Any]]:
        """The function that runs a piece of work."""
        ...

    @property
    def run_pass(self) -> Pass:
        """The function that runs a pass, given its cost in forward passes, for which simulations
        charge time."""
        ...


@dataclass(slots=True)
class _Job:
    """A pass that has waited since `came_s`, and the reply that its caller waits for."""

    asked: PassRequest
    reply: asyncio.Future[CallReply]
    came_s: float = 0.0

    @property
    def kind(self) -> PassKind:
        return _kind(self.asked.request)

    def resolve(self, answer: StageAnswer, payloads: tuple[bytes, ...] = ()) -> None:
        if not self.reply.done():
            self.reply.set_result(CallReply(encode(answer), payloads))


class StageServer:
    """One life of one server of stage `index`; `life` is its incarnation, `applied()` the last
    round in its weights. Call handlers run on the event loop; all tensor work goes through
    `computing`. `ends` read inputs and write outputs; `versions` choose the weights of a pass."""

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
        self.computing, self._life, self._applied = computing, life, applied
        self.passes = StagePasses(index, stage, ends, versions, applied, terms.staleness)
        self.held_out = HeldOutPasses(self.passes)
        self.pending = PendingGradients(staging)
        tokens, knows_loss = ends.edges.tokens, stage.is_last
        self.accounts = StageAccounts(
            staging, versions, applied, terms.staleness, tokens, knows_loss=knows_loss
        )
        # whether a trainer that knows views up to this number knows of this server's membership
        self.is_known_in: Callable[[int], bool] = lambda view: True
        self._queue: StageQueue[_Job] = StageQueue(terms.queue, terms.together)
        self._waiting = asyncio.Event()
        self._rest: Rest | None = None  # of passes that were begun
        self._line: collections.deque[asyncio.Future[bool]] = collections.deque()
        self._pass_s = Ema()
        self._served: collections.Counter[str] = collections.Counter()

    # the handler of calls

    def admit(self, caller: PeerId, request: bytes, sizes: tuple[int, ...]) -> bytes | None:
        """Return a refusal if a request makes no sense here, comes at the wrong time or finds
        the queue full; otherwise None."""
        try:
            asked = decode_request(request)
        except BadRequest as error:
            return encode(Refused(str(error)[:200]))
        refusal = self._refusal((caller, asked.number), asked, sizes)
        if refusal is not None:
            self._served[type(refusal).__name__.lower()] += 1
        return None if refusal is None else encode(refusal)

    def _refusal(
        self, key: GradientKey, asked: StageRequest, sizes: tuple[int, ...]
    ) -> StageAnswer | None:
        known = isinstance(asked, Backward) and key in self.pending.replies
        refusal = self.passes.refusal(asked, sizes, known=known)
        if refusal is not None or known or isinstance(asked, Confirm | Revoke):
            return refusal
        return None if self._queue.has_room(_kind(asked)) else Busy()

    async def serve(self, caller: PeerId, request: bytes, payloads: tuple[bytes, ...]) -> CallReply:
        """Serve an admitted request."""
        asked = decode_request(request)
        key = (caller, asked.number)
        match asked:
            case Forward() | HeldOutForward():
                return await self._enqueue(_job(caller, asked, payloads))
            case Backward():
                return await self._backward(key, asked.attempt, _job(caller, asked, payloads))
            case Confirm(attempt=attempt, view=view):
                if not self.is_known_in(view):
                    return CallReply(encode(Busy()))  # it asks again once it knows later views
                return CallReply(encode(await self._confirm(key, attempt)))
            case Revoke(attempt=attempt):
                self.pending.revoke(key, attempt)
                self._call_up()
                return CallReply(encode(Unknown()))

    async def _enqueue(self, job: _Job) -> CallReply:
        if not self._queue.has_room(job.kind):
            return CallReply(encode(Busy()))  # the queue filled up while the payloads were fetched
        job.came_s = self._now()
        self._queue.put(job.kind, job)
        self._waiting.set()
        return await job.reply

    async def _backward(self, key: GradientKey, attempt: int, job: _Job) -> CallReply:
        """Compute a pass once. A repeated request gets the same reply, under its own attempt."""
        begun = self.pending.begin(key, attempt, job.reply)
        while begun == "busy" and await self._place():
            begun = self.pending.begin(key, attempt, job.reply)
        match begun:
            case "busy":
                return CallReply(encode(Busy()))
            case "nothing":
                return CallReply(encode(Refused("it counts already, or was given up")))
            case "run":
                reply = await self._enqueue(job)
                if not job.reply.done():  # the queue was full
                    self.pending.drop(key, attempt)
                    job.resolve(Busy())  # for a repeated request, which waits for the same reply
                return reply
            case "again":
                # a repeat that is cancelled must not cancel the first request's reply
                return _under(await asyncio.shield(self.pending.replies[key]), attempt)

    async def _place(self) -> bool:
        """Wait in line for a gradient's place. Return False if the line is full, or if it does not
        move because all places hold gradients that their trainers do not confirm."""
        if len(self._line) >= self._queue.room:
            return False
        place: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._line.append(place)
        return await place

    def _call_up(self) -> None:
        """Give the free places to the first in line."""
        for _ in range(min(self.pending.staging.free, len(self._line))):
            self._line.popleft().set_result(True)

    def _turn_away(self) -> None:
        """Let all in line ask another server."""
        while self._line:
            self._line.popleft().set_result(False)

    async def _confirm(self, key: GradientKey, attempt: int) -> StageAnswer:
        found = self.pending.confirm(key, attempt)
        self._call_up()
        if isinstance(found, PendingGradient):
            await self._merge(key, found)
        return Merged() if found else Unknown()

    async def contribute(
        self, key: GradientKey, staged: MicrobatchGradient, loss: float | None, number: int
    ) -> None:
        """Merge the gradient of a microbatch that this node itself took through all stages, at
        the weights of round `number`. `loss` is in nats summed over tokens, and given only at
        the last stage."""
        self.pending.staging.own(key)
        await self._merge(key, PendingGradient(staged, loss, number))

    async def _merge(self, key: GradientKey, found: PendingGradient) -> None:
        await self.computing.compute(
            lambda: self.accounts.sums.add(key, found.staged, found.loss_sum, found.round)
        )
        self.accounts.count_merge(key)

    def renounce(self) -> int:
        """Give up all that no round has named, and return the number of merged microbatches."""
        count = self.accounts.renounce()
        self.pending.expire(self._now())
        self._call_up()
        return count

    # computing

    async def run(self) -> None:
        """Compute waiting passes forever."""
        while True:
            self.pending.expire(self._now())
            self._call_up()
            jobs = self._queue.take()
            if jobs or self._rest is not None:
                await self._do(jobs)
                continue
            self._waiting.clear()
            try:  # leases expire even if no request comes
                async with asyncio.timeout(EXPIRE_EVERY_S):
                    await self._waiting.wait()
            except TimeoutError:
                self._turn_away()

    async def _do(self, jobs: list[_Job]) -> None:
        """Compute passes and answer them. Where the device runs ahead, begin these passes, and then
        answer those begun before: while it computes, payloads are read and written here."""
        before, self._rest = self._rest, await self._begin(jobs) if jobs else None
        if before is not None:
            await before()

    async def _begin(self, jobs: list[_Job]) -> Rest | None:
        """Begin passes; return what answers them, or None if they are answered already."""
        passes, held_out, started_s = self.passes, self.held_out, self._now()
        job, kind = jobs[0], jobs[0].kind
        if kind == "backward":
            back = partial(self._answer_backward, job, started_s)
            return await self._run(
                passes.backward, passes.begin_backward, job.asked, BACKWARD_COST, back
            )
        if kind == "measure":
            told = partial(self._answer_forward, jobs, started_s)
            return await self._run(held_out.measure, held_out.begin, job.asked, 1.0, told)
        asked, answer = [job.asked for job in jobs], partial(self._answer_forward, jobs, started_s)
        return await self._run(passes.forward, passes.begin_forward, asked, len(jobs), answer)

    async def _run(
        self,
        whole: Callable[[PassInput], Found],
        begin: Callable[[PassInput], Callable[[], Found]],
        asked: PassInput,
        cost: float,
        answer: Callable[[Found], None],
    ) -> Rest | None:
        if not self.stage.runs_ahead:
            answer(await self.computing.run_pass(lambda: whole(asked), cost))
            return None
        wait = await self.computing.run_pass(lambda: begin(asked), cost)

        async def rest() -> None:
            answer(await self.computing.compute(wait))

        return rest

    def _answer_forward(
        self,
        jobs: list[_Job],
        started_s: float,
        found: tuple[Sequence[bytes | StageAnswer], Version | None],
    ) -> None:
        outputs, version = found
        took_s = (self._now() - started_s) / len(jobs)
        for job, output in zip(jobs, outputs, strict=True):
            self._served[job.kind] += 1
            if isinstance(output, bytes):
                done = Done(self._life, 0, took_s, waited_s=started_s - job.came_s, version=version)
                job.resolve(done, (output,))
            else:
                job.resolve(output)

    def _answer_backward(self, job: _Job, started_s: float, computed: BackwardReply) -> None:
        request, caller = job.asked.request, job.asked.caller
        assert isinstance(request, Backward)
        key, (found, version) = (caller, request.number), computed
        took_s = self._now() - started_s
        if not isinstance(found, BackwardResult):
            self.pending.drop(key, request.attempt)
            job.resolve(found)
            return
        weights_round = 0 if version is None else version.round
        gradient = PendingGradient(found.staged, found.loss_sum, weights_round)
        attempt = self.pending.put_aside(key, gradient, self._now())
        if attempt is None:
            job.resolve(Refused("it was given up"))
            return
        self._served["backward"] += 1
        # its share of the microbatch's whole cost: the last stage has no separate forward pass
        share = BACKWARD_COST / (BACKWARD_COST + (0.0 if self.stage.is_last else 1.0))
        self._pass_s.update(share, started_s, self._now())
        done = Done(self._life, attempt, took_s, found.loss_sum, started_s - job.came_s, version)
        job.resolve(done, found.payloads)

    # status

    @property
    def stage(self) -> Stage:
        """The stage that this server computes."""
        return self.passes.stage

    @property
    def applied(self) -> int:
        """The last round in this server's weights."""
        return self._applied()

    @property
    def waiting(self) -> int:
        """The number of waiting passes."""
        return len(self._queue)

    @property
    def rate(self) -> float:
        """Microbatches per second, forward and backward; an assumed 1 before the first."""
        return 1.0 / max(self._pass_s.seconds or 1.0 / FIRST_RATE, 1e-6)

    @property
    def served(self) -> collections.Counter[str]:
        """The numbers of passes by kind, of refusals by answer, and of merged and late
        microbatches."""
        return self._served + collections.Counter(
            merged=self.accounts.merges, late=self.accounts.left_out
        )

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _kind(asked: StagePass) -> PassKind:
    match asked:
        case Backward():
            return "backward"
        case HeldOutForward():
            return "measure"
        case Forward():
            return "forward"


def _job(caller: PeerId, asked: StagePass, payloads: tuple[bytes, ...]) -> _Job:
    return _Job(PassRequest(caller, asked, payloads), asyncio.get_running_loop().create_future())


def _under(reply: CallReply, attempt: int) -> CallReply:
    """Return the reply to an earlier request for the same pass, under this attempt."""
    answer = decode_answer(reply.body)
    if not isinstance(answer, Done):
        return reply
    return CallReply(encode(msgspec.structs.replace(answer, attempt=attempt)), reply.payloads)
