"""A trainer's client of stage servers: it makes single calls and reports their outcomes to the
path policy."""

import asyncio
import contextlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from farflock.node.pipeline.passes.requests import (
    Backward,
    BadRequest,
    Busy,
    Done,
    Foreign,
    Forward,
    Gone,
    HeldOutForward,
    Refused,
    StageAnswer,
    StageRequest,
    decode_answer,
    encode,
)
from farflock.node.pipeline.trainer.blame import Quarantine
from farflock.node.pipeline.trainer.edge_codecs import EdgeCodecs
from farflock.node.pipeline.trainer.in_flight import InFlight
from farflock.node.pipeline.trainer.stage_directory import ServerLife, StageDirectory
from farflock.swarm.links import PeerId
from farflock.swarm.messages import CodecId, Key
from farflock.swarm.paths.policy import CallOutcome, FinishedCall, PathPolicy
from farflock.swarm.paths.round_robin import BACKWARD_SIZE
from farflock.swarm.peer.call_server import FETCH_S
from farflock.swarm.peer.calls import CallFailed, NotFetched
from farflock.swarm.peer.payloads import Given, Left
from farflock.swarm.peer.peer import OpenWait, Peer

PAUSE_S = 0.25  # before asking again after a refusal, or for a stage without servers
CONFIRM_TIMEOUT_S = 10.0  # no tensors travel; well below a lease, so that it can be repeated


@dataclass(frozen=True, slots=True)
class Asked:
    """The outcome of one call; `answer` is None if the call failed or its reply is unreadable.

    `trip_s` is the time that a finished pass took, without its wait at the server; otherwise 0.
    `fetched` holds the payloads, by place in the request, that the server could not get from
    their holders and that the trainer got in its stead; None for one that is lost."""

    answer: StageAnswer | None = None
    payloads: tuple[Given, ...] = ()
    trip_s: float = 0.0
    fetched: Mapping[int, bytes | None] = field(default_factory=dict)


class StageClient:
    """Calls stage servers for one trainer. The path policy chooses the servers and is told the
    outcomes. If `direct`, large payloads go from server to server."""

    def __init__(
        self,
        peer: Peer,
        stage_directory: StageDirectory,
        policy: PathPolicy,
        codecs: EdgeCodecs,
        quarantine: Quarantine,
        forward_timeout_s: float,
        backward_timeout_s: float,
        *,
        direct: bool,
    ) -> None:
        self._calls, self._stage_directory, self._policy = peer.calls, stage_directory, policy
        self._codecs, self._quarantine = codecs, quarantine
        self._forward_timeout_s, self._backward_timeout_s = forward_timeout_s, backward_timeout_s
        self._direct = direct
        # whether a backward pass goes to the server of its forward pass: each has its own weights
        self.returns = False
        self._numbers = itertools.count()
        # calls and fetches in progress: their kind, the peer, and the deadline on the local clock
        self._asked: dict[int, tuple[Key, PeerId, float]] = {}
        self._lacking: dict[int, float] = {}  # stages without servers, and since when

    def waits(self) -> list[OpenWait]:
        """Return the calls in progress, and the stages that have no server to ask."""
        now_s = _now()
        waits = [
            OpenWait(what, (peer,), ends_s - now_s) for what, peer, ends_s in self._asked.values()
        ]
        for stage, since_s in self._lacking.items():
            waits.append(OpenWait(Key(f"server of stage {stage}", 0), (), since_s - now_s))
        return waits

    def same_server(self, flight: InFlight, stage: int) -> ServerLife | None:
        """Return the server of a stage's forward pass, where a backward pass has to return to it;
        None if it is gone, or refused the stage's payloads."""
        server = flight.servers.get(stage) if self.returns else None
        if server is None or self._stage_directory.at(stage, server.peer) != server:
            return None
        alive = {each.peer for each in self._stage_directory.serving().stages[stage]}
        avoided = self._quarantine.at(stage, _now()) | flight.origins.refusers(stage)
        return server if server.peer in alive - avoided else None

    async def next_hop(
        self, flight: InFlight, stage: int, size: float, came: CodecId | None, sends: CodecId | None
    ) -> ServerLife:
        """Wait until the policy names a server of the stage that reads the codecs `came` and
        `sends`. Servers in quarantine, and those that refused the stage's payloads before, are
        asked only if the policy names no other."""
        while True:
            serving = self._stage_directory.serving()
            now_s, unfit = _now(), self._codecs.unfit(serving.stages[stage], (came, sends))
            avoided = self._quarantine.at(stage, now_s) | flight.origins.refusers(stage)
            choose = partial(self._policy.next_hop, flight.microbatch, stage, serving, now_s, size)
            peer = choose(unfit | avoided) or choose(unfit)
            server = self._stage_directory.at(stage, peer) if peer is not None else None
            if server is not None:
                self._lacking.pop(stage, None)
                return server
            self._lacking.setdefault(stage, _now())
            await asyncio.sleep(PAUSE_S)

    async def ask(
        self, server: ServerLife, request: StageRequest, payloads: Sequence[Given] = ()
    ) -> Asked:
        """Make one call and tell the policy its outcome. Pause after a refusal or a failed call.

        What the server cannot get from its holders is fetched here."""
        started_s, timeout_s = _now(), self._timeout_s(request)
        what = Key(f"{type(request).__name__.lower()} at stage {request.stage}", request.number)
        try:
            with self._waiting(what, server.peer, timeout_s):
                reply = await self._calls.ask(
                    server.peer,
                    encode(request),
                    payloads,
                    timeout_s=timeout_s,
                    max_reply_bytes=self._max_reply_bytes(request),
                    leave=self._leaves(request),
                )
            answer = decode_answer(reply.body)
        except NotFetched as error:
            self._learn(server, request, "busy", started_s)
            return Asked(fetched=await self._fetch(request, payloads, error.places))
        except CallFailed as error:
            self._learn(server, request, error.reason, started_s)
            await asyncio.sleep(PAUSE_S)
            return Asked()
        except BadRequest:
            self._learn(server, request, "rpc", started_s)
            return Asked()
        came: tuple[Given, ...] = (*reply.payloads, *reply.left)
        if isinstance(answer, Done):
            self._learn(server, request, "done", started_s, answer.took_s)
            return Asked(answer, came, max(0.0, _now() - started_s - answer.waited_s))
        self._learn(server, request, "busy", started_s)
        if isinstance(answer, Busy | Refused | Gone | Foreign):
            await asyncio.sleep(PAUSE_S)
        return Asked(answer, came)

    def drop(self, flight: InFlight) -> None:
        """Have servers forget what they keep for a microbatch."""
        self.forget(left for left, _, _ in flight.left)
        flight.left.clear()

    def forget(self, payloads: Iterable[Left]) -> None:
        """Have the servers that made these payloads forget them."""
        for left in payloads:
            self._calls.drop(left)

    async def _fetch(
        self, request: StageRequest, payloads: Sequence[Given], places: Collection[int]
    ) -> dict[int, bytes | None]:
        """Fetch the payloads at these places, or all that were left, if it names none of them."""
        left = {place: one for place, one in enumerate(payloads) if isinstance(one, Left)}
        asked = {place: left[place] for place in left if place in places} or left
        if not asked:
            await asyncio.sleep(PAUSE_S)  # the server lies
        found: dict[int, bytes | None] = {}
        for place, one in asked.items():
            what = Key(f"payload {place} for stage {request.stage}", request.number)
            with self._waiting(what, one.holders[0], FETCH_S):
                found[place] = await self._calls.fetch(one, FETCH_S)
        return found

    @contextlib.contextmanager
    def _waiting(self, what: Key, peer: PeerId, timeout_s: float) -> Iterator[None]:
        """List a wait among `waits`."""
        number = next(self._numbers)
        self._asked[number] = what, peer, _now() + timeout_s
        try:
            yield
        finally:
            del self._asked[number]

    def _leaves(self, request: StageRequest) -> bool:
        """True if the answer's payload may stay with the server."""
        match request:
            case HeldOutForward(stage=stage) if self._is_last(stage):
                return False
            case Forward(sends=codec) | Backward(came=codec) | HeldOutForward(sends=codec):
                return self._direct and self._codecs.edges.may_stay(codec)
            case _:
                return False

    def _is_last(self, stage: int) -> bool:
        return stage == self._stage_directory.stages - 1

    def _max_reply_bytes(self, request: StageRequest) -> int:
        match request:
            case HeldOutForward(stage=stage) if self._is_last(stage):
                return self._codecs.edges.loss_bytes
            case Forward(sends=sends) | HeldOutForward(sends=sends):
                return self._codecs.edges.max_bytes("forward", sends)
            case Backward(came=came):
                return self._codecs.edges.max_bytes("backward", came)
            case _:
                return 0

    def _timeout_s(self, request: StageRequest) -> float:
        match request:
            case Forward() | HeldOutForward():
                return self._forward_timeout_s
            case Backward():
                return self._backward_timeout_s
            case _:
                return CONFIRM_TIMEOUT_S

    def _learn(
        self,
        server: ServerLife,
        request: StageRequest,
        outcome: CallOutcome,
        started_s: float,
        took_s: float | None = None,
    ) -> None:
        """Tell the policy how a pass went; confirmations say nothing about a server's speed, and
        passes on held-out text are none of the policy's."""
        if isinstance(request, Forward | Backward):
            size = 1.0 if isinstance(request, Forward) else BACKWARD_SIZE
            call = FinishedCall(server.peer, request.stage, size, started_s, took_s)
            self._policy.on_result(call, outcome, _now())


def _now() -> float:
    return asyncio.get_running_loop().time()
