"""A search for every arm's best learning rate: next to an untuned arm, any other looks good."""

import math
from collections.abc import Callable, Mapping, Sequence

from farflock.experiments.measure.threads import one_thread
from farflock.experiments.pipelines.table import Progress
from farflock.node.errors import Failure

Run = Callable[[float, int], float]  # loss by rate and seed; infinite if it diverged


def tuned(
    runs: Mapping[str, Run], rates: Sequence[float], seeds: Sequence[int], progress: Progress
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return each arm's best rate over all seeds, and its losses there.

    Raise `Failure` if an arm diverges at every rate for some seed.
    """
    best: dict[str, float] = {}
    losses: dict[str, list[float]] = {}
    done, count = 0, len(runs) * len(rates) * len(seeds)
    with one_thread():
        for name, run in runs.items():
            tried: dict[float, list[float]] = {rate: [] for rate in rates}
            for rate in rates:
                for seed in seeds:
                    tried[rate].append(run(rate, seed))
                    done += 1
                    progress(done / count)
            best[name] = min(tried, key=lambda rate: sum(tried[rate]))
            losses[name] = tried[best[name]]
            if not all(map(math.isfinite, losses[name])):
                raise Failure(f"{name}: every rate diverges for some seed", "", "add lower `rates`")
    return best, losses
