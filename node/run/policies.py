"""Path policies, by the names that manifests use."""

import functools
import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from farflock.swarm.links import PeerId
from farflock.swarm.paths.checkfree import SwappedPaths
from farflock.swarm.paths.partial_paths import BadSkip, PartialPaths
from farflock.swarm.paths.policy import PathPolicy, SwarmPaths, fixed, mixed
from farflock.swarm.paths.skippipe import BadPlan, PathPlan, PlannedPaths

SWAP = "swap"
SKIP = "skip"  # with the number of stages on a path: `skip:3`
PLANNED = "planned"  # the paths are terms of the run

# (layers of each stage, the run's seed, the asking peer) -> policy
Policy = Callable[[Sequence[int], int, str], PathPolicy]


class UnknownPolicy(ValueError):
    """No policy has this name."""


def _wired(layers: Sequence[int], seed: int, me: str) -> PathPolicy:
    return SwarmPaths(len(layers), random.Random(f"{seed}/{me}/wiring"))


POLICIES: Mapping[str, Policy] = {
    "swarm": _wired,
    "fixed": lambda layers, seed, me: fixed(len(layers), me),
    "noloco": lambda layers, seed, me: mixed(len(layers), seed, me),
    SWAP: lambda layers, seed, me: SwappedPaths(_wired(layers, seed, me), layers),
}
NAMES = (*POLICIES, PLANNED, f"{SKIP}:K")


def policy_of(
    name: str, layers: Sequence[int], seed: int, me: str, paths: PathPlan | None = None
) -> PathPolicy:
    """Return the named policy for stages of `layers` layers each; `paths` are the run's planned
    paths.

    Raise `UnknownPolicy` for an unknown name; `BadSwap`, `BadSkip` or `BadPlan` if the policy is
    impossible with these stages."""
    what, _, visited = name.partition(":")
    if what == SKIP:
        if not (visited.isascii() and visited.isdecimal() and len(visited) < 5):
            raise BadSkip(
                f"{name!r} does not say how many stages a path visits;"
                f" write {SKIP}:{max(len(layers) - 1, 3)}"
            )
        return PartialPaths(
            _wired(layers, seed, me), len(layers), int(visited), f"{seed}/{me}/partial"
        )
    if (name == PLANNED) != (paths is not None):
        why = (
            f"policy {PLANNED} has no paths to follow"
            if paths is None
            else f"policy {name!r} does not use the planned paths"
        )
        raise BadPlan(
            "horizon",
            why,
            f"give paths in [pipeline.plan] if the policy is {PLANNED}, and only then",
        )
    if paths is not None:
        return PlannedPaths(paths, len(layers))
    if name not in POLICIES:
        raise UnknownPolicy(f"{name!r} is not known")
    return POLICIES[name](layers, seed, me)


def lane_of(me: PeerId) -> int:
    """Return a trainer's pseudo-random lane, so that trainers differ and use all the lines of
    servers that a policy may have."""
    return int.from_bytes(hashlib.sha256(f"farflock-lane-v1 {me}".encode()).digest()[:4])


@functools.cache
def shares_of(
    name: str, layers: tuple[int, ...], paths: PathPlan | None = None
) -> tuple[Fraction, ...]:
    """Return, by stage, the share of all microbatches that visit it."""
    policy = policy_of(name, layers, 0, "", paths)
    return tuple(policy.share(stage) for stage in range(len(layers)))
