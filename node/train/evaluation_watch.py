"""A node's record of the run's evaluations, and its word if two of them differ."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from farflock.node.reporting import Report
from farflock.node.train.evaluation_curve import EvaluatedPoint, EvaluationCurve
from farflock.swarm.links import PeerId
from farflock.swarm.messages import Evaluation
from farflock.swarm.peer.evaluations import EvaluationPlace, Evaluations

TOLERANCE = 1e-3  # of a loss: two devices' rounding of the same weights' mean loss stays far below

log = logging.getLogger(__name__)


@dataclass(slots=True)
class EvaluationWatch:
    """One node's view of the evaluations. `alone` is true among pairs, where each member knows
    only what it measured of its own weights."""

    evaluations: Evaluations
    report: Report
    alone: bool = False
    difference: str = ""  # between two members' values for the same weights, in words
    curve: EvaluationCurve = field(default_factory=EvaluationCurve)
    recorded: int = -1  # the last round that an earlier life of this node has recorded
    _differing: int = field(default=-1, init=False)  # the last round whose values were apart

    @property
    def newest(self) -> tuple[PeerId, Evaluation] | None:
        """The value of the newest round, and who measured it: of two, the one drawn first."""
        known = self.evaluations.known
        if not known:
            return None
        number = max(known)[0]
        there = {peer: value for (at, peer), value in known.items() if at == number}
        first = next((peer for peer in self.evaluations.drawn(number) if peer in there), None)
        peer = first if first is not None else next(iter(there))
        return peer, there[peer]

    def look(self, step: int) -> None:
        """Record the values that are new, those from before this node came first; `step` is this
        node's own."""
        fresh, known = self.evaluations.fresh, self.evaluations.known
        if not fresh or self.evaluations.is_learning:
            return
        for number, peer in sorted(fresh):
            value = known.get((number, peer))
            if value is not None and number > self.recorded:
                self._record(step, peer, value)
                self._compare(number)
        fresh.clear()

    def _record(self, step: int, peer: PeerId, value: Evaluation) -> None:
        first, *_ = (*self.evaluations.drawn(value.round), peer)
        if value.loss is not None:
            known = value.tokens, value.loss, value.standard_error
            self.curve.add(EvaluatedPoint(value.round, *known))
        self.report(
            "evaluation",
            {
                "step": step,
                "round": value.round,
                "by": peer,
                "repeated": peer != first,
                "own": self.alone,
                "loss": value.loss,
                "standard_error": value.standard_error,
                "bits_per_byte": value.bits_per_byte,
                "tokens": value.tokens,
            },
        )

    def _compare(self, number: int) -> None:
        """Say it if two members measured the same weights, and not the same loss."""
        known = self.evaluations.known
        places = [place for place in known if place[0] == number]
        if len(places) < 2 or number <= self._differing or _agree([known[x] for x in places]):
            return
        self._differing = number
        said = " and ".join(_said(place, known[place]) for place in places)
        self.difference = (
            f"two members evaluated the same weights before round {number} and differ: {said};"
            " one of them computes wrongly, or lies"
        )
        log.warning("%s", self.difference)
        losses = {peer: known[number, peer].loss for _, peer in places}
        self.report("difference", {"round": number, "losses": losses})


def go_on(watch: EvaluationWatch | None, meta: Mapping[str, Any]) -> None:
    """Let a node's curve, if it has one, go on from a checkpoint's."""
    if watch is not None:
        watch.curve.resume(meta)
        watch.recorded = watch.curve.points[-1].round if watch.curve.points else -1


def _agree(values: Sequence[Evaluation]) -> bool:
    losses = [value.loss for value in values]
    finite = [loss for loss in losses if loss is not None]
    if len(finite) < len(losses):
        return not finite
    return max(finite) - min(finite) <= TOLERANCE * max(finite)


def _said(place: EvaluationPlace, value: Evaluation) -> str:
    loss = "a loss that is not finite" if value.loss is None else f"{value.loss:.4f}"
    return f"{place[1]} says {loss}"
