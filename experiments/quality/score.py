"""Shares of the gain from runs: runs that count, best trials, finalists, and what they keep.

Nothing here trains, so all of it can be tested on made-up losses.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from farflock.experiments.quality.arms import Trial
from farflock.experiments.reproduce.job import Outcome


@dataclass(frozen=True, slots=True)
class Contender:
    """A configuration of a baseline or a method; `budget` is None for baselines."""

    arm: str
    budget: int | None
    trial: Trial

    @property
    def name(self) -> str:
        """The name of all its trials, such as `ddp` or `diloco.100`."""
        return self.arm if self.budget is None else f"{self.arm}.{self.budget}"

    def at(self, rate: float) -> "Contender":
        """Return this contender with another learning rate."""
        return replace(self, trial=msgspec.structs.replace(self.trial, lr=rate))


@dataclass(frozen=True, slots=True)
class Run:
    """A contender's run on one seed; `ring_bytes` are a peer's in the same steps of exact DDP."""

    contender: Contender
    seed: int
    outcome: Outcome
    ring_bytes: float

    @property
    def loss(self) -> float:
        """Held-out loss in nats per token; infinite if the run diverged."""
        return self.outcome.metrics.get("loss", math.inf)

    @property
    def sent_bytes(self) -> float | None:
        """Mean bytes sent by a peer; None if the run diverged.

        They are those of the ring for DDP, and the transport's count for all others.
        """
        return self.ring_bytes if self.contender.arm == "ddp" else self.outcome.metrics.get("bytes")

    @property
    def saving(self) -> float | None:
        """DDP's bytes over the run's (infinite if it sent none); None if it diverged."""
        sent = self.sent_bytes
        return None if sent is None else self.ring_bytes / sent if sent else math.inf

    @property
    def excess(self) -> float:
        """The share by which the bytes exceed the budget; a run above 0 does not count."""
        sent, budget = self.sent_bytes, self.contender.budget
        return (
            0.0 if sent is None or budget is None else max(sent * budget / self.ring_bytes - 1, 0.0)
        )

    @property
    def counts(self) -> bool:
        """True if the run did not diverge and stayed within its budget."""
        return math.isfinite(self.loss) and not self.excess


@dataclass(frozen=True, slots=True)
class Final:
    """A finalist: rates tried at full length on the first seed, and all seeds at the best one."""

    ladder: tuple[Run, ...]
    runs: tuple[Run, ...]

    @property
    def rate(self) -> float:
        """The best learning rate."""
        return self.runs[0].contender.trial.lr

    @property
    def at_edge(self) -> bool:
        """True if the best rate is the lowest or highest tried; a better one may lie outside."""
        rates = [run.contender.trial.lr for run in self.ladder]
        return len(rates) > 1 and self.rate in (min(rates), max(rates))

    @property
    def losses(self) -> list[float]:
        """The loss of each seed; empty if any run does not count."""
        return [run.loss for run in self.runs] if all(run.counts for run in self.runs) else []


@dataclass(frozen=True, slots=True)
class Scores:
    """All results by contender name: the screen's runs in order, and the finalists."""

    screen: Mapping[str, Sequence[Run]]
    finals: Mapping[str, Final]

    def at(self, budget: int) -> list[str]:
        """Return the names screened at a budget."""
        return [name for name, runs in self.screen.items() if runs[0].contender.budget == budget]

    def shares(self, name: str) -> list[float]:
        """Return a finalist's shares, one per seed; empty if a run does not count or DDP has no
        gain."""
        return shares(*(self.finals[arm].losses for arm in ("none", "ddp", name)))

    def screen_share(self, run: Run) -> float | None:
        """Return a screened run's share by the baselines' best runs; None if it has none."""
        lines = [best(self.screen[line]) for line in ("none", "ddp")]
        found = shares(
            *([one.loss] if one is not None and one.counts else [] for one in (*lines, run))
        )
        return found[0] if found else None


def shares(none: Sequence[float], ddp: Sequence[float], method: Sequence[float]) -> list[float]:
    """Return the share of DDP's gain over no communication that a method keeps, seed by seed.

    Runs of one seed have the same data and initial weights. Empty if a seed is missing, or if DDP
    is not better on one of them: then there is no gain to keep.
    """
    if not len(none) == len(ddp) == len(method):
        return []
    if any(alone <= exact for alone, exact in zip(none, ddp, strict=True)):
        return []
    return [
        (alone - ours) / (alone - exact)
        for alone, exact, ours in zip(none, ddp, method, strict=True)
    ]


def best(runs: Iterable[Run]) -> Run | None:
    """Return the run with the lowest loss of those that count, the first of equals, or None."""
    return min((run for run in runs if run.counts), key=lambda run: run.loss, default=None)


def ranked(screen: Mapping[str, Sequence[Run]], names: Iterable[str]) -> list[str]:
    """Return the names that have a run that counts, the lowest loss first."""
    found = {name: one.loss for name in names if (one := best(screen[name])) is not None}
    return sorted(found, key=lambda name: (found[name], name))


def edges(runs: Sequence[Run]) -> list[str]:
    """Return the settings (`lr`, `warmup`) whose best value is at an end of the baseline's grid."""
    found, chosen = [], best(runs)
    for setting in ("lr", "warmup"):
        values = {getattr(run.contender.trial, setting) for run in runs}
        if (
            chosen
            and len(values) > 1
            and getattr(chosen.contender.trial, setting) in (min(values), max(values))
        ):
            found.append(setting)
    return found
