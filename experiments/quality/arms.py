"""The arms of `farflock bench quality`, read from arms.toml and checked before anything runs.

Each method has the same number of trials at each budget, written down beforehand with a reason, so
that no method is tuned longer than another. The two baselines have whole grids.
"""

import itertools
from collections.abc import Iterable
from importlib.resources import files
from typing import Annotated, Any, Literal

import msgspec

from farflock.experiments.reproduce.recipe import LINES, Rate, Rates, Share, built
from farflock.experiments.reproduce.recipe import Arm as RecipeArm
from farflock.node.errors import Usage, nearest
from farflock.node.run.sections import convert, tables
from farflock.optimizers.catalog import METHODS, PRESETS
from farflock.optimizers.trial_options import trial_of

TRIALS = 4
BUDGETS = (100, 500)  # DDP's bytes over what a method may send
ORIGIN = "arms.toml"
LINE_METHODS = ("local", "ddp")  # the baselines' own, so not among the methods to compare

USUAL_BETA2 = 0.95

Budget = Literal["100", "500"]
Shares = Annotated[list[Share], msgspec.Meta(min_length=1, max_length=16)]


class Grid(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Values whose combinations are all tried: peak rate, warm-up share, AdamW's second beta."""

    lr: Rates
    warmup: Shares
    beta2: Shares = msgspec.field(default_factory=lambda: [USUAL_BETA2])

    def trials(self) -> list["Trial"]:
        """Return one trial for each combination."""
        combinations = itertools.product(self.lr, self.warmup, self.beta2)
        return [Trial(lr, warmup, {}, "grid", beta2) for lr, warmup, beta2 in combinations]


class Trial(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One configuration of a method and the reason for it; `options` override those of `preset`."""

    lr: Rate
    warmup: Share
    options: dict[str, Any]
    why: Annotated[str, msgspec.Meta(min_length=1)]
    beta2: Share = USUAL_BETA2
    preset: str | None = None

    def spelt_out(self) -> "Trial":
        """Return this trial with its preset's options instead of the preset's name."""
        if self.preset is None:
            return self
        if self.preset not in PRESETS:
            raise Usage(
                f"{ORIGIN}, preset {self.preset[:64]!r}",
                "there is no preset with this name",
                nearest(self.preset, PRESETS),
            )
        return msgspec.structs.replace(
            self, options=PRESETS[self.preset][1] | self.options, preset=None
        )


class Arm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A method's trials at each budget; `optimizer` and `clip` are given if they are unusual."""

    trials: dict[Budget, list[Trial]]
    optimizer: Literal["adamw", "sgd"] = "adamw"
    clip: Annotated[float, msgspec.Meta(ge=0)] | None = None

    def at(self, budget: int) -> list[Trial]:
        """Return the trials at 1/`budget` of DDP's bytes."""
        return [
            trial.spelt_out()
            for name, trials in self.trials.items()
            if int(name) == budget
            for trial in trials
        ]


class Arms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that is tried: the baselines' grids and the methods' trials."""

    lines: dict[str, Grid]
    arms: dict[str, Arm]


def load() -> Arms:
    """Return the arms of this version; raise `Usage` for a mistake in them."""
    return read((files("farflock.experiments.quality") / ORIGIN).read_text())


def read(text: str) -> Arms:
    """Parse the arms of a text, and add those that other methods declare in their classes.

    Raise `Usage` unless every method of the catalogue has all its trials, with options that it
    accepts.
    """
    arms = convert(tables(text, ORIGIN), Arms)
    arms = msgspec.structs.replace(
        arms, arms=arms.arms | _beside(METHODS.keys() - arms.arms.keys())
    )
    _require_same(arms.lines, LINES, "line")
    _require_same(arms.arms, sorted(set(METHODS) - set(LINE_METHODS)), "method")
    for name, arm in arms.arms.items():
        for budget in BUDGETS:
            _require_trials(name, arm, budget)
    return arms


def _beside(names: Iterable[str]) -> dict[str, Arm]:
    """Return the arms that methods declare in their classes."""
    declared = {name: trial_of(METHODS[name]).quality for name in sorted(names)}
    found = {name: {"trials": trials} for name, trials in declared.items() if trials}
    return convert({"lines": {}, "arms": found}, Arms).arms


def _require_same(found: Iterable[str], wanted: Iterable[str], what: str) -> None:
    if lacking := sorted(set(wanted) - set(found)):
        raise Usage(
            ORIGIN,
            f"it has no {what} {', '.join(lacking)}",
            f"give each {TRIALS} trials per budget, here or in its class",
        )
    if surplus := sorted(set(found) - set(wanted)):
        raise Usage(
            ORIGIN, f"there is no {what} {', '.join(surplus)}", f"choose from {', '.join(wanted)}"
        )


def _require_trials(name: str, arm: Arm, budget: int) -> None:
    place = f"{ORIGIN}, {name} at 1/{budget}"
    trials = arm.at(budget)
    if len(trials) != TRIALS:
        raise Usage(place, f"it has {len(trials)} trials", f"give it {TRIALS}, like the others")
    for number, trial in enumerate(trials, 1):
        described = RecipeArm(
            label=name, method=name, options=trial.options, optimizer=arm.optimizer, clip=arm.clip
        )
        built(described, trial.options, f"{place}, trial {number}")
