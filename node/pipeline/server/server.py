"""A stage server: it computes a stage's passes for trainers, keeps their gradients aside until they are confirmed, and gives
what counts to the ordinary loop, which syncs the stage as it would a whole model.

What is asked for waits in a queue, backward passes first; who finds it full asks somebody else. One thing is computed at a
time, so that no pass sees weights which a step is just changing.
"""

import asyncio
import collections
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from farflock.compression.activation import Incompatible
from farflock.compression.codec import CorruptPayload, UnencodableTensor
from farflock.compression.subspace_versions import Superseded
from farflock.node.pipeline.memory.samples import NotHeld, ServerMemory, misfit
from farflock.node.pipeline.passes.edges import Edges
from farflock.node.pipeline.passes.requests import (
    Answer,
    Backward,
    BadRequest,
    Busy,
    Confirm,
    Done,
    Foreign,
    Forward,
    Gone,
    Lacks,
    Made,
    Merged,
    Refused,
    Request,
    Revoke,
    Stale,
    Unknown,
    Version,
    decode_answer,
    decode_request,
    encode,
)
from farflock.node.pipeline.passes.stage import Stage, Staged
from farflock.node.pipeline.server.queue import StageQueue
from farflock.node.pipeline.server.sums import Sums
from farflock.node.pipeline.versions.versions import Lacking, Versions
from farflock.node.run.terms import ServerTerms
from farflock.node.train import microbatch_ids as notes
from farflock.swarm.links import PeerId
from farflock.swarm.paths.round_robin import Ema
from farflock.swarm.peer.serving import Reply
from farflock.swarm.protocol.staging import Key, Staging

Compute = Callable[[Callable[[], Any]], Awaitable[Any]]
Pass = Callable[[Callable[[], Any], float], Awaitable[Any]]
Unread = Refused | Lacks  # an activation that cannot be read
BACKWARD_COST = 3.0  # forward passes: one that is done again, and twice as much for two gradients
EXPIRE_EVERY_S = 1.0
FIRST_RATE = 1.0


@dataclass(slots=True)
class _Job:
    """A pass that waits, with the payloads that came with it, and who waits for its reply."""

    caller: PeerId
    request: Forward | Backward
    payloads: tuple[bytes, ...]
    reply: asyncio.Future[Reply]
    came_s: float = 0.0


@dataclass(slots=True)
class Taken:
    """What a step is made of: the sum of what was merged since the one before, and the loss that is known of it (nats a token,
    None but at the last stage). What earlier steps took of `discarded` microbatches, and no round did, is to be forgotten."""

    staged: Staged
    loss: float | None
    discarded: int = 0


class StageServer:
    """One life of one server of stage `index`. `life` is its incarnation; `applied` says up to which round its weights are.

    Its handler's part runs on the event loop, what touches tensors through `compute`, one after the other; passes through
    `run_pass`, which also hears how many forward passes' work that is: simulations charge time for it. With `versions` passes
    compute with the weights that they name (docs/decisions/016); without, with those that are there."""

    def __init__(
        self,
        index: int,
        stage: Stage,
        edges: Edges,
        terms: ServerTerms,
        *,
        life: int,
        compute: Compute,
        run_pass: Pass,
        now: Callable[[], float],
        applied: Callable[[], int],
        versions: Versions | None = None,
    ) -> None:
        self._index, self._stage, self._edges, self._terms = index, stage, edges, terms
        self._life, self._compute, self._pass, self._now, self._applied = life, compute, run_pass, now, applied
        self._queue: StageQueue[_Job] = StageQueue(terms.queue, terms.together)
        self._waiting = asyncio.Event()
        self._staging = Staging(terms.places, terms.lease_s)
        self._versions = versions
        self._memory = ServerMemory(edges) if edges.remembers else None
        self._staged: dict[Key, tuple[Staged, float | None, int]] = {}  # the gradient, the loss, and the weights' round
        self._replies: dict[Key, asyncio.Future[Reply]] = {}  # of backward passes that run or are put aside
        self._sums = Sums()  # touched by what computes alone
        self._work: dict[
            Key, int
        ] = {}  # what the steps since the last round that took my contribution are made of: `_age`
        self._late: frozenset[Key] = (
            frozenset()
        )  # merged and left out: named by the next round, so that nobody waits for it
        self._closed: collections.deque[tuple[int, bytes]] = collections.deque()
        self._unclosed = 0  # microbatches merged and not known to count
        self._pass_s = Ema()
        self.merged = asyncio.Event()  # set whenever something was; who waits clears it
        self.served: collections.Counter[str] = collections.Counter()

    # the handler of calls

    def admit(self, caller: PeerId, request: bytes, sizes: tuple[int, ...]) -> bytes | None:
        """Refuse what makes no sense here, comes at the wrong time or finds no room."""
        try:
            asked = decode_request(request)
        except BadRequest as error:
            return encode(Refused(str(error)[:200]))
        refusal = self._refusal((caller, asked.number), asked, sizes)
        if refusal is not None:
            self.served[type(refusal).__name__.lower()] += 1
        return None if refusal is None else encode(refusal)

    def _refusal(self, key: Key, asked: Request, sizes: tuple[int, ...]) -> Answer | None:
        if asked.stage != self._index:
            return Refused(f"this peer serves stage {self._index}, not {asked.stage}")
        if isinstance(asked, Confirm | Revoke):
            return Refused("payloads with it") if sizes else None
        if (asked.source < 0) != self._stage.is_first or asked.source == self._index:
            return Refused(f"stage {self._index} takes no output of {asked.source}")
        if (unfit := misfit(self._edges, asked)) is not None:
            return Refused(unfit)
        if not (self._edges.knows(asked.came) and self._edges.knows(asked.sends)):
            return Foreign(self._edges.reads)
        most = self._largest(asked)
        if len(sizes) != len(most) or any(size > limit for size, limit in zip(sizes, most, strict=True)):
            return Refused(f"payloads of {sizes} bytes; at most {most} belong to it")
        if isinstance(asked, Forward) and self._applied() - asked.epoch > self._terms.staleness:
            return Stale(self._applied())
        known = isinstance(asked, Backward) and key in self._replies
        if isinstance(asked, Backward) and not known and (lack := self._lack(asked)) is not None:
            return lack
        return None if known or self._queue.has_room(backward=isinstance(asked, Backward)) else Busy()

    def _lack(self, asked: Backward) -> Gone | None:
        """Why this backward pass cannot be at the weights of its forward pass here."""
        lack = self._versions.lack(asked.version) if self._versions is not None and asked.version is not None else None
        return None if lack is None else Gone(self._applied(), lack == "late")

    def _largest(self, asked: Forward | Backward) -> tuple[int, ...]:
        """The most bytes of each payload that belongs to a request."""
        edges = self._edges
        given = () if self._stage.is_first else (edges.max_bytes("forward", asked.came),)
        if isinstance(asked, Forward):
            return (edges.token_bytes, *given)
        if self._stage.is_last:
            return (edges.token_bytes, *given, edges.token_bytes)
        arrived = (edges.max_bytes("forward", asked.sends),) if edges.is_masked(asked.sends) else ()
        return (edges.token_bytes, *given, edges.max_bytes("backward", asked.sends), *arrived)

    async def serve(self, caller: PeerId, request: bytes, payloads: tuple[bytes, ...]) -> Reply:
        """Do what was admitted."""
        asked = decode_request(request)
        key = (caller, asked.number)
        match asked:
            case Forward():
                return await self._enqueue(_Job(caller, asked, payloads, _future()))
            case Backward():
                return await self._backward(key, _Job(caller, asked, payloads, _future()))
            case Confirm(attempt=attempt):
                return Reply(encode(await self._confirm(key, attempt)))
            case Revoke(attempt=attempt):
                self._staging.revoke(key, attempt)
                self._drop_unwanted()
                return Reply(encode(Unknown()))

    async def _enqueue(self, job: _Job) -> Reply:
        backward = isinstance(job.request, Backward)
        if not self._queue.has_room(backward=backward):
            return Reply(encode(Busy()))  # others were quicker while its payloads came
        job.came_s = self._now()
        self._queue.put(job, backward=backward)
        self._waiting.set()
        return await job.reply

    async def _backward(self, key: Key, job: _Job) -> Reply:
        """Compute it once, whoever asks how often: a repeated request gets the same reply, under its own attempt."""
        assert isinstance(job.request, Backward)
        attempt = job.request.attempt
        match self._staging.begin(key, attempt):
            case "busy":
                return Reply(encode(Busy()))
            case "nothing" if key not in self._replies:
                return Reply(encode(Refused("it counts already, or was given up")))
            case "run":
                self._replies[key] = job.reply
                reply = await self._enqueue(job)
                if not job.reply.done():  # no room after all
                    self._give_up(key, attempt)
                return reply
            case _:
                return _under(await asyncio.shield(self._replies[key]), attempt)

    def _give_up(self, key: Key, attempt: int) -> None:
        self._staging.revoke(key, attempt)
        _resolve(self._replies.pop(key), Reply(encode(Busy())))

    async def _confirm(self, key: Key, attempt: int) -> Answer:
        match self._staging.confirm(key, attempt):
            case "unknown":
                self._drop_unwanted()
                return Unknown()
            case "merged":
                return Merged()
            case "merge":
                staged, loss, number = self._staged.pop(key)
                self._replies.pop(key, None)
                await self._merge(key, staged, loss, number)
                return Merged()

    async def contribute(self, key: Key, staged: Staged, loss: float | None, number: int) -> None:
        """Merge the gradient of a microbatch that this node itself took through all stages, by the weights of round `number`:
        nobody was asked for it, and nobody else has it. `loss` is for the last stage, nats summed over tokens."""
        self._staging.own(key)
        await self._merge(key, staged, loss, number)

    async def _merge(self, key: Key, staged: Staged, loss: float | None, number: int) -> None:
        await self._compute(lambda: self._sums.add(key, staged, loss, number))
        self._unclosed += 1
        self.served["merged"] += 1
        self.merged.set()

    def _drop_unwanted(self) -> None:
        """Forget the gradients that no confirmation can merge any more."""
        for key in self._staged.keys() - self._staging.kept:
            del self._staged[key]
            self._replies.pop(key, None)

    # computing

    async def run(self) -> None:
        """Compute what waits, for ever."""
        while True:
            self._staging.expire(self._now())
            self._drop_unwanted()
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
        if isinstance(jobs[0].request, Backward):
            (job,) = jobs
            await self._do_backward(job, started_s)
            return
        outputs, version = await self._pass(lambda: self._forward_at(jobs), len(jobs))
        took_s = (self._now() - started_s) / len(jobs)
        for job, output in zip(jobs, outputs, strict=True):
            waited_s = started_s - job.came_s
            done = Done(self._life, 0, took_s, waited_s=waited_s, version=version)
            answer = done if isinstance(output, bytes) else output
            self.served["forward"] += 1
            _resolve(job.reply, Reply(encode(answer), (output,) if isinstance(output, bytes) else ()))

    def _forward_at(self, jobs: list[_Job]) -> tuple[list[bytes | Unread | Stale], Version | None]:
        """The forward passes, and the version of the weights that they are of."""
        if self._versions is None:
            return self._forward_all(jobs), None
        with self._versions.using(None):
            return self._forward_all(jobs), self._versions.newest

    def _forward_all(self, jobs: list[_Job]) -> list[bytes | Unread | Stale]:
        """One pass for all; what cannot be read is refused by itself."""
        read: list[tuple[Tensor, Tensor] | Unread | Stale] = [self._read_or_stale(job) for job in jobs]
        inputs = [entry[1] for entry in read if isinstance(entry, tuple)]
        outputs = iter(torch.split(self._stage.forward(torch.cat(inputs)), self._edges.batch) if inputs else ())
        replies: list[bytes | Unread | Stale] = []
        for job, entry in zip(jobs, read, strict=True):
            if not isinstance(entry, tuple):
                replies.append(entry)
                continue
            try:
                replies.append(self._output(job, next(outputs), entry[0]))
            except UnencodableTensor as error:
                replies.append(Refused(str(error)[:200], None if self._stage.is_first else "input"))
        return replies

    def _output(self, job: _Job, y_BLD: Tensor, tokens_BL: Tensor) -> bytes:
        assert isinstance(job.request, Forward)
        if self._memory is not None:
            return self._memory.output(job.caller, y_BLD, job.request)
        return self._edges.output(y_BLD, job.request, tokens_BL, self._came(job))

    def _came(self, job: _Job) -> bytes | None:
        """The payload of the stage's input, but of tokens."""
        return None if self._stage.is_first else job.payloads[1]

    def _read_or_stale(self, job: _Job) -> tuple[Tensor, Tensor] | Unread | Stale:
        """Of a forward pass; what came in a version that is over is to set out anew."""
        try:
            return self._read(job)
        except Superseded:
            return Stale(self._applied())

    def _read(self, job: _Job) -> tuple[Tensor, Tensor] | Unread:
        """The token ids, and the stage's input. `Superseded` if that is in a version which nobody reads any more."""
        try:
            tokens_BL = self._edges.unpack(job.payloads[0])
        except CorruptPayload as error:
            return Refused(str(error)[:200])
        if self._stage.is_first:
            return tokens_BL, tokens_BL
        try:
            if self._memory is not None:
                return tokens_BL, self._memory.input(job.caller, job.payloads[1], job.request)
            return tokens_BL, self._edges.input(job.payloads[1], job.request, tokens_BL)
        except NotHeld as lacking:
            return Lacks(lacking.rows)
        except Superseded:
            raise
        except (CorruptPayload, Incompatible) as error:
            return Refused(str(error)[:200], "input")

    async def _do_backward(self, job: _Job, started_s: float) -> None:
        key = (job.caller, job.request.number)
        found, version = await self._pass(lambda: self._backward_at(job), BACKWARD_COST)
        took_s = self._now() - started_s
        if not isinstance(found, tuple):
            assert isinstance(job.request, Backward)
            self._staging.revoke(key, job.request.attempt)
            self._replies.pop(key, None)
            _resolve(job.reply, Reply(encode(found)))
            return
        staged, payloads, loss = found
        attempt = self._staging.staged(key, self._now())
        if attempt is None:
            self._replies.pop(key, None)
            _resolve(job.reply, Reply(encode(Refused("it was given up"))))
            return
        self._staged[key] = (staged, loss, 0 if version is None else version.round)
        self.served["backward"] += 1
        share = BACKWARD_COST / (BACKWARD_COST + (0.0 if self._stage.is_last else 1.0))
        self._pass_s.update(share, started_s, self._now())
        done = Done(self._life, attempt, took_s, loss, started_s - job.came_s, version)
        _resolve(job.reply, Reply(encode(done), payloads))

    def _backward_at(
        self, job: _Job
    ) -> tuple[tuple[Staged, tuple[bytes, ...], float | None] | Unread | Gone, Version | None]:
        """The backward pass at the weights that it names, and their version."""
        assert isinstance(job.request, Backward)
        if self._versions is None:
            try:
                return self._backward_one(job), None
            except Superseded:  # its stages before count it, or others do
                return Gone(self._applied(), late=True), None
        version = job.request.version or self._versions.newest
        try:
            with self._versions.using(version):
                return self._backward_one(job), version
        except Lacking as reason:  # gone while it waited
            return Gone(self._applied(), reason.lack == "late"), None

    def _backward_one(self, job: _Job) -> tuple[Staged, tuple[bytes, ...], float | None] | Unread:
        request, read = job.request, self._read(job)
        assert isinstance(request, Backward)
        if not isinstance(read, tuple):
            return read
        tokens_BL, x = read
        try:
            back = self._stage.backward(x, self._outside(job, request, tokens_BL))
            payloads: tuple[bytes, ...] = ()
            if back.input_gradient is not None:
                payloads = (self._edges.input_gradient(back.input_gradient, request, tokens_BL, x, self._came(job)),)
        except Superseded:
            raise
        except (CorruptPayload, Incompatible, UnencodableTensor) as error:
            return self._spoilt(str(error))
        if not all(bool(x.isfinite().all()) for x in back.staged.gradients.values()):
            return self._spoilt("its gradient is not finite")  # in the sum it would spoil everybody's
        return back.staged, payloads, back.loss_sum

    def _spoilt(self, why: str) -> Refused:
        """Of a backward pass whose input can be read: what the stage after made is to blame, of the last one the input."""
        made: Made = "gradient" if not self._stage.is_last else "input"
        return Refused(why[:200], None if self._stage.is_first and self._stage.is_last else made)

    def _outside(self, job: _Job, request: Backward, tokens_BL: Tensor) -> Tensor:
        """The targets, or the gradient of the stage's output."""
        at = 1 if self._stage.is_first else 2
        if self._stage.is_last:
            return self._edges.unpack(job.payloads[at])
        arrived = None
        if self._edges.is_masked(request.sends):
            arrived = self._edges.arrived(job.payloads[at + 1], request, tokens_BL)
        return self._edges.output_gradient(job.payloads[at], request, tokens_BL, arrived)

    @property
    def stage(self) -> Stage:
        """What it computes with."""
        return self._stage

    def untaken(self, trainer: PeerId) -> int:
        """A trainer's microbatches that are merged here and in no step yet."""
        return sum(peer == trainer for peer, _ in list(self._sums.rounds))

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

    # what the loop around the stage sees

    @property
    def tokens(self) -> int:
        """What was merged here and is not known to count yet."""
        return (self._unclosed - len(self._late)) * self._edges.tokens

    def take(self) -> Taken:
        """In what computes: all that is merged, for a step. It is this server's work from now on."""
        oldest = None if self._versions is None else self._versions.oldest
        taken, discarded = self._sums.take(oldest), self._discarded(oldest)
        self._leave_out(taken.late)
        self._work |= {key: self._measured(number) for key, number in taken.rounds.items()}
        if self._versions is not None:
            self._versions.begin_step([self._applied() - number for number in taken.rounds.values()])
        loss = taken.loss_sum / max(taken.staged.tokens, 1)
        return Taken(taken.staged, loss if self._stage.is_last and taken.rounds else None, discarded)

    def _discarded(self, oldest: int | None) -> int:
        """How many microbatches are given up that earlier steps took and no round did: they wait as one sum, which is late as
        soon as one of them is."""
        if oldest is None or self._versions is None or self._versions.agreed is not None:
            return 0  # local steps have used theirs
        waiting = {key: number for key, number in self._work.items() if not self._staging.is_offered(key)}
        if min(waiting.values(), default=oldest) >= oldest:
            return 0
        self._work = {key: number for key, number in self._work.items() if key not in waiting}
        self._leave_out(waiting)
        return len(waiting)

    def _leave_out(self, keys: Collection[Key]) -> None:
        self._late |= set(keys)
        self.served["late"] += len(keys)

    def _measured(self, number: int) -> int:
        """What is kept of a gradient of that round's weights: their round, as long as it waits for its own one; where a local
        step has used it, how late it was."""
        local = self._versions is not None and self._versions.agreed is not None
        return self._applied() - number if local else number

    def _age(self, key: Key, number: int) -> int:
        """How late it is for that round."""
        if self._versions is None or key in self._late:
            return notes.LATE if key in self._late else 0
        return self._work[key] if self._versions.agreed is not None else max(number - 1 - self._work[key], 0)

    def brought(self, number: int) -> bytes:
        """The keys of my contribution to this round, which is being made."""
        keys = self._staging.offer(number, self._work.keys() | self._late)
        return notes.written({key: self._age(key, number) for key in keys})

    def closing(self, number: int, noted: bytes) -> None:
        """A round is about to be applied, by whoever calls this."""
        if self._versions is not None:
            ages = notes.joined_ages([noted]) if noted else {}
            self._versions.begin_round([age for age in ages.values() if age != notes.LATE])

    def closed(self, number: int, noted: bytes) -> None:
        """A round is over; called by whoever applied it, so that it is only put down here, until `absorb`."""
        self._closed.append((number, noted))
        if self._versions is not None:
            self._versions.end_round()

    def absorb(self) -> None:
        """Take in what rounds said that are over."""
        while self._closed:
            number, noted = self._closed.popleft()
            named = set(notes.joined([noted])) if noted else set()
            self._staging.close(number, named)
            self._unclosed -= len((self._work.keys() | self._late) & named)
            self._work = {key: number for key, number in self._work.items() if key not in named}
            self._late -= named


def _under(reply: Reply, attempt: int) -> Reply:
    """The reply to an earlier request for the same pass, for this attempt."""
    answer = decode_answer(reply.body)
    if not isinstance(answer, Done):
        return reply
    return Reply(encode(msgspec.structs.replace(answer, attempt=attempt)), reply.payloads)


def _future() -> asyncio.Future[Reply]:
    return asyncio.get_running_loop().create_future()


def _resolve(future: asyncio.Future[Reply], reply: Reply) -> None:
    if not future.done():
        future.set_result(reply)
