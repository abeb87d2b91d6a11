"""A planner of cheap layouts on measured links: the machines of each stage, and the stages' order.

The cost is that of experiments/placement/layout.py. If there are few partitions, all are tried.
Otherwise the search first descends on a smooth surrogate, from three starts and then from random
kicks, and anneals the best layout by the cost itself. The cost is made of maxima, so most exchanges
of two nodes change nothing, and a search has no direction. With each maximum replaced by a mean, it
becomes a quadratic assignment of nodes to places (stage, replica), for which all exchanges are
priced at once (Burkard, Dell'Amico and Martello, "Assignment Problems", 2009, section 8.2). The
starts are the two forms of a good layout, with near nodes in one stage or in one pipeline, and a
random one.

Work is counted, never timed: the same seed and work give the same layout on the same machine.
"""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farflock.experiments.placement.layout import MAX_STAGES, Costs, Layout, Matrix, StageMembers

Order = NDArray[np.int64]  # the node at each place

WORK = 5_000  # priced exchanges of two nodes

_LED_SHARE = 0.4  # of the work, for descents before annealing
_KICKED = 8  # nodes that change places between two descents
_HOT, _COLD = 0.003, 0.0003  # temperatures of annealing, as shares of the cost
_HOTTER = 0.03  # for a walk from a random start
_SWEEPS = 2  # minimum steps of a further walk, per possible exchange
_REVERSALS = 0.1  # share of annealing's trials that reverse a part of the pipeline
_NOTHING = 1e-9  # smaller relative gains are rounding


def balanced(nodes: int, stages: int) -> tuple[int, ...]:
    """Return sizes that differ by one at most; raise `ValueError` if a stage would have no node."""
    if not 1 <= stages <= nodes:
        raise ValueError(
            f"{nodes} nodes cannot serve {stages} stages; "
            "give at least one stage, and at least as many nodes as stages"
        )
    return tuple(nodes // stages + (stage < nodes % stages) for stage in range(stages))


def plan(costs: Costs, sizes: Sequence[int], seed: int, work: int = WORK) -> Layout:
    """Return a cheap layout of all nodes into stages of these sizes, in their cheapest order.

    It is the optimum if the work suffices for all partitions, else the best found. `work` bounds
    the time, at about 0.1 ms per unit. Raise `ValueError` if the sizes or the work do not fit.
    """
    _require(costs.nodes, sizes, work)
    if partition_count(sizes) * _price(len(sizes)) <= work:
        return min(
            (costs.layout(stages) for stages in partitions(sizes)),
            key=lambda layout: layout.seconds,
        )
    search = _Search(costs, tuple(sizes), random.Random(seed), work)
    search.lead(work - int(_LED_SHARE * work))
    search.anneal()
    return search.best


def _require(nodes: int, sizes: Sequence[int], work: int) -> None:
    if not 1 <= len(sizes) <= MAX_STAGES:
        raise ValueError(f"cannot plan {len(sizes)} stages; give 1 to {MAX_STAGES}")
    if min(sizes) < 1:
        raise ValueError(
            f"a stage is empty in the sizes {tuple(sizes)}; give each stage at least one node"
        )
    if sum(sizes) != nodes:
        raise ValueError(
            f"stages of {tuple(sizes)} nodes need {sum(sizes)}, but there are {nodes}; "
            f"give sizes that add up to {nodes}"
        )
    if work < 1:
        raise ValueError(
            f"work is {work}, too little for any plan; give at least 1, usually {WORK}"
        )


def partition_count(sizes: Sequence[int]) -> int:
    """Return the number of partitions into stages of these sizes, whatever the stages' order."""
    count = math.factorial(sum(sizes))
    for size in sizes:
        count //= math.factorial(size)
    for size in set(sizes):
        count //= math.factorial(list(sizes).count(size))
    return count


def partitions(sizes: Sequence[int]) -> Iterator[tuple[StageMembers, ...]]:
    """Yield each partition of nodes 0, 1, 2 … into stages of these sizes, once."""
    yield from _partitions(tuple(range(sum(sizes))), tuple(sorted(sizes)))


def _partitions(free: StageMembers, sizes: tuple[int, ...]) -> Iterator[tuple[StageMembers, ...]]:
    """Yield every partition of the free nodes into stages of these sizes.

    The first free node goes into a stage of each size in turn, with every choice of others.
    """
    if not sizes:
        yield ()
    for size in sorted(set(sizes)):
        at = sizes.index(size)
        for others in itertools.combinations(free[1:], size - 1):
            rest = tuple(node for node in free[1:] if node not in others)
            for stages in _partitions(rest, sizes[:at] + sizes[at + 1 :]):
                yield ((free[0], *others), *stages)


def _price(stages: int) -> int:
    """Return the price of a whole layout, in exchanges.

    An exchange looks at four pairs of stages, a layout at all of them.
    """
    return 1 + math.comb(stages, 2) // 4


@dataclass(frozen=True, slots=True, eq=False)
class _Flow:
    """A part of the surrogate: the share of two nodes' cost that counts at each pair of places."""

    share: Matrix  # [place, place], symmetric, 0 from a place to itself
    cost_s: Matrix  # [node, node], likewise


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """Each place's stage and replica; the places of one replica, one per stage, are a pipeline."""

    sizes: tuple[int, ...]
    stage: Order
    replica: Order

    @classmethod
    def of(cls, sizes: tuple[int, ...]) -> "_Places":
        return cls(
            sizes,
            np.repeat(np.arange(len(sizes)), sizes),
            np.concatenate([np.arange(size) for size in sizes]),
        )

    def stages(self, order: Order) -> list[StageMembers]:
        """Return the stages that result if the nodes take the places in this order."""
        return [tuple(order[self.stage == stage].tolist()) for stage in range(len(self.sizes))]

    def same(self, label: Order) -> Matrix:
        """Return a matrix with 1 for two different places of the same stage or replica, else 0."""
        return np.asarray(label[:, None] == label, np.float64) - np.eye(len(label))

    def partners(self) -> Matrix:
        """Return a matrix with 1 for partners in neighbouring stages, else 0.

        Between unequal stages, replicas wrap around.
        """
        size = np.asarray(self.sizes)[self.stage]
        smaller = np.minimum(size[:, None], size)
        meet = self.replica[:, None] % smaller == self.replica % smaller
        return np.asarray(meet & (abs(self.stage[:, None] - self.stage) == 1), np.float64)


@dataclass(slots=True)
class _Search:
    """The best layout so far and the work that is left."""

    costs: Costs
    sizes: tuple[int, ...]
    chance: random.Random
    left: int
    _best: Layout | None = None

    @property
    def best(self) -> Layout:
        """The best layout so far; the search must have tried one."""
        assert self._best is not None, "the search has not tried a layout yet"
        return self._best

    def lead(self, until: int) -> None:
        """Descend on the surrogate from three starts, then from kicks while work beyond `until` is
        left."""
        places = _Places.of(self.sizes)
        sharing = np.array(self.costs.sharing_s(max(self.sizes)))
        handing = np.array(self.costs.handing_s)
        whole = (
            _Flow(places.same(places.stage) / self.costs.nodes, sharing),
            _Flow(places.partners() / (2 * max(self.sizes)), handing),
        )
        starts = (
            (_Flow(places.same(places.stage), sharing),),
            (_Flow(places.same(places.replica), handing),),
            (),
        )
        at_best = np.arange(self.costs.nodes)
        for start in starts:
            order = np.array(self.chance.sample(range(self.costs.nodes), self.costs.nodes))
            for flows in (start, whole):
                self._descend(flows, order)
                if self._look(places.stages(order)):
                    at_best = order.copy()
        while self.left > until:
            order = at_best.copy()
            moved = self.chance.sample(range(len(order)), min(_KICKED, len(order)))
            order[moved] = order[moved[1:] + moved[:1]]
            self._descend(whole, order)
            if self._look(places.stages(order)):
                at_best = order

    def _look(self, stages: Sequence[StageMembers]) -> bool:
        """Price these stages; keep them and return True unless a better layout is known."""
        layout = self.costs.layout(stages)
        self.left -= _price(len(stages))
        kept = self._best is None or layout.seconds <= self._best.seconds
        if kept:
            self._best = layout
        return kept

    def _descend(self, flows: Sequence[_Flow], order: Order) -> None:
        """Swap the best two nodes, in place, until no swap gains anything or no work is left.

        With F a flow's shares and C the costs as the places see them, the sum of F · C changes by 2
        · (M_rs + M_sr − M_rr − M_ss + 2 F_rs C_rs) when r and s change places, where M = F C; M
        itself changes by an outer product.
        """
        seen = [(flow.share, flow.cost_s[np.ix_(order, order)]) for flow in flows]
        mixed: Matrix = sum(
            (share @ cost for share, cost in seen), np.zeros((len(order), len(order)))
        )
        price, enough = max(1, (len(order) // 64) ** 2), _NOTHING * float(mixed.trace())
        while self.left > 0:
            alone = mixed.diagonal()
            change = (
                mixed
                + mixed.T
                - alone[:, None]
                - alone
                + sum(2 * share * cost for share, cost in seen)
            )
            self.left -= price
            r, s = divmod(int(change.argmin()), len(order))
            if change[r, s] >= -enough:
                return
            order[[r, s]] = order[[s, r]]
            mixed[:, [r, s]] = mixed[:, [s, r]]
            for share, cost in seen:
                cost[:, [r, s]] = cost[:, [s, r]]
                mixed += np.outer(share[:, r] - share[:, s], cost[s] - cost[r])
                cost[[r, s]] = cost[[s, r]]

    def anneal(self) -> None:
        """Spend the work that is left on walks that cool down (Kirkpatrick, Gelatt, Vecchi, 1983).

        The first starts from the best layout; if there is work for more, every other one starts at
        random, and hotter.
        """
        if len(self.sizes) == 1 or self.left < 1:
            return
        walk, begin = _Walk(self.costs), self.best.stages
        exchanges = (self.costs.nodes**2 - sum(size**2 for size in self.sizes)) // 2
        walks = max(1, self.left // (_SWEEPS * exchanges))
        for number in range(walks):
            self._cool(
                walk, begin, _HOT if number % 2 == 0 else _HOTTER, self.left // (walks - number)
            )
            begin = self.best.stages if number % 2 else self._anywhere()

    def _anywhere(self) -> tuple[StageMembers, ...]:
        nodes = iter(self.chance.sample(range(self.costs.nodes), self.costs.nodes))
        return tuple(tuple(sorted(itertools.islice(nodes, size))) for size in self.sizes)

    def _cool(self, walk: "_Walk", begin: Sequence[StageMembers], hot: float, work: int) -> None:
        """Walk `work` steps while cooling down; keep the best layout on the way."""
        walk.start(begin)
        best_s, best, hot_s = walk.seconds, list(walk.stages), hot * walk.seconds
        for step in range(work):
            heat_s = hot_s * (_COLD / hot) ** (step / work)
            walk.step(self.chance, walk.seconds - heat_s * math.log(1 - self.chance.random()))
            if walk.seconds < best_s * (1 - _NOTHING):
                best_s, best = walk.seconds, list(walk.stages)
        self.left -= work
        self._look(best)


class _Walk:
    """A layout that changes by one exchange at a time; each adds at most six cached prices."""

    def __init__(self, costs: Costs) -> None:
        self.costs, self.seconds = costs, 0.0
        self.stages: list[StageMembers] = []
        self._alone: dict[StageMembers, float] = {}
        self._pairs: dict[tuple[StageMembers, StageMembers], float] = {}

    def start(self, stages: Sequence[StageMembers]) -> None:
        """Begin at these stages."""
        self.stages = list(stages)
        self.seconds = self._priced(self.stages, math.inf)

    def step(self, chance: random.Random, limit_s: float) -> None:
        """Exchange two nodes or reverse a part of the pipeline, if the cost is within the limit."""
        stages = list(self.stages)
        j, k = sorted(chance.sample(range(len(stages)), 2))
        if chance.random() < _REVERSALS:
            stages[j : k + 1] = stages[j : k + 1][::-1]
        else:
            a, b = chance.choice(stages[j]), chance.choice(stages[k])
            stages[j], stages[k] = _with(stages[j], a, b), _with(stages[k], b, a)
        seconds = self._priced(stages, limit_s)
        if seconds <= limit_s:
            self.stages, self.seconds = stages, seconds

    def _priced(self, stages: list[StageMembers], limit_s: float) -> float:
        """Return the cost of the stages in this order, or, beyond the limit, a number above it."""
        seconds = max([self._sharing(stage) for stage in stages])
        pairs = [pair if pair[0] <= pair[1] else pair[::-1] for pair in itertools.pairwise(stages)]
        seconds += sum([self._pairs.get(pair, 0.0) for pair in pairs])
        for pair in pairs:
            if seconds > limit_s:
                break
            if pair not in self._pairs:
                self._pairs[pair] = self.costs.match(*pair)
                seconds += self._pairs[pair]
        return seconds

    def _sharing(self, stage: StageMembers) -> float:
        if stage not in self._alone:
            self._alone[stage] = self.costs.data_parallel(stage)
        return self._alone[stage]


def _with(stage: StageMembers, old: int, new: int) -> StageMembers:
    return tuple(sorted([*(node for node in stage if node != old), new]))
