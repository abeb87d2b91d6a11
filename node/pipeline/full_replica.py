"""The microbatches of a full replica: drawn as a trainer draws its own, taken through all stages at
once, here, and given to each stage's server, which counts them beside those of others.

No activation goes over a wire, nothing is asked of anybody and nothing is put aside: a gradient is
in the sums of this peer's servers or nowhere. So what no round has named is gone with this peer, as
a dead trainer's is, and is asked of nobody again; and a microbatch counts once at each stage, for
its key goes with the sum that it is in (node/train/microbatch_ids.py).

It is held back as trainers are. As many batches as theirs may be late, a replica may have ready for
a stage that has all it needs and does not step yet, for a round is open; more would be of weights
that are too old by then. And like a trainer it keeps only so many that no round has named."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from farflock.node.pipeline.passes.stage import MicrobatchGradient, backward_through
from farflock.node.pipeline.server.server import BACKWARD_COST, Computing, StageServer
from farflock.node.pipeline.server.task import BatchTrigger
from farflock.node.pipeline.trainer.commits import CommitTracker
from farflock.node.pipeline.trainer.in_flight import MicrobatchSource
from farflock.node.pipeline.trainer.stage_directory import StageDirectory
from farflock.node.reporting import Report
from farflock.swarm.paths.policy import Microbatch
from farflock.swarm.peer.peer import OpenWait, Peer

TICK_S = 0.05


@dataclass(frozen=True, slots=True)
class LocalStage:
    """One stage of a replica: what counts there, and when a step of it is due."""

    server: StageServer
    batch: BatchTrigger


class FullTrainer:
    """One life of a full replica's own training. `parts` are those of all stages, from the first to
    the last; its microbatches are drawn from `source`. At most `ahead` of
    them wait for a step of a stage that has enough, and at most `kept` wait to be named."""

    def __init__(
        self,
        peer: Peer,
        stage_directory: StageDirectory,
        parts: Sequence[LocalStage],
        source: MicrobatchSource,
        ahead: int,
        kept: int,
        computing: Computing,
        report: Report = lambda kind, fields: None,
    ) -> None:
        self._peer, self._stage_directory, self._parts = peer, stage_directory, tuple(parts)
        self.source, self._ahead, self._most = source, ahead, kept
        self._computing = computing
        # Nobody is asked for a pass, so whatever a round may have named is open here.
        self.commits = CommitTracker(peer.me, stage_directory, report, doubtful=("open",))
        self.stopping = False
        self.spoilt = 0  # microbatches whose gradient was not finite: they count nowhere

    async def run(self, enough: Callable[[], bool]) -> None:
        """Train until `enough`, or until told to stop."""
        self.source.skip(self._stage_directory.tokens())
        while not (self.stopping or enough()):
            self.commits.hear(self._now())
            if self._may_begin():
                await self._train(self.source.next())
            else:
                await asyncio.sleep(TICK_S)

    @property
    def kept(self) -> int:
        """Microbatches that wait to be named."""
        return len(self.commits.begun_s)

    def waits(self) -> list[OpenWait]:
        """It asks nobody for anything."""
        return []

    def _may_begin(self) -> bool:
        if self.kept >= self._most or not self._peer.membership.is_member:
            return False
        ready = [part for part in self._parts if part.server.accounts.untaken(self._peer.me) >= self._ahead]
        return not any(part.batch.is_full() for part in ready)  # one that lacks something may lack it of me alone

    async def _train(self, microbatch: Microbatch) -> None:
        number, started_s, order = microbatch.step, self._now(), self.source.order(microbatch)
        servers = [self._parts[stage].server for stage in order]
        work = partial(self._compute, servers, microbatch)
        staged, loss, rounds = await self._computing.run_pass(work, BACKWARD_COST * len(order))
        if not all(bool(x.isfinite().all()) for part in staged for x in part.gradients.values()):
            self.spoilt += 1  # in the sum it would spoil everybody's
            return
        self.commits.begin(number, order, started_s)
        for server, part, of in zip(servers, staged, rounds, strict=True):
            await server.contribute((self._peer.me, number), part, loss if server.stage.is_last else None, of)
        self.commits.trained(number, loss / self.source.edges.tokens)

    def _compute(
        self, servers: Sequence[StageServer], microbatch: Microbatch
    ) -> tuple[tuple[MicrobatchGradient, ...], float, list[int]]:
        """Take one microbatch there and back, by the weights that all stages have now, which are of
        these rounds. Called by the thread that computes."""
        staged, loss = backward_through([server.stage for server in servers], *self.source.batch(microbatch))
        return staged, loss, [server.applied for server in servers]

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
