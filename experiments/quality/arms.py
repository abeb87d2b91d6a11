"""What `farflock bench quality` tries, read from arms.toml and checked to the last word before anything runs.

Each method has the same number of trials at each budget, written down beforehand with a reason, so that nobody's search is
longer than another's; the two lines that all are held against have whole grids.
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
LINE_METHODS = ("local", "ddp")  # the lines' own: neither is a way to save bytes

USUAL_BETA2 = 0.95

Budget = Literal["100", "500"]
Shares = Annotated[list[Share], msgspec.Meta(min_length=1, max_length=16)]


class Grid(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All combinations of these are tried: the rate's peak, the share of warm-up, and AdamW's second beta."""

    lr: Rates
    warmup: Shares
    beta2: Shares = msgspec.field(default_factory=lambda: [USUAL_BETA2])

    def trials(self) -> list["Trial"]:
        """One for each combination."""
        combinations = itertools.product(self.lr, self.warmup, self.beta2)
        return [Trial(lr, warmup, {}, "grid", beta2) for lr, warmup, beta2 in combinations]


class Trial(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One configuration of a method, and why it is worth a trial. With `preset`, `options` are changes to the preset's."""

    lr: Rate
    warmup: Share
    options: dict[str, Any]
    why: Annotated[str, msgspec.Meta(min_length=1)]
    beta2: Share = USUAL_BETA2
    preset: str | None = None

    def spelt_out(self) -> "Trial":
        """The same without a preset's name."""
        if self.preset is None:
            return self
        if self.preset not in PRESETS:
            raise Usage(
                f"{ORIGIN}, preset {self.preset[:64]!r}", "there is none of this name", nearest(self.preset, PRESETS)
            )
        return msgspec.structs.replace(self, options=PRESETS[self.preset][1] | self.options, preset=None)


class Arm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A method with its trials at each budget; `optimizer` and `clip` are the inner optimizer's where not those of all."""

    trials: dict[Budget, list[Trial]]
    optimizer: Literal["adamw", "sgd"] = "adamw"
    clip: Annotated[float, msgspec.Meta(ge=0)] | None = None

    def at(self, budget: int) -> list[Trial]:
        """The trials at 1/`budget` of DDP's bytes."""
        return [trial.spelt_out() for name, trials in self.trials.items() if int(name) == budget for trial in trials]


class Arms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that is tried."""

    lines: dict[str, Grid]
    arms: dict[str, Arm]


def load() -> Arms:
    """The arms of this version; `Usage` if there is anything wrong with them."""
    return read((files("farflock.experiments.quality") / ORIGIN).read_text())


def read(text: str) -> Arms:
    """Arms from their text, and of methods that are not in it from their classes, checked: every method of the catalogue, with
    all its trials, and options that it takes."""
    arms = convert(tables(text, ORIGIN), Arms)
    arms = msgspec.structs.replace(arms, arms=arms.arms | _beside(METHODS.keys() - arms.arms.keys()))
    _require_same(arms.lines, LINES, "line")
    _require_same(arms.arms, sorted(set(METHODS) - set(LINE_METHODS)), "method")
    for name, arm in arms.arms.items():
        for budget in BUDGETS:
            _require_trials(name, arm, budget)
    return arms


def _beside(names: Iterable[str]) -> dict[str, Arm]:
    """The arms that methods declare themselves."""
    declared = {name: trial_of(METHODS[name]).quality for name in sorted(names)}
    found = {name: {"trials": trials} for name, trials in declared.items() if trials}
    return convert({"lines": {}, "arms": found}, Arms).arms


def _require_same(found: Iterable[str], wanted: Iterable[str], what: str) -> None:
    if lacking := sorted(set(wanted) - set(found)):
        raise Usage(
            ORIGIN,
            f"it has no {what} {', '.join(lacking)}",
            f"give each {TRIALS} trials a budget, here or in its class",
        )
    if surplus := sorted(set(found) - set(wanted)):
        raise Usage(ORIGIN, f"there is no {what} {', '.join(surplus)}", f"choose from {', '.join(wanted)}")


def _require_trials(name: str, arm: Arm, budget: int) -> None:
    place = f"{ORIGIN}, {name} at 1/{budget}"
    trials = arm.at(budget)
    if len(trials) != TRIALS:
        raise Usage(place, f"it has {len(trials)} trials", f"give it {TRIALS}, as all have")
    for number, trial in enumerate(trials, 1):
        described = RecipeArm(label=name, method=name, options=trial.options, optimizer=arm.optimizer, clip=arm.clip)
        built(described, trial.options, f"{place}, trial {number}")
