"""Consensus of replicas moved by the outer step alone: NoLoCo's arithmetic without any gradient.

Replicas begin apart and are paired at random each round. The result is the factor per round by
which their mean square distance from the mean grows. Nothing is trained, so theta is phi.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from farflock.experiments.reproduce.job import Noise, Outcome, Point
from farflock.optimizers.method import Exchange, Progress, Result, Tensors, What
from farflock.optimizers.noloco import NoLoCo, stability_bound
from farflock.optimizers.parts.blocks import BlocksOfWhole

WEIGHTS = 256
NAME = "weights"
GONE = 1e-10  # of the initial distance: below it only float32 rounding is left
SETTLING = 10  # rounds left out of the growth: momentum starts at rest


class Still(BlocksOfWhole):
    """A replica that no gradient ever moves."""

    names = (NAME,)
    shapes: Mapping[str, tuple[int, ...]] = {NAME: (WEIGHTS,)}

    def __init__(self, weights: Tensor) -> None:
        self._weights = weights.clone()

    def read(self, names: Sequence[str], what: What) -> dict[str, Tensor]:
        """Return a copy of the weights."""
        return {NAME: self._weights.clone()}

    def write(self, tensors: Tensors, what: What, mix: float = 1.0) -> None:
        """Replace the weights; `mix` is not used."""
        self._weights = tensors[NAME].clone()

    def inner_step(self, lr: float | None = None) -> None:
        """Do nothing: there is no gradient."""


def run(job: Noise, progress: Callable[[float], None]) -> Outcome:
    """Return the metrics `growth`, the distance's factor per round, and `bound`, gamma's limit."""
    chance = torch.Generator().manual_seed(job.seed)
    replicas = [Still(torch.randn(WEIGHTS, generator=chance)) for _ in range(job.peers)]
    methods = [_method(job) for _ in replicas]
    pairs = random.Random(f"{job.seed}/pairs")
    distances = [_distance(replicas)]
    for number in range(job.rounds):
        _round(number, replicas, methods, pairs)
        distances.append(_distance(replicas))
        progress((number + 1) / job.rounds)
        if not GONE < distances[-1] / distances[0] < 1 / GONE:
            break
    settled = distances[min(SETTLING, (len(distances) - 1) // 2) :]
    growth = (settled[-1] / settled[0]) ** (1 / (len(settled) - 1)) if settled[0] else 0.0
    curve = [
        Point(
            tokens=number,
            sent_bytes=0,
            compute_s=0,
            loss=distance,
            lr=0,
            spread=math.sqrt(distance),
        )
        for number, distance in enumerate(distances)
    ]
    return Outcome(metrics={"growth": growth, "bound": stability_bound(job.alpha)}, curve=curve)


def _method(job: Noise) -> NoLoCo:
    """Return a NoLoCo with any gamma, set afterwards because the constructor rejects bad ones."""
    method = NoLoCo(period=1, alpha=job.alpha, beta=0.1, gamma=0.1, codec="fp32")
    method.beta = method.gamma = job.gamma
    return method


def _round(
    number: int, replicas: Sequence[Still], methods: Sequence[NoLoCo], pairs: random.Random
) -> None:
    """Take one outer step of each replica with a random partner; with an odd number, one steps
    alone."""
    asked: list[Exchange] = []
    for replica, method in zip(replicas, methods, strict=True):
        method.local_step(replica, Progress(number))
        asked += method.due(replica, Progress(number + 1))
    order = pairs.sample(range(len(replicas)), len(replicas))
    for group in [sorted(order[first : first + 2]) for first in range(0, len(order), 2)]:
        sent = [asked[member].tensors[NAME] for member in group]
        mean = {NAME: torch.stack(sent).mean(dim=0)}
        for member in group:
            result = Result(
                "ok" if len(group) > 1 else "alone",
                number + 1,
                tuple(str(one) for one in group),
                (1.0,) * len(group),
                mean,
                sent=asked[member].tensors,
                taken={NAME: ((0, WEIGHTS),)},
            )
            methods[member].apply(replicas[member], asked[member], result)


def _distance(replicas: Sequence[Still]) -> float:
    """Return the weights' mean square distance from their mean over replicas, in float64."""
    together = torch.stack([replica.read((NAME,), "param")[NAME].double() for replica in replicas])
    return float((together - together.mean(dim=0)).square().mean())
