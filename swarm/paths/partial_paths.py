"""Partial paths: each microbatch visits K of the S stages, for fewer hops and less compute.

The model tolerates it, since residual blocks trained this way can stand in for each other
(SkipPipe, Blagoev et al., arXiv:2502.19913).

Every path has the first stage, which embeds, and the last, which has the loss. The stages between
are skipped equally often: a lane's microbatches come in cycles, each with one microbatch per such
stage, and a cycle visits every such stage exactly K - 2 times, in a random order of its own.
SkipPipe plans paths beforehand, from measured links and for servers that all stay
(swarm/paths/planner.py); here the wrapped policy still chooses the servers, so they may come and
go.
"""

import random
from fractions import Fraction

from farflock.swarm.paths.policy import Microbatch, PathPolicy, ReorderedPaths


class BadSkip(ValueError):
    """That many of these stages cannot be visited; the message says how many can."""


class PartialPaths(ReorderedPaths):
    """Any policy, on paths of `visited` of its `stages`; `BadSkip` for too few or too many."""

    def __init__(self, policy: PathPolicy, stages: int, visited: int, seed: str) -> None:
        if not min(3, stages) <= visited <= stages:
            raise BadSkip(
                f"paths that visit {visited} of {stages} stages; "
                f"choose {min(3, stages)} to {stages} stages"
            )
        super().__init__(policy)
        self._seed = seed
        self._between, self._visited = max(stages - 2, 1), max(visited - 2, 0)
        self._last = stages - 1

    def stage_order(self, microbatch: Microbatch) -> tuple[int, ...]:
        out = self._left_out(microbatch)
        return tuple(stage for stage in self._policy.stage_order(microbatch) if stage not in out)

    def share(self, stage: int) -> Fraction:
        inner = Fraction(self._visited, self._between) if 0 < stage < self._last else Fraction(1)
        return inner * self._policy.share(stage)

    def _left_out(self, microbatch: Microbatch) -> frozenset[int]:
        """Return the inner stages left out; microbatches visit a ring's stretches in turn."""
        cycle, place = divmod(microbatch.step + microbatch.index, self._between)
        ring = list(range(1, self._last))
        random.Random(f"{self._seed}/{microbatch.lane}/{cycle}").shuffle(ring)
        first = place * self._visited
        return frozenset(ring) - {
            ring[(first + turn) % self._between] for turn in range(self._visited)
        }
