"""The terms of a run that trains a user's own model. They replace the manifest, and all peers must
agree on them.

A model cannot be sent as data, so each peer brings it with its program; the terms hold its
fingerprint, the method with every option spelt out, and the run's name and seed. They are sealed,
sent and hashed as a manifest is. The founder's arguments determine them; a joiner's arguments must
not contradict them, and default to the run's.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec
import torch
from torch import nn

from farflock.node.errors import RefusedByRun, Usage
from farflock.node.run.entitled import MAX_TOKENS_OF_USERS
from farflock.node.run.fit import require_members
from farflock.node.run.sections import (
    PROTOCOL,
    SENT,
    USER_MODEL,
    ExchangeSection,
    MethodSection,
    PlainText,
    constructor_options,
    convert,
    fill_method,
    require_codecs,
    require_method,
    tables,
)
from farflock.node.run.toml import to_toml
from farflock.optimizers.catalog import method as build_method
from farflock.optimizers.method import Method
from farflock.swarm.messages import MAX_MEMBERS

TomlTable = dict[str, Any]

DEFAULT_METHOD = "diloco"
_EXCHANGE = (*SENT, "view_s", "max_tokens_per_round")  # options that live in [exchange]
DEFAULT_VIEW_S = 5.0  # joiners are let in at the next view: loops in notebooks are short


class UserRunSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[run]: the name, and the seed from which pairs and reducers are drawn. A user's model has its
    own source of randomness."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]{0,63}$")] = "unnamed"
    seed: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] = 0
    protocol: Annotated[int, msgspec.Meta(ge=0)] = PROTOCOL


class UserModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[user_model]: the number of trained tensors and of their values, a hash of everything that
    all peers must have in common, and the class of the inner optimizer."""

    tensors: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    numbers: Annotated[int, msgspec.Meta(ge=1, le=2**60)]
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
    inner: PlainText


class UserTerms(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A whole run of a user's own model, resolved."""

    run: UserRunSection
    user_model: UserModel
    method: MethodSection
    exchange: ExchangeSection

    def canonical(self) -> bytes:
        """Return the TOML that is hashed, signed and sent."""
        return to_toml(msgspec.to_builtins(self)).encode()

    def build(self) -> Method:
        """Return the method; raise `Usage` if it refuses its options."""
        require_codecs(self.exchange)
        try:
            return build_method(self.method.name, **constructor_options(self.method, self.exchange))
        except ValueError as error:
            raise Usage("the run cannot work", str(error), "") from None


def run_id(raw: bytes, founder: str) -> str:
    """Return the run's id from the terms as they are sent, computed as for manifests."""
    return hashlib.sha256(raw + b"\x00" + founder.encode()).hexdigest()[:32]


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
    """Return a caller's arguments as tables of the terms; arguments left out (None) are omitted."""
    sent = {name: options[name] for name in _EXCHANGE if options.get(name) is not None}
    rest = {name: value for name, value in options.items() if name not in _EXCHANGE}
    table: TomlTable = {"run": {name: value for name, value in run.items() if value is not None}}
    table[USER_MODEL] = msgspec.to_builtins(model)
    table["method"] = {"options": rest} if method is None else {"name": method, "options": rest}
    return table | {"exchange": sent}


def founded(wished: TomlTable) -> UserTerms:
    """Return a founder's terms with defaults spelt out; raise `Usage` if no run can have them."""
    table = {**wished, "method": {"name": DEFAULT_METHOD} | wished["method"]}
    usual = {"view_s": DEFAULT_VIEW_S, "max_tokens_per_round": MAX_TOKENS_OF_USERS}
    table["exchange"] = usual | wished["exchange"]
    fill_method(table)
    table["run"] = {**table["run"], "protocol": PROTOCOL}
    return _checked(table)


def joined(raw: bytes, wished: TomlTable) -> UserTerms:
    """Return the run's terms; raise `RefusedByRun` if this version cannot take part in the run,
    or if a joiner's arguments contradict them."""
    try:
        table = tables(raw, "the run's terms")
        if USER_MODEL not in table:
            why = "its members train one of Farflock's models"
            raise RefusedByRun(
                "that run does not train your own model", why, "join it with `farflock join INVITE`"
            )
        terms = _checked(table)
    except Usage as error:
        raise RefusedByRun(
            "this version cannot take part in that run",
            str(error),
            "update farflock, or tell the run's founder",
        ) from None
    _require_equal(wished, msgspec.to_builtins(terms))
    return terms


def _checked(table: TomlTable) -> UserTerms:
    terms = convert(table, UserTerms)
    require_method(terms.method)
    require_members(terms.build(), MAX_MEMBERS, "the largest number of members")
    return terms


def _require_equal(wished: TomlTable, theirs: TomlTable) -> None:
    mine, run = wished[USER_MODEL], theirs[USER_MODEL]
    if mine["sha256"] != run["sha256"]:
        sizes = (
            f"it has {mine['tensors']} tensors with {mine['numbers']:,} values,"
            f" the run's model {run['tensors']} with {run['numbers']:,}"
        )
        if (mine["tensors"], mine["numbers"]) == (run["tensors"], run["numbers"]):
            sizes = "names, shapes, types or frozen values of its parameters differ"
        raise RefusedByRun(
            "this model differs from the run's", sizes, "build it as the run's founder did"
        )
    known = dict(_flat(theirs, ""))
    for place, value in _flat(wished, ""):
        if known.get(place) != value:
            there = f"{known[place]!r}" if place in known else "not set"
            why = f"it is {value!r} here and {there} in the run"
            raise RefusedByRun(place, why, "leave it out to use the run's value, or give the same")


def _flat(table: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value
