"""The manifest of a run that trains a user's own model, from the arguments of its program.

A model cannot be sent as data, so each peer brings it with its program; the manifest holds its
fingerprint, the method with every option spelt out, and the run's name and seed. The founder's
arguments determine them; a joiner's arguments must not contradict them, and default to the run's.
"""

import hashlib
from typing import Any

import msgspec
import torch
from torch import nn

from farflock.node.errors import RefusedByRun, Usage
from farflock.node.run.manifest import Manifest, of_program, places
from farflock.node.run.model_section import UserModel
from farflock.node.run.sections import SENT, fill_method

TomlTable = dict[str, Any]

DEFAULT_METHOD = "diloco"
DEFAULT_VIEW_S = 5.0  # joiners are let in at the next view: loops in notebooks are short

_AS_FOUNDED = (
    "build the model and its inner optimizer as the run's founder did, with the same names, shapes,"
    " types and frozen values"
)
_GIVE = "leave it out to use the run's value, or give the same"


def fingerprint(model: nn.Module, inner: torch.optim.Optimizer) -> UserModel:
    """Hash what peers must have in common: names, shapes and types of all parameters, and the
    values of frozen ones. Raise `Usage` if no parameter is trained."""
    trained = [entry for entry in model.parameters() if entry.requires_grad]
    if not trained:
        raise Usage("the model", "all its parameters are frozen", "unfreeze some")
    digest = hashlib.sha256()
    for name, entry in model.named_parameters():
        digest.update(
            f"{name}\x00{tuple(entry.shape)}\x00{entry.dtype}\x00{entry.requires_grad}\x00".encode()
        )
        if not entry.requires_grad:
            gathered = getattr(entry, "full_tensor", None)  # of a shard: all ranks take part
            whole = entry if gathered is None else gathered()
            digest.update(
                whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            )
    numbers = sum(entry.numel() for entry in trained)
    return UserModel(len(trained), numbers, digest.hexdigest(), type(inner).__name__)


def wish(model: UserModel, method: str | None, run: TomlTable, options: TomlTable) -> TomlTable:
    """Return a caller's arguments as tables of a manifest; arguments left out (None) are omitted.
    The model comes first, as whatever else differs follows from another one."""
    sent = {name: options[name] for name in (*SENT, "view_s") if options.get(name) is not None}
    rest = {name: value for name, value in options.items() if name not in (*SENT, "view_s")}
    named = {} if method is None else {"name": method}
    told = {name: value for name, value in run.items() if value is not None}
    table = {"model": msgspec.to_builtins(model), "run": told}
    return table | {"method": {**named, "options": rest}, "exchange": sent}


def founded(wished: TomlTable) -> Manifest:
    """Return a founder's manifest with defaults spelt out; raise `Usage` if no run can have it."""
    table = {**wished, "method": {"name": DEFAULT_METHOD} | wished["method"]}
    table["exchange"] = {"view_s": DEFAULT_VIEW_S} | wished["exchange"]
    fill_method(table)
    return of_program(table)


def require_agreed(manifest: Manifest, wished: TomlTable) -> None:
    """Raise `RefusedByRun`, with the place and both values, where a joiner's arguments contradict
    its run's manifest."""
    known = dict(places(manifest.to_tables()))
    for place, value in places(wished):
        if known.get(place) != value:
            there = f"{known[place]!r:.80}" if place in known else "not set"
            why = f"it is {value!r:.80} here and {there} in the run"
            raise RefusedByRun(place, why, _AS_FOUNDED if place.startswith("model.") else _GIVE)
