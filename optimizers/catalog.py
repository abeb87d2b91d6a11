"""The registry of methods and presets by name. A method's module is imported when it is first
looked up."""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from farflock.optimizers.method import Method


class Methods(Mapping[str, type[Any]]):
    """Method classes by name, imported on lookup from `module:Class` below this package.

    A program may add classes of its own; they are found by name, but are not in the catalog that
    iteration goes through. A name from outside never makes anything be imported but the catalog."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = places
        self._own: dict[str, type[Any]] = {}

    def add(self, kind: type[Any]) -> str:
        """Let this process look up a class by its dotted name; return the name that runs know it
        by, which is the catalog's if it is there."""
        place = f"{kind.__module__.removeprefix('farflock.optimizers.')}:{kind.__qualname__}"
        for name, known in self._places.items():
            if known == place and self[name] is kind:
                return name
        name = f"{kind.__module__}.{kind.__qualname__}"
        self._own[name] = kind
        return name

    def __getitem__(self, name: str) -> type[Any]:
        if name in self._own:
            return self._own[name]
        module, _, attribute = self._places[name].partition(":")
        found: type[Any] = getattr(import_module(f"farflock.optimizers.{module}"), attribute)
        return found

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self._places or name in self._own)

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

# A preset is a method with options chosen for the bytes that a peer sends: 1/100 and 1/500 of what
# DDP sends in an fp32 ring of four peers.
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "best-100": (
        "lean",
        {"period": 3, "correction": 0.2, "codec": "ecsq:98", "return_codec": "ecsq:98"},
    ),
    "best-500": (
        "lean",
        {"period": 8, "correction": 0.0, "codec": "ecsq:48", "return_codec": "ecsq:48"},
    ),
}
NAMES = (*METHODS, *PRESETS)
# Methods that exchange the gradient itself: a step may count several times (`Progress.weight`).
SUMMING = frozenset({"ddp"})

_SHOWN = 64  # characters shown of a wrong name: it may come from a stranger's manifest


def method(name: str, **options: Any) -> Method:  # noqa: ANN401 - options come from a manifest; the constructor checks them
    """Return the method or preset of this name, made with these options.

    Raise `ValueError` with the nearest name for an unknown name or option."""
    if name not in METHODS and name not in PRESETS:
        raise ValueError(f"method {name[:_SHOWN]!r} is not known; {_nearest(name, set(NAMES))}")
    known = options_of(name)
    for option in options:
        if option not in known:
            raise ValueError(
                f"method {name} has no option {option[:_SHOWN]!r}; {_nearest(option, known)}"
            )
    base, preset = unfolded(name)
    made: Method = METHODS[base](**{**preset, **options})
    return made


def unfolded(name: str) -> tuple[str, dict[str, Any]]:
    """Return a preset's method and a copy of its options; any other name is itself, with none."""
    base, preset = PRESETS.get(name, (name, {}))
    return base, dict(preset)


def options_of(name: str) -> dict[str, Any]:
    """Return a method's or preset's options and plain defaults (`dataclasses.MISSING` if none)."""
    base, preset = unfolded(name)
    fields = {field.name: field.default for field in dataclasses.fields(METHODS[base])}
    return {
        option: value for option, value in fields.items() if not option.startswith("_")
    } | preset


def _nearest(word: str, choices: dict[str, Any] | set[str]) -> str:
    close = difflib.get_close_matches(word[:_SHOWN], list(choices), n=1)
    return (
        f"did you mean {close[0]!r}?"
        if close
        else f"choose from {', '.join(sorted(choices)) or 'none'}"
    )
