"""The manifest: a run as data. Its hash together with the founder's id is the run's id.

A founder writes TOML and leaves out what has a default. What is hashed, signed and sent is the
*resolved* manifest, again TOML, with every size, option and hash spelt out, so no later version of
a preset or a default can change a run. A misspelt key, a wrong type or an impossible value is
refused with its place and the nearest valid one.

A program that trains its own model (`farflock.SwarmOptimizer`) makes such a document too, from its
arguments (node/run/user_terms.py).
"""

import hashlib
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import msgspec

from farflock.node.errors import RefusedByRun, Usage
from farflock.node.model.data import MAX_RECURRING
from farflock.node.run.data_section import (
    DataSection,
    fill_data,
    require_text,
    require_tokenizer,
)
from farflock.node.run.evaluation_section import EvaluationSection
from farflock.node.run.fit import require_inner, require_layers, require_members
from farflock.node.run.head import PROTOCOL, run_id
from farflock.node.run.model_section import (
    FROM,
    ModelKind,
    ModelSection,
    UserModel,
    begun,
    fill_model,
    folder_of,
    require_codec,
    take_sizes,
)
from farflock.node.run.pipeline_section import METHOD as PIPELINE_METHOD
from farflock.node.run.pipeline_section import (
    PipelineSection,
    fill_pipeline,
    plan_of,
    require_pipeline,
)
from farflock.node.run.sections import (
    ExchangeSection,
    MethodSection,
    Section,
    constructor_options,
    convert,
    fill_method,
    require_codecs,
    require_method,
    require_protocol,
    tables,
)
from farflock.node.run.spelling import place_of, spell_counts
from farflock.node.run.terms import PipelinePlan, RunPlan
from farflock.node.run.toml import to_toml
from farflock.optimizers.catalog import METHODS, NAMES, options_of
from farflock.optimizers.catalog import method as build_method
from farflock.optimizers.decoupled import Decoupled
from farflock.optimizers.method import Method
from farflock.optimizers.parts.inner import InnerConfig, InnerName
from farflock.optimizers.parts.schedule import Schedule
from farflock.swarm.messages import MAX_MEMBERS

MAX_BATCH = 65_536  # sequences; a peer's memory is checked before it starts
SEQ = 64  # tokens of a sequence, if the manifest does not say
WARMUP_SHARE = 0.05  # of the run's tokens, if the manifest names no warm-up
# the tables that a program that trains its own model keeps to itself, beside its total of tokens
_PROGRAMS = frozenset(("data", "train", "evaluation", "pipeline"))

BatchCount = Annotated[int, msgspec.Meta(ge=1, le=MAX_BATCH)]
TokenCount = Annotated[int, msgspec.Meta(ge=1, le=2**60)]
Beta = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class RunSection(Section, frozen=True):
    """[run]: the name, the seed of all randomness, and the total number of tokens."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]{0,63}$")] = "unnamed"
    seed: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] = 0
    total_tokens: TokenCount = 1_000_000
    protocol: Annotated[int, msgspec.Meta(ge=0)] = PROTOCOL


class TrainSection(Section, frozen=True, kw_only=True):
    """[train]: the inner steps. A step takes `accumulate` batches of `batch` sequences of `seq`
    tokens. The rate rises to `lr` over `warmup_tokens` and falls to `min_lr_ratio` of it; a
    joiner's rate also ramps up over `joiner_steps` of its own. With `samples`, each trainer draws
    that many sequences once and repeats them in epochs; otherwise each sequence is new. `momentum`
    and `nesterov` are for sgd and muon (optimizers/parts/inner.py). `clip` is the largest gradient
    norm, 0 for none."""

    batch: BatchCount = 8
    seq: BatchCount = SEQ
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


class TrustSection(Section, frozen=True):
    """[trust]: the peers that may take part. This version supports invited peers only."""

    level: Literal["trusted"] = "trusted"


class Manifest(Section, frozen=True, kw_only=True):
    """A whole run, resolved. If its model is a user's own, its program alone knows the total of
    tokens, the data and the inner steps: the canonical form has neither these nor [evaluation] and
    [pipeline], and their values here mean nothing."""

    run: RunSection = RunSection()
    model: ModelSection | UserModel
    data: DataSection
    train: TrainSection
    method: MethodSection = MethodSection()
    exchange: ExchangeSection = ExchangeSection()
    evaluation: EvaluationSection = EvaluationSection()
    trust: TrustSection = TrustSection()
    pipeline: PipelineSection | None = None  # None: whole models

    def canonical(self) -> bytes:
        """Return the TOML that is hashed, signed and sent; `parse` restores the manifest."""
        return to_toml(self.to_tables()).encode()

    def to_tables(self) -> dict[str, Any]:
        """Return what the canonical form says, as untyped tables."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        if isinstance(self.model, UserModel):
            del found["run"]["total_tokens"]
            return {name: table for name, table in found.items() if name not in _PROGRAMS}
        return found

    def hash(self) -> str:
        """Return the SHA-256 of the canonical bytes, in hex."""
        return hashlib.sha256(self.canonical()).hexdigest()

    def run_id(self, founder: str) -> str:
        """Return the 32 hex digits that identify this run by this founder."""
        return run_id(self.canonical(), founder)

    def plan(self) -> RunPlan:
        """Return the training terms that all nodes of this run share; raise `ValueError` if one
        is invalid. A run of a user's own model has none."""
        assert isinstance(self.model, ModelSection)
        train = self.train
        return RunPlan(
            run_seed=self.run.seed,
            model=self.model.shape,
            inner=InnerConfig(
                train.optimizer,
                train.lr,
                train.betas,
                train.weight_decay,
                momentum=train.momentum,
                nesterov=train.nesterov,
            ),
            schedule=Schedule(
                train.lr,
                self.run.total_tokens,
                train.warmup_tokens,
                train.min_lr_ratio,
                train.joiner_steps,
            ),
            method=self.method.name,
            options=constructor_options(self.method, self.exchange),
            batch=train.batch,
            seq=train.seq,
            accumulate=train.accumulate,
            samples=train.samples or 0,
            clip_norm=train.clip or None,
            autocast=train.autocast,
            weights=self.model.weights,
        )

    def pipeline_plan(self) -> PipelinePlan | None:
        """Return the model's cut into stages and the terms between them; None for a run of whole
        models."""
        return None if self.pipeline is None else plan_of(self.pipeline, self.plan())

    def build(self) -> Method:
        """Return the method; raise `Usage` if it refuses its options."""
        try:
            return build_method(self.method.name, **constructor_options(self.method, self.exchange))
        except ValueError as error:
            raise Usage("the manifest cannot run", str(error), "") from None

    def check(self) -> Self:
        """Return the manifest itself; raise `Usage` if it cannot run."""
        require_method(self.method)
        require_codecs(self.exchange)
        if isinstance(self.model, UserModel):
            require_members(self.build(), MAX_MEMBERS, "the largest number of members")
        else:
            self._check_training(self.model)
        return self

    def _check_training(self, model: ModelSection) -> None:
        require_text(self.data)
        require_tokenizer(self.data, model.vocab_size)
        if self.train.seq > model.context:
            why = f"sequences of {self.train.seq} tokens do not fit a context of {model.context}"
            remedy = f"set it to {model.context} or less, or enlarge model.context"
            raise Usage("train.seq", why, remedy)
        try:
            plan = self.plan()
        except ValueError as error:
            raise Usage("the manifest cannot run", str(error), "") from None
        made = self.build()
        require_inner(plan.method, made, plan.inner, plan.clip_norm)
        require_layers(made, model.layers)
        require_members(made, self.exchange.start_peers, "exchange.start_peers")
        if self.pipeline is not None:
            require_pipeline(self.pipeline, plan, made)
            require_codec(self.pipeline.codec, model)


# msgspec reads no union of two tables, so each kind of manifest has a form of its own to be read by
class _NodesManifest(Manifest, frozen=True, kw_only=True):
    model: ModelSection


class _ProgramsManifest(Manifest, frozen=True, kw_only=True):
    model: UserModel
    data: DataSection = DataSection()
    train: TrainSection = TrainSection(warmup_tokens=0)


_WAYS = {  # what a run of such a model trains, and the way into it
    ModelSection: ("one of Farflock's models", "join it with `farflock join INVITE`"),
    UserModel: (
        "a model of its founder's own program",
        "join from that program, with farflock.SwarmOptimizer(model, invite=...)",
    ),
}


def load(path: Path, assignments: Sequence[str] = (), prepared: Sequence[Path] = ()) -> Manifest:
    """Read and resolve a founder's file with `a.b=c` overrides and folders of prepared data; raise
    `Usage`, `BadIndex` or `RefusedByRun`."""
    return resolve(_written(path), assignments, prepared)


def model_folder(path: Path | None, assignments: Sequence[str] = ()) -> Path | None:
    """Return the folder of the model that a founder's file or an assignment starts from; None if
    neither names one."""
    table = {} if path is None else _written(path)
    for assignment in assignments:
        override(table, assignment)
    return folder_of(table.get("model", {}))


def _written(path: Path) -> dict[str, Any]:
    """Return the tables of a founder's file; the model's folder is relative to that of the file."""
    table = tables(path.read_bytes(), str(path))
    model = table.get("model")
    if isinstance(model, dict) and (folder := folder_of(model)) is not None:
        model[FROM] = str(path.parent / folder)
    return table


def parse(text: str | bytes, model: ModelKind = ModelSection) -> Manifest:
    """Parse a resolved manifest as members send it; raise `RefusedByRun` if it is invalid, or if
    its model is of the other kind."""
    try:
        table = tables(text, "the manifest")
        require_protocol(table)
        given = table.get("model")
        kind = UserModel if isinstance(given, dict) and "tensors" in given else ModelSection
        if kind is not model:
            trained, remedy = _WAYS[kind]
            raise RefusedByRun("that run is joined in another way", f"it trains {trained}", remedy)
        return of_program(table) if model is UserModel else convert(table, _NodesManifest).check()
    except Usage as error:
        raise RefusedByRun(
            "this version cannot take part in that run",
            str(error),
            "update farflock, or tell the run's founder",
        ) from None


def of_program(table: dict[str, Any]) -> Manifest:
    """Return the manifest of a run whose model is a user's own; raise `Usage` if it cannot run."""
    manifest = convert(table, _ProgramsManifest)
    known = dict(places(manifest.to_tables()))
    for place, _ in places(table):
        if place not in known:
            why = "a program that trains its own model keeps that to itself"
            raise Usage(place, why, "leave it out")
    return manifest.check()


def places(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of nested tables with its place, such as `train.lr`."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from places(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def resolve(
    table: dict[str, Any], assignments: Sequence[str] = (), prepared: Sequence[Path] = ()
) -> Manifest:
    """Resolve a founder's tables into a complete manifest; this may read the corpus, the tokenizer,
    or the weights of a folder, to hash them. `prepared` are folders of prepared data."""
    for assignment in assignments:
        override(table, assignment)
    require_protocol(table)
    _require_tables(table)
    spell_counts(table)
    folder = take_sizes(table)
    fill_data(table, prepared)
    train = table.get("train", {})
    fill_model(table, train.get("seq", SEQ) if isinstance(train, dict) else None)
    if "pipeline" in table:
        table.setdefault("method", {}).setdefault("name", PIPELINE_METHOD)
    fill_method(table)
    _fill_train(table)
    if "pipeline" in table:
        fill_pipeline(table)
    manifest = convert(table, _NodesManifest).check()
    if folder is None:
        return manifest
    return msgspec.structs.replace(manifest, model=begun(folder, manifest.model)).check()


def override(table: dict[str, Any], assignment: str) -> None:
    """Set one value, as in `train.lr=0.01`; a value that is not TOML is taken as text."""
    path, equals, value = assignment.partition("=")
    names = path.strip().split(".")
    if not equals or not all(names):
        raise Usage("--set", f"{assignment!r} does not give a value", "write it as train.lr=0.01")
    for section in names[:-1]:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise Usage(
                "--set", f"{section} in {path} is a value, not a table", "write it as train.lr=0.01"
            )
    try:
        table[names[-1]] = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        table[names[-1]] = value


def demo_manifest(method: str, peers: int, steps: int) -> Manifest:
    """Return the manifest of `farflock demo`."""
    train = {"batch": 8, "seq": 64}
    return resolve(
        {
            "run": {
                "name": "demo",
                "seed": 1,
                "total_tokens": peers * steps * math.prod(train.values()),
            },
            "train": train,
            "method": {"name": method, "options": demo_options(method, steps)},
            "exchange": {"view_s": 2.0, "start_peers": peers},
        }
    )


def demo_options(method: str, steps: int) -> dict[str, Any]:
    """Return a method's options in a demo, whose few steps call for short rounds and waits."""
    known = options_of(method) if method in NAMES else {}
    options: dict[str, Any] = {"codec": "int8"} if method == "diloco" else {}
    for name, most in (("period", max(4, min(10, steps // 10))), ("deadline_s", 6.0)):
        if name in known:
            options[name] = min(most, known[name])
    return options


def simulated_default(assignments: Sequence[str], prepared: Sequence[Path] = ()) -> Manifest:
    """Return the default manifest of `farflock sim`: a tiny model, short rounds, the assigned
    method."""
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
        prepared,
    )


def _require_tables(table: Mapping[str, Any]) -> None:
    for name, value in table.items():
        if not isinstance(value, dict):
            place = place_of(name)
            sections = ", ".join(f"[{section}]" for section in Manifest.__struct_fields__)
            remedy = f"write it as {place}" if place else f"move it into one of {sections}"
            raise Usage(name, "a key outside any table is not allowed", remedy)


def _fill_train(table: dict[str, Any]) -> None:
    """Spell out the warm-up and, if the method's step is a sign, an inner optimizer that leaves
    it unchanged."""
    run, train, method = (table.setdefault(name, {}) for name in ("run", "train", "method"))
    if "warmup_tokens" not in train and isinstance(
        total := run.get("total_tokens", RunSection().total_tokens), int
    ):
        train["warmup_tokens"] = int(total * WARMUP_SHARE)
    if issubclass(METHODS[method["name"]], Decoupled) and method["options"]["sign"] is True:
        table["train"] = {"optimizer": "sgd", "clip": 0.0} | train
