"""The notes of an audit of a simulated pipeline: passes, servers' lives, and counted work."""

from dataclasses import dataclass, field
from typing import Any

import torch

from farflock.node.train import microbatch_ids as notes


@dataclass(frozen=True, eq=False)
class Pass:
    """A pass that was computed: its stage, the round before it, its weights and its input; forward,
    or backward with the gradient that came from outside."""

    stage: int
    round: int
    weights: dict[str, torch.Tensor]
    x: bytes
    outside: bytes | None = None


@dataclass(frozen=True, eq=False)
class Whole:
    """A pass forward and back through all stages of a full replica, by these weights of the unsplit
    model; `stage` is the one whose gradient is asked for."""

    stage: int
    weights: dict[str, torch.Tensor]


@dataclass
class Life:
    """The events of one life of a server."""

    number: int
    stage: int
    serving: Any
    # the backward pass whose gradient is put aside
    computed: dict[tuple[str, int], Pass] = field(default_factory=dict)
    merged: dict[tuple[str, int], Pass] = field(default_factory=dict)
    used: Any = None  # the weights that the stage computed with last
    weights: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)  # by round


@dataclass
class WatchedSums:
    """A server's sums, whose `add` is watched."""

    sums: Any
    add: Any

    def __getattr__(self, name):
        return getattr(self.sums, name)


def counted(noted):
    """The counted microbatches in a round's notes, with their lateness."""
    return {key: age for key, age in notes.joined_ages([noted]).items() if age != notes.LATE}
