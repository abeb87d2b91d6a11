"""A row of `bench faults`, as data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from farflock.experiments.bench.workers.hosted_swarm import HostedSwarm, Setting

Seconds = dict[str, float]  # until progress, by metric; NEVER where it did not come


@dataclass(frozen=True, slots=True)
class Play:
    """A fault that is done to a swarm that trains together, with its parameters in words.

    `strike` does it, undoes it, and returns the seconds of each metric, of which the first is
    `name`; it is called again with the same swarm if all came to pass. `before` are the seconds at
    e28b7fbf by metric, as `source` says."""

    name: str
    what: str
    strike: Callable[[HostedSwarm], Seconds]
    setting: Setting = field(default_factory=Setting)
    before: Mapping[str, float] = field(default_factory=dict)
    source: str = ""
