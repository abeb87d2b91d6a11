"""The held-out loss of a pipeline, measured through the servers of its stages.

Held-out microbatches go forward through all stages, in the codecs of training, and the last stage
answers with the loss of each sequence. Servers keep nothing of them, and no path policy hears of
them: the servers of a stage take turns, and one that fails is passed over. So an evaluation changes
nothing but the time that servers have for training.

What is measured are the weights that the servers have at that time. The rounds of the stages are
not in step, and a stage may apply one between two microbatches.

Shapes: N sequences, B sequences of a microbatch, L positions."""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from farflock.compression.codec import CorruptPayload
from farflock.node.model.evaluation import LossEstimate, summarise
from farflock.node.pipeline.passes.requests import Busy, Done, Measure, NotFinite, Stale
from farflock.node.pipeline.trainer.edge_codecs import EdgeCodecs
from farflock.node.pipeline.trainer.stage_client import PAUSE_S, Asked, StageClient
from farflock.node.pipeline.trainer.stage_directory import ServerLife, StageDirectory
from farflock.swarm.links import PeerId
from farflock.swarm.messages import CodecId
from farflock.swarm.peer.calls.payloads import Given, Left
from farflock.swarm.tasks import cancel

MEASURE_TIMEOUT_S = 600.0  # of one evaluation
MAX_STAGE_TRIES = 256  # of one microbatch at one stage, most of them at busy servers
MAX_WALKS = 3  # of one microbatch: it begins again if a payload is lost, or its codec changes

log = logging.getLogger(__name__)


class NotMeasured(Exception):
    """No path through the stages gives the loss of a microbatch."""


class _Overflow(Exception):
    """A stage's output is not finite."""


class _Again(Exception):
    """A walk has to begin again at the first stage."""


@dataclass(slots=True)
class _Walk:
    """One microbatch on its way: the `payloads` of its next request without the targets, their
    codec, and what stays with servers."""

    number: int
    epoch: int
    payloads: list[Given]
    came: CodecId | None = None
    left: list[Left] = field(default_factory=list)


@dataclass(slots=True)
class _Stand:
    """The tries of one microbatch at one stage: the servers that cannot help it, and whether one
    has said that the output is not finite."""

    tries: int = 0
    useless: set[PeerId] = field(default_factory=set)
    overflows: bool = False


class PathMeter:
    """Measures held-out windows, tokens and next tokens (N, L), through servers. At most `together`
    microbatches are under way at once."""

    def __init__(
        self,
        client: StageClient,
        stage_directory: StageDirectory,
        codecs: EdgeCodecs,
        windows: tuple[Tensor, Tensor],
        together: int,
    ) -> None:
        self._client, self._stage_directory, self._codecs = client, stage_directory, codecs
        self._windows, self._together = windows, together

    async def measure(self) -> LossEstimate | None:
        """Return the mean loss in nats per token, which is NaN where a stage's output is not
        finite; None if no servers give it within `MEASURE_TIMEOUT_S`."""
        room = asyncio.Semaphore(self._together)
        batches = enumerate(_microbatches(self._windows, self._codecs.edges.batch))
        walks = [asyncio.ensure_future(self._losses(room, *batch)) for batch in batches]
        try:
            async with asyncio.timeout(MEASURE_TIMEOUT_S):
                losses = torch.cat(await asyncio.gather(*walks))
        except NotMeasured as reason:
            log.info("this node was drawn to evaluate, and cannot: %s", reason)
            return None
        except TimeoutError:
            log.info("this node was drawn to evaluate, and has taken %d s", MEASURE_TIMEOUT_S)
            return None
        finally:
            await cancel(*walks)
        return summarise(losses[: len(self._windows[0])])

    async def _losses(
        self, room: asyncio.Semaphore, number: int, batch: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Return the loss of each sequence of a microbatch, float64 (B,)."""
        edges = self._codecs.edges
        tokens, targets = map(edges.pack, batch)
        async with room:
            for _ in range(MAX_WALKS):
                walk = _Walk(number, self._stage_directory.epoch, [tokens])
                try:
                    return await self._through(walk, targets)
                except _Overflow:
                    return torch.full((edges.batch,), torch.nan, dtype=torch.float64)
                except _Again:
                    await asyncio.sleep(PAUSE_S)
                finally:
                    self._client.forget(walk.left)
        raise NotMeasured(f"microbatch {number} began {MAX_WALKS} times, and none came through")

    async def _through(self, walk: _Walk, targets: bytes) -> Tensor:
        """Take a microbatch through all stages."""
        edges, last = self._codecs.edges, self._stage_directory.stages - 1
        tokens = walk.payloads[0]
        for stage in range(last):
            output, walk.came = await self._output(walk, stage)
            walk.payloads = [tokens, output]
            if isinstance(output, Left):
                walk.left.append(output)
        walk.payloads.append(targets)
        losses, _ = await self._output(walk, last)
        assert isinstance(losses, bytes), "losses are never left with their maker"
        return edges.unpack_losses(losses)

    async def _output(self, walk: _Walk, stage: int) -> tuple[Given, CodecId | None]:
        """Return a stage's output and its codec, from whichever server gives it; raise `_Overflow`
        if all that answer say that it is not finite."""
        stand = _Stand()
        while stand.tries < MAX_STAGE_TRIES:
            sends = self._sends(stage, walk.came)
            server = self._server(walk, stage, stand, (walk.came, sends))
            if server is None:
                if stand.overflows:
                    raise _Overflow
                raise NotMeasured(f"stage {stage} has no server that can measure")
            stand.tries += 1
            request = Measure(walk.number, stage, stage - 1, walk.epoch, walk.came, sends)
            asked = await self._client.ask(server, request, walk.payloads)
            if isinstance(asked.answer, Done) and len(asked.payloads) == 1:
                output = self._readable(asked.payloads[0], stage, sends)
                if output is not None:
                    return output
            self._learn(walk, stand, server, asked)
        raise NotMeasured(f"the servers of stage {stage} are busy")

    def _sends(self, stage: int, came: CodecId | None) -> CodecId | None:
        """Return the codec of a stage's output; the last one's is in none."""
        stages = self._stage_directory.serving().stages
        if stage + 1 == len(stages):
            return None
        return self._codecs.choose(stages[stage], stages[stage + 1], came)

    def _server(
        self, walk: _Walk, stage: int, stand: _Stand, needs: Sequence[CodecId | None]
    ) -> ServerLife | None:
        """Return the server whose turn it is; None if there is none that may be asked."""
        servers = self._stage_directory.serving().stages[stage]
        useless = self._codecs.unfit(servers, needs) | stand.useless
        able = sorted({server.peer for server in servers} - useless)
        if not able:
            return None
        return self._stage_directory.at(stage, able[(walk.number + stand.tries) % len(able)])

    def _readable(
        self, payload: Given, stage: int, sends: CodecId | None
    ) -> tuple[Given, CodecId | None] | None:
        """Return an output with its codec; None if it is damaged."""
        edges = self._codecs.edges
        if stage + 1 < self._stage_directory.stages:
            return payload, edges.written_in(payload, sends)
        try:
            edges.unpack_losses(payload if isinstance(payload, bytes) else b"")
        except CorruptPayload:
            return None
        return payload, None

    def _learn(self, walk: _Walk, stand: _Stand, server: ServerLife, asked: Asked) -> None:
        """Take in that a server has given no output; raise `_Again` if no other one could."""
        if asked.fetched:
            for place, payload in asked.fetched.items():
                if payload is None:
                    raise _Again
                walk.payloads[place] = payload
            return
        if isinstance(asked.answer, Stale):
            raise _Again
        stand.overflows |= isinstance(asked.answer, NotFinite)
        if not isinstance(asked.answer, Busy):
            stand.useless.add(server.peer)


def _microbatches(windows: tuple[Tensor, Tensor], batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Return the windows in microbatches (B, L); the last one is filled up with its own first
    sequences, whose losses the caller leaves out."""
    x, y = windows
    for first in range(0, len(x), batch):
        rows = [first + row % (len(x) - first) for row in range(batch)]
        yield x[rows], y[rows]
