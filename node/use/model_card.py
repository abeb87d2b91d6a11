"""A model card: the README of an export, in the form of the hub, with the facts of the run.

Names, manifests and keys come from other peers, and a README is shown as a web page. So each such
value is put into a code span, in which nothing is markup, and what the hub reads as data is only
written if it is of the expected form.
"""

import contextlib
import hashlib
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from farflock import __version__
from farflock.node.errors import FarflockError
from farflock.node.model.hf_config import CLASSES
from farflock.node.model.llama import ModelConfig
from farflock.node.model.weights_folder import CURVE_NAME, UNSTATED
from farflock.node.run.manifest import parse
from farflock.node.train.evaluation_curve import EvaluatedPoint, points_of
from farflock.node.train.run_size import StreamSize, stream_sizes

_MAX_MANIFEST_CHARS = 256 * 1024
_MAX_VALUE_CHARS = 200
_MAX_LISTED = 200
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,63}", re.ASCII)
_BARS = re.compile("`+")


@dataclass(frozen=True, slots=True)
class CardFacts:
    """The facts of a card beside the model's shape. `meta` is a checkpoint's: the run, its
    manifest, how far it came, and its members. `dtype` is that of the weights; `streams` are what
    the run's method exchanges, where that is known, and `curve` has its evaluations."""

    meta: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "fp32"
    streams: Sequence[StreamSize] = ()
    curve: Sequence[EvaluatedPoint] = ()


def facts_of(meta: Mapping[str, Any], dtype: str) -> CardFacts:
    """Return the facts of a checkpoint's model; without those of its streams if the manifest is
    none that this version runs."""
    text, streams = _manifest_text(meta), tuple[StreamSize, ...]()
    if text:
        with contextlib.suppress(FarflockError):
            manifest = parse(text)
            streams = stream_sizes(manifest.plan(), manifest.pipeline_plan())
    return CardFacts(meta, dtype, streams, tuple(points_of(meta)))


def model_card(title: str, config: ModelConfig, facts: CardFacts) -> str:
    """Return a README. Its title is the run's name, or `title` if that is not known."""
    text = _manifest_text(facts.meta)
    manifest = _tables(text)
    rows = "\n".join(f"| {name} | {value} |" for name, value in _rows(config, facts, manifest))
    return "\n".join(
        [
            *_front_matter(config, manifest),
            "",
            f"# {plain(_table(manifest, 'run').get('name') or title)}",
            "",
            f"A language model ({CLASSES[config.architecture]}), trained with Farflock on machines"
            " far apart.",
            "",
            f"| | |\n|---|---|\n{rows}",
            "",
            *_USE,
            *_evaluation(facts.curve),
            *(_reproduction(text, manifest) if text else ()),
        ]
    )


_USE = (
    "## Use",
    "",
    "```python",
    "from transformers import AutoModelForCausalLM, AutoTokenizer",
    "",
    'model = AutoModelForCausalLM.from_pretrained(".")',
    'tokenizer = AutoTokenizer.from_pretrained(".")',
    "```",
    "",
)


def _evaluation(curve: Sequence[EvaluatedPoint]) -> Iterator[str]:
    yield "## Evaluation"
    yield ""
    if curve:
        last = curve[-1]
        yield f"![The held-out loss over the run's tokens]({CURVE_NAME})"
        yield ""
        yield (
            "While the run trained, members measured it on text that none of them trained on: at"
            f" last {last.loss:.3f} ± {last.standard_error:.3f} nats a token, before round"
            f" {last.round:,}, at {last.tokens:,} tokens. These are their words, and the weights"
            " here may be of a later round. Measure the model yourself:"
        )
    else:
        yield "This export states no measurement. Measure the model on text that is new to it:"
    yield ""
    yield "```console"
    yield "$ farflock evaluate . --data FOLDER"
    yield "```"
    yield ""


def _front_matter(config: ModelConfig, manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yield the YAML that the hub reads."""
    yield "---"
    yield "library_name: transformers"
    yield "pipeline_tag: text-generation"
    licence = _table(manifest, "model").get("licence", UNSTATED)
    if licence != UNSTATED:
        known = str(licence).lower()
        yield f'license: "{known if _LICENCE.fullmatch(known) else "other"}"'
    yield f"tags: [farflock, {config.architecture}]"
    yield "---"


def _rows(
    config: ModelConfig, facts: CardFacts, manifest: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    meta, model = facts.meta, _table(manifest, "model")
    yield "parameters", f"{config.parameters():,}, written in {facts.dtype}"
    yield "context", f"{config.context:,} tokens"
    if "run" in meta:
        yield "run", code(meta["run"])
    if text := _manifest_text(meta):
        yield "SHA-256 of the manifest", code(hashlib.sha256(text.encode()).hexdigest())
    if data := _table(manifest, "data"):
        yield "data", _listed(data)
    if "weights" in model:
        yield "weights at the start, by their hash", code(model["weights"])
        yield "their licence", code(model.get("licence", UNSTATED))
    if method := _table(manifest, "method"):
        options = _listed(_table(method, "options"))
        yield "method", code(method.get("name")) + (f": {options}" if options else "")
    if exchange := _table(manifest, "exchange"):
        yield "exchanges", _listed(exchange)
    for stream in facts.streams:
        yield f"bytes of {code(stream.stream)}", _bytes(stream)
    if "tokens" in meta:
        whole = _table(manifest, "run").get("total_tokens")
        yield "tokens", _number(meta["tokens"]) + (f" of {_number(whole)}" if whole else "")
    if "step" in meta:
        yield "steps of the peer that saved it", _number(meta["step"])
    if members := meta.get("members"):
        yield "members at that time, by key", _members(members)
    yield "Farflock", code(__version__)


def _bytes(stream: StreamSize) -> str:
    """Return what one contribution to a stream takes, and how often there is one."""
    back = f", and {stream.back_bytes:,} of what comes back" if stream.back_bytes else ""
    often = f", every {stream.steps:g} steps" if math.isfinite(stream.steps) else ""
    return f"at most {stream.out_bytes:,} of a contribution{back}{often}"


def _members(members: object) -> str:
    keys = members if isinstance(members, list | tuple) else []
    more = f", and {len(keys) - _MAX_LISTED:,} more" if len(keys) > _MAX_LISTED else ""
    return f"{len(keys):,}: " + ", ".join(code(key) for key in keys[:_MAX_LISTED]) + more


def _reproduction(text: str, manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yield how to train the model again: with the manifest, in a fence that it cannot close."""
    fence = "`" * max(3, 1 + max(map(len, _BARS.findall(text)), default=0))
    yield "## Reproduce"
    yield ""
    yield f"Install Farflock {__version__}, save this manifest as `run.toml`, and start:"
    yield ""
    yield "```console"
    yield "$ farflock run run.toml"
    yield "```"
    yield ""
    yield (
        "Others join by the invite that it prints. Peers that join at other times, or of which "
        "other rounds fail, end with other weights."
    )
    if "weights" in _table(manifest, "model"):
        yield "The first peer needs the weights at the start: name their folder as `model.from`."
    if _table(manifest, "data").keys() & {"root", "mix"}:
        yield "It is trained on prepared data: name their folder, as in `--data FOLDER`."
    yield ""
    yield f"{fence}toml"
    yield "".join(char if char.isprintable() or char in "\n\t" else "�" for char in text.rstrip())
    yield fence
    yield ""


def _manifest_text(meta: Mapping[str, Any]) -> str:
    text = meta.get("manifest")
    return text if isinstance(text, str) and len(text) <= _MAX_MANIFEST_CHARS else ""


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


def _listed(values: Mapping[str, Any]) -> str:
    """Return a table's single values, and those of the tables in it; without lists such as those
    of chunks."""
    found = [
        (f"{name}.{key}" if key else name, value)
        for name, table in values.items()
        for key, value in (table.items() if isinstance(table, dict) else [("", table)])
        if not isinstance(value, list | dict)
    ]
    return ", ".join(code(f"{name} = {value}") for name, value in found[:_MAX_LISTED])


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else code(value)


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
    text = str(value)[: _MAX_VALUE_CHARS + 1]
    text = "".join(char if char.isprintable() else " " for char in text)
    return text if len(text) <= _MAX_VALUE_CHARS else text[:_MAX_VALUE_CHARS] + "…"
