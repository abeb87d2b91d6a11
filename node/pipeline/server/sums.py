"""What a stage server has merged and no step has taken yet, apart by the round of the weights that it was computed with: what
has become too old until a step comes can then be left out, and the rest stays."""

from dataclasses import dataclass, field

from farflock.node.pipeline.passes.stage import Accumulator, Staged
from farflock.swarm.protocol.staging import Key


@dataclass(frozen=True, slots=True)
class Summed:
    """What a step takes: the sum, its loss (nats, summed over tokens), and of each microbatch in it the round of its weights;
    and what is left out."""

    staged: Staged
    loss_sum: float
    rounds: dict[Key, int]
    late: frozenset[Key]


@dataclass(slots=True)
class Sums:
    """A sum for each round of weights. Touched by what computes alone."""

    rounds: dict[Key, int] = field(default_factory=dict)
    _sums: dict[int, Accumulator] = field(default_factory=dict)
    _losses: dict[int, float] = field(default_factory=dict)

    def add(self, key: Key, staged: Staged, loss_sum: float | None, round_number: int) -> None:
        """One more microbatch, computed with the weights of that round."""
        self._sums.setdefault(round_number, Accumulator()).add(staged)
        self._losses[round_number] = self._losses.get(round_number, 0.0) + (loss_sum or 0.0)
        self.rounds[key] = round_number

    def take(self, oldest: int | None = None) -> Summed:
        """All of it, oldest first, without what is older than round `oldest`."""
        total, loss_sum = Accumulator(), 0.0
        for number in sorted(self._sums):
            if oldest is None or number >= oldest:
                total.add(self._sums[number].take())
                loss_sum += self._losses[number]
        late = frozenset(key for key, number in self.rounds.items() if oldest is not None and number < oldest)
        rounds = {key: number for key, number in self.rounds.items() if key not in late}
        self.rounds, self._sums, self._losses = {}, {}, {}
        return Summed(total.take(), loss_sum, rounds, late)
