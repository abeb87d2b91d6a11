"""Tables that the terms of all runs have, with Farflock's model or a user's, and their reader.

A misspelt key, a wrong type or an impossible value is refused with its place and the nearest
possible thing.
"""

import dataclasses
import math
import re
import tomllib
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from farflock.node.errors import RefusedByRun, Usage, nearest
from farflock.node.run.split import nearest_divisor
from farflock.optimizers.catalog import METHODS, NAMES, unfolded
from farflock.optimizers.parts.outer import OuterHeavyBall, OuterNesterov, OuterSGD
from farflock.swarm.frame import VERSION as FRAME_VERSION

# one number for all that peers exchange; a peer with another one is refused before it dials
PROTOCOL = FRAME_VERSION
MAX_MANIFEST_BYTES = 64 * 1024
MAX_LINE_CHARS = 1024  # parsing TOML takes time quadratic in a dotted key's length
# the table that runs of a user's own model have in place of [model] (node/run/user_terms.py)
USER_MODEL = "user_model"
OUTERS: dict[str, type[Any]] = {
    "sgd": OuterSGD,
    "nesterov": OuterNesterov,
    "heavyball": OuterHeavyBall,
}
SENT = ("codec", "return_codec", "deadline_s")  # method options that live in [exchange]
PlainText = Annotated[str, msgspec.Meta(max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$")]
SectionT = TypeVar("SectionT", bound=msgspec.Struct)
Option = int | float | str | bool | dict[str, int | float | str]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the manifest."""


class MethodSection(Section, frozen=True):
    """[method]: how peers keep one model although they train apart, and the method's options."""

    name: PlainText = "noloco"
    options: dict[PlainText, Option] = {}


class ExchangeSection(Section, frozen=True):
    """[exchange]: what is sent and how long peers wait for it; None if the method has no such
    option. Membership changes at most every `view_s` seconds, members without a majority for
    `branch_after_s` go on as a branch, and the founder trains once `start_peers` members are
    there."""

    codec: PlainText | None = None
    return_codec: PlainText | None = None
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] | None = None
    view_s: Annotated[float, msgspec.Meta(ge=0.5, le=3600)] = 30.0
    branch_after_s: Annotated[float, msgspec.Meta(ge=10, le=1e6)] = 600.0
    start_peers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1


def tables(text: str | bytes, origin: str) -> dict[str, Any]:
    """Parse TOML into untyped tables; raise `Usage` if it is invalid or too large."""
    if len(text) > MAX_MANIFEST_BYTES:
        raise Usage(
            origin,
            f"it has {len(text)} bytes, above {MAX_MANIFEST_BYTES}",
            "a manifest is a short TOML file",
        )
    try:
        lines = text.decode() if isinstance(text, bytes) else text
        longest = max(map(len, lines.splitlines()), default=0)
        if longest > MAX_LINE_CHARS:
            raise Usage(
                origin,
                f"it has a line of {longest} characters, above {MAX_LINE_CHARS}",
                "break it up",
            )
        return tomllib.loads(lines)
    except (ValueError, RecursionError) as error:  # ValueError: TOMLDecodeError, UnicodeDecodeError
        raise Usage(origin, f"it is no TOML: {str(error)[:200]}", "correct it there") from None


def require_protocol(table: Mapping[str, Any]) -> None:
    """Check the protocol first of all, as another version's manifest may have other keys."""
    run = table.get("run")
    require_same_protocol(run.get("protocol", PROTOCOL) if isinstance(run, dict) else PROTOCOL)


def require_same_protocol(protocol: object) -> None:
    """Raise `RefusedByRun` if the run's peers speak another protocol."""
    if protocol != PROTOCOL:
        remedy = (
            "update farflock"
            if isinstance(protocol, int) and protocol > PROTOCOL
            else "use the version that made it"
        )
        raise RefusedByRun(
            "the run has another protocol", f"{protocol!r}, this program speaks {PROTOCOL}", remedy
        )


def fill_method(table: dict[str, Any]) -> None:
    """Spell out the method's options, and move those about sending into [exchange]. The default
    number of fragments is the divisor of the model's layers nearest to the method's own default."""
    method, exchange = table.setdefault("method", {}), table.setdefault("exchange", {})
    name, given = method.get("name", MethodSection().name), method.get("options", {})
    require_name("method.name", name, dict.fromkeys(NAMES))
    name, preset = unfolded(name)
    if not isinstance(given, dict):
        raise Usage(
            "method.options", f"it is {given!r}, not a table", "write it as [method.options]"
        )
    defaults, layers = _defaults(METHODS[name]) | preset, table.get("model", {}).get("layers")
    if "fragments" in defaults and isinstance(layers, int):
        defaults["fragments"] = nearest_divisor(layers, defaults["fragments"])
    for option, value in given.items():
        if value is None and defaults.get(option) is not None:  # TOML has no null
            why = "None cannot be written into a run's terms"
            raise Usage(
                f"method.options.{option}",
                why,
                f"leave it out for {defaults[option]!r}, or name a value",
            )
    for option in SENT:
        if option in exchange and option in given and exchange[option] != given[option]:
            raise Usage(
                f"exchange.{option}",
                f"method.options.{option} says something else",
                "keep one of the two",
            )
        if option in exchange and option not in defaults:
            raise Usage(f"exchange.{option}", f"{name} has no such thing", "leave it out")
        if option in defaults:
            exchange.setdefault(option, given.get(option, defaults[option]))
    resolved = {
        option: value
        for option, value in (defaults | given).items()
        if option not in SENT and value is not None
    }
    table["method"] = {**method, "name": name, "options": resolved}


def _defaults(method: type[Any]) -> dict[str, Any]:
    """Return a method's options as plain values: its constructor's fields that are not state."""
    return _values(method())


def _values(made: Any) -> dict[str, Any]:  # noqa: ANN401 - a method or an outer optimizer
    names = [field.name for field in dataclasses.fields(made) if not field.name.startswith("_")]
    values = {name: getattr(made, name) for name in names}
    kinds = {kind: name for name, kind in OUTERS.items()}
    return {
        name: {"name": kinds[type(value)], **_values(value)} if type(value) in kinds else value
        for name, value in values.items()
    }


def constructor_options(method: MethodSection, exchange: ExchangeSection) -> dict[str, Any]:
    """Return the keyword arguments of the method's constructor."""
    sent = {name: value for name in SENT if (value := getattr(exchange, name)) is not None}
    options: dict[str, Any] = {**method.options, **sent}
    if "outer" in options:
        outer = dict(options["outer"])
        options["outer"] = OUTERS[outer.pop("name", "nesterov")](**outer)
    return options


def require_method(method: MethodSection) -> None:
    """Refuse unknown names, unknown options and options of a wrong type."""
    require_name("method.name", method.name, METHODS)
    options = dict(method.options)
    outer = options.pop("outer", None)
    _require_options(METHODS[method.name], options, f"method.options of {method.name}")
    if outer is None:
        return
    if not isinstance(outer, dict) or "outer" not in _defaults(METHODS[method.name]):
        raise Usage(
            "method.options.outer",
            f"{outer!r} does not fit method {method.name}",
            "leave it out, or make it a table",
        )
    name = outer.get("name", "nesterov")
    require_name("method.options.outer.name", name, OUTERS)
    rest = {option: value for option, value in outer.items() if option != "name"}
    _require_options(OUTERS[str(name)], rest, f"method.options.outer of {name}")


def require_name(place: str, name: object, known: Mapping[str, Any]) -> None:
    if not isinstance(name, str) or name not in known:
        raise Usage(place, f"{str(name)[:64]!r} is not known", nearest(str(name), known))


def _require_options(kind: type[Any], options: Mapping[str, Any], place: str) -> None:
    known, hints = _defaults(kind), get_type_hints(kind)
    for option, value in options.items():
        if option not in known:
            raise Usage(place, f"there is no {option[:64]!r}", nearest(option, known))
        try:
            msgspec.convert(value, hints[option])
        except msgspec.ValidationError as error:
            if get_origin(hints[option]) is Literal:
                choices = [str(choice) for choice in get_args(hints[option])]
                raise Usage(
                    f"{place}, {option}",
                    f"{value!r:.80} is not known",
                    nearest(str(value), choices),
                ) from None
            raise Usage(f"{place}, {option}", str(error), "correct that value") from None


def convert(table: dict[str, Any], kind: type[SectionT]) -> SectionT:
    """Convert tables to a manifest or to `UserTerms`; raise `Usage` with the place of an error."""
    require_protocol(table)
    _require_known(table, kind, "")
    try:
        terms = msgspec.convert(table, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _misfit(table, str(error), kind) from None
    _require_plain(table, "")  # last, as the types bound the depth of the table
    return terms


def _misfit(table: Mapping[str, Any], message: str, root: type[msgspec.Struct]) -> Usage:
    """Return msgspec's error with the value it is about, and the choices if there are few."""
    reason, _, place = message.partition(" - at `$.")
    place = place.rstrip("`")
    if missing := re.search(r"missing required field `(\w+)`", reason):
        return Usage(
            ".".join(filter(None, (place, missing[1]))), "it is missing", "give it a value"
        )
    value: Any = table
    kind: Any = root
    for name in place.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
        fields = getattr(kind, "__struct_fields__", ())
        kind = _section_of(get_type_hints(kind)[name]) if name in fields else None
    shown = (
        "" if value is None or isinstance(value, Mapping) else f"{value!r:.80} is not possible: "
    )
    if get_origin(kind) is Literal:
        return Usage(place, f"{value!r:.80} is not known", nearest(str(value), get_args(kind)))
    return Usage(
        place or "the manifest", f"{shown}{reason}", "" if ";" in reason else "correct that value"
    )


def _require_known(table: Mapping[str, Any], kind: type[msgspec.Struct], path: str) -> None:
    """Refuse unknown keys, and name the nearest known one."""
    fields = {field.name: _section_of(field.type) for field in msgspec.structs.fields(kind)}
    for name, value in table.items():
        if name not in fields:
            raise Usage(f"{path}{name}"[:128], "there is no such key", nearest(name, fields))
        if (
            isinstance(value, dict)
            and isinstance(fields[name], type)
            and issubclass(fields[name], msgspec.Struct)
        ):
            _require_known(value, fields[name], f"{path}{name}.")


def _section_of(kind: Any) -> Any:  # noqa: ANN401 - types have no common type
    """Return the type inside an optional one."""
    return (
        next(part for part in get_args(kind) if part is not NoneType)
        if isinstance(kind, UnionType)
        else kind
    )


def _require_plain(value: object, path: str) -> None:
    """Refuse numbers that are not finite or exceed 64 bits, and texts that are not UTF-8."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise Usage(path, "the whole number has more than 64 bits", "name a smaller one")
    if isinstance(value, float) and not math.isfinite(value):
        raise Usage(path, f"{value} is no number to compute with", "name a finite one")
    if (
        isinstance(value, str)
        and not value.isascii()
        and value.encode(errors="replace").decode() != value
    ):
        raise Usage(path, f"{value!r} is not UTF-8", "name it otherwise")
    entries = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for name, entry in entries:
        _require_plain(entry, f"{path}.{name}" if path else str(name))
