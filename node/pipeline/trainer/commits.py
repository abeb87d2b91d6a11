"""A trainer's microbatches that count at each stage, because a round names them (decision 014)."""

import collections
from collections.abc import Callable, Iterable

from farflock.node.pipeline.trainer.stage_directory import StageDirectory
from farflock.node.reporting import Report
from farflock.swarm.links import PeerId
from farflock.swarm.protocol.gradient_leases import GradientKey
from farflock.swarm.protocol.ledger import Ledger, Phase

RECENT = 32  # microbatches in the mean loss
REMEMBERED = 4096  # named numbers kept per stage, well above the default `TrainerTerms.kept`


class DuplicateDetector:
    """Detects microbatches of trainer `me` that the rounds of one stage name twice."""

    def __init__(self, me: PeerId, stages: int) -> None:
        self._me = me
        self._named: list[set[int]] = [set() for _ in range(stages)]
        self.doubled = 0  # named twice at one stage: a bug if not 0

    def of_round(self, stage: int, keys: Iterable[GradientKey]) -> list[int]:
        """Return this trainer's numbers among the keys that a round of the stage names."""
        mine = [number for trainer, number in keys if trainer == self._me]
        named = self._named[stage]
        self.doubled += len(named.intersection(mine))
        named.update(mine)
        if len(named) > 2 * REMEMBERED:
            self._named[stage] = set(sorted(named)[-REMEMBERED:])
        return mine


class CommitTracker:
    """Tracks a trainer's microbatches until they count. `ledger` holds their phase at each stage;
    rounds decide which ones count.

    A microbatch in one of the `doubtful` phases may already be in a round. `heard` is told the
    stage of each round and how many microbatches it names."""

    def __init__(
        self,
        me: PeerId,
        stage_directory: StageDirectory,
        report: Report,
        doubtful: tuple[Phase, ...] = ("bound", "merged"),
        heard: Callable[[int, int], None] = lambda stage, size: None,
    ) -> None:
        self._me, self._stage_directory, self._report = me, stage_directory, report
        self._doubtful, self._heard = doubtful, heard
        self._losses: collections.deque[float] = collections.deque(maxlen=RECENT)
        self.ledger = Ledger(stage_directory.stages)
        self._named = DuplicateDetector(me, stage_directory.stages)
        # start times of the microbatches that do not count everywhere yet
        self.begun_s: dict[int, float] = {}
        # start times of those that the rounds heard of last left out as late
        self.late_begun_s: list[float] = []
        self._dropped: set[int] = set()  # those of them that will not count at every stage
        self.finished = 0  # microbatches that count at every stage
        self.dropped = 0  # gradients given up, each of one microbatch at one stage
        # microbatches that may or may not count: the log was truncated before this peer read it
        self.lost = 0
        self.mixed = 0  # backward passes at other weights than their forward pass

    def trained(self, number: int, loss: float) -> None:
        """Note that a microbatch has come back, with its loss in nats per token."""
        self._losses.append(loss)
        self._report("loss", {"number": number, "loss": loss})

    @property
    def recent_loss(self) -> float | None:
        """The mean loss of the last `RECENT` microbatches in nats per token; None before the
        first."""
        return sum(self._losses) / len(self._losses) if self._losses else None

    @property
    def doubled(self) -> int:
        """Microbatches that one stage's rounds named twice; a bug if not 0."""
        return self._named.doubled

    def begin(self, number: int, order: Iterable[int], now_s: float) -> None:
        """Track a microbatch that visits the stages of `order`."""
        self.ledger.begin(number, order)
        self.begun_s[number] = now_s

    def hear(self, now_s: float) -> list[int]:
        """Read which microbatches rounds have named and which servers have left. Forget the
        finished microbatches and return their numbers."""
        for stage, keys in self._stage_directory.named():
            self.ledger.committed(stage, self._named.of_round(stage, keys))
            self._heard(stage, len(keys))
        self._hear_of_late()
        # before the servers that left: what may already count must not be asked for again
        while (doubtful := self._stage_directory.skipped()) is not None:
            self._give_up(doubtful)
        for stage, server in self._stage_directory.left():
            self.ledger.lost(stage, server)
        over = self.ledger.finish()
        for number in over:
            self._end(number, now_s)
        return over

    def drop(self, number: int, stage: int) -> None:
        """Note that a microbatch will not count at this stage."""
        if number in self.begun_s:
            self._dropped.add(number)
        self.dropped += 1
        self._report("dropped", {"number": number, "stage": stage})

    def _end(self, number: int, now_s: float) -> None:
        took_s = now_s - self.begun_s.pop(number)
        if number in self._dropped:
            self._dropped.discard(number)
            return
        self.finished += 1
        self._report("microbatch", {"number": number, "took_s": took_s})

    def _hear_of_late(self) -> None:
        """Drop gradients that a round named as left out; their microbatches count only at other
        stages."""
        self.late_begun_s.clear()
        for stage, (trainer, number) in self._stage_directory.left_out:
            if trainer == self._me and number in self.begun_s:
                self.late_begun_s.append(self.begun_s[number])
                self.drop(number, stage)
        self._stage_directory.left_out.clear()

    def _give_up(self, stage: int) -> None:
        """Write off this stage's doubtful microbatches, which may or may not count: the logs
        dropped its rounds before this peer heard of them."""
        phases = {number: self.ledger.phase((number, stage)) for number in self.begun_s}
        waiting = [number for number, phase in phases.items() if phase in self._doubtful]
        self.ledger.committed(stage, waiting)
        self.lost += len(waiting)
