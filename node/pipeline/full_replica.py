"""The microbatches of a full replica, which takes them through all stages locally.

It draws them as a trainer does and hands each gradient to its own stage servers, which count it
like other trainers' gradients. Nothing is sent, asked for or left pending: a gradient is either in
this peer's sums or nowhere. So if this peer fails, the microbatches that no round has named are
lost, like a dead trainer's, and no other peer redoes them. A microbatch still counts once at each
stage, because its key travels with the sum that contains it (node/train/microbatch_ids.py).

A replica is throttled like a trainer. While an open round keeps a stage with a full batch from
its step, only as many microbatches may be ready for that stage as a trainer may have in flight:
more would be too old by the time of the step. The number of microbatches that no round has named
is bounded too."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from farflock.node.pipeline.passes.graphs import within_memory
from farflock.node.pipeline.passes.stage import MicrobatchGradient, backward_through
from farflock.node.pipeline.server.passes import finite
from farflock.node.pipeline.server.server import BACKWARD_COST, Computing, StageServer
from farflock.node.pipeline.server.task import BatchTrigger
from farflock.node.pipeline.trainer.commits import CommitTracker
from farflock.node.pipeline.trainer.in_flight import MicrobatchSource
from farflock.node.pipeline.trainer.stage_directory import StageDirectory
from farflock.node.reporting import Report
from farflock.swarm.paths.policy import Microbatch
from farflock.swarm.peer.peer import OpenWait, Peer

TICK_S = 0.05  # between two checks while throttled


@dataclass(frozen=True, slots=True)
class LocalStage:
    """The server of one of a replica's stages, and the trigger of its steps."""

    server: StageServer
    batch: BatchTrigger


class FullTrainer:
    """The training that a full replica does itself, for one life of its node. `local_stages` are
    the stages in order.

    Microbatches come from `source`. At most `ahead` of them wait for the step of a stage that
    has a full batch, and at most `kept` wait until a round names them."""

    def __init__(
        self,
        peer: Peer,
        stage_directory: StageDirectory,
        local_stages: Sequence[LocalStage],
        source: MicrobatchSource,
        ahead: int,
        kept: int,
        computing: Computing,
        report: Report = lambda kind, fields: None,
    ) -> None:
        self._peer, self._stage_directory, self._stages = peer, stage_directory, tuple(local_stages)
        self.source, self._ahead, self._max_kept = source, ahead, kept
        self._computing = computing
        # no server is asked, so a microbatch that a round may have named is still "open" here
        self.commits = CommitTracker(peer.me, stage_directory, report, doubtful=("open",))
        self.stopping = False
        self.spoilt = 0  # microbatches dropped because a gradient was not finite

    async def run(self, enough: Callable[[], bool]) -> None:
        """Train until `enough()` is true or `stopping` is set."""
        while not (self.stopping or enough()):
            self._drop_given_up()
            if self.commits.hear(self._now()):
                self.source.settle(self.commits.begun_s)
            if self.may_begin() and self.source.is_ready():
                await self._train(self.source.next())
            else:
                await asyncio.sleep(TICK_S)

    @property
    def kept(self) -> int:
        """Microbatches waiting to be named by a round."""
        return len(self.commits.begun_s)

    def waits(self) -> list[OpenWait]:
        """Return no waits: this trainer calls no other peer."""
        return []

    def may_begin(self) -> bool:
        """True if the next microbatch may begin now."""
        if self.kept >= self._max_kept or not self._peer.membership.is_member:
            return False
        me = self._peer.me
        ready = [each for each in self._stages if each.server.accounts.untaken(me) >= self._ahead]
        # a stage without a full batch may be waiting for this peer alone, so go on for it
        return not any(each.batch.is_full() for each in ready)

    def _drop_given_up(self) -> None:
        """Drop what the own stages gave up when a view left this peer out: nobody redoes it."""
        for stage, local in enumerate(self._stages):
            given_up, local.server.accounts.own_given_up = local.server.accounts.own_given_up, []
            for _, number in given_up:
                self.commits.ledger.committed(stage, [number])
                self.commits.drop(number, stage)

    async def _train(self, microbatch: Microbatch) -> None:
        number, started_s, order = microbatch.step, self._now(), self.source.order(microbatch)
        servers = [self._stages[stage].server for stage in order]
        work = partial(self._compute_finite, servers, microbatch)
        found = await self._computing.run_pass(work, BACKWARD_COST * len(order))
        if found is None:
            self.spoilt += 1  # one such gradient would spoil the sum of the whole group
            return
        staged, loss, rounds = found
        self.commits.begin(number, order, started_s)
        key = self._peer.me, number
        for server, gradient, of in zip(servers, staged, rounds, strict=True):
            known_loss = loss if server.stage.is_last else None
            await server.contribute(key, gradient, known_loss, of)
        self.commits.trained(number, loss / self.source.edges.tokens)

    def _compute_finite(
        self, servers: Sequence[StageServer], microbatch: Microbatch
    ) -> tuple[tuple[MicrobatchGradient, ...], float, list[int]] | None:
        """Return what `compute` does, or None if a gradient is not finite."""
        found = self.compute(servers, microbatch)
        gradients = (x for staged in found[0] for x in staged.gradients.values())
        return found if bool(finite(gradients)) else None

    def compute(
        self, servers: Sequence[StageServer], microbatch: Microbatch
    ) -> tuple[tuple[MicrobatchGradient, ...], float, list[int]]:
        """Compute a microbatch forward and backward; return its gradients by stage, its loss and
        the round of each stage's weights. Runs on the compute thread."""
        stages, batch = [server.stage for server in servers], self.source.batch(microbatch)
        staged, loss = within_memory(
            [server.passes.graphs for server in servers],
            lambda _: backward_through(stages, *batch),
        )
        return staged, loss, [server.applied for server in servers]

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
