"""What a stage server has merged, what its steps made of it, and what of that the stage's rounds
have counted."""

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
    """What a step is made of: the sum of what was merged since the one before, and the loss that is
    known of it (nats a token, None where no loss is known). What earlier steps took of `discarded`
    microbatches, and no round did, is to be forgotten."""

    staged: MicrobatchGradient
    loss: float | None
    discarded: int = 0


@dataclass(frozen=True, slots=True)
class _Step:
    """How a step took in a microbatch: the round of the weights of its gradient, and the last round
    before the step."""

    weights: int
    after: int


@dataclass(frozen=True, slots=True)
class AccumulatedGradient:
    """What a step takes: the sum, its loss (nats, summed over tokens), the round of the weights of
    each microbatch in it, and the microbatches that are left out as `late`."""

    staged: MicrobatchGradient
    loss_sum: float
    rounds: dict[GradientKey, int]
    late: frozenset[GradientKey]


@dataclass(slots=True)
class AccumulatorByRound:
    """Gradients merged since the last step, a sum for each round of the weights that they are of: what
    is too old when the step comes can be left out. Only the thread that computes touches it."""

    rounds: dict[GradientKey, int] = field(default_factory=dict)
    _sums: dict[int, GradientAccumulator] = field(default_factory=dict)
    _losses: dict[int, float] = field(default_factory=dict)

    def add(self, key: GradientKey, staged: MicrobatchGradient, loss_sum: float | None, round_number: int) -> None:
        """Add the gradient of one more microbatch, of the weights of that round; its loss is in nats,
        summed over tokens."""
        self._sums.setdefault(round_number, GradientAccumulator()).add(staged)
        self._losses[round_number] = self._losses.get(round_number, 0.0) + (loss_sum or 0.0)
        self.rounds[key] = round_number

    def take(self, is_late: Callable[[int], bool] = lambda number: False) -> AccumulatedGradient:
        """Take all of it, oldest first, without the gradients of weights of a round that
        `is_late`."""
        total, loss_sum = GradientAccumulator(), 0.0
        left_out = {number for number in self._sums if is_late(number)}
        for number in sorted(self._sums.keys() - left_out):  # in this order, for sums are rounded
            total.add(self._sums[number].take())
            loss_sum += self._losses[number]
        late = frozenset(key for key, number in self.rounds.items() if number in left_out)
        rounds = {key: number for key, number in self.rounds.items() if key not in late}
        self.rounds, self._sums, self._losses = {}, {}, {}
        return AccumulatedGradient(total.take(), loss_sum, rounds, late)


class StageAccounts:
    """The microbatches of one stage server from merge to count; for its rounds these are the
    `Books` (node/train/state_sync.py).

    A microbatch is merged, taken by a step, brought into a round, and named by that round or
    another; what is too late for a step, by more rounds than `staleness`, is left out and named as
    such, so that nobody waits for it. `applied` is the last round in the weights, `tokens_each` the
    tokens of a microbatch. `sums.add` and `take` are called by the thread that computes."""

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
        self.taken: dict[GradientKey, _Step] = {}  # by steps, and in no round yet that took my contribution
        self.late: frozenset[GradientKey] = frozenset()  # left out, until a round names them
        self.rounds_over: collections.deque[tuple[int, bytes]] = collections.deque()
        self._unclosed = 0  # microbatches that are merged and not known to count
        self.merges = self.left_out = 0  # microbatches so far
        self.merged = asyncio.Event()  # set with each merge; whoever waits for it clears it

    # merging

    def count_merge(self) -> None:
        """One more is in the sum: wake whoever waits for a step."""
        self._unclosed += 1
        self.merges += 1
        self.merged.set()

    @property
    def tokens(self) -> int:
        """Tokens that were merged here and are not known to count yet."""
        return (self._unclosed - len(self.late)) * self._tokens_each

    def untaken(self, trainer: PeerId) -> int:
        """A trainer's microbatches that are merged and in no step yet."""
        return sum(peer == trainer for peer, _ in list(self.sums.rounds))

    # steps

    def take(self) -> Taken:
        """Take all that is merged, for a step: from now on it is this server's own work."""
        applied = self._applied()
        summed = self.sums.take(lambda weights: self._is_late(weights, applied + 1))
        discarded = self._discard(applied + 1)
        self._leave_out(summed.late)
        self.taken |= {key: _Step(weights, applied) for key, weights in summed.rounds.items()}
        self._versions.begin_step([applied - weights for weights in summed.rounds.values()])
        loss = summed.loss_sum / max(summed.staged.tokens, 1)
        return Taken(summed.staged, loss if self._knows_loss and summed.rounds else None, discarded)

    def _is_late(self, weights: int, number: int, stepped: int | None = None) -> bool:
        """Return whether a gradient of these weights is too late for this round."""
        return self._versions.delay(weights, number, stepped) > self._staleness

    def _discard(self, number: int) -> int:
        """Give up what earlier steps took and no round did, once a part of it is too late for this
        round: it waits as one sum. Returns how many microbatches that are."""
        waiting = {key: step for key, step in self.taken.items() if not self._staging.is_offered(key)}
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
        """As `Books.brought`: the keys of my contribution to this round, which is being made, and
        how late each is."""
        keys = self._staging.offer(number, self.taken.keys() | self.late)
        return notes.written({key: self._age(key, number) for key in keys})

    def _age(self, key: GradientKey, number: int) -> int:
        if key in self.late:
            return notes.LATE
        step = self.taken[key]
        return self._versions.delay(step.weights, number, step.after)

    def closing(self, number: int, noted: bytes) -> None:
        """As `Books.closing`: the weights are about to change."""
        ages = notes.joined_ages([noted]) if noted else {}
        self._versions.begin_round([age for age in ages.values() if age != notes.LATE])

    def closed(self, number: int, noted: bytes) -> None:
        """As `Books.closed`: called by the thread that applied the round, so it is only put down
        here, until `absorb`."""
        self.rounds_over.append((number, noted))
        self._versions.end_round()

    def absorb(self) -> None:
        """Take in what the rounds that are over have named."""
        while self.rounds_over:
            number, noted = self.rounds_over.popleft()
            named = set(notes.joined([noted])) if noted else set()
            self._staging.close(number, named)
            self._unclosed -= len((self.taken.keys() | self.late) & named)
            self.taken = {key: step for key, step in self.taken.items() if key not in named}
            self.late -= named
