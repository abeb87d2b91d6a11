"""Gradients that a stage server has merged since its last step, summed by the round of the weights
that they are of: what has become too old when the step comes can then be left out, and the rest
stays."""

from collections.abc import Callable
from dataclasses import dataclass, field

from farflock.node.pipeline.passes.stage import GradientAccumulator, MicrobatchGradient
from farflock.swarm.protocol.gradient_leases import GradientKey


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
    """A sum for each round of weights. Only the thread that computes touches it."""

    rounds: dict[GradientKey, int] = field(default_factory=dict)
    _sums: dict[int, GradientAccumulator] = field(default_factory=dict)
    _losses: dict[int, float] = field(default_factory=dict)

    def add(self, key: GradientKey, staged: MicrobatchGradient, loss_sum: float | None, round_number: int) -> None:
        """Add the gradient of one more microbatch, of the weights of that round."""
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
