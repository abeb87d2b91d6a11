"""A run's evaluations over time, as a node keeps them in its checkpoints for the model's card."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from farflock.swarm.messages import BoundedLoss, Count

CURVE = "evaluations"  # in a checkpoint's meta
MAX_POINTS = 512


class EvaluatedPoint(msgspec.Struct, frozen=True, array_like=True):
    """One evaluation, of the weights before a round, at so many tokens of the run: the loss and its
    standard error in nats a token."""

    round: Count
    tokens: Count
    loss: BoundedLoss
    standard_error: BoundedLoss


_Points = Annotated[list[EvaluatedPoint], msgspec.Meta(max_length=2 * MAX_POINTS)]


@dataclass(slots=True)
class EvaluationCurve:
    """The values in the order of rounds: all of them or, of more than `MAX_POINTS`, a part of the
    older ones, evenly."""

    points: list[EvaluatedPoint] = field(default_factory=list)

    def add(self, point: EvaluatedPoint) -> None:
        """Take in a value, unless one of its round or of a later one is here."""
        if self.points and point.round <= self.points[-1].round:
            return
        self.points.append(point)
        if len(self.points) > MAX_POINTS:
            del self.points[1:-1:2]

    def resume(self, meta: Mapping[str, Any]) -> None:
        """Go on from a checkpoint of this node."""
        later, self.points = self.points, points_of(meta)
        for point in later:
            self.add(point)


def points_of(meta: Mapping[str, Any]) -> list[EvaluatedPoint]:
    """Return the values in a checkpoint's meta; none if it has none that can be read."""
    try:
        found = msgspec.convert(meta.get(CURVE, []), _Points)
    except msgspec.ValidationError:
        return []
    return sorted(found, key=lambda point: point.round)
