"""The manifest of a run that trains a user's own model, from the arguments of its program.

A model cannot be sent as data, so each peer brings it with its program; the manifest holds its
fingerprint, the method with every option spelt out, and the run's name and seed. The founder's
arguments determine them; a joiner's arguments must not contradict them, and default to the run's.
"""

import dataclasses
import hashlib
from typing import Any

import msgspec
import torch
from torch import nn

from farflock.node.errors import RefusedByRun, Usage
from farflock.node.run.manifest import Manifest, of_program, places
from farflock.node.run.model_section import UserModel
from farflock.node.run.sections import SENT, fill_method, option_values, require_name
from farflock.node.run.tensor_list import (
    TensorList,
    decode,
    first_difference,
    list_tensors,
)
from farflock.optimizers.catalog import METHODS, NAMES
from farflock.optimizers.method import Method
from farflock.optimizers.parts.stateful import StatefulMethod

TomlTable = dict[str, Any]
# Any `Method`. The catalog's are named too, since pyright does not take their class variables for
# the protocol's properties.
GivenMethod = Method | StatefulMethod

DEFAULT_METHOD = "diloco"
DEFAULT_VIEW_S = 5.0  # joiners are let in at the next view: loops in notebooks are short

_AS_FOUNDED = (
    "build the model and its inner optimizer as the run's founder did, with the same names, shapes,"
    " types and frozen values"
)
OF_MODEL = ("frozen", "buffers")  # arguments that say what peers have in common, and average
_SENT = (*SENT, "view_s")
_COUNTS = ("model.tensors", "model.numbers")
_GIVE = "leave it out to use the run's value, or give the same"


def fingerprint(
    model: nn.Module, inner: torch.optim.Optimizer, listed: TensorList | None = None
) -> UserModel:
    """Hash what peers must have in common, all of which may be `listed`: names, shapes and types of
    all parameters, and the values of frozen ones. Raise `Usage` if no parameter is trained."""
    trained = [entry for entry in model.parameters() if entry.requires_grad]
    if not trained:
        raise Usage("the model", "all its parameters are frozen", "unfreeze some")
    listed = list_tensors(model) if listed is None else listed
    digest = hashlib.sha256()
    for name, shape, dtype, values in map(msgspec.structs.astuple, listed):
        digest.update(f"{name}\x00{shape}\x00{dtype}\x00{not values}\x00".encode() + values)
    numbers = sum(entry.numel() for entry in trained)
    return UserModel(len(trained), numbers, digest.hexdigest(), type(inner).__name__)


def spelt(method: str | GivenMethod | None, options: TomlTable) -> tuple[str | None, TomlTable]:
    """Return the name of a method, and its options with those that an instance sets: the ones that
    differ from its defaults, so that it means what its name means with them.

    Raise `Usage` for an unknown name, an instance that cannot be described by a name and plain
    options, or an option that both an instance and the caller set."""
    codecs = {name: options[name].name for name in SENT if hasattr(options.get(name), "name")}
    options = {**options, **codecs}
    if method is None:
        return None, options
    if isinstance(method, str):
        if method not in METHODS:
            require_name("method.name", method, dict.fromkeys(NAMES))
        return method, options
    made = _described(method)
    kind, known = type(method), option_values(method)
    for option in options:
        if option in made or (option in known and option not in SENT):
            why = f"it is an option of the {kind.__name__} that is given as the method"
            raise Usage(option, why, f"write {kind.__name__}({option}=...)")
    return METHODS.add(kind), {**made, **options}


def _described(method: object) -> TomlTable:
    """Return the options of an instance that differ from the defaults of its class."""
    kind = type(method)
    if isinstance(method, type):
        why, remedy = "it is a class", f"give an instance: {method.__name__}()"
        raise Usage("method", why, remedy)
    if not dataclasses.is_dataclass(kind) or not callable(getattr(method, "due", None)):
        why = f"a {kind.__name__} is neither a method's name nor a dataclass that is a method"
        raise Usage("method", why, "choose one of farflock's, such as farflock.DiLoCo()")
    try:
        defaults = option_values(kind())
    except TypeError:
        why = f"{kind.__name__} has an option without a default"
        raise Usage("method", why, "give each of its fields a default") from None
    return {name: value for name, value in option_values(method).items() if value != defaults[name]}


def wish(model: UserModel, method: str | None, run: TomlTable, options: TomlTable) -> TomlTable:
    """Return a caller's arguments as tables of a manifest; arguments left out (None) are omitted.
    The model comes first, as whatever else differs follows from another one."""
    sent = {name: options[name] for name in _SENT if options.get(name) is not None}
    rest = {name: value for name, value in options.items() if name not in (*_SENT, *OF_MODEL)}
    named = {} if method is None else {"name": method}
    told = {name: value for name, value in run.items() if value is not None}
    chosen = {name: options[name] for name in OF_MODEL if options.get(name) is not None}
    table = {"model": msgspec.to_builtins(model) | chosen, "run": told}
    return table | {"method": {**named, "options": rest}, "exchange": sent}


def founded(wished: TomlTable) -> Manifest:
    """Return a founder's manifest with defaults spelt out; raise `Usage` if no run can have it."""
    table = {**wished, "method": {"name": DEFAULT_METHOD} | wished["method"]}
    table["exchange"] = {"view_s": DEFAULT_VIEW_S} | wished["exchange"]
    fill_method(table)
    return of_program(table)


def require_agreed(
    manifest: Manifest, wished: TomlTable, ours: bytes = b"", theirs: bytes = b""
) -> None:
    """Raise `RefusedByRun`, with the place and both values, where a joiner's arguments contradict
    its run's manifest; if lists of both models are there (tensor_list.py), with the first tensor
    that differs."""
    known = dict(places(manifest.to_tables()))
    for name in OF_MODEL:  # what is compared depends on them
        here, there = wished.get("model", {}).get(name), known[f"model.{name}"]
        if here != there:
            why = f"it is {here!r:.80} here and {there!r:.80} in the run"
            raise RefusedByRun(name, why, "give the run's to SwarmOptimizer, and leave out None")
    for place, value in places(wished):
        if known.get(place) != value:
            there = f"{known[place]!r:.80}" if place in known else "not set"
            why = f"it is {value!r:.80} here and {there} in the run"
            differs = first_difference(decode(ours) or (), decode(theirs) or ()) if theirs else ()
            if differs and place in _COUNTS:
                raise RefusedByRun(place, f"{why}, as {differs[0]}", differs[1])
            if differs and place == "model.sha256":
                raise RefusedByRun("the model is not the run's", *differs)
            raise RefusedByRun(place, why, _AS_FOUNDED if place.startswith("model.") else _GIVE)
