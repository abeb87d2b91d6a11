"""Tables that the terms of all runs have, whether they train Farflock's model or a user's, and the
code that reads them.

A misspelt key, a wrong type or an impossible value is refused with its place and the nearest valid
one.
"""

import dataclasses
import math
import re
import threading
import tomllib
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from farflock.compression.catalog import codec
from farflock.node.errors import RefusedByRun, Usage
from farflock.node.run.head import PROTOCOL, require_same_protocol
from farflock.node.run.spelling import near_key, near_option, near_value
from farflock.node.run.split import nearest_divisor
from farflock.optimizers.catalog import METHODS, NAMES, unfolded
from farflock.optimizers.parts.outer import OuterHeavyBall, OuterNesterov, OuterSGD

MAX_MANIFEST_BYTES = 64 * 1024
MAX_LINE_CHARS = 1024  # parsing TOML takes time quadratic in a dotted key's length
OUTERS: dict[str, type[Any]] = {
    "sgd": OuterSGD,
    "nesterov": OuterNesterov,
    "heavyball": OuterHeavyBall,
}
MAX_DEADLINE_S = 7 * 24 * 3600  # a large model on a slow line takes days for a round
SENT = ("codec", "return_codec", "deadline_s")  # method options that live in [exchange]
PlainText = Annotated[str, msgspec.Meta(max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$")]
SectionT = TypeVar("SectionT", bound=msgspec.Struct)
Option = int | float | str | bool | dict[str, int | float | str]
# msgspec learns a type when it is first used, and crashes if two threads let it do so at once.
_FIRST_USE = threading.Lock()
_TOML_PLACE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")
_MISMATCH = re.compile(
    r"Expected `(?P<kind>[^`]+)`(?: (?P<bound>[<>]=? \S+)|(?P<size> of length [^,]+)"
    r"| matching regex '(?P<pattern>.*)')?(?:, got (?P<got>.+))?"
)
_KINDS = {  # msgspec's names in words
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the manifest."""


class MethodSection(Section, frozen=True):
    """[method]: the method by which peers that train apart keep one model, and its options."""

    name: PlainText = "noloco"
    options: dict[PlainText, Option] = {}


class ExchangeSection(Section, frozen=True):
    """[exchange]: the codecs of what peers send, and how long they wait for each other; an
    option that the method lacks is None. Membership changes at most once every `view_s` seconds,
    members without a majority for `branch_after_s` continue as a branch, and the founder starts
    to train once there are `start_peers` members."""

    codec: PlainText | None = None
    return_codec: PlainText | None = None
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_DEADLINE_S)] | None = None
    view_s: Annotated[float, msgspec.Meta(ge=0.5, le=3600)] = 30.0
    branch_after_s: Annotated[float, msgspec.Meta(ge=10, le=1e6)] = 600.0
    start_peers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1


def tables(text: str | bytes, origin: str) -> dict[str, Any]:
    """Parse TOML into untyped tables; raise `Usage` if it is invalid or too large."""
    if len(text) > MAX_MANIFEST_BYTES:
        raise Usage(
            origin,
            f"it has {len(text):,} bytes, and a manifest at most {MAX_MANIFEST_BYTES:,}",
            "name a manifest, which is a short TOML file",
        )
    try:
        lines = text.decode() if isinstance(text, bytes) else text
        longest = max(map(len, lines.splitlines()), default=0)
        if longest > MAX_LINE_CHARS:
            raise Usage(
                origin,
                f"it has a line of {longest:,} characters, and {MAX_LINE_CHARS:,} are allowed",
                "break that line",
            )
        return tomllib.loads(lines)
    except tomllib.TOMLDecodeError as error:
        raise _syntax_error(origin, str(error)) from None
    except UnicodeDecodeError as error:
        why = f"it is not UTF-8 text: byte {error.start} is invalid"
        raise Usage(origin, why, "convert it to UTF-8") from None
    except RecursionError:
        raise Usage(origin, "its arrays or tables are nested too deeply", "flatten it") from None


def _syntax_error(origin: str, message: str) -> Usage:
    """Return tomllib's error with the line in front: `run.toml, line 3: expected ...`."""
    found = _TOML_PLACE.search(message)
    where = "" if found is None else f", line {found[1]}" if found[1] else ", at the end"
    why = message if found is None else message[: found.start()]
    return Usage(f"{origin}{where}", f"{why[:1].lower()}{why[1:200]}", "correct the TOML there")


def require_protocol(table: Mapping[str, Any]) -> None:
    """Check the protocol before anything else, as another version's manifest may have other
    keys."""
    run = table.get("run")
    require_same_protocol(run.get("protocol", PROTOCOL) if isinstance(run, dict) else PROTOCOL)


def fill_method(table: dict[str, Any]) -> None:
    """Spell out the method's options, and move those that concern exchanges into [exchange]. The
    default number of fragments is the divisor of the model's layers nearest to the method's own
    default."""
    method, exchange = table.setdefault("method", {}), table.setdefault("exchange", {})
    name, given = method.get("name", MethodSection().name), method.get("options", {})
    if name not in METHODS:  # which also knows a program's own
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
            why = "a run's terms cannot hold None"
            raise Usage(
                f"method.options.{option}",
                why,
                f"give a value, or leave it out to get {defaults[option]!r}",
            )
    for option in SENT:
        if option in exchange and option in given and exchange[option] != given[option]:
            raise Usage(
                f"exchange.{option}",
                f"it differs from method.options.{option}",
                "keep one of the two",
            )
        if option in exchange and option not in defaults:
            raise Usage(f"exchange.{option}", f"method {name} has no such option", "leave it out")
        if option in defaults:
            exchange.setdefault(option, given.get(option, defaults[option]))
    resolved = {
        option: value
        for option, value in (defaults | given).items()
        if option not in SENT and value is not None
    }
    table["method"] = {**method, "name": name, "options": resolved}


def _defaults(method: type[Any]) -> dict[str, Any]:
    """Return a method's options as plain values: the fields of its constructor that are not
    state."""
    return option_values(method())


def option_values(made: Any) -> dict[str, Any]:  # noqa: ANN401 - a method or an outer optimizer
    """Return the options of a method or an outer optimizer as plain values and tables."""
    names = [field.name for field in dataclasses.fields(made) if not field.name.startswith("_")]
    values = {name: getattr(made, name) for name in names}
    kinds = {kind: name for name, kind in OUTERS.items()}
    return {
        name: {"name": kinds[type(value)], **option_values(value)}
        if type(value) in kinds
        else value
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
    """Refuse an unknown method, unknown options and options of a wrong type."""
    if method.name not in METHODS and "." in method.name:
        raise RefusedByRun(
            "the run has a method of its founder's own program",
            f"this program does not know {method.name[:64]!r}",
            "join with an instance of that class as the method",
        )
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
            "leave it out, or write it as a table",
        )
    name = outer.get("name", "nesterov")
    require_name("method.options.outer.name", name, OUTERS)
    rest = {option: value for option, value in outer.items() if option != "name"}
    _require_options(OUTERS[str(name)], rest, f"method.options.outer of {name}")


def require_name(place: str, name: object, known: Mapping[str, Any]) -> None:
    if not isinstance(name, str) or name not in known:
        raise Usage(place, f"{str(name)[:64]!r} is not known", near_value(str(name), known))


def require_codecs(exchange: ExchangeSection) -> None:
    """Raise `Usage`, with the place, for a codec that does not exist."""
    for place in ("codec", "return_codec"):
        name = getattr(exchange, place)
        try:
            if name is not None:
                codec(name)
        except ValueError as error:
            raise Usage(f"exchange.{place}", str(error), "") from None


def _require_options(kind: type[Any], options: Mapping[str, Any], place: str) -> None:
    known, hints = _defaults(kind), get_type_hints(kind)
    for option, value in options.items():
        if option not in known:
            raise Usage(place, f"there is no {option[:64]!r}", near_option(option, known))
        try:
            _converted(value, hints[option])
        except msgspec.ValidationError as error:
            if get_origin(hints[option]) is Literal:
                choices = [str(choice) for choice in get_args(hints[option])]
                raise Usage(
                    f"{place}, {option}",
                    f"{value!r:.80} is not known",
                    near_value(str(value), choices),
                ) from None
            raise _mismatch(f"{place}, {option}", value, str(error)) from None


def convert(table: dict[str, Any], kind: type[SectionT]) -> SectionT:
    """Convert tables to a manifest; raise `Usage` with the place of the first error."""
    _require_known(table, kind, "")
    try:
        terms: SectionT = _converted(table, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _misfit(table, str(error), kind) from None
    _require_plain(table, "")  # last, as the types bound the depth of the table
    return terms


def _converted(value: Any, kind: Any) -> Any:  # noqa: ANN401 - msgspec's
    with _FIRST_USE:
        return msgspec.convert(value, kind)


def _misfit(table: Mapping[str, Any], message: str, root: type[msgspec.Struct]) -> Usage:
    """Return msgspec's error in words: the place, what belongs there, and what is there now."""
    reason, _, place = message.partition(" - at `$.")
    place = place.rstrip("`")
    value, kind = _entry_at(table, root, place)
    if missing := re.search(r"missing required field `(\w+)`", reason):
        return _missing(place, value, kind, missing[1])
    if get_origin(kind) is Literal:
        return Usage(place, f"{value!r:.80} is not known", near_value(str(value), get_args(kind)))
    return _mismatch(place or "the manifest", value, reason)


def _entry_at(table: Mapping[str, Any], root: type[msgspec.Struct], place: str) -> tuple[Any, Any]:
    """Return the value at a place such as `train.betas[1]`, and its type; None where either is
    unknown."""
    value: Any = table
    kind: Any = root
    for name in place.split(".") if place else ():
        key, bracket, _ = name.partition("[")
        value = value.get(key) if isinstance(value, Mapping) else None
        fields = getattr(kind, "__struct_fields__", ())
        kind = _section_of(get_type_hints(kind)[key]) if key in fields else None
        if bracket:
            kind = None
    return value, kind


def _missing(place: str, given: object, kind: object, first: str) -> Usage:
    """Return the error for a table with missing keys; it names all of them, as far as they are
    known."""
    names = [first]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(given, Mapping):
        fields = [field.name for field in msgspec.structs.fields(kind) if field.required]
        names = [name for name in fields if name not in given] or names
    if len(names) == 1:
        return Usage(".".join(filter(None, (place, first))), "it is missing", "give it a value")
    return Usage(
        place or "the manifest", f"{', '.join(names)} are missing", "give each of them a value"
    )


def _mismatch(place: str, value: object, reason: str) -> Usage:
    """Return a type's or a bound's error as `train.lr must be a number, got 'fast'`."""
    found = _MISMATCH.fullmatch(reason)
    if found is None:
        return Usage(place, reason, "" if ";" in reason else "correct that value")
    kinds = [_KINDS.get(kind, kind) for kind in found["kind"].split(" | ") if kind != "null"]
    wanted = " or ".join(kinds) + (f" {found['bound']}" if found["bound"] else "")
    wanted += found["size"] or ""
    if found["pattern"] is not None:
        wanted += f" that matches the pattern {found['pattern']!r}"
    shown = found["got"] if value is None or isinstance(value, Mapping) else f"{value!r:.80}"
    return Usage(f"{place} must be {wanted}" + (f", got {shown}" if shown else ""), "", "")


def _require_known(table: Mapping[str, Any], kind: type[msgspec.Struct], path: str) -> None:
    """Refuse unknown keys, and name the nearest known one."""
    fields = {field.name: _section_of(field.type) for field in msgspec.structs.fields(kind)}
    for name, value in table.items():
        if name not in fields:
            remedy = near_key(name, path.rstrip("."), fields)
            raise Usage(f"{path}{name}"[:128], "there is no such key", remedy)
        if (
            isinstance(value, dict)
            and isinstance(fields[name], type)
            and issubclass(fields[name], msgspec.Struct)
        ):
            _require_known(value, fields[name], f"{path}{name}.")


def _section_of(kind: Any) -> Any:  # noqa: ANN401 - types have no common type
    """Return the type inside an optional type."""
    return (
        next(member for member in get_args(kind) if member is not NoneType)
        if isinstance(kind, UnionType)
        else kind
    )


def _require_plain(value: object, path: str) -> None:
    """Refuse numbers that are not finite or exceed 64 bits, and texts that are not UTF-8."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise Usage(path, "the number has more than 64 bits", "give a smaller one")
    if isinstance(value, float) and not math.isfinite(value):
        raise Usage(path, f"{value} is not finite", "give a finite number")
    if (
        isinstance(value, str)
        and not value.isascii()
        and value.encode(errors="replace").decode() != value
    ):
        raise Usage(path, f"{value!r} is not valid UTF-8", "give another text")
    entries = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for name, entry in entries:
        _require_plain(entry, f"{path}.{name}" if path else str(name))
