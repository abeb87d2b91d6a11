"""The walk of one microbatch: forward through its stages and back, one server after the other.

A walk that cannot go on begins again, as long as no stage counts the microbatch. After that, the
gradients that can no longer be computed are dropped: the microbatch counts only at the stages
whose backward passes it has completed."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from farflock.compression.codec import CorruptPayload
from farflock.node.pipeline.passes.requests import (
    Backward,
    Confirm,
    Done,
    Foreign,
    Forward,
    Gone,
    Lacks,
    Merged,
    Refused,
    Revoke,
    StageAnswer,
    Stale,
    Unknown,
)
from farflock.node.pipeline.trainer.blame import Quarantine
from farflock.node.pipeline.trainer.commits import CommitTracker
from farflock.node.pipeline.trainer.edge_codecs import EdgeCodecs
from farflock.node.pipeline.trainer.in_flight import InFlight, StageInputs, WholeInput
from farflock.node.pipeline.trainer.stage_client import PAUSE_S, Asked, StageClient
from farflock.node.pipeline.trainer.stage_directory import ServerLife, StageDirectory
from farflock.node.reporting import Report
from farflock.swarm.links import PeerId
from farflock.swarm.paths.round_robin import BACKWARD_SIZE
from farflock.swarm.peer.payloads import Given, Left

ATTEMPTS_PER_SERVER = 2  # that fail before weights or a codec count as lost: servers come and go

ForwardRefusal = Stale | Foreign | Refused  # after which a walk begins again


class Walker:
    """Takes microbatches forward and back along their paths. `commits` tracks where each
    gradient counts, `inputs` keeps the outputs of stages, and `spawn` starts background tasks."""

    def __init__(
        self,
        client: StageClient,
        stage_directory: StageDirectory,
        codecs: EdgeCodecs,
        inputs: StageInputs,
        quarantine: Quarantine,
        commits: CommitTracker,
        report: Report,
        spawn: Callable[[Coroutine[Any, Any, object]], None],
    ) -> None:
        self._client, self._stage_directory = client, stage_directory
        self._codecs, self._inputs = codecs, inputs
        self._quarantine, self._commits = quarantine, commits
        self._report, self._spawn = report, spawn

    async def walk(self, flight: InFlight) -> None:
        """Take a microbatch forward and back; start again if a stage finds it too old or no server
        can decode its payloads."""
        last = flight.order[-1]
        while not (await self._forward(flight) and await self.backward(flight, last, first=True)):
            pass
        for stage in reversed(flight.order[:-1]):
            await self.backward(flight, stage)

    async def backward(self, flight: InFlight, stage: int, *, first: bool = False) -> bool:
        """Ask for a stage's backward pass until a server answers under the attempt that counts, and
        confirm that attempt.

        Return False if a part of the walk has to be repeated. Only the walk's `first` backward pass
        returns that: after it, some stage already counts the microbatch. Without the gradient of
        the stage's output there is nothing to ask for: the trainer's tick asks once it is made
        again."""
        place = flight.number, stage
        flight.asking.add(stage)
        try:
            while self._commits.ledger.phase(place) in ("open", "sent"):
                if stage not in flight.gradients:
                    break
                if flight.lacks_input(stage):
                    if first:
                        return False
                    self._drop_rest(flight, stage)
                    break
                reply = await self._backward_once(flight, stage)
                if isinstance(reply, Refused):
                    if first:
                        return await self._begin_again(flight)
                    self._drop_rest(flight, stage)
                elif reply is not None:
                    source = flight.source(stage)
                    if source >= 0:
                        flight.gradients[source] = reply
                    break
        finally:
            flight.asking.discard(stage)
        return True

    # forward

    async def _forward(self, flight: InFlight) -> bool:
        """Get the inputs of all stages. The last stage's forward pass is part of its backward pass.
        An input that is lost on the way is made again.

        Return False if a stage cannot read its input, or is too many rounds away from the round in
        which the microbatch set out."""
        while (stage := flight.due()) is not None:
            answer = await self._forward_once(flight, stage)
            if isinstance(answer, Done):
                flight.weights.used(stage, answer.version)
            elif answer is not None:
                return await self._begin_again(flight)
        return True

    async def _begin_again(self, flight: InFlight) -> bool:
        """Let the walk begin again at the first stage, in the newest round; return False."""
        await asyncio.sleep(PAUSE_S)
        self._client.drop(flight)
        flight.set_out_again(self._stage_directory.epoch)
        return False

    async def _forward_once(self, flight: InFlight, stage: int) -> Done | ForwardRefusal | None:
        """Ask one server for a forward pass.

        Return `Done`, with the output kept as the next stage's input; an answer after which the
        walk begins again; or None if another server may be asked."""
        after = flight.after(stage)
        assert after is not None
        came = flight.codecs.get(flight.source(stage))
        stages = self._stage_directory.serving().stages
        sends = self._codecs.choose(stages[stage], stages[after], came)
        server = await self._client.next_hop(flight, stage, 1.0, came, sends)
        expected = self._inputs.expect(flight, stage)
        where = flight.number, stage, flight.source(stage), flight.epoch
        request = Forward(*where, expected.visit, came, sends)
        asked = await self._ask(server, request, flight)
        if not isinstance(asked.answer, Done) or len(asked.payloads) != 1:
            return self._without_output(flight, stage, server, asked.answer)
        (payload,) = asked.payloads
        flight.origins.made((after, "input"), server.peer)
        flight.servers[stage] = server
        flight.codecs[stage] = self._codecs.edges.written_in(payload, sends)
        try:
            flight.inputs[after] = expected.read(payload, request)
        except CorruptPayload:  # the trainer itself sees the damage: no second witness is needed
            self._put_into_quarantine(flight, stage, server.peer)
            await asyncio.sleep(PAUSE_S)
            return None
        return asked.answer

    def _without_output(
        self,
        flight: InFlight,
        stage: int,
        server: ServerLife,
        answer: StageAnswer | None,
    ) -> ForwardRefusal | None:
        """Return the answer if the walk has to begin again; None if another server may be asked."""
        match answer:
            case Stale() | Foreign():
                return answer
            case Refused() if self._is_undecodable(flight, stage, server, answer):
                return answer
            case _:
                return None

    # back

    async def _backward_once(self, flight: InFlight, stage: int) -> Given | Refused | None:
        """Ask one server for a backward pass. Return the payload of the gradient of the stage's
        input (b"" at the first stage), None if the attempt produced no gradient, or a refusal if
        the payloads of other stages cannot be decoded."""
        place, source, ledger = (flight.number, stage), flight.source(stage), self._commits.ledger
        came, sends = flight.codecs.get(source), flight.codecs.get(stage)
        server = self._client.same_server(flight, stage)
        if server is None:
            server = await self._client.next_hop(flight, stage, BACKWARD_SIZE, came, sends)
        if ledger.phase(place) not in ("open", "sent"):
            return None  # a round named it in the meantime, which only a faulty peer causes
        attempt = ledger.send(place, server.name)
        version, visit = flight.weights.named(stage), self._inputs.backward_visit(flight)
        where = flight.number, stage, source, flight.epoch
        request = Backward(*where, attempt, version, visit, came, sends)
        rest = [flight.gradients[stage], *self._mask(flight, stage)]
        asked = await self._ask(server, request, flight, rest)
        answer, whole = asked.answer, len(asked.payloads) == (0 if source < 0 else 1)
        if not isinstance(answer, Done) or not whole or answer.life != server.life:
            ledger.silent(place, attempt)
            return self._without_gradient(flight, server, request, answer)
        if not ledger.replied(place, server.name, answer.attempt):
            # this reply counts nowhere: free the gradient before its lease ends
            self._spawn(self._client.ask(server, Revoke(*place, answer.attempt)))
            return None
        self._spawn(self.confirm(flight, stage, server.name, attempt))
        self._commits.mixed += self._client.returns and flight.servers.get(stage, server) != server
        flight.weights.used(stage, answer.version)
        if answer.loss_sum is not None:
            self._commits.trained(flight.number, answer.loss_sum / self._codecs.edges.tokens)
        flight.origins.made((source, "gradient"), server.peer)
        return asked.payloads[0] if asked.payloads else b""

    def _without_gradient(
        self,
        flight: InFlight,
        server: ServerLife,
        request: Backward,
        answer: StageAnswer | None,
    ) -> Refused | None:
        """Handle an answer without a gradient. Return a refusal if other stages' payloads cannot
        be decoded; None if the pass may be asked for again or was dropped."""
        match answer:
            case Foreign():
                self._lacks(flight, request.stage, answer)
            case Gone(late=late) if late or request.version is not None:
                self._lacks(flight, request.stage, answer)
            case Refused() if self._is_undecodable(flight, request.stage, server, answer):
                return answer
        return None

    async def confirm(self, flight: InFlight, stage: int, name: str, attempt: int) -> None:
        """Ask the server life `name` once to merge the gradient computed under this attempt.

        The trainer's tick repeats this until an answer has come."""
        place, ledger = (flight.number, stage), self._commits.ledger
        flight.asking.add(stage)
        try:
            server = self._stage_directory.server(name)
            if server is None:
                return  # it has left: its last rounds decide what counts
            confirm = Confirm(*place, attempt, self._stage_directory.view_number)
            match (await self._client.ask(server, confirm)).answer:
                case Merged():
                    ledger.merged(place, attempt)
                case Unknown():
                    ledger.refused(place, attempt)
        finally:
            flight.asking.discard(stage)

    def _lacks(self, flight: InFlight, stage: int, answer: Gone | Foreign) -> None:
        """Note that a server lacks the weights of the forward pass, or the codec of a payload.

        Once every server does, the rest is dropped or computed at other weights: the walk cannot
        begin again, because the last stage already counts the microbatch."""
        if not (isinstance(answer, Gone) and answer.late):
            yet_to_come = isinstance(answer, Gone) and flight.weights.is_ahead(stage, answer.round)
            flight.lacked[stage] += not yet_to_come
            if flight.lacked[stage] < ATTEMPTS_PER_SERVER * max(self._servers(stage), 1):
                return
        if not (isinstance(answer, Gone) and flight.weights.give_up(stage)):
            self._drop_rest(flight, stage)

    def give_up_lost(self, flight: InFlight, stage: int) -> None:
        """Give up a stage's gradient if that of its output was lost and will not be made again,
        because a round already counts the microbatch at the stage that made it."""
        after = flight.after(stage)
        if after is not None and self._commits.ledger.phase((flight.number, after)) == "committed":
            self._drop_rest(flight, stage)

    def _drop_rest(self, flight: InFlight, stage: int) -> None:
        """Give up this stage's gradient, and those of earlier stages whose output gradient is
        unknown."""
        earlier = flight.order[: flight.order.index(stage)]
        for each in (stage, *(known for known in earlier if known not in flight.gradients)):
            self._commits.ledger.committed(each, [flight.number])
            self._commits.drop(flight.number, each)

    def _servers(self, stage: int) -> int:
        """Return the number of servers of a stage."""
        return len(self._stage_directory.serving().stages[stage])

    # one call

    async def _ask(
        self,
        server: ServerLife,
        request: Forward | Backward,
        flight: InFlight,
        rest: Sequence[Given] = (),
    ) -> Asked:
        """Call a server with the tokens, the stage's input (unless the tokens are the input), and
        `rest`.

        A server that answers `Lacks` gets more of the input the next time the caller asks it."""
        kept = flight.inputs.get(request.stage)
        handed = [] if kept is None else [kept.payload(server)]
        payloads = [flight.tokens, *handed, *rest]
        asked = await self._client.ask(server, request, payloads)
        flight.trip_s += asked.trip_s
        left = [one for one in asked.payloads if isinstance(one, Left)]
        flight.left += [(one, server, request.stage) for one in left]
        if flight.number not in self._commits.begun_s:
            self._client.drop(flight)  # it counts everywhere already
        if kept is not None:
            match asked.answer:
                case Done():
                    kept.taken(server, handed[0])
                case Lacks(rows=rows) if not kept.taken(server, handed[0], rows):
                    await asyncio.sleep(PAUSE_S)  # asked at once, it would answer the same
        for place, payload in asked.fetched.items():
            flight.replace(request.stage, payloads[place], payload)
            if payload is None:
                self._blame_for_loss(flight, payloads[place])
                await asyncio.sleep(PAUSE_S)
        return asked

    def _mask(self, flight: InFlight, stage: int) -> list[Given]:
        """Return the stage's output if the codec needs it to decode the gradient, else nothing."""
        after = flight.after(stage)
        if after is None or not self._codecs.edges.is_masked(flight.codecs.get(stage)):
            return []
        arrived = flight.inputs[after]
        return [arrived.raw] if isinstance(arrived, WholeInput) else []

    # blame

    def _is_undecodable(
        self,
        flight: InFlight,
        stage: int,
        server: ServerLife,
        answer: Refused,
    ) -> bool:
        """Note a refusal. Return True if enough servers say that the payload cannot be decoded.

        If several do, the maker is quarantined."""
        if answer.unread is None:
            return False
        payload = stage, answer.unread
        undecodable = flight.origins.refused(payload, server.peer, self._servers(stage))
        maker = flight.origins.to_blame(payload)
        made_at = flight.source(stage) if answer.unread == "input" else flight.after(stage)
        if maker is not None and made_at is not None:
            self._put_into_quarantine(flight, made_at, maker)
        return undecodable

    def _blame_for_loss(self, flight: InFlight, lost: Given) -> None:
        """Quarantine the maker of a lost payload if it still serves in the life that made it."""
        for one, maker, stage in flight.left:
            if isinstance(lost, Left) and one.call == lost.call:
                serving = self._stage_directory.serving().stages[stage]
                lives = self._stage_directory.server(maker.name) is not None
                if lives and maker.peer in {server.peer for server in serving}:
                    self._put_into_quarantine(flight, stage, maker.peer)

    def _put_into_quarantine(self, flight: InFlight, stage: int, maker: PeerId) -> None:
        self._quarantine.add(stage, maker, asyncio.get_running_loop().time())
        self._report("shunned", {"stage": stage, "peer": maker, "number": flight.number})
