"""Partial paths: each microbatch visits K of the S stages, so that it takes fewer hops and less compute. The model bears it,
since residual blocks can stand in for each other when they are trained that way (SkipPipe, Blagoev et al., arXiv:2502.19913).

The first stage, which embeds, and the last, which has the loss, are on every path. Of those between, each is left out equally
often: a lane's microbatches go by cycles of as many as there are stages between, in each of which every such stage is visited
exactly K - 2 times, in an order that chance draws for each cycle. SkipPipe plans its paths beforehand, by measured links and
for servers that all stay (swarm/paths/planner.py); here who serves a stage remains the wrapped policy's choice, so that servers
may come and go.
"""

import random
from fractions import Fraction

from farflock.swarm.paths.policy import Microbatch, PathPolicy, ReorderedPaths


class BadSkip(ValueError):
    """So many of these stages cannot be visited; the message says how many can."""


class PartialPaths(ReorderedPaths):
    """Any policy, on paths of `visited` of its `stages`. `BadSkip` if that leaves out one of the ends, or stages between that
    nobody would ever train."""

    def __init__(self, policy: PathPolicy, stages: int, visited: int, seed: str) -> None:
        if not min(3, stages) <= visited <= stages:
            raise BadSkip(f"paths visit {visited} of {stages} stages; choose from {min(3, stages)} to {stages}")
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
        """The stages between the ends of which this microbatch visits none: in a cycle's order, laid out as a ring, each
        microbatch takes the stretch after the one before it."""
        cycle, place = divmod(microbatch.step + microbatch.index, self._between)
        ring = list(range(1, self._last))
        random.Random(f"{self._seed}/{microbatch.lane}/{cycle}").shuffle(ring)
        first = place * self._visited
        return frozenset(ring) - {ring[(first + turn) % self._between] for turn in range(self._visited)}
