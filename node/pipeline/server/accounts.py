"""The microbatches of a stage server: merged, taken by steps, and counted by the stage's rounds."""

import asyncio
import collections
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from farflock.node.pipeline.passes.stage import GradientAccumulator, MicrobatchGradient
from farflock.node.pipeline.server.weight_versions import WeightVersions
from farflock.node.train import microbatch_ids as notes
from farflock.swarm.links import PeerId
from farflock.swarm.protocol.gradient_leases import GradientKey, GradientLeases


@dataclass(slots=True)
class Taken:
    """A step's gradient, which is the sum of those merged since the last step, and its loss in
    nats per token (None if unknown). If `discarded` is not 0, the gradient of that many
    microbatches, left over from earlier steps, must be dropped."""

    staged: MicrobatchGradient
    loss: float | None
    discarded: int = 0


@dataclass(frozen=True, slots=True)
class _Step:
    """The round in the weights at which a gradient was computed, and the last round before the
    step that took it."""

    weights: int
    after: int


@dataclass(frozen=True, slots=True)
class AccumulatedGradient:
    """The gradient for one step, its loss (nats, summed over tokens), the round of each
    microbatch's weights, and the microbatches left out as `late`."""

    staged: MicrobatchGradient
    loss_sum: float
    rounds: dict[GradientKey, int]
    late: frozenset[GradientKey]


@dataclass(slots=True)
class AccumulatorByRound:
    """Gradients merged since the last step, with one sum for each round of their weights, so
    that a step can leave out those that are too old. Only the compute thread uses this."""

    rounds: dict[GradientKey, int] = field(default_factory=dict)
    _sums: dict[int, GradientAccumulator] = field(default_factory=dict)
    _losses: dict[int, float] = field(default_factory=dict)

    def add(
        self,
        key: GradientKey,
        staged: MicrobatchGradient,
        loss_sum: float | None,
        round_number: int,
    ) -> None:
        """Add a microbatch's gradient at weights of `round_number`; the loss is summed, in nats."""
        self._sums.setdefault(round_number, GradientAccumulator()).add(staged)
        self._losses[round_number] = self._losses.get(round_number, 0.0) + (loss_sum or 0.0)
        self.rounds[key] = round_number

    def clear(self) -> None:
        """Drop all."""
        self.take()

    def take(self, is_late: Callable[[int], bool] = lambda number: False) -> AccumulatedGradient:
        """Take all sums and start again from zero. They are added oldest first, without the
        gradients of rounds for which `is_late` is true."""
        total, loss_sum = GradientAccumulator(), 0.0
        left_out = {number for number in self._sums if is_late(number)}
        for number in sorted(self._sums.keys() - left_out):  # fixed order: float sums depend on it
            total.add(self._sums[number].take())
            loss_sum += self._losses[number]
        late = frozenset(key for key, number in self.rounds.items() if number in left_out)
        rounds = {key: number for key, number in self.rounds.items() if key not in late}
        self.rounds, self._sums, self._losses = {}, {}, {}
        return AccumulatedGradient(total.take(), loss_sum, rounds, late)


class StageAccounts:
    """The microbatches of one stage server, from their merge until a round counts them; the stage's
    rounds use it as their `ContributionLog` (node/train/driver.py).

    A microbatch is merged, taken by a step, contributed to a round, and named by that round or
    another. One that is more than `staleness` rounds late for a step is left out and named as
    late, so that its trainer does not wait for it. `applied()` is the last round in the weights,
    `tokens_each` the tokens per microbatch. The compute thread calls `sums.add` and `take`."""

    def __init__(
        self,
        staging: GradientLeases,
        versions: WeightVersions,
        applied: Callable[[], int],
        staleness: int,
        tokens_each: int,
        *,
        knows_loss: bool,
    ) -> None:
        self._staging, self._versions, self._applied = staging, versions, applied
        self._staleness, self._tokens_each, self._knows_loss = staleness, tokens_each, knows_loss
        self.sums = AccumulatorByRound()
        self.taken: dict[GradientKey, _Step] = {}  # by steps, and not yet named by a round
        self.late: frozenset[GradientKey] = frozenset()  # left out and not yet named by a round
        self.rounds_over: collections.deque[tuple[int, bytes]] = collections.deque()
        self.own_given_up: list[GradientKey] = []  # by a full replica, whose trainer takes them
        self._unclosed = 0  # merged microbatches not known to count
        self.merges = self.left_out = 0  # microbatches in total
        self.merged = asyncio.Event()  # set by each merge, cleared by the waiter

    # merging

    def count_merge(self, key: GradientKey) -> None:
        """Count one more merge, unless it was given up meanwhile, and wake up the task that waits
        for a step."""
        self._unclosed += self._staging.is_merged(key)
        self.merges += 1
        self.merged.set()

    def renounce(self) -> int:
        """Give up all that no round has named, but for the `sums`, which the worker clears; return
        the number of microbatches."""
        self.own_given_up += self._staging.reset()
        count, self._unclosed = self._unclosed, 0
        self.taken, self.late = {}, frozenset()
        return count

    @property
    def tokens(self) -> int:
        """Tokens merged here that are not yet known to count and that the next round can use.

        If others made a batch full, the round would find nothing in it, and fail."""
        number = self._applied() + 1
        late = sum(self._is_late(weights, number) for weights in list(self.sums.rounds.values()))
        return (self._unclosed - len(self.late) - late) * self._tokens_each

    def untaken(self, trainer: PeerId) -> int:
        """Return how many of a trainer's microbatches are merged but not yet in a step."""
        return sum(peer == trainer for peer, _ in list(self.sums.rounds))

    # steps

    def take(self) -> Taken:
        """Take everything merged so far for a step. From now on it is this server's own
        contribution."""
        applied = self._applied()
        summed = self.sums.take(lambda weights: self._is_late(weights, applied + 1))
        discarded = self._discard(applied + 1)
        self._leave_out(summed.late)
        self.taken |= {key: _Step(weights, applied) for key, weights in summed.rounds.items()}
        self._versions.begin_step([applied - weights for weights in summed.rounds.values()])
        loss = summed.loss_sum / max(summed.staged.tokens, 1)
        return Taken(summed.staged, loss if self._knows_loss and summed.rounds else None, discarded)

    def _is_late(self, weights: int, number: int, stepped: int | None = None) -> bool:
        """True if a gradient of these weights is too late for this round."""
        return self._versions.delay(weights, number, stepped) > self._staleness

    def _discard(self, number: int) -> int:
        """Discard the gradient that earlier steps took and that is in no round, once a part of
        it is too late for this round: it is one sum and cannot be split. Return its number of
        microbatches."""
        # an offered key stays: a round that is still open may name it
        waiting = {
            key: step for key, step in self.taken.items() if not self._staging.is_offered(key)
        }
        if not any(self._is_late(step.weights, number, step.after) for step in waiting.values()):
            return 0
        self.taken = {key: step for key, step in self.taken.items() if key not in waiting}
        self._leave_out(waiting)
        return len(waiting)

    def _leave_out(self, keys: Collection[GradientKey]) -> None:
        self.late |= set(keys)
        self.left_out += len(keys)

    # rounds

    def brought(self, number: int) -> bytes:
        """As `ContributionLog.brought`: the keys in the contribution, and by how many rounds
        each is late."""
        keys = self._staging.offer(number, self.taken.keys() | self.late)
        return notes.written({key: self._age(key, number) for key in keys})

    def _age(self, key: GradientKey, number: int) -> int:
        if key in self.late:
            return notes.LATE
        step = self.taken[key]
        return self._versions.delay(step.weights, number, step.after)

    def closing(self, number: int, noted: bytes) -> None:
        """As `ContributionLog.closing`: the weights are about to change."""
        ages = notes.joined_ages([noted]) if noted else {}
        self._versions.begin_round([age for age in ages.values() if age != notes.LATE])

    def closed(self, number: int, noted: bytes) -> None:
        """As `ContributionLog.closed`. This runs in the worker, so it only queues the keys for
        `absorb`."""
        self.rounds_over.append((number, noted))
        self._versions.end_round()

    def absorb(self) -> None:
        """Settle the microbatches that closed rounds have named."""
        while self.rounds_over:
            number, noted = self.rounds_over.popleft()
            named = set(notes.joined([noted])) if noted else set()
            self._staging.close(number, named)
            self._unclosed -= len((self.taken.keys() | self.late) & named)
            self.taken = {key: step for key, step in self.taken.items() if key not in named}
            self.late -= named
