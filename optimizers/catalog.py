"""The methods by name: the only registry, a literal dict."""

import dataclasses
import difflib
from typing import Any

from farflock.optimizers.asynchronous import Async
from farflock.optimizers.co2 import CO2
from farflock.optimizers.ddp import DDP
from farflock.optimizers.delayed import Delayed
from farflock.optimizers.demo import DeMo
from farflock.optimizers.desloc import DesLoc
from farflock.optimizers.diloco import DiLoCo
from farflock.optimizers.edit import EDiT
from farflock.optimizers.flexdemo import FlexDeMo
from farflock.optimizers.local import Local
from farflock.optimizers.method import Method
from farflock.optimizers.noloco import NoLoCo
from farflock.optimizers.sparseloco import SparseLoCo
from farflock.optimizers.sparta import Sparta
from farflock.optimizers.sparta_diloco import SpartaDiLoCo
from farflock.optimizers.streaming import Streaming

METHODS: dict[str, type[Any]] = {
    "local": Local,
    "ddp": DDP,
    "diloco": DiLoCo,
    "noloco": NoLoCo,
    "sparseloco": SparseLoCo,
    "demo": DeMo,
    "flexdemo": FlexDeMo,
    "streaming": Streaming,
    "delayed": Delayed,
    "co2": CO2,
    "desloc": DesLoc,
    "sparta": Sparta,
    "sparta-diloco": SpartaDiLoCo,
    "edit": EDiT,
    "async": Async,
}

_SHOWN = 64  # characters of a wrong name that are looked at: it may come from a stranger's manifest


def method(name: str, **options: Any) -> Method:  # noqa: ANN401 - options come from a manifest; the constructor checks them
    """The method of this name; `ValueError` with the nearest valid choice for an unknown name or option."""
    if name not in METHODS:
        raise ValueError(f"method {name[:_SHOWN]!r} is not known; {_nearest(name, METHODS)}")
    known = options_of(name)
    for option in options:
        if option not in known:
            raise ValueError(f"method {name} has no option {option[:_SHOWN]!r}; {_nearest(option, known)}")
    made: Method = METHODS[name](**options)
    return made


def options_of(name: str) -> dict[str, Any]:
    """The options that a method of the catalogue has, with their defaults (`dataclasses.MISSING` for those that are built)."""
    return {field.name: field.default for field in dataclasses.fields(METHODS[name]) if not field.name.startswith("_")}


def _nearest(word: str, choices: dict[str, Any] | set[str]) -> str:
    close = difflib.get_close_matches(word[:_SHOWN], list(choices), n=1)
    return f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(sorted(choices)) or 'none'}"
