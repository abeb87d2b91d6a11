"""Computations by name: the only registry, a literal dict, which recipes choose from."""

from farflock.experiments.pipelines import depth, ladder, ordering, rebalancing, subspace, utilisation, wiring
from farflock.experiments.pipelines.table import Computation

COMPUTATIONS: dict[str, Computation] = {
    "activation-ladder": Computation(ladder.Size, ladder.compute),
    "depth": Computation(depth.Size, depth.compute),
    "dtfm-ordering": Computation(ordering.Size, ordering.compute),
    "subspace-nano": Computation(subspace.Size, subspace.compute),
    "swarm-rebalancing": Computation(rebalancing.Size, rebalancing.compute),
    "swarm-utilisation": Computation(utilisation.Size, utilisation.compute),
    "swarm-wiring": Computation(wiring.Size, wiring.compute),
}
