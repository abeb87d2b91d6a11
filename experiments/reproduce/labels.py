"""The arms' labels in a figure, from their resolved options.

A recipe's own label may name an option that a tier overrides. These labels give the method and the
settings in which an arm differs from the other arms of that method.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from farflock.experiments.reproduce.recipe import Arm, Sizes, options_of
from farflock.experiments.reproduce.study import Result, Study
from farflock.optimizers.catalog import METHODS
from farflock.optimizers.catalog import options_of as defaults_of

SETTINGS = ("peers", "lr", "optimizer", "clip", "late", "speeds")  # of an arm, besides its options


def figure_labels(study: Study, results: Sequence[Result]) -> dict[str, str]:
    """Return each result's label by name; in a study that trains nothing, arms keep their own."""
    own = {result.name: result.label for result in results}
    trains = study.recipe.experiment == "training"
    return labels(study.arms, study.sizes, own) if trains else own


def labels(arms: Mapping[str, Arm | None], sizes: Sizes, own: Mapping[str, str]) -> dict[str, str]:
    """Return each arm's label by name; `own` has the labels of the baselines.

    Arms with equal settings, as in tier ci, are told apart by their names.
    """
    resolved = {name: _resolved(arm, sizes) for name, arm in arms.items() if arm is not None}
    made = {}
    for name, settings in resolved.items():
        alike = [other for other in resolved.values() if other["method"] == settings["method"]]
        differs = [
            each for each in settings if any(other[each] != settings[each] for other in alike)
        ]
        shown = [f"{each} {_shown(settings[each])}" for each in differs]
        made[name] = ", ".join((METHODS[settings["method"]].__name__, *shown))
    known = list(made.values())
    told = {
        name: label if known.count(label) == 1 else f"{label} (arm {name})"
        for name, label in made.items()
    }
    return {name: told.get(name, own[name]) for name in arms}


class _Settings(dict[str, Any]):
    """Settings by name; None for a setting that only other arms of the method have."""

    def __missing__(self, key: str) -> None:
        return None


def _resolved(arm: Arm, sizes: Sizes) -> _Settings:
    options = defaults_of(arm.method) | options_of(arm, sizes)
    given = msgspec.to_builtins(arm)
    shared = {"peers": sizes.peers, "lr": sizes.lr, "clip": sizes.clip}
    settings = {name: shared.get(name) if given[name] is None else given[name] for name in SETTINGS}
    return _Settings({"method": arm.method, **_flat("", options), **settings})


def _flat(path: str, table: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in table.items():
        inside = _flat(f"{path}{name}.", value) if isinstance(value, dict) else {path + name: value}
        found |= inside
    return found


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
