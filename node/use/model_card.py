"""A model card: the README of an export, in the form of the hub, with the facts of the run.

Names, manifests and keys come from other peers, and a README is shown as a web page. So each such
value is put into a code span, in which nothing is markup, and what the hub reads as data is only
written if it is of the expected form.
"""

import hashlib
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from farflock import __version__
from farflock.node.model.hf_shape import HfShape
from farflock.node.model.llama import ModelConfig
from farflock.node.model.lora import LoraTerms, adapter_shapes

MAX_MANIFEST_CHARS = 256 * 1024
MAX_VALUE_CHARS = 200
MAX_LISTED = 200
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,63}")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
_BARS = re.compile("`+")


class BadCard(ValueError):
    """A model card that the hub would not take; the message names the remedy."""


@dataclass(frozen=True, slots=True)
class CardFacts:
    """The facts of a card beside the model's shape. `meta` is a checkpoint's: the run, its
    manifest, how far it came and, where these are known, `members` (names, or names by key) and
    `evaluation` (numbers by name). `dtype` is that of the weights, `base_model` the hub's name of
    the model that training started from. `adapters` are those that the folder has beside nothing
    else, if it has any."""

    meta: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    base_model: str | None = None
    adapters: LoraTerms | None = None


def model_card(title: str, config: ModelConfig, facts: CardFacts) -> str:
    """Return a README. Its title is the run's name, or `title` if that is not known. Raise
    `BadCard` for a `base_model` that is no name on the hub."""
    text = _manifest_text(facts.meta)
    manifest = _tables(text)
    rows = "\n".join(f"| {name} | {value} |" for name, value in _rows(config, facts, manifest))
    return "\n".join(
        [
            *_front_matter(facts, manifest),
            "",
            f"# {plain(_table(manifest, 'run').get('name') or title)}",
            "",
            _subject(config, facts),
            "",
            f"| | |\n|---|---|\n{rows}",
            "",
            *_USES[facts.adapters is not None],
            *(_reproduction(text, manifest) if text else ()),
        ]
    )


_SUBJECTS = (  # of a model, and of adapters alone
    "A Llama-style language model, trained with Farflock on machines far apart.",
    "Adapters (LoRA) for a Llama-style language model, trained with Farflock on machines far"
    " apart.",
)


def _subject(config: ModelConfig, facts: CardFacts) -> str:
    if not isinstance(config, HfShape):
        return _SUBJECTS[facts.adapters is not None]
    kind = config.facts.architecture
    return f"A language model ({kind}), trained with Farflock on machines far apart."


def _use(*lines: str) -> tuple[str, ...]:
    return ("## Use", "", "```python", *lines, "```", "")


_USES = (
    _use(
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained(".")',
        'tokenizer = AutoTokenizer.from_pretrained(".")',
    ),
    _use(
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM",
        "",
        'base = AutoModelForCausalLM.from_pretrained("the model that they belong to")',
        'model = PeftModel.from_pretrained(base, ".")',
    ),
)


def _front_matter(facts: CardFacts, manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yield the YAML that the hub reads; JSON is a part of YAML, so values are written as that."""
    yield "---"
    yield f"library_name: {'transformers' if facts.adapters is None else 'peft'}"
    yield "pipeline_tag: text-generation"
    licence = _table(manifest, "run").get("licence")
    if licence is not None:
        known = str(licence).lower()
        yield f"license: {_quoted(known if _LICENCE.fullmatch(known) else 'other')}"
    if facts.base_model is not None:
        if not _HUB_NAME.fullmatch(facts.base_model):
            raise BadCard(
                f"{facts.base_model[:MAX_VALUE_CHARS]!r} is not the name of a model on the hub; "
                "write it as organisation/model"
            )
        yield f"base_model: {_quoted(facts.base_model)}"
    yield 'tags: ["farflock", "llama", "decentralized-training"]'
    yield "---"


def _rows(
    config: ModelConfig, facts: CardFacts, manifest: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    meta, run = facts.meta, _table(manifest, "run")
    if facts.adapters is None:
        yield "parameters", f"{config.parameters():,}, written as {facts.dtype}"
    else:
        yield "adapters", _adapters(config, facts.adapters)
    yield "context", f"{config.context:,} tokens"
    if "run" in meta:
        yield "run", code(meta["run"])
    if text := _manifest_text(meta):
        yield "SHA-256 of the manifest", code(hashlib.sha256(text.encode()).hexdigest())
    yield from _data_rows(_table(manifest, "data"))
    if start := _table(manifest, "model").get("start"):
        name = "weights at the start" if facts.adapters is None else "weights of the model"
        yield name, code(start)
    if method := _table(manifest, "method"):
        yield "method", code(method.get("name")) + _listed(_table(method, "options"))
    if "tokens" in meta:
        whole = f" of {_number(run['total_tokens'])}" if "total_tokens" in run else ""
        yield "tokens", _number(meta["tokens"]) + whole
    if "step" in meta:
        yield "steps", _number(meta["step"])
    if members := meta.get("members"):
        yield "members", _members(members)
    if evaluation := _table(meta, "evaluation"):
        yield "held-out loss", _measured(evaluation)
    if "licence" in run:
        yield "licence", code(run["licence"])
    yield "Farflock", __version__


def _adapters(config: ModelConfig, terms: LoraTerms) -> str:
    values = sum(map(math.prod, adapter_shapes(config, terms).values()))
    beside = f"{config.parameters():,} parameters that were not trained"
    targets = ", ".join(terms.targets)
    return f"{values:,} values of rank {terms.r} at {targets}, beside {beside}"


def _data_rows(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if "corpus" in data:
        yield "data", f"{code(data['corpus'])}, SHA-256 {code(data.get('sha256'))}"
    if "root" in data:
        yield "root of the data", code(data["root"])
    if mix := _table(data, "mix"):
        yield "sources of the data, by weight", _listed(mix).removeprefix(": ")
    elif "root" in data:
        yield "sources of the data", "all, each as often as it has tokens"
    if "tokenizer" in data:
        yield "tokenizer", code(data["tokenizer"])


def _measured(evaluation: Mapping[str, Any]) -> str:
    """Return an evaluation of the run in words, whatever its values are."""
    numbers = [
        f"{value:.4f}" if isinstance(value, float) else str(value)
        for value in map(evaluation.get, ("loss", "standard_error", "round", "sequences"))
    ]
    loss, error, number, sequences = map(code, numbers)
    return f"{loss} ± {error} nats a token after round {number}, on {sequences} sequences"


def _members(members: object) -> str:
    """Return the members by name, or by key where they have none."""
    named = (
        [name or key for key, name in members.items()]
        if isinstance(members, Mapping)
        else list(members)
        if isinstance(members, list | tuple)
        else []
    )
    more = f", and {len(named) - MAX_LISTED:,} more" if len(named) > MAX_LISTED else ""
    return f"{len(named):,}: " + ", ".join(code(name) for name in named[:MAX_LISTED]) + more


def _reproduction(text: str, manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yield how to train the model again: with the manifest, in a fence that it cannot close."""
    fence = "`" * max(3, 1 + max(map(len, _BARS.findall(text)), default=0))
    yield "## Reproduce"
    yield ""
    yield (
        f"Install Farflock {__version__}, save this manifest as `run.toml`, and start with "
        "`farflock run run.toml`; others join by the invite that it prints. Peers that join at "
        "other times, or of which other rounds fail, end with other weights."
    )
    if "root" in _table(manifest, "data"):
        yield "It names its data by their root: give the folder that holds them with `--data`."
    yield ""
    yield f"{fence}toml"
    yield "".join(char if char.isprintable() or char in "\n\t" else "�" for char in text.rstrip())
    yield fence
    yield ""


def _manifest_text(meta: Mapping[str, Any]) -> str:
    text = meta.get("manifest")
    return text if isinstance(text, str) and len(text) <= MAX_MANIFEST_CHARS else ""


def _tables(text: str) -> dict[str, Any]:
    """Return a manifest's tables as they are, since it may be another version's; none if it is not
    TOML."""
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return {}


def _table(tables: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = tables.get(name)
    return found if isinstance(found, Mapping) else {}


def _some(values: object) -> list[tuple[object, object]]:
    return list(values.items())[:MAX_LISTED] if isinstance(values, Mapping) else []


def _listed(values: Mapping[str, Any]) -> str:
    return "".join(
        f"{', ' if place else ': '}{code(f'{name} = {value}')}"
        for place, (name, value) in enumerate(_some(values))
    )


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else code(value)


def _quoted(value: str) -> str:
    return msgspec.json.encode(value).decode()


def code(value: object) -> str:
    """Return a value as a code span of Markdown, shortened: one line without control characters,
    and without the bar that ends a table's cell."""
    text = _one_line(value).replace("|", "¦")
    fence = "`" * (1 + max(map(len, _BARS.findall(text)), default=0))
    edge = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{edge}{text}{edge}{fence}" if text.strip() else "—"


def plain(value: object) -> str:
    """Return a value as words without any markup: letters, digits, spaces, dots and dashes."""
    kept = "".join(char if char.isalnum() or char in " .-" else " " for char in _one_line(value))
    return " ".join(kept.replace("--", " ").split()).lstrip("-. ") or "A model"


def _one_line(value: object) -> str:
    text = str(value)[: MAX_VALUE_CHARS + 1]
    text = "".join(char if char.isprintable() else " " for char in text)
    return text if len(text) <= MAX_VALUE_CHARS else text[:MAX_VALUE_CHARS] + "…"
