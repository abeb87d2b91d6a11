"""Options with which the law tests, the disaster simulator and the byte counter try a method.

A method declares them as `trial: ClassVar[TrialOptions]` in its class. One that declares nothing is
tried with short rounds and lossless codecs wherever it has the options `period`, `codec` and
`return_codec`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LAW_PERIOD, QUICK_PERIOD = 3, 2  # local steps a round


class TrialIncomplete(ValueError):
    """Raised if a method cannot be tried as declared; the message says what to add, and where."""


@dataclass(frozen=True, slots=True)
class Disaster:
    """One run of the disaster simulator: a method's options and the length of its local steps,
    relative to the usual one. `turn` is its place among all methods' runs: seed n runs turn n,
    modulo their number; runs without a turn (None) come last."""

    options: Mapping[str, Any]
    turn: int | None = None
    step_length: float = 1.0


@dataclass(frozen=True, slots=True)
class TrialOptions:
    """Options of a method's trials, in addition to the usual ones.

    `law` is for the law tests, `quick` for manual tests with lossless rounds of two steps; with
    either, every stream must have a round within a few steps. `rest` is a number of steps after
    which the method, made with `law`, holds nothing but its snapshot; None if there is none.
    `disasters` are usually the options of `law`, once. `biased`: the method accepts biased codecs,
    because it sends later what they drop; other methods must refuse them. `quality`: the trials of
    `farflock bench quality` at each budget, as in experiments/quality/arms.toml, for a method not
    named there.
    """

    law: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    quick: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rest: int | None = None
    disasters: tuple[Disaster, ...] = ()
    biased: bool = False
    quality: Mapping[str, Sequence[Mapping[str, Any]]] = dataclasses.field(default_factory=dict)


def trial_of(method: type[Any]) -> TrialOptions:
    """Return the trial options that a method's class declares, or the defaults."""
    return getattr(method, "trial", TrialOptions())


def law_options(method: type[Any]) -> dict[str, Any]:
    """Return the options for a method's law tests; raise `TrialIncomplete` if they do not
    suffice."""
    return _complete(method, LAW_PERIOD, trial_of(method).law, "law")


def quick_options(method: type[Any]) -> dict[str, Any]:
    """Return options for lossless rounds of two steps; raise `TrialIncomplete` if insufficient."""
    return _complete(method, QUICK_PERIOD, trial_of(method).quick, "quick")


def disasters_of(method: type[Any]) -> tuple[Disaster, ...]:
    """Return a method's disasters, at least one."""
    return trial_of(method).disasters or (Disaster(law_options(method)),)


def _complete(
    method: type[Any], period: int, declared: Mapping[str, Any], what: str
) -> dict[str, Any]:
    if not dataclasses.is_dataclass(method):
        raise TrialIncomplete(
            f"{method.__name__} is not a dataclass, so its options are not known; "
            f"put @dataclass(slots=True) before the class in {method.__module__}"
        )
    fields = {
        field.name: field
        for field in dataclasses.fields(method)
        if field.init and field.name[0] != "_"
    }
    usual = {"period": period, "codec": "fp32", "return_codec": "fp32"}
    options = {name: value for name, value in usual.items() if name in fields} | dict(declared)
    where = (
        f"trial: ClassVar[TrialOptions] = TrialOptions({what}={{...}}) "
        f"in the class {method.__name__} ({method.__module__})"
    )
    for name in sorted(options.keys() - fields.keys()):
        raise TrialIncomplete(f"{method.__name__} has no option {name!r}; remove it from {where}")
    for name, field in fields.items():
        needs = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if needs and name not in options:
            raise TrialIncomplete(
                f"{method.__name__} has no value for its option {name!r} in a trial; "
                f"name one in {where}"
            )
    return options
