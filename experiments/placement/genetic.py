"""The genetic search of DT-FM (Yuan et al., arXiv:2206.01288, section 4): our planner's baseline.

The population begins as random balanced partitions. Each trial makes a child of two parents by
five-point crossover, repairs the sizes of its stages, and improves it by local search; the child
replaces the worst member if it is better. Stages are put in Held and Karp's order. Local search is
the paper's, or Kernighan and Lin's, with which the paper compares its own. The baseline shares
nothing with our planner but the arithmetic of the cost (experiments/placement/layout.py).

Deviation, in the baseline's favour: exchanges between two stages are kept only if the two, priced
alone, then cost less. The gains are estimates and nearly always positive; without this check, its
layouts cost more at the same number of trials.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from farflock.experiments.placement.layout import Costs, Layout, MatrixRows

POINTS = 5  # of crossover
MAX_PASSES = 10  # over all pairs of stages; the last ones find little

Gain = Literal["circular", "kernighan-lin"]
Genome = list[int]  # the stage of each node
Move = tuple[float, int, int]  # gain, a node of one stage, a node of another


@dataclass(frozen=True, slots=True)
class Setting:
    """The search's method and length; 24 and 4900 are those of DT-FM's released script."""

    gain: Gain = "circular"
    population: int = 24
    trials: int = 4900


@dataclass(frozen=True, slots=True)
class Stages:
    """Two stages after some exchanges, and their nodes that have not moved yet."""

    one: list[int]
    other: list[int]
    left: list[int]
    right: list[int]

    @classmethod
    def of(cls, one: Sequence[int], other: Sequence[int]) -> "Stages":
        return cls(list(one), list(other), list(one), list(other))

    def exchange(self, a: int, b: int) -> None:
        """Exchange `a` of the one stage for `b` of the other; neither moves again."""
        self.left.remove(a)
        self.right.remove(b)
        self.one[self.one.index(a)], self.other[self.other.index(b)] = b, a


def search(costs: Costs, sizes: Sequence[int], seed: int, setting: Setting | None = None) -> Layout:
    """Return the best layout of the last population; the same for the same seed."""
    setting = Setting() if setting is None else setting
    chance, refine = random.Random(seed), Refine(costs, sizes, setting.gain)
    members = []
    for _ in range(setting.population):
        genome = [stage for stage, count in enumerate(sizes) for _ in range(count)]
        chance.shuffle(genome)
        members.append((costs.layout(stages_of(genome)), genome))
    for _ in range(setting.trials):
        (_, mother), (_, father) = chance.sample(members, 2)
        child = refine(mended(crossed(mother, father, chance), sizes, chance))
        layout = costs.layout(stages_of(child))
        worst = max(range(len(members)), key=lambda member: members[member][0].seconds)
        if layout.seconds < members[worst][0].seconds:
            members[worst] = layout, child
    return min((layout for layout, _ in members), key=lambda layout: layout.seconds)


def stages_of(genome: Genome) -> list[tuple[int, ...]]:
    """Return the nodes of each stage."""
    return [
        tuple(node for node, at in enumerate(genome) if at == stage)
        for stage in range(max(genome) + 1)
    ]


def crossed(mother: Genome, father: Genome, chance: random.Random) -> Genome:
    """Return a child made of pieces from both parents in turn, cut at up to five points."""
    cuts = sorted(chance.sample(range(1, len(mother)), min(POINTS, len(mother) - 1)))
    child: Genome = []
    for turn, (begin, end) in enumerate(itertools.pairwise((0, *cuts, len(mother)))):
        child += (mother, father)[turn % 2][begin:end]
    return child


def mended(genome: Genome, sizes: Sequence[int], chance: random.Random) -> Genome:
    """Restore every stage's size by moving random nodes from stages that are too large."""
    genome, lacking, surplus = list(genome), [], []
    for stage, size in enumerate(sizes):
        nodes = [node for node, at in enumerate(genome) if at == stage]
        chance.shuffle(nodes)
        surplus += nodes[size:]
        lacking += [stage] * (size - len(nodes))
    chance.shuffle(surplus)
    for node, stage in zip(surplus, lacking, strict=True):
        genome[node] = stage
    return genome


class Refine:
    """Local search over all pairs of stages until a pass improves nothing."""

    def __init__(self, costs: Costs, sizes: Sequence[int], gain: Gain) -> None:
        circular = gain == "circular"
        self._costs = costs
        self._weights: MatrixRows = costs.handing_s if circular else costs.sharing_s(max(sizes))
        self._best: Callable[[Stages, MatrixRows], Move] = (
            circular_move if circular else kernighan_lin_move
        )
        self._fewest = 2 if circular else 1  # unmoved nodes per stage: a link has two

    def __call__(self, genome: Genome) -> Genome:
        """Return a genome of the same sizes that costs no more, priced by pairs of stages."""
        stages = list(stages_of(genome))
        for _ in range(MAX_PASSES):
            changed = [
                self._improve(stages, j, k)
                for j, k in itertools.combinations(range(len(stages)), 2)
            ]
            if not any(changed):
                break
        refined = list(genome)
        for number, stage in enumerate(stages):
            for node in stage:
                refined[node] = number
        return refined

    def _improve(self, stages: list[tuple[int, ...]], j: int, k: int) -> bool:
        one, other = self._exchanged(stages[j], stages[k])
        if self._price(one, other) >= self._price(stages[j], stages[k]) * (1 - 1e-9):
            return False
        stages[j], stages[k] = one, other
        return True

    def _exchanged(
        self, one: Sequence[int], other: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Exchange nodes greedily; return both stages at the greatest sum of gains."""
        trial, result = Stages.of(one, other), Stages.of(one, other)
        moves: list[Move] = []
        while min(len(trial.left), len(trial.right)) >= self._fewest:
            moves.append(self._best(trial, self._weights))
            trial.exchange(*moves[-1][1:])
        totals = [0.0, *itertools.accumulate(gain for gain, _, _ in moves)]
        for _, a, b in moves[: totals.index(max(totals))]:
            result.exchange(a, b)
        return tuple(result.one), tuple(result.other)

    def _price(self, one: Sequence[int], other: Sequence[int]) -> float:
        return max(map(self._costs.data_parallel, (one, other))) + self._costs.match(one, other)


def circular_move(stages: Stages, weights: MatrixRows) -> Move:
    """Return DT-FM's move: from each stage, one end of its fastest inner link leaves.

    For end d1 of the link (d1, d2), the gain is the mean cost of its links to the other stage,
    which become inner links, less the cost of that link.
    """
    return max(
        (_freed(a, mate_a, stages.other, weights) + _freed(b, mate_b, stages.one, weights), a, b)
        for a, mate_a in _fastest(stages.left, weights)
        for b, mate_b in _fastest(stages.right, weights)
    )


def _freed(node: int, mate: int, others: Sequence[int], weights: MatrixRows) -> float:
    row = weights[node]
    return sum([row[other] for other in others]) / len(others) - row[mate]


def _fastest(stage: Sequence[int], weights: MatrixRows) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the ends of a stage's cheapest link, each with the other."""
    a, b = min(itertools.combinations(stage, 2), key=lambda pair: weights[pair[0]][pair[1]])
    return (a, b), (b, a)


def kernighan_lin_move(stages: Stages, weights: MatrixRows) -> Move:
    """Return the exchange that most lowers costs inside both stages (Kernighan and Lin, 1970)."""
    out = {a: _pull(a, stages.other, stages.one, weights) for a in stages.left}
    back = {b: _pull(b, stages.one, stages.other, weights) for b in stages.right}
    # A pull to the other stage is a loss here: costs inside stages count, those between do not.
    return max(
        (2 * weights[a][b] - out[a] - back[b], a, b) for a in stages.left for b in stages.right
    )


def _pull(node: int, there: Sequence[int], here: Sequence[int], weights: MatrixRows) -> float:
    """Return a node's costs to the other stage less those to its own."""
    row = weights[node]
    return sum([row[other] for other in there]) - sum([row[other] for other in here])
