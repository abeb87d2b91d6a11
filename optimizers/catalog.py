"""The methods by name, and presets of them: the only registry. A method is imported when it is asked for."""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from farflock.optimizers.method import Method


class Methods(Mapping[str, type[Any]]):
    """Classes by name, from the places (`module:Class` below this package) that they are imported from when looked up."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> type[Any]:
        module, _, attribute = self._places[name].partition(":")
        found: type[Any] = getattr(import_module(f"farflock.optimizers.{module}"), attribute)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


METHODS = Methods(
    {
        "local": "local:Local",
        "ddp": "ddp:DDP",
        "diloco": "diloco:DiLoCo",
        "noloco": "noloco:NoLoCo",
        "sparseloco": "sparseloco:SparseLoCo",
        "demo": "demo_optimizer:DeMo",
        "flexdemo": "contrib.flexdemo:FlexDeMo",
        "streaming": "streaming:Streaming",
        "delayed": "contrib.delayed:Delayed",
        "co2": "contrib.co2:CO2",
        "desloc": "contrib.desloc:DesLoc",
        "sparta": "sparta:Sparta",
        "sparta-diloco": "contrib.sparta_diloco:SpartaDiLoCo",
        "edit": "contrib.edit:EDiT",
        "async": "contrib.asynchronous:Async",
        "lean": "lean:Lean",
    }
)

# A preset is a method with options of it, chosen for the bytes that a peer sends: a hundredth and a five hundredth of DDP's in
# a fp32 ring, with four peers.
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "best-100": ("lean", {"period": 3, "correction": 0.2, "codec": "ecsq:98", "return_codec": "ecsq:98"}),
    "best-500": ("lean", {"period": 8, "correction": 0.0, "codec": "ecsq:48", "return_codec": "ecsq:48"}),
}
NAMES = (*METHODS, *PRESETS)
SUMMING = frozenset(
    {"ddp"}
)  # what they exchange is the gradient itself, so that a step may count often (`Progress.weight`)

_SHOWN = 64  # characters of a wrong name that are looked at: it may come from a stranger's manifest


def method(name: str, **options: Any) -> Method:  # noqa: ANN401 - options come from a manifest; the constructor checks them
    """The method or preset of this name; `ValueError` with the nearest valid choice for an unknown name or option."""
    if name not in NAMES:
        raise ValueError(f"method {name[:_SHOWN]!r} is not known; {_nearest(name, set(NAMES))}")
    known = options_of(name)
    for option in options:
        if option not in known:
            raise ValueError(f"method {name} has no option {option[:_SHOWN]!r}; {_nearest(option, known)}")
    base, preset = unfolded(name)
    made: Method = METHODS[base](**{**preset, **options})
    return made


def unfolded(name: str) -> tuple[str, dict[str, Any]]:
    """The method behind a preset and the options that it sets, a copy; any other name is its own, and sets none."""
    base, preset = PRESETS.get(name, (name, {}))
    return base, dict(preset)


def options_of(name: str) -> dict[str, Any]:
    """The options that a method or preset has, with their defaults (`dataclasses.MISSING` for those that are built)."""
    base, preset = unfolded(name)
    fields = {field.name: field.default for field in dataclasses.fields(METHODS[base])}
    return {option: value for option, value in fields.items() if not option.startswith("_")} | preset


def _nearest(word: str, choices: dict[str, Any] | set[str]) -> str:
    close = difflib.get_close_matches(word[:_SHOWN], list(choices), n=1)
    return f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(sorted(choices)) or 'none'}"
