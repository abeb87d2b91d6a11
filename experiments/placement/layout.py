"""The cost of a layout of nodes into pipeline stages, in seconds of communication per step.

A planner is only as good as its objective, so the model is exactly that of DT-FM (Yuan et al.,
arXiv:2206.01288, equations 1 to 4): a sharded parameter server in each stage, the best partners
between neighbouring stages, and stages in their cheapest order. Links are made symmetric, as there.

Deviation: stages may differ in size. Between unequal stages, each node of the larger has a partner,
and no node of the smaller has more partners than the sizes force. With equal sizes this is the
paper's perfect matching.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
from numpy.typing import ArrayLike, NDArray

Matrix = NDArray[np.float64]
StageMembers = tuple[int, ...]  # numbers of nodes, ascending
MatrixRows = Sequence[Sequence[float]]

MAX_NODES = 1024
MAX_STAGES = 16  # Held and Karp's table has stages · 2^stages entries: here 8 MiB


@dataclass(frozen=True, slots=True, eq=False)
class LinkCosts:
    """One-way latency and bandwidth of each pair of nodes, both symmetric with unused diagonals."""

    latency_s: Matrix
    bandwidth: Matrix  # bytes per second

    @classmethod
    def of(cls, latency_s: ArrayLike, bandwidth: ArrayLike) -> "LinkCosts":
        """Return links from two matrices of measurements; the mean of both directions counts.

        Raise `ValueError` unless they are square, of the same size, with finite latencies of at
        least 0 and finite bandwidths above 0.
        """
        latency, rate = (
            np.asarray(latency_s, dtype=np.float64),
            np.asarray(bandwidth, dtype=np.float64),
        )
        if latency.ndim != 2 or latency.shape[0] != latency.shape[1] or latency.shape != rate.shape:
            raise ValueError(
                f"latencies have shape {latency.shape} and bandwidths have shape {rate.shape}; "
                "give two matrices with one row and one column per node"
            )
        if not 1 <= len(latency) <= MAX_NODES:
            raise ValueError(f"cannot plan {len(latency)} nodes; give 1 to {MAX_NODES}")
        for name, matrix, fits in (
            ("latency", latency, np.isfinite(latency) & (latency >= 0)),
            ("bandwidth", rate, np.isfinite(rate) & (rate > 0)),
        ):
            wrong = np.argwhere(~(fits | np.eye(len(matrix), dtype=bool)))
            if len(wrong):
                i, j = (int(index) for index in wrong[0])
                raise ValueError(
                    f"the {name} from node {i} to node {j} is {matrix[i, j]}; "
                    "measure it again or leave out one of the two nodes"
                )
        mean_latency, mean_rate = (latency + latency.T) / 2, (rate + rate.T) / 2
        np.fill_diagonal(mean_latency, 0.0)
        np.fill_diagonal(mean_rate, 1.0)
        return cls(mean_latency, mean_rate)

    def __len__(self) -> int:
        return len(self.latency_s)


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """Bytes per step: a stage's gradient (`c_dp`) and a node's output to the next (`c_pp`)."""

    gradient_bytes: float
    activation_bytes: float

    def __post_init__(self) -> None:
        for name, size in (
            ("gradient", self.gradient_bytes),
            ("activations", self.activation_bytes),
        ):
            if not (math.isfinite(size) and size >= 0):
                raise ValueError(
                    f"cannot send {size} bytes of {name}; give a finite number of at least 0"
                )


@dataclass(frozen=True, slots=True)
class Layout:
    """Stages in the order of the pipeline, and their cost."""

    stages: tuple[StageMembers, ...]
    data_parallel_s: float
    pipeline_s: float

    @property
    def seconds(self) -> float:
        """The cost of communication, COMM in the paper, which the planners minimise."""
        return self.data_parallel_s + self.pipeline_s


class Costs:
    """Equations 1 to 3 on given links, in plain lists: single pairs are looked up very often."""

    def __init__(self, links: LinkCosts, traffic: StepTraffic) -> None:
        self.nodes = len(links)
        self._links, self._traffic = links, traffic
        self.handing_s: list[list[float]] = _pair(links, traffic.activation_bytes).tolist()
        self._sharing_s: dict[int, list[list[float]]] = {}

    def sharing_s(self, size: int) -> list[list[float]]:
        """Return each pair's cost in a stage of `size` nodes, each with 1/`size` of gradients."""
        if size not in self._sharing_s:
            self._sharing_s[size] = _pair(self._links, self._traffic.gradient_bytes / size).tolist()
        return self._sharing_s[size]

    def data_parallel(self, stage: Sequence[int]) -> float:
        """Return DATAP of one stage: its slowest node's exchanges with all others in sequence."""
        if len(stage) == 1:
            return 0.0
        pair, members = self.sharing_s(len(stage)), itemgetter(*stage)
        return float(max(sum(members(pair[node])) for node in stage))

    def match(self, one: Sequence[int], other: Sequence[int]) -> float:
        """Return MATCH of two stages: the slowest link if all nodes have the best partners."""
        return bottleneck(self._between(one, other))[0]

    def layout(self, stages: Sequence[Sequence[int]]) -> Layout:
        """Return the layout of a partition with its stages in the cheapest order (COMM)."""
        count = len(stages)
        weights = np.zeros((count, count))
        for j in range(count):
            for k in range(j):
                weights[j, k] = weights[k, j] = self.match(stages[j], stages[k])
        pipeline_s, order = cheapest_order(weights)
        ordered = tuple(tuple(sorted(stages[stage])) for stage in order)
        return Layout(ordered, max(map(self.data_parallel, ordered)), pipeline_s)

    def _between(self, one: Sequence[int], other: Sequence[int]) -> list[tuple[float, ...]]:
        larger, smaller = (one, other) if len(one) >= len(other) else (other, one)
        places = _places(larger, smaller)
        if len(places) == 1:
            return [(self.handing_s[larger[0]][places[0]],)]
        members = itemgetter(*places)
        return [members(self.handing_s[node]) for node in larger]


def _places(larger: Sequence[int], smaller: Sequence[int]) -> Sequence[int]:
    """Return the nodes of the smaller stage, each as often as it may be a partner."""
    return (
        smaller
        if len(larger) == len(smaller)
        else tuple(smaller) * math.ceil(len(larger) / len(smaller))
    )


def _pair(links: LinkCosts, size_bytes: float) -> Matrix:
    """Return 2 · (latency + bytes / bandwidth), for both ways, and 0 from a node to itself."""
    seconds: Matrix = 2 * (links.latency_s + size_bytes / links.bandwidth)
    np.fill_diagonal(seconds, 0.0)
    return seconds


def bottleneck(rows: MatrixRows) -> tuple[float, list[int]]:
    """Assign distinct columns to rows; return the smallest possible maximum, and the columns.

    `rows` has at least as many columns as rows. The limit starts at a lower bound of all
    assignments, and rises only to the next entry that may give a column to a row without one
    (Gross, "The bottleneck assignment problem", 1959).
    """
    limit = max(map(min, rows))
    if len(rows) == len(rows[0]):
        limit = max(limit, max(map(min, zip(*rows, strict=True))))
    holders: dict[int, int] = {}  # column -> row
    for row in range(len(rows)):
        seen: set[int] = set()
        tried = [row]
        while not _place(row, rows, limit, holders, seen, tried):
            limit = min(
                [entry for r in tried for column, entry in enumerate(rows[r]) if column not in seen]
            )
            seen, tried = set(), [row]
    columns = [0] * len(rows)
    for column, row in holders.items():
        columns[row] = column
    return limit, columns


def _place(
    row: int,
    rows: MatrixRows,
    limit: float,
    holders: dict[int, int],
    seen: set[int],
    tried: list[int],
) -> bool:
    """Give a row a column within the limit, moving other rows if needed; return whether it has one.

    `seen` collects columns, `tried` rows.
    """
    for column, entry in enumerate(rows[row]):
        if entry <= limit and column not in holders:
            holders[column] = row
            return True
    for column, entry in enumerate(rows[row]):
        if entry <= limit and column not in seen:
            seen.add(column)
            tried.append(holders[column])
            if _place(holders[column], rows, limit, holders, seen, tried):
                holders[column] = row
                return True
    return False


def cheapest_order(weights: Matrix) -> tuple[float, tuple[int, ...]]:
    """Return PIPEP: the cost of the cheapest open path through all stages, and the stages' order.

    This is Held and Karp's dynamic program over sets of stages; `weights` is symmetric. The end of
    the path with the lower number comes first. Raise `ValueError` beyond `MAX_STAGES`.
    """
    count = len(weights)
    if not 1 <= count <= MAX_STAGES:
        raise ValueError(f"cannot order {count} stages exactly; give 1 to {MAX_STAGES}")
    cheapest = np.full((1 << count, count), np.inf)  # [set, last stage of the path through it]
    cheapest[1 << np.arange(count), np.arange(count)] = 0.0
    for sets, lasts, before in _extensions(count):
        cheapest[sets, lasts] = (cheapest[before] + weights[lasts]).min(axis=1)
    last, todo = int(cheapest[-1].argmin()), (1 << count) - 1
    order = [last]
    while todo := todo & ~(1 << last):
        last = int((cheapest[todo] + weights[last]).argmin())
        order.append(last)
    return float(cheapest[-1].min()), tuple(order if order[0] <= order[-1] else reversed(order))


@functools.lru_cache(maxsize=MAX_STAGES)
def _extensions(
    count: int,
) -> tuple[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]], ...]:
    """Return for each size from 2: sets of stages, their last stages, and the sets without them."""
    every = np.arange(1 << count)
    member = (every[:, None] >> np.arange(count)) & 1
    sizes = member.sum(axis=1)
    steps = []
    for size in range(2, count + 1):
        sets, lasts = np.nonzero(member * (sizes == size)[:, None])
        steps.append((sets, lasts, sets & ~(1 << lasts)))
    return tuple(steps)
