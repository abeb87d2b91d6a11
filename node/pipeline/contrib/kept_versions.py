"""Versions of a stage's weights that are kept by round, for a pipeline that does not wait
(docs/decisions/016).

Old weights are in a stash (node/pipeline/contrib/stash.py). The group agrees with each round on how late its
gradients are (node/train/microbatch_ids.py), and the step that takes the gradients is corrected by it
(optimizers/parts/corrections.py)."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from farflock.node.pipeline.contrib.stash import Stash, Weights
from farflock.node.pipeline.passes.requests import Version
from farflock.node.pipeline.server.weight_versions import ORIGIN, MissingReason, MissingVersion, WeightVersions
from farflock.node.run.terms import Asynchronous, Correction
from farflock.node.train.driver import Driver
from farflock.optimizers.parts.corrections import AdaptiveBraking, Age, SpikeCompensation, Trend, along_trend

FINENESS = 16  # parts of a step in which an agreed delay is counted, so that it is a whole number in states
DELAY = "delay"  # a mark of a state (node/train/state_sync.py)


def corrected(inner: torch.optim.Optimizer, correction: Correction, age: Age) -> None:
    """Hook a correction into an inner optimizer; that of `nesterov` is the optimizer itself."""
    if "spike" in correction:
        if not isinstance(inner, torch.optim.SGD):
            raise ValueError(f"spike compensation is for sgd with momentum, not for {type(inner).__name__}")
        SpikeCompensation(inner, age)
    if "prediction" in correction:
        Trend(inner)
    if correction == "braking":
        AdaptiveBraking(inner, age)


def mean_delay(ages: Collection[int]) -> int:
    """The mean of several microbatches' delays, in parts of a step (`FINENESS`), half a part up; 0
    of none. Whole numbers alone, so that all members who see the same list have the same delay."""
    return (2 * FINENESS * sum(ages) + len(ages)) // (2 * len(ages)) if ages else 0


@dataclass(slots=True)
class Versions(WeightVersions):
    """Versions that are kept, as `WeightVersions`, at one server of stage `module`.

    `applied` says which round its weights are of, `marks` what goes with its state, `bound` how
    many rounds a gradient may be late. Where members' weights part between rounds (`local_steps` a
    round), passes use what the last round gave, `agreed()`, which all have; None: the module's own
    weights are that."""

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
    _origin: int = -1  # of what is stashed; -1 before the first
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
        """As `WeightVersions.delay`. Where a local step has used the gradient, it was as late as it
        was for that step."""
        if self.agreed is not None and stepped is not None:
            return stepped - weights
        return max(number - 1 - weights, 0)

    def begin_round(self, ages: Collection[int]) -> None:
        """As `WeightVersions.begin_round`; the weights of before it are kept."""
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
        """As `WeightVersions.begin_step`: a local step is late by the steps since then."""
        if self.agreed is not None:
            self.age.epochs = self.local_steps * mean_delay(ages) / FINENESS + self._since
            self._since += 1

    def _follow(self) -> None:
        """Forget all versions where the weights have come from elsewhere."""
        origin = self.marks().get(ORIGIN, 0)
        if (self._stash.epoch, self._origin) != (self.applied(), origin):
            self._stash.begin_anew(self.applied())
            self._origin = origin
            self._serve()

    def _serve(self) -> None:
        """Set what the passes of this round use, where that is not the module's own weights: what
        all agreed upon, or the weights that are expected once their gradients are taken in, as late
        as those of the last round were."""
        if self.agreed is not None:
            places = dict(self.module.named_parameters())
            self._stash.serve({name: x.to(places[name]) for name, x in self.agreed().items()})
        elif self.terms.predicts and (ahead := min(self.marks().get(DELAY, 0) / FINENESS, self.bound)) > 0:
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
    """Make those of a server whose stage `driver`'s method syncs, by steps of all at once
    (`summing`) or by local ones."""
    method = driver.method
    agreed = None if summing else lambda: method.eval_params(driver.replica)
    local_steps = int(getattr(method, "mask_period", getattr(method, "period", 1)))
    return Versions(module, inner, terms, bound, applied, marks, agreed, local_steps, report)
