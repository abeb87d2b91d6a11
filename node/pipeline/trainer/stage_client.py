"""A trainer's client of stage servers: one call to one server, and what is learned of it."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from farflock.node.pipeline.passes.requests import (
    Backward,
    BadRequest,
    Busy,
    Done,
    Foreign,
    Forward,
    Gone,
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
from farflock.swarm.peer.calls import CallFailed
from farflock.swarm.peer.peer import OpenWait, Peer

PAUSE_S = 0.25  # before a stage that refused, or that nobody serves, is asked again
CONFIRM_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What came of one call: None if it brought nothing that can be read; and how long that took,
    without waiting at the server, if what was asked for is done."""

    answer: StageAnswer | None = None
    payloads: tuple[bytes, ...] = ()
    trip_s: float = 0.0


class StageClient:
    """Asks the servers of stages on behalf of one trainer. Which one is asked is the path policy's
    choice, which hears how each call went."""

    def __init__(
        self,
        peer: Peer,
        stage_directory: StageDirectory,
        policy: PathPolicy,
        codecs: EdgeCodecs,
        quarantine: Quarantine,
        forward_timeout_s: float,
        backward_timeout_s: float,
    ) -> None:
        self._calls, self._stage_directory, self._policy = peer.calls, stage_directory, policy
        self._codecs, self._quarantine = codecs, quarantine
        self._forward_timeout_s, self._backward_timeout_s = forward_timeout_s, backward_timeout_s
        self._numbers = itertools.count()
        # Calls under way: for what, to which peer, until when on the local clock.
        self._asked: dict[int, tuple[Key, PeerId, float]] = {}
        self._lacking: dict[int, float] = {}  # stages without a server to ask, and since when

    def waits(self) -> list[OpenWait]:
        """What is asked of which peer now, and which stages have no server to ask."""
        now_s = _now()
        waits = [OpenWait(what, (peer,), ends_s - now_s) for what, peer, ends_s in self._asked.values()]
        for stage, since_s in self._lacking.items():
            waits.append(OpenWait(Key(f"server of stage {stage}", 0), (), since_s - now_s))
        return waits

    async def next_hop(
        self, flight: InFlight, stage: int, size: float, came: CodecId | None, sends: CodecId | None
    ) -> ServerLife:
        """The server that the policy names among those that read these codecs, as soon as it names
        one. A server that is in quarantine, or has refused what is to be handed in, is asked only
        where the policy names no other."""
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

    async def ask(self, server: ServerLife, request: StageRequest, payloads: Sequence[bytes] = ()) -> Asked:
        """Make one call, and tell the policy what came of it. A pause follows a refusal, and a call
        that failed."""
        started_s, timeout_s = _now(), self._timeout_s(request)
        number = next(self._numbers)
        what = Key(f"{type(request).__name__.lower()} at stage {request.stage}", request.number)
        self._asked[number] = (what, server.peer, started_s + timeout_s)
        try:
            reply = await self._calls.ask(
                server.peer,
                encode(request),
                payloads,
                timeout_s=timeout_s,
                max_reply_bytes=self._max_reply_bytes(request),
            )
            answer = decode_answer(reply.body)
        except CallFailed as error:
            self._learn(server, request, error.reason, started_s)
            await asyncio.sleep(PAUSE_S)
            return Asked()
        except BadRequest:
            self._learn(server, request, "rpc", started_s)
            return Asked()
        finally:
            del self._asked[number]
        if isinstance(answer, Done):
            self._learn(server, request, "done", started_s, answer.took_s)
            return Asked(answer, reply.payloads, max(0.0, _now() - started_s - answer.waited_s))
        self._learn(server, request, "busy", started_s)
        if isinstance(answer, Busy | Refused | Gone | Foreign):
            await asyncio.sleep(PAUSE_S)
        return Asked(answer, reply.payloads)

    def _max_reply_bytes(self, request: StageRequest) -> int:
        match request:
            case Forward(sends=sends):
                return self._codecs.edges.max_bytes("forward", sends)
            case Backward(came=came):
                return self._codecs.edges.max_bytes("backward", came)
            case _:
                return 0

    def _timeout_s(self, request: StageRequest) -> float:
        match request:
            case Forward():
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
        """Tell the policy; confirmations say nothing of a server's speed."""
        if isinstance(request, Forward | Backward):
            size = 1.0 if isinstance(request, Forward) else BACKWARD_SIZE
            call = FinishedCall(server.peer, request.stage, size, started_s, took_s)
            self._policy.on_result(call, outcome, _now())


def _now() -> float:
    return asyncio.get_running_loop().time()
