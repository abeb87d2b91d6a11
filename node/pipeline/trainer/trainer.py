"""A pipeline's trainer: it draws microbatches, walks each forward and back through the stages, and sees to it that each stage's
gradient of each counts once (swarm/protocol/ledger.py).

It holds no weights. What it holds of a microbatch is the input of each stage, and the gradient of each stage's output, encoded
as they came, until every stage's rounds have named it: so whatever dies, the pass can be asked of somebody else. Who is asked
is the path policy's affair (swarm/paths/policy.py).
"""

import asyncio
import collections
import itertools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from farflock.compression.codec import CorruptPayload
from farflock.node.pipeline.memory.samples import Row, TrainerMemory, refers
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
    Merged,
    Refused,
    Request,
    Revoke,
    Stale,
    Unknown,
    Version,
    Visit,
    decode_answer,
    encode,
)
from farflock.node.pipeline.trainer.edge_codecs import EdgeCodecs
from farflock.node.pipeline.trainer.heard import Heard
from farflock.node.pipeline.trainer.spoilt import Origins, Shunned
from farflock.node.pipeline.trainer.stage_directory import Rolls, Server
from farflock.node.run.terms import TrainerTerms
from farflock.swarm.links import PeerId
from farflock.swarm.messages import CodecId, Key
from farflock.swarm.paths.policy import Call, Microbatch, Outcome, PathPolicy
from farflock.swarm.paths.round_robin import BACKWARD_SIZE
from farflock.swarm.peer.calls import CallFailed
from farflock.swarm.peer.peer import Peer, Wait
from farflock.swarm.protocol.depth import Depth
from farflock.swarm.protocol.ledger import Ledger, Place

PAUSE_S = 0.25  # before a stage that refused, or that nobody serves, is asked again
CONFIRM_TIMEOUT_S = 10.0
TICK_S = 0.1
ASKED_IN_VAIN = 2  # times as often as there are servers, until nobody seems to have some weights
RECENT = 32  # microbatches whose mean loss is shown
NUMBERS, LIVES = 2**32, 2**29  # microbatches of one life, and lives whose numbers differ

Report = Callable[[str, dict[str, object]], None]


@dataclass(slots=True)
class _Parcel:
    """One microbatch as its trainer keeps it: which samples it is, where the codec wants that; by stage the payload of its
    input, or of such a codec its rows, the payload of the gradient of its output, and what its output is written in; who made
    these; and the versions of the weights on its way. `lacked` counts by stage who was asked in vain, for want of these or of a
    codec."""

    microbatch: Microbatch
    order: tuple[int, ...]
    tokens: bytes
    targets: bytes
    epoch: int
    samples: tuple[int, ...] = ()
    inputs: dict[int, bytes | tuple[Row, ...]] = field(default_factory=dict)
    outside: dict[int, bytes] = field(default_factory=dict)
    codecs: dict[int, CodecId | None] = field(default_factory=dict)
    versions: dict[int, Version] = field(default_factory=dict)
    lacked: collections.Counter[int] = field(default_factory=collections.Counter)
    origins: Origins = field(default_factory=Origins)
    dropped: bool = False  # it counts at some stages alone
    begun_s: float = 0.0
    trip_s: float = 0.0  # of its passes that brought something, without waiting at servers

    def source(self, stage: int) -> int:
        """The stage before, -1 before the first."""
        at = self.order.index(stage)
        return self.order[at - 1] if at else -1

    def after(self, stage: int) -> int | None:
        """The stage after, None after the last."""
        at = self.order.index(stage)
        return self.order[at + 1] if at + 1 < len(self.order) else None


def first_number(life: int) -> int:
    """Where this life of a trainer begins to number its microbatches: not where a former one did, for those may count already
    or be somewhere on their way. The rest after `NUMBERS` says which of its stream's batches it is."""
    return life % LIVES * NUMBERS


class Trainer:
    """One life of one trainer. `batch(n)` is the n-th microbatch of its stream, tokens and targets (B, L); `first` is this
    life's first number (`first_number`). A trainer that comes later begins in its stream where the run is. `samples(n)` are the
    ids of that microbatch's sequences, which a codec that remembers samples needs."""

    def __init__(
        self,
        peer: Peer,
        rolls: Rolls,
        policy: PathPolicy,
        edges: Edges,
        batch: Callable[[int], tuple[Tensor, Tensor]],
        terms: TrainerTerms,
        report: Report = lambda kind, fields: None,
        lane: int = 0,
        first: int = 0,
        samples: Callable[[int], tuple[int, ...]] = lambda number: (),
    ) -> None:
        self._peer, self._rolls, self._policy, self._edges = peer, rolls, policy, edges
        self._batch, self._terms, self._report, self._lane = batch, terms, report, lane
        self._samples, self._memory = samples, TrainerMemory(edges) if edges.remembers else None
        self._codecs = EdgeCodecs(edges, peer.codec_offers.of)
        self._shunned = Shunned()
        self._ledger = Ledger(rolls.stages)
        self._depth = Depth(min(rolls.stages, terms.window), terms.window)
        self._parcels: dict[int, _Parcel] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._walking: set[int] = set()
        self._asking: set[Place] = set()
        self._first = self._next = first
        self._numbers = itertools.count()
        self._asked: dict[int, tuple[Key, PeerId, float]] = {}  # what, of whom, until when on the local clock
        self._lacking: dict[int, float] = {}  # stages that nobody can be asked for, and since when
        self._failure: BaseException | None = None  # a bug in one of our tasks
        self.stopping = False
        self._losses: collections.deque[float] = collections.deque(maxlen=RECENT)  # nats a token
        self._heard = Heard(peer.me, rolls.stages)
        self.finished = 0  # microbatches that count at every stage
        self.dropped = (
            0  # gradients that never counted, for their weights were gone: each of one microbatch at one stage
        )
        self.lost = 0  # microbatches of which it is not known whether they count, for the log of rounds has moved on

    # running

    async def run(self, enough: Callable[[], bool]) -> None:
        """Train until `enough`, or until told to stop; then see to what is on its way no longer."""
        self._first = self._next = self._first + self._rolls.tokens() // self._edges.tokens
        try:
            while not (self.stopping or enough()):
                if self._failure is not None:
                    raise self._failure
                self._look_around()
                self._begin_more()
                await asyncio.sleep(TICK_S)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def kept(self) -> int:
        """Microbatches that are on their way or wait to be named."""
        return len(self._parcels)

    @property
    def recent_loss(self) -> float | None:
        """Mean of the last microbatches' losses, in nats a token."""
        return sum(self._losses) / len(self._losses) if self._losses else None

    @property
    def doubled(self) -> int:
        """Microbatches named twice at one stage, which must not be."""
        return self._heard.doubled

    @property
    def visits(self) -> dict[str, int]:
        """Of a codec that remembers samples: how many came whole, and as differences, and how often a server lacked one."""
        return dict(self._memory.counts) if self._memory is not None else {}

    @property
    def begun(self) -> int:
        """Microbatches so far."""
        return self._next - self._first

    def _look_around(self) -> None:
        """Hear what rounds have named and who has left; ask again for what is lost; forget what counts everywhere."""
        for stage, keys in self._rolls.named():
            self._ledger.committed(stage, self._heard.of_round(stage, keys))
        self._hear_of_late()
        while (doubtful := self._rolls.skipped()) is not None:  # before those are asked again whose server has left
            self._give_up(doubtful)
        for stage, server in self._rolls.left():
            self._ledger.lost(stage, server)
        for number in self._ledger.finish():
            parcel = self._parcels.pop(number)
            if parcel.dropped:
                continue
            self.finished += 1
            self._report("microbatch", {"number": number, "took_s": self._now() - parcel.begun_s})
        for place in self._ledger.open():
            parcel = self._parcels[place[0]]
            if place not in self._asking and place[0] not in self._walking and place[1] in parcel.outside:
                self._spawn(self._backward(parcel, place))  # lost with its server; the rest of it stays as it is
        for place, server, attempt in list(self._ledger.confirms()):
            if place not in self._asking:
                self._spawn(self._confirm(place, server, attempt))

    def _begin_more(self) -> None:
        while len(self._walking) < self._depth.wanted and len(self._parcels) < self._terms.kept:
            number, self._next = self._next, self._next + 1
            parcel = self._parcels[number] = self._parcel(number)
            self._ledger.begin(number, parcel.order)
            self._walking.add(number)
            self._spawn(self._walk(number, parcel))

    def _hear_of_late(self) -> None:
        """What rounds named and left out counts at other stages alone."""
        for stage, (trainer, number) in self._rolls.left_out:
            if trainer == self._peer.me and (parcel := self._parcels.get(number)) is not None:
                self._drop(parcel, stage)
        self._rolls.left_out.clear()

    def _drop(self, parcel: _Parcel, stage: int) -> None:
        parcel.dropped = True
        self.dropped += 1
        self._report("dropped", {"number": parcel.microbatch.step, "stage": stage})

    def _give_up(self, stage: int) -> None:
        """Rounds of a stage have left everybody's log before I heard of them: what waits for them may count or not."""
        waiting = [number for number in self._parcels if self._ledger.phase((number, stage)) in ("bound", "merged")]
        self._ledger.committed(stage, waiting)
        self.lost += len(waiting)

    def _spawn(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and self._failure is None:
            self._failure = error

    # one microbatch

    async def _walk(self, number: int, parcel: _Parcel) -> None:
        """Forward, then back; a walk that a stage finds too old, or whose payloads nobody can read, is begun anew."""
        last = parcel.order[-1]
        try:
            while not (await self._forward(parcel) and await self._backward(parcel, (number, last))):
                parcel.epoch = self._rolls.epoch
                parcel.inputs.clear()
                parcel.codecs.clear()
                parcel.versions.clear()
                parcel.trip_s = 0.0
            for stage in reversed(parcel.order[:-1]):
                await self._backward(parcel, (number, stage))
            self._depth.came_back(self._now(), parcel.trip_s)
        finally:
            self._walking.discard(number)

    def _parcel(self, number: int) -> _Parcel:
        microbatch = Microbatch(step=number, index=0, lane=self._lane)
        tokens_BL, targets_BL = self._batch(number % NUMBERS)
        tokens, targets = self._edges.pack(tokens_BL), self._edges.pack(targets_BL)
        order = self._policy.stage_order(microbatch)
        parcel = _Parcel(microbatch, order, tokens, targets, self._rolls.epoch, begun_s=self._now())
        parcel.outside[order[-1]] = targets
        if self._memory is not None:
            parcel.samples = self._samples(number % NUMBERS)
        return parcel

    async def _forward(self, parcel: _Parcel) -> bool:
        """The inputs of all stages; False if some stage is too far from the round that the microbatch set out in, or cannot
        read its input. The last stage's own pass is part of its way back."""
        for stage in parcel.order[:-1]:
            while (answer := await self._forward_once(parcel, stage)) is None:
                pass
            if not isinstance(answer, Done):
                await asyncio.sleep(PAUSE_S)
                return False
            if answer.version is not None:
                parcel.versions[stage] = answer.version
        return True

    async def _forward_once(self, parcel: _Parcel, stage: int) -> Done | Stale | Foreign | Refused | None:
        """What one server says to it, with the next stage's input put down if it is done; None if it brought nothing."""
        after = parcel.after(stage)
        assert after is not None
        came, stages = parcel.codecs.get(parcel.source(stage)), self._rolls.serving().stages
        sends = self._codecs.choose(stages[stage], stages[after], came)
        server = await self._next_hop(parcel, stage, 1.0, came, sends)
        known = self._memory.known(stage, parcel.samples) if self._memory is not None else None
        visit = known.visit if known is not None else None
        request = Forward(parcel.microbatch.step, stage, parcel.source(stage), parcel.epoch, visit, came, sends)
        answer, reply = await self._ask_with_input(server, request, parcel)
        if not isinstance(answer, Done) or len(reply) != 1:
            if isinstance(answer, Refused) and not self._is_spoilt(parcel, stage, server, answer):
                return None
            return answer if isinstance(answer, Stale | Foreign | Refused) else None
        parcel.origins.made((after, "input"), server.peer)
        parcel.codecs[stage] = self._edges.written_in(reply[0], sends)
        if self._memory is None or known is None:
            parcel.inputs[after] = reply[0]
            return answer
        try:
            parcel.inputs[after] = self._memory.received(reply[0], request, known)
        except CorruptPayload:  # seen by ourselves
            self._shun(parcel, stage, server.peer)
            await asyncio.sleep(PAUSE_S)
            return None
        return answer

    async def _backward(self, parcel: _Parcel, place: Place) -> bool:
        """Ask until somebody has answered under the attempt that counts; what it put aside is then to be confirmed. False if
        the walk is to begin anew."""
        stage = place[1]
        self._asking.add(place)
        try:
            while self._ledger.phase(place) in ("open", "sent"):
                reply = await self._backward_once(parcel, place)
                if isinstance(reply, Refused):
                    if stage == parcel.order[-1] and place[0] in self._walking:
                        await asyncio.sleep(PAUSE_S)
                        return False
                    self._drop_rest(parcel, stage)
                elif reply is not None:
                    source = parcel.source(stage)
                    if source >= 0:
                        parcel.outside[source] = reply
                    break
        finally:
            self._asking.discard(place)
        return True

    async def _backward_once(self, parcel: _Parcel, place: Place) -> bytes | Refused | None:
        """The gradient of the stage's input (b"" of the first), or None if this attempt brought nothing; a refusal if
        what other stages made cannot be read."""
        number, stage = place
        source = parcel.source(stage)
        came, sends = parcel.codecs.get(source), parcel.codecs.get(stage)
        server = await self._next_hop(parcel, stage, BACKWARD_SIZE, came, sends)
        if self._ledger.phase(place) not in ("open", "sent"):
            return None  # a round has named it meanwhile, as nobody honest would have
        attempt = self._ledger.send(place, server.name)
        version = parcel.versions.get(stage)
        visit = Visit(parcel.samples) if self._memory is not None else None
        request = Backward(number, stage, source, parcel.epoch, attempt, version, visit, came, sends)
        rest = [parcel.outside[stage], *self._mask(parcel, stage)]
        answer, reply = await self._ask_with_input(server, request, parcel, rest)
        whole = len(reply) == (0 if source < 0 else 1)
        if not isinstance(answer, Done) or not whole or answer.life != server.life:
            self._ledger.silent(place, attempt)
            if isinstance(answer, Foreign) or (isinstance(answer, Gone) and (version is not None or answer.late)):
                self._lacks(parcel, stage, answer, version)
            return answer if isinstance(answer, Refused) and self._is_spoilt(parcel, stage, server, answer) else None
        if not self._ledger.replied(place, server.name, answer.attempt):
            self._spawn(self._revoke(server, place, answer.attempt))
            return None
        self._spawn(self._confirm(place, server.name, attempt))
        if answer.version is not None:
            parcel.versions[stage] = answer.version
        if answer.loss_sum is not None:
            self._losses.append(answer.loss_sum / self._edges.tokens)
            self._report("loss", {"number": number, "loss": answer.loss_sum / self._edges.tokens})
        parcel.origins.made((source, "gradient"), server.peer)
        return reply[0] if reply else b""

    def _lacks(self, parcel: _Parcel, stage: int, answer: Gone | Foreign, version: Version | None) -> None:
        """A server has not got the weights of the forward pass, or what its payload is written with. If no other has, the last
        stage counts this microbatch already, so that it cannot begin anew: the rest of it is dropped, or differentiated at
        other weights."""
        if not (isinstance(answer, Gone) and answer.late):
            yet_to_come = isinstance(answer, Gone) and version is not None and answer.round < version.round
            parcel.lacked[stage] += not yet_to_come
            if parcel.lacked[stage] < ASKED_IN_VAIN * max(len(self._rolls.serving().stages[stage]), 1):
                return
        if isinstance(answer, Gone) and version is not None and self._terms.gone == "newest":
            del parcel.versions[stage]
            return
        self._drop_rest(parcel, stage)

    def _drop_rest(self, parcel: _Parcel, stage: int) -> None:
        """It counts at the stages after this one, and not here or before."""
        before = [known for known in parcel.order[: parcel.order.index(stage)] if known not in parcel.outside]
        for known in (stage, *before):
            self._ledger.committed(known, [parcel.microbatch.step])
            self._drop(parcel, known)

    def _is_spoilt(self, parcel: _Parcel, stage: int, server: Server, answer: Refused) -> bool:
        """Whether what another stage made is refused by as many as it takes; who made it is then passed by for a while."""
        if answer.unread is None:
            return False
        payload = stage, answer.unread
        spoilt = parcel.origins.refused(payload, server.peer, len(self._rolls.serving().stages[stage]))
        maker = parcel.origins.to_blame(payload)
        made_at = parcel.source(stage) if answer.unread == "input" else parcel.after(stage)
        if maker is not None and made_at is not None:
            self._shun(parcel, made_at, maker)
        return spoilt

    def _shun(self, parcel: _Parcel, stage: int, maker: PeerId) -> None:
        self._shunned.shun(stage, maker, self._now())
        self._report("shunned", {"stage": stage, "peer": maker, "number": parcel.microbatch.step})

    async def _confirm(self, place: Place, name: str, attempt: int) -> None:
        """Once; `_look_around` does it again until it is answered."""
        self._asking.add(place)
        try:
            server = self._rolls.server(name)
            if server is None:
                return  # gone: its last rounds will tell
            answer, _ = await self._ask(server, Confirm(place[0], place[1], attempt))
            match answer:
                case Merged():
                    self._ledger.merged(place, attempt)
                case Unknown():
                    self._ledger.refused(place, attempt)
        finally:
            self._asking.discard(place)

    async def _revoke(self, server: Server, place: Place, attempt: int) -> None:
        await self._ask(server, Revoke(place[0], place[1], attempt))

    async def _ask_with_input(
        self, server: Server, request: Forward | Backward, parcel: _Parcel, rest: Sequence[bytes] = ()
    ) -> tuple[Answer | None, tuple[bytes, ...]]:
        """Hand in tokens, the stage's input unless that is tokens, and the rest. Who lacks what the input refers to is asked
        again, with more of it: by whoever asks."""
        kept, stage = parcel.inputs.get(request.stage), request.stage
        if kept is None or isinstance(kept, bytes):
            given = [] if kept is None else [kept]
            return await self._ask(server, request, [parcel.tokens, *given, *rest])
        assert self._memory is not None
        payload = self._memory.handed(stage, server.name, parcel.samples, kept)
        answer, reply = await self._ask(server, request, [parcel.tokens, payload, *rest])
        if isinstance(answer, Done):
            self._memory.taken(stage, server.name, parcel.samples, kept)
        elif isinstance(answer, Lacks):
            self._memory.taken(stage, server.name, parcel.samples, kept, answer.rows)
            if not refers(payload, answer.rows, len(parcel.samples)):
                await asyncio.sleep(PAUSE_S)  # it would not know better at once
        return answer, reply

    def _mask(self, parcel: _Parcel, stage: int) -> list[bytes]:
        """The activation that a gradient belongs to, where the codec needs it to read that."""
        after = parcel.after(stage)
        masked = after is not None and self._edges.is_masked(parcel.codecs.get(stage))
        arrived = parcel.inputs[after] if masked and after is not None else None
        return [arrived] if isinstance(arrived, bytes) else []

    # asking

    def waits(self) -> list[Wait]:
        """What is asked of whom now, and which stages nobody can be asked for."""
        now_s = self._now()
        asked = [Wait(what, (peer,), ends_s - now_s) for what, peer, ends_s in self._asked.values()]
        return asked + [
            Wait(Key(f"server of stage {stage}", 0), (), since_s - now_s) for stage, since_s in self._lacking.items()
        ]

    async def _next_hop(
        self, parcel: _Parcel, stage: int, size: float, came: CodecId | None, sends: CodecId | None
    ) -> Server:
        """Whom the policy names of those who read these codecs, as soon as it names somebody; only where it names nobody else,
        one that is shunned or has refused what is to be handed in."""
        while True:
            serving = self._rolls.serving()
            now_s, unfit = self._now(), self._codecs.unfit(serving.stages[stage], (came, sends))
            better_not = self._shunned.at(stage, now_s) | parcel.origins.refusers(stage)
            choose = partial(self._policy.next_hop, parcel.microbatch, stage, serving, now_s, size)
            peer = choose(unfit | better_not) or choose(unfit)
            server = self._rolls.at(stage, peer) if peer is not None else None
            if server is not None:
                self._lacking.pop(stage, None)
                return server
            self._lacking.setdefault(stage, self._now())
            await asyncio.sleep(PAUSE_S)

    async def _ask(
        self, server: Server, request: Request, payloads: Sequence[bytes] = ()
    ) -> tuple[Answer | None, tuple[bytes, ...]]:
        """One call, and what the policy learns of it; None if it brought nothing. A pause follows a refusal."""
        started_s, timeout_s = self._now(), self._patience_s(request)
        number = next(self._numbers)
        what = Key(f"{type(request).__name__.lower()} at stage {request.stage}", request.number)
        self._asked[number] = (what, server.peer, started_s + timeout_s)
        try:
            reply = await self._peer.calls.ask(
                server.peer,
                encode(request),
                payloads,
                timeout_s=timeout_s,
                max_reply_bytes=self._most_reply_bytes(request),
            )
            answer = decode_answer(reply.body)
        except CallFailed as error:
            self._learn(server, request, error.reason, started_s)
            await asyncio.sleep(PAUSE_S)
            return None, ()
        except BadRequest:
            self._learn(server, request, "rpc", started_s)
            return None, ()
        finally:
            del self._asked[number]
        if isinstance(answer, Done):
            self._learn(server, request, "done", started_s, answer.took_s)
            if (parcel := self._parcels.get(request.number)) is not None:
                parcel.trip_s += max(0.0, self._now() - started_s - answer.waited_s)
        else:
            self._learn(server, request, "busy", started_s)
        if isinstance(answer, Busy | Refused | Gone | Foreign):
            await asyncio.sleep(PAUSE_S)
        return answer, reply.payloads

    def _most_reply_bytes(self, request: Request) -> int:
        match request:
            case Forward(sends=sends):
                return self._edges.max_bytes("forward", sends)
            case Backward(came=came):
                return self._edges.max_bytes("backward", came)
            case _:
                return 0

    def _patience_s(self, request: Request) -> float:
        match request:
            case Forward():
                return self._terms.forward_timeout_s
            case Backward():
                return self._terms.backward_timeout_s
            case _:
                return CONFIRM_TIMEOUT_S

    def _learn(
        self, server: Server, request: Request, outcome: Outcome, started_s: float, took_s: float | None = None
    ) -> None:
        """Tell the policy; confirmations say nothing of a server's speed."""
        if isinstance(request, Forward | Backward):
            size = 1.0 if isinstance(request, Forward) else BACKWARD_SIZE
            self._policy.on_result(Call(server.peer, request.stage, size, started_s, took_s), outcome, self._now())

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
