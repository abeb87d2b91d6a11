"""How a method is tried: the options with which the law tests, the disasters and the counter of bytes run it.

They stand beside the method, as `trial: ClassVar[TrialOptions]` in its class. A method that declares nothing is tried with
short rounds and lossless codecs wherever it has the options `period`, `codec` and `return_codec`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LAW_PERIOD, QUICK_PERIOD = 3, 2  # local steps a round


class TrialIncomplete(ValueError):
    """A method cannot be tried as it is declared; the message says what to add, and where."""


@dataclass(frozen=True, slots=True)
class Disaster:
    """One run of the disaster simulator: the method's options, how many usual steps one of its local steps lasts, and its
    `turn` among all methods' runs (seed n runs the one of turn n, modulo their number; None: after those that have one)."""

    options: Mapping[str, Any]
    turn: int | None = None
    step_length: float = 1.0


@dataclass(frozen=True, slots=True)
class TrialOptions:
    """`law` and `quick` are options beside the usual ones, for the law tests and for tests by hand with lossless rounds of two
    steps; they need rounds of every stream within a few steps. `rest` is a number of steps after which the method, tried
    with `law`, holds nothing beside its snapshot; None if there is none. `disasters` are usually the options of `law`, once.
    `biased`: it takes biased codecs, because what they leave out comes again; others must refuse them. `quality`: the trials of
    `farflock bench quality` at each budget, as in experiments/quality/arms.toml, for a method that is not named there.
    """

    law: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    quick: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rest: int | None = None
    disasters: tuple[Disaster, ...] = ()
    biased: bool = False
    quality: Mapping[str, Sequence[Mapping[str, Any]]] = dataclasses.field(default_factory=dict)


def trial_of(method: type[Any]) -> TrialOptions:
    """What a method's class declares, or the usual."""
    return getattr(method, "trial", TrialOptions())


def law_options(method: type[Any]) -> dict[str, Any]:
    """The options with which the law tests make a method; `TrialIncomplete` if they do not suffice."""
    return _complete(method, LAW_PERIOD, trial_of(method).law, "law")


def quick_options(method: type[Any]) -> dict[str, Any]:
    """The options of lossless rounds of two steps; `TrialIncomplete` if they do not suffice."""
    return _complete(method, QUICK_PERIOD, trial_of(method).quick, "quick")


def disasters_of(method: type[Any]) -> tuple[Disaster, ...]:
    """A method's disasters, at least one."""
    return trial_of(method).disasters or (Disaster(law_options(method)),)


def _complete(method: type[Any], period: int, declared: Mapping[str, Any], what: str) -> dict[str, Any]:
    if not dataclasses.is_dataclass(method):
        raise TrialIncomplete(
            f"{method.__name__} is no dataclass, so its options are not known; put @dataclass(slots=True) before the class "
            f"in {method.__module__}"
        )
    fields = {field.name: field for field in dataclasses.fields(method) if field.init and field.name[0] != "_"}
    usual = {"period": period, "codec": "fp32", "return_codec": "fp32"}
    options = {name: value for name, value in usual.items() if name in fields} | dict(declared)
    where = f"trial: ClassVar[TrialOptions] = TrialOptions({what}={{...}}) in the class {method.__name__} ({method.__module__})"
    for name in sorted(options.keys() - fields.keys()):
        raise TrialIncomplete(f"{method.__name__} has no option {name!r}; remove it from {where}")
    for name, field in fields.items():
        needs = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if needs and name not in options:
            raise TrialIncomplete(
                f"{method.__name__} has no value for its option {name!r} in a trial; name one in {where}"
            )
    return options
