"""SkipPipe's released instance: 20 nodes in six stages, four sets of paths, and their starts.

Source: gensyn-ai/skippipe, `schedule.json` and the scripts that made it. Node k is in region k mod
12 of its table of links (`experiments/placement/regions.toml`, `gcp`). The released delays contain
the table's mistake between the Netherlands and London; without it, the same plans are simulated on
correct links.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from farflock.experiments.placement import regions
from farflock.experiments.placement.layout import LinkCosts

PARTITION = (
    (0, 3, 4, 10, 11),
    (15, 8, 14),
    (1, 9, 6),
    (16, 12, 13),
    (5, 18, 7),
    (17, 2, 19),
)  # stage 0 has the data nodes
NODES = sum(map(len, PARTITION))
STAGE_OF = {node: stage for stage, nodes in enumerate(PARTITION) for node in nodes}
# 8 samples · 1024 tokens · 1024 channels · 4 bytes, plus what the delays imply.
MICROBATCH_BYTES = 32 * 2**20 + 216
OVERHEAD_S = 0.35  # the released planner's 0.13 + 0.20 + 0.02 for each transfer
FORWARD_S = 0.44  # inferred from the released times
SCRIPT_FORWARD_S = 1.76  # the script's present value: 0.055 s for each of 4 layers and 8 samples
MEMORY = 3  # microbatches that a node holds between their forward and their backward pass

Path = tuple[int, ...]  # nodes from the data node, to which the output returns
Paths = Mapping[int, tuple[Path, ...]]  # the paths of each data node


def _from(tails: Mapping[int, tuple[Path, ...]]) -> Paths:
    return {origin: tuple((origin, *tail) for tail in each) for origin, each in tails.items()}


# Full pipelines, one per node of a later stage; so two of the five data nodes are idle.
FULL: Paths = {
    PARTITION[0][column]: (tuple(nodes[column] for nodes in PARTITION),) for column in range(3)
}
RANDOM = _from(
    {
        0: ((12, 7, 17), (14, 16, 9), (1, 8, 19)),
        3: ((12, 7, 17), (15, 6, 5), (1, 8, 19)),
        4: ((13, 18, 2), (15, 6, 5), (1, 8, 19)),
        10: ((13, 18, 2), (15, 6, 5), (14, 16, 9)),
        11: ((13, 18, 2), (12, 7, 17), (14, 16, 9)),
    }
)
NOT_COLLISION_AWARE = _from(
    {
        0: ((12, 5, 19), (1, 19, 18), (6, 18, 17)),
        3: ((12, 6, 2), (14, 12, 2), (6, 14, 13)),
        4: ((15, 13, 7), (15, 5, 17), (15, 13, 7)),
        10: ((1, 17, 5), (1, 7, 2), (14, 18, 19)),
        11: ((8, 16, 9), (8, 16, 9), (8, 16, 9)),
    }
)
COLLISION_AWARE = _from(
    {
        0: ((14, 6, 12),),
        3: ((15, 17, 5),),
        4: ((7, 13, 19),),
        10: ((1, 18, 2),),
        11: ((8, 16, 9),),
    }
)


@dataclass(frozen=True, slots=True)
class Start:
    """One microbatch: its number (the last two digits are its slot), its start and its path."""

    number: int
    start_s: float
    path: Path


def full_starts() -> Iterator[Start]:
    """Yield 27 microbatches: each of three data nodes starts three, three times."""
    for column, (path,) in enumerate(FULL.values()):
        for turn in range(3):
            for k in range(3):
                yield Start(100 * turn + 3 * k + 9 * column, 0.1 * turn, path)


def drawn_starts(paths: Paths, forward_s: float) -> Iterator[Start]:
    """Yield 30 microbatches: five data nodes start one on each of their three paths, twice."""
    for lane, each in enumerate(paths.values()):
        for turn in range(2):
            for k, path in enumerate(each):
                yield Start(100 * turn + 3 * lane + k, 2.5 * turn + k * forward_s, path)


def planned_starts(paths: Paths) -> Iterator[Start]:
    """Yield 30 microbatches: each of five data nodes starts three, twice, on its paths in turn."""
    for lane, each in enumerate(paths.values()):
        for turn in range(2):
            for q in range(3):
                yield Start(
                    100 * turn + 10 * q + lane, 2.5 * turn + q, each[(3 * turn + q) % len(each)]
                )


@functools.cache
def links(mistaken: bool) -> LinkCosts:
    """Return the links of the nodes, as released if `mistaken`, else corrected."""
    gcp = regions.load()["gcp"]
    return gcp.links(gcp.turns(NODES), released=mistaken)


def delays_s(mistaken: bool = True) -> list[list[float]]:
    """Return a microbatch's seconds between each two nodes; the diagonal means nothing."""
    found = links(mistaken)
    delays: list[list[float]] = (
        found.latency_s + MICROBATCH_BYTES / found.bandwidth + OVERHEAD_S
    ).tolist()
    return delays
