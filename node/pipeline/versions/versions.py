"""A stage's weights by round, and how late gradients are: what a pipeline needs that does not wait (docs/decisions/016).

A forward pass says which version it used, and the backward pass names it, so that any server of the stage
differentiates the same function (node/pipeline/versions/stash.py). The delay of a gradient is measured: the rounds that
were applied between its weights and the round that it goes into. The group agrees on it with the round
(node/train/microbatch_ids.py), and the step that takes the gradients is corrected by it (optimizers/corrections.py)."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from farflock.node.pipeline.passes.requests import Version
from farflock.node.pipeline.versions.stash import Stash
from farflock.node.run.terms import Asynchronous, Correction
from farflock.node.train.driver import Driver
from farflock.optimizers.corrections import AdaptiveBraking, Age, SpikeCompensation, Trend, along_trend
from farflock.optimizers.method import State
from farflock.optimizers.state import state_hash

Lack = Literal["ahead", "gone", "late"]
Weights = Mapping[str, Tensor]

FINENESS = 16  # parts of a step in which an agreed delay is counted, so that it is a whole number in states
ORIGIN, DELAY = "origin", "delay"  # marks of a state (node/train/state_sync.py)


class Lacking(LookupError):
    """The version that a request names is not here; `lack` says why."""

    def __init__(self, lack: Lack) -> None:
        super().__init__(f"the version that is asked for is not here: {lack}")
        self.lack = lack


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
    """The mean of several microbatches' delays, in parts of a step (`FINENESS`), half a part up; 0 of none. Whole numbers
    alone, so that all members who see the same list have the same delay."""
    return (2 * FINENESS * sum(ages) + len(ages)) // (2 * len(ages)) if ages else 0


def origin_of(state: State) -> int:
    """Names a state that a stage begins anew with: rounds of former weights have the same numbers and are other versions."""
    return int.from_bytes(state_hash(state)[:7], "little")


@dataclass(slots=True)
class Versions:
    """The versions at one server of stage `module`; touched by what computes alone.

    `applied` says which round its weights are of, `marks` what goes with its state, `bound` how many rounds a gradient may be
    late. Where members' weights part between rounds (`local_steps` a round), passes use what the last round gave, `agreed()`,
    which all have; None: the module's own weights are that."""

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
        """What forward passes use."""
        return Version(self.applied(), self.marks().get(ORIGIN, 0))

    @property
    def oldest(self) -> int:
        """The round of the oldest weights whose gradients may go into the next round."""
        return self.applied() - self.bound

    @contextmanager
    def using(self, version: Version | None) -> Iterator[None]:
        """Inside the block the stage computes with these weights (None: the newest); `Lacking` if they are not here."""
        self._follow()
        if version is not None and (lack := self.lack(version)) is not None:
            raise Lacking(lack)
        with self._stash.version(self._stash.epoch if version is None else version.round):
            yield

    def lack(self, version: Version) -> Lack | None:
        """Why a version is not here: its round is yet to come; others may have it; or it may be used no more. Changes nothing,
        so that requests are looked at before their payloads come, beside what computes."""
        newest = self.applied()
        if version.origin != self.marks().get(ORIGIN, 0) or newest - version.round > self.bound:
            return "late"
        if version.round > newest:
            return "ahead"
        return None if version.round in (newest, *self._stash.epochs) else "gone"

    def begin_round(self, ages: Collection[int]) -> None:
        """A round is about to change the weights, and takes in gradients that are so many rounds old."""
        self._follow()
        if ages:
            delay = mean_delay(ages)
            self.marks()[DELAY] = delay
            self.report({"round": self.applied() + 1, "mean": delay / FINENESS, "most": max(ages)})
            if self.agreed is None:
                self.age.epochs = delay / FINENESS
        self._stash.leave()

    def end_round(self) -> None:
        """It has changed them."""
        self._since = 0
        if self._stash.epoch == self.applied():
            self._serve()

    def begin_step(self, ages: Collection[int]) -> None:
        """A local step takes in gradients whose weights are of so many rounds before: it is late by the steps since then."""
        if self.agreed is not None:
            self.age.epochs = self.local_steps * mean_delay(ages) / FINENESS + self._since
            self._since += 1

    def _follow(self) -> None:
        """Begin anew where the weights have come from elsewhere."""
        origin = self.marks().get(ORIGIN, 0)
        if (self._stash.epoch, self._origin) != (self.applied(), origin):
            self._stash.begin_anew(self.applied())
            self._origin = origin
            self._serve()

    def _serve(self) -> None:
        """What the passes of this round use, where that is not the module's own: what all agreed upon, or what is expected once
        their gradients are taken in, as late as those of the last round were."""
        if self.agreed is not None:
            places = dict(self.module.named_parameters())
            self._stash.serve({name: x.to(places[name]) for name, x in self.agreed().items()})
        elif self.terms.predicts and (ahead := min(self.marks().get(DELAY, 0) / FINENESS, self.bound)) > 0:
            self._stash.serve(along_trend(self.module, self.inner, ahead))


def versions_of(
    terms: Asynchronous | None,
    bound: int,
    module: nn.Module,
    inner: torch.optim.Optimizer,
    driver: Driver,
    *,
    applied: Callable[[], int],
    marks: Callable[[], dict[str, int]],
    summing: bool,
    report: Callable[[dict[str, object]], None],
) -> Versions | None:
    """Those of a server whose stage `driver`'s method syncs, by steps of all at once (`summing`) or by local ones; None for a
    pipeline that keeps no versions."""
    if terms is None:
        return None
    method = driver.method
    agreed = None if summing else lambda: method.eval_params(driver.replica)
    local_steps = int(getattr(method, "mask_period", getattr(method, "period", 1)))
    return Versions(module, inner, terms, bound, applied, marks, agreed, local_steps, report)
