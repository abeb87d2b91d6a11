"""From runs to shares: what counts, which trial is the best, which methods are in the final, and what they keep.

Nothing here trains, so that all of it can be tested on made-up losses.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from farflock.experiments.quality.arms import Trial
from farflock.experiments.reproduce.job import Outcome


@dataclass(frozen=True, slots=True)
class Contender:
    """A configuration of a line or a method; `budget` is None for lines."""

    arm: str
    budget: int | None
    trial: Trial

    @property
    def name(self) -> str:
        """`ddp`, or `diloco.100`."""
        return self.arm if self.budget is None else f"{self.arm}.{self.budget}"

    def at(self, rate: float) -> "Contender":
        """The same with another learning rate."""
        return replace(self, trial=msgspec.structs.replace(self.trial, lr=rate))


@dataclass(frozen=True, slots=True)
class Run:
    """A contender's run on one seed. `ring_bytes` are what exact DDP sends a peer in as many steps."""

    contender: Contender
    seed: int
    outcome: Outcome
    ring_bytes: float

    @property
    def loss(self) -> float:
        """Held out, in nats a token; infinite if it diverged."""
        return self.outcome.metrics.get("loss", math.inf)

    @property
    def sent_bytes(self) -> float | None:
        """A peer's, mean over peers: the ring's for DDP, else the transport's counter; None if it diverged."""
        return self.ring_bytes if self.contender.arm == "ddp" else self.outcome.metrics.get("bytes")

    @property
    def saving(self) -> float | None:
        """How many times fewer bytes than DDP's (infinite for none); None if it diverged."""
        sent = self.sent_bytes
        return None if sent is None else self.ring_bytes / sent if sent else math.inf

    @property
    def excess(self) -> float:
        """Its bytes over those that its budget allows, less one; 0 for what stays within. Above 0 the run does not count."""
        sent, budget = self.sent_bytes, self.contender.budget
        return 0.0 if sent is None or budget is None else max(sent * budget / self.ring_bytes - 1, 0.0)

    @property
    def counts(self) -> bool:
        """Whether it ended, within its budget."""
        return math.isfinite(self.loss) and not self.excess


@dataclass(frozen=True, slots=True)
class Final:
    """A finalist: the rates that were tried at full length on the first seed, and all seeds at the best of them."""

    ladder: tuple[Run, ...]
    runs: tuple[Run, ...]

    @property
    def rate(self) -> float:
        """The best one."""
        return self.runs[0].contender.trial.lr

    @property
    def at_edge(self) -> bool:
        """Whether it is the least or the greatest that was tried: a better one may lie outside."""
        rates = [run.contender.trial.lr for run in self.ladder]
        return len(rates) > 1 and self.rate in (min(rates), max(rates))

    @property
    def losses(self) -> list[float]:
        """Of each seed; empty if a run does not count."""
        return [run.loss for run in self.runs] if all(run.counts for run in self.runs) else []


@dataclass(frozen=True, slots=True)
class Scores:
    """What came of it all, by name of the contender: the screen's runs in their order, and the finalists."""

    screen: Mapping[str, Sequence[Run]]
    finals: Mapping[str, Final]

    def at(self, budget: int) -> list[str]:
        """The names that were screened at a budget."""
        return [name for name, runs in self.screen.items() if runs[0].contender.budget == budget]

    def shares(self, name: str) -> list[float]:
        """A finalist's, of each seed; empty if a run does not count, or where DDP gains nothing."""
        return shares(*(self.finals[arm].losses for arm in ("none", "ddp", name)))

    def screen_share(self, run: Run) -> float | None:
        """Of one run of the screen, beside the best of both lines; None if it does not count."""
        lines = [best(self.screen[line]) for line in ("none", "ddp")]
        found = shares(*([one.loss] if one is not None and one.counts else [] for one in (*lines, run)))
        return found[0] if found else None


def shares(none: Sequence[float], ddp: Sequence[float], method: Sequence[float]) -> list[float]:
    """The share of DDP's gain over no communication that a method keeps, seed by seed: runs of one seed have the same data
    and initial weights. Empty if a seed is lacking, or if on one DDP is not better than none: there is nothing to keep."""
    if not len(none) == len(ddp) == len(method):
        return []
    if any(alone <= exact for alone, exact in zip(none, ddp, strict=True)):
        return []
    return [(alone - ours) / (alone - exact) for alone, exact, ours in zip(none, ddp, method, strict=True)]


def best(runs: Iterable[Run]) -> Run | None:
    """The lowest loss among those that count; the earlier of two equal ones, None if none counts."""
    return min((run for run in runs if run.counts), key=lambda run: run.loss, default=None)


def ranked(screen: Mapping[str, Sequence[Run]], names: Iterable[str]) -> list[str]:
    """Those of the names with a run that counts, the lowest loss first."""
    found = {name: one.loss for name in names if (one := best(screen[name])) is not None}
    return sorted(found, key=lambda name: (found[name], name))


def edges(runs: Sequence[Run]) -> list[str]:
    """Of a line's grid: the settings (`lr`, `warmup`) whose best value is the least or the greatest that was tried."""
    found, chosen = [], best(runs)
    for setting in ("lr", "warmup"):
        values = {getattr(run.contender.trial, setting) for run in runs}
        if chosen and len(values) > 1 and getattr(chosen.contender.trial, setting) in (min(values), max(values)):
            found.append(setting)
    return found
