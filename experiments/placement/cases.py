"""Networks to test planners on: measured links of two clouds, and links drawn at random."""

from dataclasses import dataclass

import numpy as np

from farflock.experiments.placement import regions
from farflock.experiments.placement.layout import Costs, Layout, LinkCosts, StepTraffic
from farflock.experiments.placement.planner import WORK, balanced, plan

# DT-FM's workload. A stage has three of 24 layers, which have 1.3e9 parameters of four bytes. One
# of eight pipelines takes an eighth of a million tokens, in sequences of 2048, with two bytes for
# each of 2048 channels (the authors' code has 2024 tokens, which must be a slip).
GPT3_XL = StepTraffic(
    gradient_bytes=1.3e9 * 4 * 3 / 24, activation_bytes=125_000 / 2048 * 2048 * 2048 * 2
)


@dataclass(frozen=True, slots=True)
class Scale:
    """Nodes, stages, the number of small cases solved exactly, and the lengths of the searches."""

    nodes: int = 64
    stages: int = 8
    small: int = 50
    trials: int = 500
    work: int = WORK


@dataclass(frozen=True, slots=True)
class Case:
    """A named network of links, and the traffic on it."""

    name: str
    links: LinkCosts
    traffic: StepTraffic

    def plan(self, size: Scale, seed: int) -> Layout:
        """Return our planner's layout."""
        return plan(
            Costs(self.links, self.traffic), balanced(size.nodes, size.stages), seed, size.work
        )


def cases(nodes: int) -> list[Case]:
    """Return the three cases with this many nodes."""
    tables = regions.load()
    where = [regions.WORLDWIDE[node % len(regions.WORLDWIDE)] for node in range(nodes)]
    return [
        Case("worldwide", tables["aws"].links(where), GPT3_XL),
        Case("gcp", tables["gcp"].links(tables["gcp"].turns(nodes)), GPT3_XL),
        drawn(nodes, 0),
    ]


def drawn(nodes: int, seed: int) -> Case:
    """Draw links of 1 to 200 ms and 1 to 100 MB/s; a gradient is ten times as large as
    activations."""
    chance = np.random.Generator(np.random.PCG64(seed))
    links = LinkCosts.of(
        chance.uniform(0.001, 0.2, (nodes, nodes)), chance.uniform(1e6, 1e8, (nodes, nodes))
    )
    return Case("by chance", links, StepTraffic(5e7, 5e6))
