"""The end of a run whose servers have weights of their own: one mean of all servers of each stage.

Without it such a run would end with as many models as its stages have servers, each of which lacks
the last steps of the others. So once the last count of a stage is over, its servers make one more
round, which gives all of them the mean of their weights. It has the number after the last count's:
the view that would decide the next count decides it (decision 038). As in any round of a stage all
members vote, so they look on, and stay until it is decided.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from farflock.compression.codec import UnencodableTensor
from farflock.node.model.stage_tensors import shapes_of
from farflock.node.pipeline.lifecycle.assembly import StageNode
from farflock.node.pipeline.server.counting import NO_WEIGHT
from farflock.node.reporting import Report
from farflock.node.run.counts import placeholder_streams
from farflock.node.run.terms import PipelinePlan, RunPlan
from farflock.node.train.driver import Claim
from farflock.node.train.exchange_client import ExchangeClient, OutOfStep
from farflock.optimizers.catalog import method
from farflock.optimizers.method import (
    All,
    Exchange,
    ExchangeKey,
    Replica,
    Result,
    TensorBlock,
    Tensors,
)
from farflock.optimizers.parts.blocks import LazyTensors, read
from farflock.optimizers.parts.state import Shapes, zeros
from farflock.swarm.peer.peer import Peer

STREAM = "last"
DEADLINE_S = 30.0  # of the round; what is decided may take as long again to fetch
LOOK_EVERY_S = 0.25

log = logging.getLogger(__name__)


class LastMeans:
    """One node's part in the last rounds. `counts` are the names of the stages' counting streams;
    there are none where a method needs no such rounds. `shapes` returns the shapes of a stage's
    parameters."""

    def __init__(
        self,
        peer: Peer,
        counts: Mapping[int, str],
        shapes: Callable[[int], Shapes],
        report: Report,
    ) -> None:
        self._peer, self._counts, self._shapes = peer, dict(counts), shapes
        self._report = report
        self._opened: dict[int, int] = {}  # by stage, its last round as far as is known here
        self._taken: list[str] = []  # the streams whose content is here

    async def look_on(self, served: Collection[int], over: Callable[[], bool]) -> None:
        """Vote in the last rounds of the stages that are not served here once the run is `over`."""
        while self._counts:
            for stage in self._counts.keys() - served if over() else ():
                self._look_on(stage)
            await asyncio.sleep(LOOK_EVERY_S)

    async def after(
        self,
        training: Coroutine[Any, Any, None],
        together: Callable[[], bool],
        serving: StageNode | None = None,
    ) -> None:
        """Train to the end. If all members end there `together`, take the mean for the server, if
        this is one, and stay until the last rounds of all stages are over."""
        await training
        if not (self._counts and together()):
            return
        if serving is not None:
            await self.take(serving)
        until_s = self._peer.context.now() + DEADLINE_S
        while self._awaited() and self._peer.context.now() < until_s:  # noqa: ASYNC110 - votes
            await asyncio.sleep(LOOK_EVERY_S)

    async def take(self, serving: StageNode) -> None:
        """Replace a server's weights with the mean of those of its stage. If there is none, each
        server keeps its own."""
        client = serving.loop.client
        if client.members() == 1:
            return
        try:
            async with asyncio.timeout(2 * DEADLINE_S):
                result = await self._exchanged(serving)
        except (TimeoutError, OutOfStep, UnencodableTensor) as reason:
            self._say_without(serving.index, str(reason) or "it was not decided in time")
            return
        if result.mean is None or sum(result.weights) < 1.0:
            self._say_without(serving.index, "no server had all of its work counted")
            return
        await serving.loop.compute(partial(_replace, serving, result.mean))
        servers = sum(weight >= 1.0 for weight in result.weights)
        self._report("last_mean", {"stage": serving.index, "servers": servers})

    async def _exchanged(self, serving: StageNode) -> Result:
        client, compute, counting = serving.loop.client, serving.loop.compute, serving.counting
        assert counting is not None, "a method without counts of its own has one state at its end"
        stage, number, replica = serving.index, counting.counts, serving.loop.driver.replica
        tensors: Tensors = LazyTensors(replica.shapes, partial(_parameters, replica))
        exchange = self._exchange(number, tensors)
        if not counting.is_counted:  # as in a merge: nothing that is not counted leaves a server
            exchange = replace(exchange, tensors=zeros(replica.shapes), weight=NO_WEIGHT)
        client.open(exchange, number - 1)
        self._opened[stage] = number
        offer = await compute(lambda: client.offer(exchange, Claim(0)))
        outcome = await client.exchange(offer)
        result = await compute(lambda: client.decode(exchange.key, outcome))
        self._taken.append(client.name(STREAM))
        self._peer.tallies.end(client.name(STREAM), stage, number)
        return result

    def _look_on(self, stage: int) -> None:
        newest = self._peer.rounds.newest(self._counts[stage])
        if newest < self._opened.get(stage, 0):
            return
        client = ExchangeClient(self._peer, self._peer.terms.seed, stage)
        with torch.device("meta"):  # of another stage's weights only the shapes matter
            exchange = self._exchange(newest + 1, zeros(self._shapes(stage)))
        client.look_on(exchange, newest)
        self._opened[stage] = newest + 1

    def _exchange(self, number: int, tensors: Tensors) -> Exchange:
        key, exact = ExchangeKey(STREAM, number), "fp32"
        return Exchange(
            key, "mean", All(), tensors, 1.0, exact, exact, uniform=True, deadline_s=DEADLINE_S
        )

    def _awaited(self) -> bool:
        """Return whether a vote of this node is still needed, or what it holds of the content: a
        stage of several servers has not had its last round, or another server of a stage that is
        served here has not taken the mean."""
        peer, view = self._peer, self._peer.context.views.newest
        for stage in self._counts:
            servers = [view.peers[index] for index in view.serving(stage)]
            living = [each for each in servers if not peer.context.gone(view, each)]
            if len(living) > 1 and not self._is_decided(stage):
                return True
        return not all(map(peer.tallies.is_over, self._taken))

    def _is_decided(self, stage: int) -> bool:
        number = self._opened.get(stage)
        return number is not None and self._peer.rounds.newest(f"{STREAM}/{stage}") >= number

    def _say_without(self, stage: int, why: str) -> None:
        log.warning(
            "the servers of stage %d end with weights of their own, and not with their mean: %s",
            *(stage, why),
        )


def last_means(
    plan: RunPlan, pipeline: PipelinePlan, peer: Peer, counts: Mapping[int, str], report: Report
) -> LastMeans:
    """Return a node's part; `counts` are the names of the streams that name microbatches.

    Only a method that merges, and gives each server weights of its own, needs last rounds."""
    made, spans = method(plan.method, **plan.options), pipeline.stages
    merges = bool(placeholder_streams(made, plan.model.layers))
    if not (merges and made.equality == "per-peer"):
        counts = {}
    return LastMeans(peer, counts, lambda stage: shapes_of(plan.model, spans[stage]), report)


def _parameters(replica: Replica, name: str, start: int, stop: int) -> Tensor:
    return replica.block(name, "param", start, stop)


def _replace(serving: StageNode, mean: Tensors) -> None:
    """Put the mean into the replica, and into what the method shows as the model."""
    driver, counting = serving.loop.driver, serving.counting
    assert counting is not None
    shown = counting.evaluated(driver.replica)

    def change(block: TensorBlock, _: Tensor) -> tuple[Tensor]:
        value = read(mean, block)
        block.of(shown[block.name]).copy_(value)
        return (value,)

    with driver.cuts.changing():
        driver.replica.update(driver.replica.names, ("param",), change)
