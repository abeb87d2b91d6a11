"""The manifest: what a run is, as data. Its hash with the founder's id is the run's id.

A founder writes TOML and leaves out what has a default; what is hashed, signed and sent is the *resolved* manifest, again
TOML, with every size, option and hash spelt out, so that no later version of a preset or a default can change a run. A
misspelt key, a wrong type or an impossible value is refused with its place and the nearest thing that is possible.
"""

import dataclasses
import functools
import hashlib
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from farflock.node.errors import RefusedByRun, Usage, nearest
from farflock.node.model.corpus import SHIPPED, BadCorpus, load_corpus
from farflock.node.model.data import MAX_RECURRING
from farflock.node.model.llama import PRESETS, ModelConfig
from farflock.node.model.tokenizer import TOKENIZERS
from farflock.node.run.fit import nearest_divisor, require_inner, require_layers, require_members
from farflock.node.run.pipeline_section import METHOD as PIPELINE_METHOD
from farflock.node.run.pipeline_section import PipelineSection, fill_pipeline, plan_of, require_pipeline
from farflock.node.run.terms import PipelinePlan, RunPlan
from farflock.node.run.toml import to_toml
from farflock.optimizers.catalog import METHODS, NAMES, options_of, unfolded
from farflock.optimizers.catalog import method as build_method
from farflock.optimizers.decoupled import Decoupled
from farflock.optimizers.parts.inner import InnerConfig, InnerName
from farflock.optimizers.parts.outer import OuterHeavyBall, OuterNesterov, OuterSGD
from farflock.optimizers.parts.schedule import Schedule
from farflock.swarm.frame import VERSION as FRAME_VERSION
from farflock.swarm.identity import SIGNATURE_BYTES, Identity, verify

PROTOCOL = FRAME_VERSION  # one number for all that peers exchange; who has another one is refused before it dials
MAX_HEAD_BYTES = 512
_HEAD_DOMAIN = b"head"
MAX_MANIFEST_BYTES = 64 * 1024
MAX_LINE_CHARS = 1024  # the time that TOML takes grows with the square of a dotted key's length
MAX_BATCH = 65_536  # sequences; a peer's memory is checked before it starts
WARMUP_SHARE = 0.05  # of the run's tokens, where the manifest names no warm-up

USER_MODEL = (
    "user_model"  # the table that runs of somebody's own model have in place of [model] (node/run/user_terms.py)
)
OUTERS: dict[str, type[Any]] = {"sgd": OuterSGD, "nesterov": OuterNesterov, "heavyball": OuterHeavyBall}
SENT = ("codec", "return_codec", "deadline_s")  # options of a method that [exchange] holds

PlainText = Annotated[str, msgspec.Meta(max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$")]
BatchCount = Annotated[int, msgspec.Meta(ge=1, le=MAX_BATCH)]
TokenCount = Annotated[int, msgspec.Meta(ge=1, le=2**60)]
Beta = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
SectionT = TypeVar("SectionT", bound=msgspec.Struct)
Option = int | float | str | bool | dict[str, int | float | str]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the manifest."""


class RunSection(_Section, frozen=True):
    """[run]: what it is called, the seed of all its randomness, and how many tokens it trains in all."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]{0,63}$")] = "unnamed"
    seed: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] = 0
    total_tokens: TokenCount = 1_000_000
    protocol: Annotated[int, msgspec.Meta(ge=0)] = PROTOCOL


class DataSection(_Section, frozen=True, kw_only=True):
    """[data]: the text, how it is cut into tokens, and the SHA-256 of exactly that text.

    The hash is never left open in a resolved manifest: it keeps a founder from making a volunteer train on just any file
    that happens to have that name there."""

    corpus: PlainText = SHIPPED
    tokenizer: PlainText = "bytes"
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]


class TrainSection(_Section, frozen=True, kw_only=True):
    """[train]: the inner steps. A step takes `accumulate` batches of `batch` sequences of `seq` tokens. The rate rises to
    `lr` over `warmup_tokens` and falls to `min_lr_ratio` of it; a joiner's rate also grows over `joiner_steps` of its
    own. With `samples` each trainer draws so many sequences once, which come again in epochs; without each is a new one.
    `momentum` and `nesterov` are for sgd and muon (optimizers/parts/inner.py). `clip` is the greatest gradient norm, 0
    for none."""

    batch: BatchCount = 8
    seq: BatchCount = 64
    accumulate: BatchCount = 1
    samples: Annotated[int, msgspec.Meta(ge=1, le=MAX_RECURRING)] | None = None
    optimizer: InnerName = "adamw"
    lr: Annotated[float, msgspec.Meta(gt=0, le=100)] = 3e-3
    warmup_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**60)]
    min_lr_ratio: Share = 0.1
    weight_decay: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.1
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    momentum: Beta | None = None
    nesterov: bool = False
    clip: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 1.0
    autocast: bool = False
    joiner_steps: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 20


class MethodSection(_Section, frozen=True):
    """[method]: how peers keep one model although they train apart, and the options of that method."""

    name: PlainText = "noloco"
    options: dict[PlainText, Option] = {}


class ExchangeSection(_Section, frozen=True):
    """[exchange]: what is sent and how long it is waited for; empty where the method has no such thing. Membership changes
    at most every `view_s` seconds, members without a majority for `branch_after_s` go on as a branch, and the founder
    trains once `start_peers` members are there."""

    codec: PlainText | None = None
    return_codec: PlainText | None = None
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] | None = None
    view_s: Annotated[float, msgspec.Meta(ge=0.5, le=3600)] = 30.0
    branch_after_s: Annotated[float, msgspec.Meta(ge=10, le=1e6)] = 600.0
    start_peers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1


class TrustSection(_Section, frozen=True):
    """[trust]: who may take part. This version knows invited friends alone."""

    level: Literal["trusted"] = "trusted"


class Manifest(_Section, frozen=True, kw_only=True):
    """A whole run, resolved."""

    run: RunSection = RunSection()
    model: ModelConfig
    data: DataSection
    train: TrainSection
    method: MethodSection = MethodSection()
    exchange: ExchangeSection = ExchangeSection()
    trust: TrustSection = TrustSection()
    pipeline: PipelineSection | None = None  # whole models

    def canonical(self) -> bytes:
        """The TOML that is hashed, signed and sent; `parse` gives the same manifest again."""
        return to_toml(msgspec.to_builtins(self)).encode()

    def hash(self) -> str:
        """SHA-256 of the canonical bytes."""
        return hashlib.sha256(self.canonical()).hexdigest()

    def run_id(self, founder: str) -> str:
        """32 hex digits that name this run of this founder."""
        return hashlib.sha256(self.canonical() + b"\x00" + founder.encode()).hexdigest()[:32]

    def plan(self) -> RunPlan:
        """What all nodes of this run do; raise `ValueError` where the parts refuse their numbers."""
        train = self.train
        return RunPlan(
            run_seed=self.run.seed,
            model=self.model,
            inner=InnerConfig(
                train.optimizer,
                train.lr,
                train.betas,
                train.weight_decay,
                momentum=train.momentum,
                nesterov=train.nesterov,
            ),
            schedule=Schedule(
                train.lr, self.run.total_tokens, train.warmup_tokens, train.min_lr_ratio, train.joiner_steps
            ),
            method=self.method.name,
            options=constructor_options(self.method, self.exchange),
            batch=train.batch,
            seq=train.seq,
            accumulate=train.accumulate,
            samples=train.samples or 0,
            clip_norm=train.clip or None,
            autocast=train.autocast,
        )

    def pipeline_plan(self) -> PipelinePlan | None:
        """How the model is cut and what is agreed upon between its stages; None for a run of whole models."""
        return None if self.pipeline is None else plan_of(self.pipeline, self.plan())

    def check(self) -> "Manifest":
        """Refuse what cannot run, before anything starts; returns itself."""
        require_method(self.method)
        if self.data.tokenizer not in TOKENIZERS:
            raise Usage(
                "data.tokenizer", f"{self.data.tokenizer!r} is not known", nearest(self.data.tokenizer, TOKENIZERS)
            )
        vocabulary = TOKENIZERS[self.data.tokenizer]().vocab_size
        if self.model.vocab_size != vocabulary:
            why = f"{self.model.vocab_size}, but the tokenizer {self.data.tokenizer!r} has {vocabulary} tokens"
            raise Usage("model.vocab_size", why, f"set it to {vocabulary}")
        if self.train.seq > self.model.context:
            why = f"sequences of {self.train.seq} tokens do not fit a context of {self.model.context}"
            raise Usage("train.seq", why, f"set it to {self.model.context} or less, or enlarge model.context")
        try:
            plan = self.plan()
            made = build_method(plan.method, **plan.options)
        except ValueError as error:
            raise Usage("the manifest cannot run", str(error), "") from None
        require_inner(plan.method, made, plan.inner, plan.clip_norm)
        require_layers(made, self.model.layers)
        require_members(made, self.exchange.start_peers, "exchange.start_peers")
        if self.pipeline is not None:
            require_pipeline(self.pipeline, plan, made)
        return self


def load(path: Path, assignments: Sequence[str] = ()) -> Manifest:
    """Read a founder's file, apply `a.b=c` overrides and resolve; `Usage` or `RefusedByRun` for whatever is wrong."""
    return resolve(tables(path.read_bytes(), str(path)), assignments)


def parse(text: str | bytes) -> Manifest:
    """A resolved manifest from its canonical text, as members send it; `RefusedByRun` for anything else."""
    try:
        table = tables(text, "the manifest")
        _require_known_model(table)
        return convert(table, Manifest).check()
    except Usage as error:
        raise RefusedByRun(
            "this version cannot take part in that run", str(error), "tell its founder, or update"
        ) from None


def resolve(table: dict[str, Any], assignments: Sequence[str] = ()) -> Manifest:
    """A manifest with everything spelt out, from what a founder wrote; may read the corpus to hash it."""
    for assignment in assignments:
        override(table, assignment)
    require_protocol(table)
    _require_tables(table)
    _fill_model(table)
    if "pipeline" in table:
        table.setdefault("method", {}).setdefault("name", PIPELINE_METHOD)
    fill_method(table)
    _fill_train(table)
    if "pipeline" in table:
        fill_pipeline(table)
    data = table.setdefault("data", {})
    if "sha256" not in data:
        data["sha256"] = _corpus_hash(str(data.get("corpus", SHIPPED)))
    return convert(table, Manifest).check()


def override(table: dict[str, Any], assignment: str) -> None:
    """Set one value: `train.lr=0.01`. The value is read as TOML, and as a text where it is none."""
    path, equals, value = assignment.partition("=")
    names = path.strip().split(".")
    if not equals or not all(names):
        raise Usage("--set", f"{assignment!r} does not name a value", "write it as train.lr=0.01")
    for section in names[:-1]:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise Usage("--set", f"{path}: {section} is a value, not a table", "write it as train.lr=0.01")
    try:
        table[names[-1]] = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        table[names[-1]] = value


def demo_manifest(method: str, peers: int, steps: int) -> Manifest:
    """What `farflock demo` trains: rounds are short, for it has few steps, and nobody is waited for long."""
    known = options_of(method) if method in NAMES else {}
    options: dict[str, Any] = {"codec": "int8"} if method == "diloco" else {}
    for name, most in (("period", 10), ("deadline_s", 6.0)):
        if name in known:
            options[name] = min(most, known[name])
    train = {"batch": 8, "seq": 64}
    return resolve(
        {
            "run": {"name": "demo", "seed": 1, "total_tokens": peers * steps * math.prod(train.values())},
            "train": train,
            "method": {"name": method, "options": options},
            "exchange": {"view_s": 2.0, "start_peers": peers},
        }
    )


def simulated_default(assignments: Sequence[str]) -> Manifest:
    """What `farflock sim` runs without a manifest: a tiny model, short rounds, of whatever method is assigned."""
    assigned: dict[str, Any] = {}
    for assignment in assignments:
        override(assigned, assignment)
    method = assigned.get("method")
    name = method.get("name", "noloco") if isinstance(method, dict) else "noloco"
    known = options_of(name) if isinstance(name, str) and name in METHODS else {}
    exchange = {"deadline_s": 10.0} if "deadline_s" in known else {}
    return resolve(
        {
            "run": {"name": "simulated", "seed": 1, "total_tokens": 40_000},
            "model": {"preset": "tiny"},
            "train": {"batch": 2, "seq": 32},
            "method": {"name": name, "options": {"period": 5} if "period" in known else {}},
            "exchange": {"view_s": 5.0, **exchange},
        },
        assignments,
    )


def tables(text: str | bytes, origin: str) -> dict[str, Any]:
    """What a TOML text says, untyped."""
    if len(text) > MAX_MANIFEST_BYTES:
        raise Usage(origin, f"it has {len(text)} bytes, above {MAX_MANIFEST_BYTES}", "a manifest is a short TOML file")
    try:
        lines = text.decode() if isinstance(text, bytes) else text
        longest = max(map(len, lines.splitlines()), default=0)
        if longest > MAX_LINE_CHARS:
            raise Usage(origin, f"it has a line of {longest} characters, above {MAX_LINE_CHARS}", "break it up")
        return tomllib.loads(lines)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise Usage(origin, f"it is no TOML: {str(error)[:200]}", "correct it there") from None


def require_protocol(table: Mapping[str, Any]) -> None:
    """First of all: another version's manifest may well have other keys."""
    run = table.get("run")
    require_same_protocol(run.get("protocol", PROTOCOL) if isinstance(run, dict) else PROTOCOL)


def require_same_protocol(protocol: object) -> None:
    """Refuse a run whose peers exchange something else."""
    if protocol != PROTOCOL:
        remedy = (
            "update farflock" if isinstance(protocol, int) and protocol > PROTOCOL else "use the version that made it"
        )
        raise RefusedByRun("the run has another protocol", f"{protocol!r}, this program speaks {PROTOCOL}", remedy)


def _require_known_model(table: Mapping[str, Any]) -> None:
    if USER_MODEL in table:
        why, remedy = (
            "a command cannot build it",
            "join it from that program: farflock.SwarmOptimizer(model, invite=...)",
        )
        raise RefusedByRun("that run trains the model of a program of its founder's", why, remedy)


def _require_tables(table: Mapping[str, Any]) -> None:
    for name, value in table.items():
        if not isinstance(value, dict):
            raise Usage(
                name, "it stands outside any table", f"put it under one of {', '.join(Manifest.__struct_fields__)}"
            )


def _fill_model(table: dict[str, Any]) -> None:
    """Spell out the preset; sizes beside it replace its own."""
    model = dict(table.get("model", {}))
    named = any(size in model for size in ("dim", "layers", "heads"))
    preset = model.pop("preset", None if named else "demo")
    if preset is not None:
        _require_name("model.preset", preset, PRESETS)
        model = msgspec.to_builtins(PRESETS[preset]) | model
    table["model"] = model


def _fill_train(table: dict[str, Any]) -> None:
    """Spell out the warm-up, and for a method whose step is a sign the inner optimizer that takes it as it is."""
    run, train, method = (table.setdefault(name, {}) for name in ("run", "train", "method"))
    if "warmup_tokens" not in train and isinstance(total := run.get("total_tokens", RunSection().total_tokens), int):
        train["warmup_tokens"] = int(total * WARMUP_SHARE)
    if issubclass(METHODS[method["name"]], Decoupled) and method["options"]["sign"] is True:
        table["train"] = {"optimizer": "sgd", "clip": 0.0} | train


def fill_method(table: dict[str, Any]) -> None:
    """Spell out the method's options, and put what is about sending into [exchange]. Fragments that nobody has counted are
    as many as divide the model's layers, nearest to the method's own number."""
    method, exchange = table.setdefault("method", {}), table.setdefault("exchange", {})
    name, given = method.get("name", MethodSection().name), method.get("options", {})
    _require_name("method.name", name, dict.fromkeys(NAMES))
    name, preset = unfolded(name)
    if not isinstance(given, dict):
        raise Usage("method.options", f"it is {given!r}, not a table", "write it as [method.options]")
    defaults, layers = _defaults(METHODS[name]) | preset, table.get("model", {}).get("layers")
    if "fragments" in defaults and isinstance(layers, int):
        defaults["fragments"] = nearest_divisor(layers, defaults["fragments"])
    for option, value in given.items():
        if value is None and defaults.get(option) is not None:  # TOML cannot say it
            why = "None cannot be written into a run's terms"
            raise Usage(f"method.options.{option}", why, f"leave it out for {defaults[option]!r}, or name a value")
    for option in SENT:
        if option in exchange and option in given and exchange[option] != given[option]:
            raise Usage(f"exchange.{option}", f"method.options.{option} says something else", "keep one of the two")
        if option in exchange and option not in defaults:
            raise Usage(f"exchange.{option}", f"{name} has no such thing", "leave it out")
        if option in defaults:
            exchange.setdefault(option, given.get(option, defaults[option]))
    resolved = {
        option: value for option, value in (defaults | given).items() if option not in SENT and value is not None
    }
    table["method"] = {**method, "name": name, "options": resolved}


def _defaults(method: type[Any]) -> dict[str, Any]:
    """A method's options as plain values: the fields of its constructor that are not state."""
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
    """What the method's constructor is given."""
    sent = {name: value for name in SENT if (value := getattr(exchange, name)) is not None}
    options: dict[str, Any] = {**method.options, **sent}
    if "outer" in options:
        outer = dict(options["outer"])
        options["outer"] = OUTERS[outer.pop("name", "nesterov")](**outer)
    return options


def require_method(method: MethodSection) -> None:
    """Refuse unknown names, unknown options and options of a wrong type."""
    _require_name("method.name", method.name, METHODS)
    options = dict(method.options)
    outer = options.pop("outer", None)
    _require_options(METHODS[method.name], options, f"method.options of {method.name}")
    if outer is None:
        return
    if not isinstance(outer, dict) or "outer" not in _defaults(METHODS[method.name]):
        raise Usage(
            "method.options.outer", f"{outer!r} does not fit method {method.name}", "leave it out, or make it a table"
        )
    name = outer.get("name", "nesterov")
    _require_name("method.options.outer.name", name, OUTERS)
    rest = {option: value for option, value in outer.items() if option != "name"}
    _require_options(OUTERS[str(name)], rest, f"method.options.outer of {name}")


def _require_name(place: str, name: object, known: Mapping[str, Any]) -> None:
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
                raise Usage(f"{place}, {option}", f"{value!r:.80} is not known", nearest(str(value), choices)) from None
            raise Usage(f"{place}, {option}", str(error), "correct that value") from None


@functools.cache
def _corpus_hash(name: str) -> str:
    """The SHA-256 of a corpus, read once."""
    try:
        return load_corpus(name).sha256
    except BadCorpus as error:
        raise Usage("data.corpus", str(error), "") from None


def convert(table: dict[str, Any], kind: type[SectionT]) -> SectionT:
    """Tables as a manifest (or what a run of somebody's own model has in its place); `Usage` with the place of an error."""
    require_protocol(table)
    _require_known(table, kind, "")
    try:
        terms = msgspec.convert(table, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _misfit(table, str(error), kind) from None
    _require_plain(table, "")  # after the types, which bound how deep the table is
    return terms


def _misfit(table: Mapping[str, Any], message: str, root: type[msgspec.Struct]) -> Usage:
    """Say msgspec's error with the value that it is about, and the choices if there are only some."""
    reason, _, place = message.partition(" - at `$.")
    place = place.rstrip("`")
    if missing := re.search(r"missing required field `(\w+)`", reason):
        return Usage(".".join(filter(None, (place, missing[1]))), "it is missing", "give it a value")
    value: Any = table
    kind: Any = root
    for name in place.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
        fields = getattr(kind, "__struct_fields__", ())
        kind = _section_of(get_type_hints(kind)[name]) if name in fields else None
    shown = "" if value is None or isinstance(value, Mapping) else f"{value!r:.80} is not possible: "
    if get_origin(kind) is Literal:
        return Usage(place, f"{value!r:.80} is not known", nearest(str(value), get_args(kind)))
    return Usage(place or "the manifest", f"{shown}{reason}", "" if ";" in reason else "correct that value")


def _require_known(table: Mapping[str, Any], kind: type[msgspec.Struct], path: str) -> None:
    """Refuse keys that this version does not know, and name the nearest one that it does."""
    fields = {field.name: _section_of(field.type) for field in msgspec.structs.fields(kind)}
    for name, value in table.items():
        if name not in fields:
            raise Usage(f"{path}{name}"[:128], "there is no such key", nearest(name, fields))
        if isinstance(value, dict) and isinstance(fields[name], type) and issubclass(fields[name], msgspec.Struct):
            _require_known(value, fields[name], f"{path}{name}.")


def _section_of(kind: Any) -> Any:  # noqa: ANN401 - types have no common one
    """The kind of what may be left out."""
    return next(part for part in get_args(kind) if part is not NoneType) if isinstance(kind, UnionType) else kind


def _require_plain(value: object, path: str) -> None:
    """Refuse numbers that are not finite or have more than 64 bits, and texts that are no UTF-8."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise Usage(path, "the whole number has more than 64 bits", "name a smaller one")
    if isinstance(value, float) and not math.isfinite(value):
        raise Usage(path, f"{value} is no number to compute with", "name a finite one")
    if isinstance(value, str) and not value.isascii() and value.encode(errors="replace").decode() != value:
        raise Usage(path, f"{value!r} is not UTF-8", "name it otherwise")
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, entry in entries:
        _require_plain(entry, f"{path}.{name}" if path else str(name))


class BadHead(ValueError):
    """Bytes that are no head, or that the founder they name did not sign."""


class Head(msgspec.Struct, frozen=True, array_like=True):
    """The founder's word on which manifest is the run's; every member re-publishes it. Wire: signature (64 bytes) and msgpack
    array [run, founder, digest, size, sequence, protocol].

    `digest` and `size` (bytes) are those of the canonical manifest; a higher `sequence` replaces a lower one. A head of a
    later `protocol` may have further fields: it is still read, so that it can be told why it cannot be joined."""

    run: Annotated[str, msgspec.Meta(max_length=64)]
    founder: Annotated[str, msgspec.Meta(max_length=64)]
    digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    size: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    sequence: Annotated[int, msgspec.Meta(ge=0, le=2**31)]
    protocol: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = PROTOCOL


def seal_head(identity: Identity, head: Head) -> bytes:
    """Signature and head; raise `BadHead` if others would refuse it."""
    if head.founder != identity.peer:
        raise BadHead(f"{identity.peer} cannot sign a head of {head.founder}'s run")
    body = msgspec.msgpack.encode(head)
    blob = identity.sign(_HEAD_DOMAIN, body) + body
    unseal_head(blob)
    return blob


def unseal_head(blob: bytes) -> Head:
    """A head with its founder's signature; `BadHead` for anything else."""
    if not SIGNATURE_BYTES < len(blob) <= MAX_HEAD_BYTES:
        raise BadHead(f"a head has {SIGNATURE_BYTES + 1} to {MAX_HEAD_BYTES} bytes, got {len(blob)}")
    signature, body = blob[:SIGNATURE_BYTES], blob[SIGNATURE_BYTES:]
    try:
        head = msgspec.msgpack.decode(body, type=Head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadHead(f"not a head: {error}") from None
    if not verify(head.founder, _HEAD_DOMAIN, body, signature):
        raise BadHead(f"not signed by {head.founder}")
    return head
