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
import collections
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from farflock.node.model.data import Batches
from farflock.node.pipeline.passes.stage import MicrobatchGradient, backward_through
from farflock.node.pipeline.server.server import BACKWARD_COST, Computing, StageServer
from farflock.node.pipeline.server.task import BatchTrigger
from farflock.node.pipeline.trainer.commits import DuplicateDetector
from farflock.node.pipeline.trainer.in_flight import NUMBERS
from farflock.node.pipeline.trainer.stage_directory import StageDirectory
from farflock.node.pipeline.trainer.walker import RECENT
from farflock.node.reporting import Report
from farflock.swarm.paths.policy import Microbatch, PathPolicy
from farflock.swarm.peer.peer import OpenWait, Peer
from farflock.swarm.protocol.ledger import Ledger

TICK_S = 0.05


@dataclass(frozen=True, slots=True)
class LocalStage:
    """One stage of a replica: what counts there, and when a step of it is due."""

    server: StageServer
    batch: BatchTrigger


@dataclass(frozen=True, slots=True)
class OwnMicrobatches:
    """A replica's own stream of microbatches, of `tokens_each`, with the way that the run's policy
    has for each of them."""

    batches: Batches
    policy: PathPolicy
    lane: int
    tokens_each: int

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Draw a microbatch of the stream: tokens and targets (B, L)."""
        return self.batches.batch(number % NUMBERS)

    def order(self, number: int) -> tuple[int, ...]:
        """Return the stages that it visits."""
        return self.policy.stage_order(Microbatch(number, 0, self.lane))


@dataclass(frozen=True, slots=True)
class FullLimits:
    """How far a replica runs ahead: at most `ahead` microbatches wait for a step of a stage that
    has enough, and at most `kept` wait to be named."""

    ahead: int
    kept: int


class FullTrainer:
    """One life of a full replica's own training. `parts` are those of all stages, from the first to
    the last; `first` is this life's first number (`first_number`)."""

    def __init__(
        self,
        peer: Peer,
        stage_directory: StageDirectory,
        parts: Sequence[LocalStage],
        microbatches: OwnMicrobatches,
        limits: FullLimits,
        computing: Computing,
        report: Report = lambda kind, fields: None,
        first: int = 0,
    ) -> None:
        self._peer, self._stage_directory, self._parts = peer, stage_directory, tuple(parts)
        self._microbatches, self._limits = microbatches, limits
        self._computing, self._report = computing, report
        self._ledger = Ledger(len(self._parts))
        self._begun_s: dict[int, float] = {}  # microbatches that some stage has not named yet
        self._heard = DuplicateDetector(peer.me, len(self._parts))
        self._first = self._next = first
        self.stopping = False
        self._losses: collections.deque[float] = collections.deque(maxlen=RECENT)  # nats a token
        self.finished = 0  # microbatches that count at every stage
        self.lost = 0  # microbatches of which it is not known whether they count, for the log of rounds has moved on
        self._late: set[int] = set()  # microbatches that some stage left out
        self.dropped = 0  # gradients that never counted, for a round found them too late: each at one stage
        self.spoilt = 0  # microbatches whose gradient was not finite: they count nowhere

    async def run(self, enough: Callable[[], bool]) -> None:
        """Train until `enough`, or until told to stop."""
        self._first = self._next = self._first + self._stage_directory.tokens() // self._microbatches.tokens_each
        while not (self.stopping or enough()):
            self._look_around()
            if self._may_begin():
                await self._train(self._next)
            else:
                await asyncio.sleep(TICK_S)

    @property
    def kept(self) -> int:
        """Microbatches that wait to be named."""
        return len(self._begun_s)

    @property
    def recent_loss(self) -> float | None:
        """Mean of the last microbatches' losses, in nats a token."""
        return sum(self._losses) / len(self._losses) if self._losses else None

    @property
    def doubled(self) -> int:
        """Microbatches named twice at one stage, which must not be."""
        return self._heard.doubled

    @property
    def begun(self) -> int:
        """Microbatches so far."""
        return self._next - self._first

    def waits(self) -> list[OpenWait]:
        """It asks nobody for anything."""
        return []

    def _may_begin(self) -> bool:
        if self.kept >= self._limits.kept or not self._peer.membership.is_member:
            return False
        ready = [part for part in self._parts if part.server.accounts.untaken(self._peer.me) >= self._limits.ahead]
        return not any(part.batch.is_full() for part in ready)  # one that lacks something may lack it of me alone

    async def _train(self, number: int) -> None:
        self._next, started_s = number + 1, self._now()
        order = self._microbatches.order(number)
        cost = BACKWARD_COST * len(order)
        staged, loss, rounds = await self._computing.run_pass(lambda: self._compute(number), cost)
        if not all(bool(x.isfinite().all()) for part in staged for x in part.gradients.values()):
            self.spoilt += 1  # in the sum it would spoil everybody's
            return
        self._ledger.begin(number, order)
        self._begun_s[number] = started_s
        for server, part, of in zip(self._visited(number), staged, rounds, strict=True):
            await server.contribute((self._peer.me, number), part, loss if server.stage.is_last else None, of)
        mean_loss = loss / self._microbatches.tokens_each
        self._losses.append(mean_loss)
        self._report("loss", {"number": number, "loss": mean_loss})

    def _compute(self, number: int) -> tuple[tuple[MicrobatchGradient, ...], float, list[int]]:
        """Take one microbatch there and back, by the weights that all stages have now, which are of
        these rounds. Called by the thread that computes."""
        visited, batch = self._visited(number), self._microbatches.batch(number)
        staged, loss = backward_through([server.stage for server in visited], *batch)
        return staged, loss, [server.applied for server in visited]

    def _visited(self, number: int) -> list[StageServer]:
        return [self._parts[stage].server for stage in self._microbatches.order(number)]

    def _look_around(self) -> None:
        """Hear what rounds have named, and forget what counts everywhere."""
        for stage, keys in self._stage_directory.named():
            self._ledger.committed(stage, self._heard.of_round(stage, keys))
        self._hear_of_late()
        while (doubtful := self._stage_directory.skipped()) is not None:
            self._give_up(doubtful)
        for number in self._ledger.finish():
            took_s = self._now() - self._begun_s.pop(number)
            if number in self._late:
                self._late.discard(number)
                continue
            self.finished += 1
            self._report("microbatch", {"number": number, "took_s": took_s})

    def _hear_of_late(self) -> None:
        """What rounds named and left out counts at other stages alone."""
        for stage, (trainer, number) in self._stage_directory.left_out:
            if trainer == self._peer.me and number in self._begun_s:
                self._late.add(number)
                self.dropped += 1
                self._report("dropped", {"number": number, "stage": stage})
        self._stage_directory.left_out.clear()

    def _give_up(self, stage: int) -> None:
        """Rounds of a stage have left everybody's log before I heard of them: what waits for them
        may count or not."""
        waiting = [number for number in self._begun_s if self._ledger.phase((number, stage)) != "committed"]
        self._ledger.committed(stage, waiting)
        self.lost += len(waiting)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
