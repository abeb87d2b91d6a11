"""The held-out loss of a pipeline, measured through the servers of its stages.

Held-out microbatches go forward through all stages, in the codecs of training, and the last stage
answers with the loss of each sequence. Servers keep nothing of them, and no path policy hears of
them: the servers of a stage take turns, and another one is asked instead of one that fails. So an
evaluation changes nothing but the time that servers have for training.

Shapes: N sequences, B sequences of a microbatch, L positions."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from farflock.compression.codec import CorruptPayload
from farflock.node.model.data import inputs_and_targets
from farflock.node.model.evaluation import HeldOut, HeldOutLoss, held_out_loss
from farflock.node.pipeline.passes.requests import Busy, Done, HeldOutForward, NotFinite, Stale
from farflock.node.pipeline.trainer.edge_codecs import EdgeCodecs
from farflock.node.pipeline.trainer.stage_client import PAUSE_S, Asked, StageClient
from farflock.node.pipeline.trainer.stage_directory import ServerLife, StageDirectory
from farflock.swarm.links import PeerId
from farflock.swarm.messages import CodecId
from farflock.swarm.peer.payloads import Given, Left
from farflock.swarm.protocol.evaluation_progress import ENDED, STALLED_S
from farflock.swarm.tasks import cancel

MAX_TRIES = 256  # of one microbatch at one stage, most of them at busy servers
MAX_WALKS = 3  # of one microbatch

log = logging.getLogger(__name__)


class _NotMeasured(Exception):
    """No path through the stages gives the loss of a microbatch; the message says why."""


class _Overflow(Exception):
    """A stage's output is not finite."""


class _Again(Exception):
    """A walk has to begin again at the first stage; the message says why."""


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

    useless: set[PeerId] = field(default_factory=set)
    overflows: bool = False


class PathMeter:
    """Measures held-out sequences of L tokens through servers; `held_out` returns them, or None as
    long as not all of them are here. At most `together` microbatches are under way at once."""

    def __init__(
        self,
        client: StageClient,
        stage_directory: StageDirectory,
        codecs: EdgeCodecs,
        held_out: Callable[[], HeldOut | None],
        together: int,
    ) -> None:
        self._client, self._stage_directory, self._codecs = client, stage_directory, codecs
        self._held_out, self._together = held_out, together

    async def measure(
        self, moved: Callable[[int], None] = lambda percent: None
    ) -> HeldOutLoss | None:
        """Return the mean loss, which is NaN where a stage's output is not finite; say why and
        return None if the servers do not give it. `moved` is called with the percent that are done,
        from 0 on."""
        held_out = self._held_out()
        if held_out is None:
            _give_up("the held-out text is still on its way here")
            return None
        room = asyncio.Semaphore(self._together)
        batches = enumerate(_microbatches(held_out, self._codecs.edges.batch))
        walks = [asyncio.ensure_future(self._losses(room, *batch)) for batch in batches]
        try:
            await _ended(walks, moved)
        except _NotMeasured as reason:
            _give_up(reason)
            return None
        except TimeoutError:
            _give_up(f"no hundredth of it was measured within {STALLED_S:.0f} s")
            return None
        finally:
            await cancel(*walks)
        losses = torch.cat([walk.result() for walk in walks])
        return held_out_loss(losses[: len(held_out.rows)], held_out.rows, held_out.lengths)

    async def _losses(
        self, room: asyncio.Semaphore, number: int, batch: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Return the loss of each sequence of a microbatch, float64 (B,)."""
        edges, why = self._codecs.edges, ""
        tokens, targets = map(edges.pack, batch)
        async with room:
            for _ in range(MAX_WALKS):
                walk = _Walk(number, self._stage_directory.epoch, [tokens])
                try:
                    return await self._through(walk, targets)
                except _Overflow:
                    return torch.full((edges.batch,), torch.nan, dtype=torch.float64)
                except _Again as reason:
                    why = str(reason)
                    await asyncio.sleep(PAUSE_S)
                finally:
                    self._client.forget(walk.left)
        raise _NotMeasured(f"microbatch {number} began {MAX_WALKS} times; the last time, {why}")

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
        for turn in range(walk.number, walk.number + MAX_TRIES):
            servers = self._stage_directory.serving().stages[stage]
            if not servers:  # the last one is gone: perhaps another takes its place
                await asyncio.sleep(PAUSE_S)
                continue
            sends = self._sends(stage, walk.came)
            useless = self._codecs.unfit(servers, (walk.came, sends)) | stand.useless
            able = sorted({server.peer for server in servers} - useless)
            if not able and stand.overflows:
                raise _Overflow
            if not able:
                raise _Again(f"no server of stage {stage} gave its output")
            server = self._stage_directory.at(stage, able[turn % len(able)])
            assert server is not None, "the servers of a view are members of it"
            request = HeldOutForward(walk.number, stage, stage - 1, walk.epoch, walk.came, sends)
            asked = await self._client.ask(server, request, walk.payloads)
            output = self._readable(asked, stage, sends)
            if output is not None:
                return output
            self._learn(walk, stand, server, asked)
        raise _Again(f"stage {stage} had no server, or only busy ones")

    def _sends(self, stage: int, came: CodecId | None) -> CodecId | None:
        """Return the codec of a stage's output; the last one's is in none."""
        stages = self._stage_directory.serving().stages
        is_last = stage + 1 == self._stage_directory.stages
        return None if is_last else self._codecs.choose(stages[stage], stages[stage + 1], came)

    def _readable(
        self, asked: Asked, stage: int, sends: CodecId | None
    ) -> tuple[Given, CodecId | None] | None:
        """Return the output that a server gave with its codec; None if there is none."""
        if not (isinstance(asked.answer, Done) and len(asked.payloads) == 1):
            return None
        edges, (payload,) = self._codecs.edges, asked.payloads
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
                    raise _Again("a stage's output was lost with its server")
                walk.payloads[place] = payload
            return
        if isinstance(asked.answer, Stale):
            raise _Again("its codec was superseded on the way")
        stand.overflows |= isinstance(asked.answer, NotFinite)
        if not isinstance(asked.answer, Busy):
            stand.useless.add(server.peer)


async def _ended(walks: Sequence[asyncio.Future[Tensor]], moved: Callable[[int], None]) -> None:
    """Wait until all microbatches are measured, and tell how many percent are; raise `TimeoutError`
    if they do not become more for too long."""
    now, before = asyncio.get_running_loop().time, 0
    moved(before)
    async with asyncio.timeout(STALLED_S) as limit:
        for done, walk in enumerate(asyncio.as_completed(walks), 1):
            await walk
            percent = 100 * done // len(walks)
            if before < percent < ENDED:  # the caller says the end
                limit.reschedule(now() + STALLED_S)
                moved(percent)
            before = percent


def _give_up(why: object) -> None:
    log.warning("this node was drawn to evaluate the run, and gives it up: %s", why)


def _microbatches(held_out: HeldOut, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Return the sequences in microbatches (B, L), tokens and targets; the last one is filled up
    with its own first sequences, whose losses the caller leaves out."""
    rows = held_out.rows
    for first in range(0, len(rows), batch):
        taken = [first + row % (len(rows) - first) for row in range(batch)]
        yield inputs_and_targets(rows[taken])
