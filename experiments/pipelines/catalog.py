"""The computations by name. This literal dict is the only registry from which recipes choose."""

from farflock.experiments.pipelines import (
    checkfree,
    checkfree_hours,
    contention,
    delay,
    depth,
    ladder,
    noloco_pipeline,
    noloco_sync,
    ordering,
    rebalancing,
    selective,
    skippipe,
    skippipe_halves,
    subspace,
    utilisation,
    wiring,
)
from farflock.experiments.pipelines.table import Computation

COMPUTATIONS: dict[str, Computation] = {
    "activation-ladder": Computation(ladder.Size, ladder.compute),
    "checkfree": Computation(checkfree.Size, checkfree.compute),
    "checkfree-hours": Computation(checkfree_hours.Size, checkfree_hours.compute),
    "delay": Computation(delay.Size, delay.compute),
    "depth": Computation(depth.Size, depth.compute),
    "dtfm-ordering": Computation(ordering.Size, ordering.compute),
    "noloco-pipeline": Computation(noloco_pipeline.Size, noloco_pipeline.compute),
    "noloco-sync": Computation(noloco_sync.Size, noloco_sync.compute),
    "selective": Computation(selective.Size, selective.compute),
    "skippipe": Computation(skippipe.Size, skippipe.compute),
    "skippipe-effects": Computation(contention.Size, contention.compute),
    "skippipe-halves": Computation(skippipe_halves.Size, skippipe_halves.compute),
    "subspace-nano": Computation(subspace.Size, subspace.compute),
    "swarm-rebalancing": Computation(rebalancing.Size, rebalancing.compute),
    "swarm-utilisation": Computation(utilisation.Size, utilisation.compute),
    "swarm-wiring": Computation(wiring.Size, wiring.compute),
}
