"""Versions of a stage's weights by round, for a pipeline that does not wait (docs/decisions/016).

Old weights are in a stash (node/pipeline/contrib/stash.py). With each round the group agrees on
the lateness of its gradients (node/train/microbatch_ids.py), and the step that takes them is
corrected by that delay (optimizers/parts/corrections.py)."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from farflock.node.pipeline.contrib.stash import Stash, Weights
from farflock.node.pipeline.passes.requests import Version
from farflock.node.pipeline.server.weight_versions import (
    ORIGIN,
    MissingReason,
    MissingVersion,
    WeightVersions,
)
from farflock.node.run.terms import Asynchronous, Correction
from farflock.node.train.driver import Driver
from farflock.optimizers.parts.corrections import (
    AdaptiveBraking,
    Age,
    SpikeCompensation,
    Trend,
    along_trend,
)

FINENESS = 16  # agreed delays are counted in 1/16 steps, since states hold integers
DELAY = "delay"  # name of a state mark (node/train/state_sync.py)


def corrected(inner: torch.optim.Optimizer, correction: Correction, age: Age) -> None:
    """Install a correction in an inner optimizer. `nesterov` needs nothing: it is a choice of inner
    optimizer."""
    if "spike" in correction:
        if not isinstance(inner, torch.optim.SGD):
            raise ValueError(
                f"spike compensation needs sgd with momentum, not {type(inner).__name__}; "
                "choose another correction"
            )
        SpikeCompensation(inner, age)
    if "prediction" in correction:
        Trend(inner)
    if correction == "braking":
        AdaptiveBraking(inner, age)


def mean_delay(ages: Collection[int]) -> int:
    """Return the mean delay of several microbatches in parts of a step (`FINENESS`), half a part
    rounded up; 0 for none.

    The mean is computed in integers, so that all members with the same list have the same delay."""
    return (2 * FINENESS * sum(ages) + len(ages)) // (2 * len(ages)) if ages else 0


@dataclass(slots=True)
class Versions(WeightVersions):
    """The versions that one server of stage `module` keeps.

    `applied()` is the round of its weights, `marks` are the numbers stored with its state, and
    `bound` is the maximum delay of a gradient in rounds. Where members' weights diverge between
    rounds (`local_steps` per round), passes use the last round's result, `agreed()`, which all
    members have. `agreed` is None where that result is the module's own weights."""

    module: nn.Module
    inner: torch.optim.Optimizer
    terms: Asynchronous
    bound: int
    applied: Callable[[], int]
    marks: Callable[[], dict[str, int]]
    agreed: Callable[[], Weights] | None = None
    local_steps: int = 1
    report: Callable[[dict[str, object]], None] = lambda fields: None
    age: Age = field(default_factory=Age)
    _stash: Stash = field(init=False)
    _origin: int = -1  # of the stashed versions; -1 before the first
    _since: int = 0  # local steps since the last round

    def __post_init__(self) -> None:
        self._stash = Stash(self.module, self.terms.versions)
        corrected(self.inner, self.terms.correction, self.age)

    @property
    def newest(self) -> Version:
        """The version that forward passes use."""
        return Version(self.applied(), self.marks().get(ORIGIN, 0))

    @contextmanager
    def using(self, version: Version | None) -> Iterator[Version]:
        """As `WeightVersions.using`."""
        self._follow()
        if version is not None and (lack := self.lack(version)) is not None:
            raise MissingVersion(lack)
        used = version or self.newest
        with self._stash.version(used.round):
            yield used

    def lack(self, version: Version) -> MissingReason | None:
        """As `WeightVersions.lack`."""
        newest = self.applied()
        if version.origin != self.marks().get(ORIGIN, 0) or newest - version.round > self.bound:
            return "late"
        if version.round > newest:
            return "ahead"
        return None if version.round in (newest, *self._stash.epochs) else "gone"

    def delay(self, weights: int, number: int, stepped: int | None = None) -> int:
        """As `WeightVersions.delay`. A gradient used by a local step keeps its delay."""
        if self.agreed is not None and stepped is not None:
            return stepped - weights
        return max(number - 1 - weights, 0)

    def begin_round(self, ages: Collection[int]) -> None:
        """As `WeightVersions.begin_round`; keep the weights from before it."""
        self._follow()
        if ages:
            delay = mean_delay(ages)
            self.marks()[DELAY] = delay
            self.report({"round": self.applied() + 1, "mean": delay / FINENESS, "most": max(ages)})
            if self.agreed is None:
                self.age.epochs = delay / FINENESS
        self._stash.leave()

    def end_round(self) -> None:
        """As `WeightVersions.end_round`."""
        self._since = 0
        if self._stash.epoch == self.applied():
            self._serve()

    def begin_step(self, ages: Collection[int]) -> None:
        """As `WeightVersions.begin_step`. A local step adds the steps since the last round to
        the delay."""
        if self.agreed is not None:
            self.age.epochs = self.local_steps * mean_delay(ages) / FINENESS + self._since
            self._since += 1

    def _follow(self) -> None:
        """Forget all versions if the weights were adopted from another peer or a checkpoint."""
        origin = self.marks().get(ORIGIN, 0)
        if (self._stash.epoch, self._origin) != (self.applied(), origin):
            self._stash.begin_anew(self.applied())
            self._origin = origin
            self._serve()

    def _serve(self) -> None:
        """Set the weights of this round's passes if they are not the module's own: either those
        that all members agreed on, or a prediction of the weights at the time when the passes'
        gradients are taken in, assuming that these are as late as the last round's were."""
        if self.agreed is not None:
            places = dict(self.module.named_parameters())
            self._stash.serve({name: x.to(places[name]) for name, x in self.agreed().items()})
        elif self.terms.predicts:
            ahead = min(self.marks().get(DELAY, 0) / FINENESS, self.bound)
            if ahead > 0:
                self._stash.serve(along_trend(self.module, self.inner, ahead))


def versions_of(
    terms: Asynchronous,
    bound: int,
    module: nn.Module,
    inner: torch.optim.Optimizer,
    driver: Driver,
    *,
    applied: Callable[[], int],
    marks: Callable[[], dict[str, int]],
    summing: bool,
    report: Callable[[dict[str, object]], None],
) -> Versions:
    """Make a server's versions for `driver`'s method, of common steps (`summing`) or local ones."""
    method = driver.method
    agreed = None if summing else lambda: method.eval_params(driver.replica)
    local_steps = int(getattr(method, "mask_period", getattr(method, "period", 1)))
    return Versions(module, inner, terms, bound, applied, marks, agreed, local_steps, report)
