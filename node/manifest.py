"""The manifest: what a run is, as data. Its hash with the founder's id is the run's id.

TOML on the founder's disk, canonical JSON on the wire; a misspelt key or a wrong type is refused with its path. The head
is the founder's signature on a manifest's digest; every member re-publishes it.
"""

import difflib
import hashlib
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from farflock.node.errors import Usage
from farflock.swarm.identity import SIGNATURE_BYTES, Identity, verify

if TYPE_CHECKING:
    from farflock.node.participant import Plan

PROTOCOL = 1
MAX_HEAD_BYTES = 512
_DOMAIN = b"head"

Positive = Annotated[int, msgspec.Meta(ge=1)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the manifest; unknown keys are refused."""


class Run(_Section):
    """[run]: name, seed, and how many tokens it trains in all."""

    name: Annotated[str, msgspec.Meta(max_length=64)] = "unnamed"
    seed: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] = 0
    total_tokens: Positive = 1_000_000
    protocol: int = PROTOCOL


class Model(_Section):
    """[model]: one of node/model.py's presets."""

    preset: str = "demo"


class Data(_Section):
    """[data]: the corpus, and its hash where it must be exactly that text."""

    corpus: str = "shakespeare"
    sha256: str = ""


class Train(_Section):
    """[train]: the inner steps."""

    batch: Positive = 8
    seq: Positive = 64
    accumulate: Positive = 1
    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: Annotated[float, msgspec.Meta(gt=0)] = 3e-3
    warmup_share: Share = 0.05
    floor: Share = 0.1
    weight_decay: Annotated[float, msgspec.Meta(ge=0)] = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: Annotated[float, msgspec.Meta(ge=0)] = 1.0  # 0: none
    autocast: bool = False
    joiner_steps: Annotated[int, msgspec.Meta(ge=0)] = 20


class Method(_Section):
    """[method]: its name and its own options."""

    name: str = "noloco"
    options: dict[str, str | int | float] = {}  # noqa: RUF012 - msgspec copies it


class Exchange(_Section):
    """[exchange]: how often membership may change, in seconds; how many members the founder waits for before it trains."""

    start_peers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    view_s: Annotated[float, msgspec.Meta(ge=0.5, le=3600)] = 30.0


class Trust(_Section):
    """[trust]: who may take part."""

    level: Literal["trusted"] = "trusted"


class Manifest(_Section):
    """A whole run."""

    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    train: Train = Train()
    method: Method = Method()
    exchange: Exchange = Exchange()
    trust: Trust = Trust()

    def canonical(self) -> bytes:
        """The bytes that are hashed, signed and sent: JSON with sorted keys and every default spelt out."""
        return msgspec.json.format(msgspec.json.encode(self, order="deterministic"), indent=1)

    def hash(self) -> str:
        """SHA-256 of the canonical bytes."""
        return hashlib.sha256(self.canonical()).hexdigest()

    def run_id(self, founder: str) -> str:
        """32 hex digits that name this run of this founder."""
        return hashlib.sha256(self.canonical() + b"\x00" + founder.encode()).hexdigest()[:32]

    def plan(self) -> "Plan":
        """What all nodes of this run do."""
        from farflock.node.model import PRESETS
        from farflock.node.participant import Plan
        from farflock.optimizers.inner import InnerConfig
        from farflock.optimizers.schedule import Schedule

        train = self.train
        warmup = int(self.run.total_tokens * train.warmup_share)
        return Plan(
            run_seed=self.run.seed,
            model=PRESETS[self.model.preset],
            inner=InnerConfig(train.optimizer, train.lr, train.betas, train.weight_decay),
            schedule=Schedule(train.lr, self.run.total_tokens, warmup, train.floor, train.joiner_steps),
            method=self.method.name,
            options=dict(self.method.options),
            batch=train.batch,
            seq=train.seq,
            accumulate=train.accumulate,
            clip_norm=train.clip or None,
            autocast=train.autocast,
        )

    def check(self) -> "Manifest":
        """Refuse what cannot run, before anything starts."""
        from farflock.node.model import PRESETS
        from farflock.optimizers.catalog import method

        if self.run.protocol != PROTOCOL:
            raise Usage("the manifest is of another version", f"protocol {self.run.protocol}, not {PROTOCOL}", "update")
        if self.model.preset not in PRESETS:
            raise Usage("the model is not known", f"preset {self.model.preset!r}", nearest(self.model.preset, list(PRESETS)))
        if self.train.seq > PRESETS[self.model.preset].context:
            limit = PRESETS[self.model.preset].context
            raise Usage("the sequences are too long", f"seq {self.train.seq} in a context of {limit}", f"use {limit} or less")
        try:
            method(self.method.name, **self.method.options)
        except (TypeError, ValueError) as error:
            raise Usage("the method cannot be used like this", str(error), "correct [method]") from None
        return self


def load(path: Path, assignments: tuple[str, ...] = ()) -> Manifest:
    """Read a manifest file and apply `a.b=c` overrides; `Usage` with the key's path for whatever is wrong."""
    try:
        table = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        try:
            table = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise Usage("the manifest cannot be read", f"{path} is neither TOML nor JSON: {error}", "correct it") from None
    for assignment in assignments:
        override(table, assignment)
    return convert(table).check()


def parse(text: str) -> Manifest:
    """A manifest from its canonical bytes, as members send them."""
    return convert(msgspec.json.decode(text, type=dict[str, Any])).check()


def convert(table: dict[str, Any]) -> Manifest:
    """Typed from untyped; unknown keys name the nearest known one."""
    try:
        return msgspec.convert(table, Manifest, strict=False)
    except msgspec.ValidationError as error:
        raise Usage("the manifest is not valid", str(error), _hint(str(error))) from None


def override(table: dict[str, Any], assignment: str) -> None:
    """Set one value: `train.lr=0.01`; the value is read as TOML, or as a string if it is no TOML value."""
    path, equals, value = assignment.partition("=")
    if not equals or not path:
        raise Usage("that is no assignment", f"{assignment!r} has no name and value", "write it as train.lr=0.01")
    *sections, name = path.strip().split(".")
    for section in sections:
        table = table.setdefault(section, {})
    try:
        table[name] = tomllib.loads(f"x = {value}")["x"]
    except tomllib.TOMLDecodeError:
        table[name] = value


def demo_manifest(method: str, peers: int, steps: int) -> Manifest:
    """What `farflock demo` trains."""
    options: dict[str, dict[str, str | int | float]] = {
        "noloco": {"period": 10, "codec": "fp16", "deadline_s": 6.0},
        "diloco": {"period": 10, "codec": "int8", "deadline_s": 6.0},
        "ddp": {"deadline_s": 6.0},
        "local": {},
    }
    if method not in options:
        raise Usage("the method is not known", f"{method!r}", nearest(method, list(options)))
    train = Train()
    return Manifest(
        run=Run(name="demo", seed=1, total_tokens=peers * steps * train.batch * train.seq),
        train=train,
        method=Method(name=method, options=options[method]),
        exchange=Exchange(view_s=2.0, start_peers=peers),
    ).check()


def simulated_default(assignments: tuple[str, ...]) -> Manifest:
    """What `farflock sim` runs without a manifest: a tiny model, short rounds."""
    table: dict[str, Any] = {
        "run": {"name": "simulated", "seed": 1, "total_tokens": 40_000},
        "model": {"preset": "tiny"},
        "train": {"batch": 2, "seq": 32},
        "method": {"name": "noloco", "options": {"period": 5, "codec": "fp16", "deadline_s": 10.0}},
        "exchange": {"view_s": 5.0},
    }
    for assignment in assignments:
        override(table, assignment)
    return convert(table).check()


def nearest(word: str, choices: list[str]) -> str:
    """The remedy for a misspelt name."""
    close = difflib.get_close_matches(word, choices, n=1)
    return f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(sorted(choices))}"


def _hint(message: str) -> str:
    """For an unknown field: the nearest known one of any section."""
    if "unknown field" not in message:
        return "correct that value"
    wrong = message.split("`")[1]
    sections = (Manifest, Run, Model, Data, Train, Method, Exchange, Trust)
    return nearest(wrong, sorted({name for section in sections for name in section.__struct_fields__}))


class Head(msgspec.Struct, frozen=True, array_like=True):
    """The founder's word on which manifest is the run's."""

    run: Annotated[str, msgspec.Meta(max_length=64)]
    founder: Annotated[str, msgspec.Meta(max_length=64)]
    digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    size: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    sequence: Annotated[int, msgspec.Meta(ge=0, le=2**31)]


def seal_head(identity: Identity, head: Head) -> bytes:
    """Signature and head."""
    body = msgspec.msgpack.encode(head)
    return identity.sign(_DOMAIN, body) + body


def unseal_head(blob: bytes) -> Head:
    """A head with its founder's signature; `ValueError` for anything else."""
    if not SIGNATURE_BYTES < len(blob) <= MAX_HEAD_BYTES:
        raise ValueError(f"a head has at most {MAX_HEAD_BYTES} bytes, got {len(blob)}")
    body = blob[SIGNATURE_BYTES:]
    try:
        head = msgspec.msgpack.decode(body, type=Head)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a head: {error}") from None
    if not verify(head.founder, _DOMAIN, body, blob[:SIGNATURE_BYTES]):
        raise ValueError(f"not signed by {head.founder}")
    return head
