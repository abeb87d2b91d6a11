"""A model of transformers' own class as a shape: what `[model] hf` is, and what follows from it.

A model is its configuration, as canonical JSON with every field that its class has, so no later
version's default can change it. The class is the one that transformers has for causal language
models of that type: code from elsewhere is never run, and nothing is downloaded. Steps must repeat,
so every dropout is 0 here, whatever a config.json says. A class with values that no gradient
changes is refused: peers exchange weights only.

Importing this module does not import transformers, which the extra `hf` installs.
"""

import copy
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch

from farflock.node.model.hf_config import (
    CONFIG_NAME,
    MAX_CONFIG_BYTES,
    BadModelFolder,
    config_bytes,
)
from farflock.node.model.llama import ModelConfig

MAX_HF_BYTES = 16 * 1024  # of the canonical text, which manifests carry
MAX_HF_PARAMETERS = 2**40
MAX_HF_CONTEXT = 131_072  # tokens; a model with room for more is trained with this many
_MAX_ITEMS = 4_096  # of a list or a table
_MAX_CHARACTERS = 256
_MAX_DEPTH = 6
_MAX_WHOLE = 2**40
_MAX_REPEATED = 1_024  # layers, or experts of one
_LIMITS = {  # bounds, inclusive, of what follows from a configuration
    "vocab_size": (2, 2**32),
    "dim": (2, 65_536),
    "layers": (1, _MAX_REPEATED),
    "heads": (1, 1_024),
    "kv_heads": (1, 1_024),
    "ffn_dim": (1, 2**20),
    "context": (1, MAX_HF_CONTEXT),
}
_REPEATED = re.compile(r"(layers?|experts|blocks)$")
_RANDOM = re.compile(r"drop|jitter")  # fields that make passes draw random numbers
_OWN_PARTS = {"attn_config", "ffn_config"}  # of one model; others make several into one
_KERNELS = ("attn_implementation", "experts_implementation")  # this machine's choice
_CODE = ("auto_map", "trust_remote_code", "custom_generate")
_REMEDY = "name a folder that transformers' save_pretrained wrote, or its config.json"
OTHER_MODEL = "choose another model"  # the remedy where nothing else helps

Json = dict[str, Any]
ResultT = TypeVar("ResultT")
Theirs = Any  # an object of transformers, whose types are not checked here


class HfFacts(NamedTuple):
    """The facts that follow from a configuration, without a weight: the class, the sizes of
    `ModelConfig` (a context of 0 means that it has no end), the trained tensors in order, other
    names of tied ones, and how names in files may differ."""

    architecture: str
    sizes: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, str]
    prefix: str  # which files of the model without its head leave out
    spare: tuple[str, ...]  # patterns of names in older files that mean nothing

    def parameter_named(self, stored: str) -> str | None:
        """Return the name of the trained tensor that a file calls `stored`; None if it has no part
        in the model."""
        for name in (stored, f"{self.prefix}.{stored}"):
            name = self.aliases.get(name, name)
            if name in self.shapes:
                return name
        return None if any(re.search(pattern, stored) for pattern in self.spare) else stored


class HfShape(ModelConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model of transformers as a shape: `hf` is its configuration, as `canonical_text` returns
    it, and the sizes are those that follow from it. Only the context may be shorter.

    Raise `ValueError` if a size does not follow, or if the configuration is refused."""

    hf: str

    def __post_init__(self) -> None:
        said = facts_of(self.hf).sizes
        _require_within({**said, "context": self.context}, "hf")
        for name, value in said.items():
            mine = getattr(self, name)
            fits = mine <= (value or mine) if name == "context" else mine == value
            if not fits:
                raise ValueError(
                    f"the model's {name} is {mine}, and its hf says {value}; leave out {name}"
                )
        for field in msgspec.structs.fields(ModelConfig):
            if field.name not in said and getattr(self, field.name) != field.default:
                raise ValueError(
                    f"{field.name} is for native models; leave it out, or leave out hf"
                )

    @property
    def facts(self) -> HfFacts:
        """The facts that follow from the configuration."""
        return facts_of(self.hf)

    def parameters(self) -> int:
        """Return the number of weights without allocating any."""
        return sum(map(math.prod, self.facts.shapes.values()))


def hf_shape(text: str, context: int | None = None) -> HfShape:
    """Return the shape of a canonical configuration, with a shorter context if that is given; raise
    `BadModelFolder` if it is refused."""
    sizes = dict(facts_of(text).sizes)
    longest = sizes.pop("context")
    if context is None and not longest:
        raise BadModelFolder(
            "the model's configuration names no longest sequence; write context = N in [model]"
        )
    try:
        fields = {**sizes, "hf": text, "context": longest if context is None else context}
        return msgspec.convert(fields, HfShape)
    except ValueError as error:
        raise BadModelFolder(str(error)) from None


def text_in(path: Path) -> str:
    """Return the canonical configuration of a folder, or of a config.json itself; raise
    `BadModelFolder` if it cannot be read, or is refused."""
    path = path / CONFIG_NAME if path.is_dir() else path
    return canonical_text(config_bytes(path), str(path))


def canonical_text(raw: bytes, origin: str = CONFIG_NAME) -> str:
    """Return what a config.json means, as JSON with sorted keys: each field of its class, also
    those that it leaves out, with every dropout 0. Raise `BadModelFolder` if it is refused.

    Fields that the class does not know are left out: they change nothing."""
    if len(raw) > MAX_CONFIG_BYTES:
        raise BadModelFolder(f"{origin} is larger than {MAX_CONFIG_BYTES:,} bytes; {_REMEDY}")
    given = _decoded(raw, origin)
    _require_unaided(given, origin)
    kind = _class_of(given, origin)
    known = {*_own_names(kind), *kind.attribute_map}
    fields = {
        name: value
        for name, value in given.items()
        if name in known or not (name.startswith("_") or hasattr(kind, name))
    }
    for name in sorted({*_base_names(), *_KERNELS} - {"is_encoder_decoder"}):
        fields.pop(name, None)
    config = _configured(kind, fields, origin)
    text = _encoded(_own_fields(config)).decode()
    if len(text) > MAX_HF_BYTES:
        raise BadModelFolder(
            f"{origin} means {len(text):,} bytes of configuration, and a manifest has room for "
            f"{MAX_HF_BYTES:,}; {OTHER_MODEL}"
        )
    facts_of(text)
    return text


def hub_config(shape: HfShape) -> Json:
    """Return the fields of the config.json with which transformers loads the model's weights."""
    said: Json = msgspec.json.decode(shape.hf)
    return said | {"architectures": [shape.facts.architecture], "dtype": "float32"}


@functools.lru_cache(maxsize=8)
def facts_of(text: str) -> HfFacts:
    """Return what follows from a canonical configuration; raise `BadModelFolder` if it is none, or
    if a version of transformers made it that means something else than the one here.

    The model is made without memory for its weights."""
    if len(text) > MAX_HF_BYTES:
        raise BadModelFolder(f"the model's hf is larger than {MAX_HF_BYTES:,} bytes; {OTHER_MODEL}")
    config = _canonical_config(text)
    with torch.device("meta"):
        model = guarded(lambda: _model_of(config), "the model's hf")
    _require_trained(model)
    shapes = {name: tuple(x.shape) for name, x in model.named_parameters()}
    sizes = _sizes_of(config, model)
    _require_within({name: x for name, x in sizes.items() if name != "context" or x}, "hf")
    if (count := sum(map(math.prod, shapes.values()))) > MAX_HF_PARAMETERS:
        raise BadModelFolder(f"the model's hf describes {count:,} parameters; {OTHER_MODEL}")
    first = {id(x): name for name, x in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    aliases = {name: first[id(x)] for name, x in every if name not in shapes}
    spare = tuple(model._keys_to_ignore_on_load_unexpected or ())
    prefix = str(model.base_model_prefix)
    return HfFacts(type(model).__name__, sizes, shapes, aliases, prefix, spare)


def _canonical_config(text: str) -> Theirs:
    """Return the configuration that a canonical text means, exactly."""
    origin = "the model's hf"
    raw = text.encode(errors="surrogatepass")  # which no JSON has
    given = _decoded(raw, origin)
    kind = _class_of(given, origin)
    if _encoded(given) != raw:
        raise BadModelFolder(f"{origin} is not in canonical form; let farflock write the manifest")
    if unknown := sorted(given.keys() - {*_own_names(kind), "model_type"}):
        raise BadModelFolder(f"{origin} has the unknown field {unknown[0][:64]!r}; {_versions()}")
    # transformers writes into what it is given, also into the dictionaries in it
    config = _configured(kind, copy.deepcopy(given), origin)
    if not _agrees(given, _own_fields(config)):
        raise BadModelFolder(f"{origin} means something else here; {_versions()}")
    return config


def _configured(kind: Theirs, given: Json, origin: str) -> Theirs:
    """Return a configuration of a class, without randomness."""
    config = guarded(lambda: _calm(kind, given), origin)
    parts = {name for name in kind.sub_configs if name not in _OWN_PARTS}
    if parts or config.is_encoder_decoder:
        raise BadModelFolder(
            f"{origin} describes a model of several parts, of which text is one; "
            "choose a model of text alone"
        )
    if getattr(config, "output_router_logits", False):
        raise BadModelFolder(
            f"{origin} asks for its router's balance as a loss, which is not trained here; "
            "set output_router_logits to false"
        )
    config.use_cache = False
    return config


def _calm(kind: Theirs, given: Json) -> Theirs:
    fields = {name: value for name, value in given.items() if name != "model_type"}
    config = kind(**fields)
    calmed = _calmed(_own_fields(config))
    return kind(**(fields | calmed)) if calmed else config


def _calmed(fields: Json) -> Json:
    """Return the fields of a configuration that have to do with randomness, without it, and its
    parts so."""
    found: Json = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            if calmed := _calmed(value):
                found[name] = value | calmed
        elif _RANDOM.search(name) and isinstance(value, int | float) and value:
            found[name] = type(value)(0)
    return found


def made_by_transformers(text: str) -> Theirs:
    """Return transformers' own model of a canonical configuration, in float32; its class draws the
    weights from torch's generators."""
    return _model_of(_canonical_config(text))


def _model_of(config: Theirs) -> Theirs:
    return transformers_module().AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _class_of(given: Json, origin: str) -> Theirs:
    """Return the class of a configuration; raise `BadModelFolder` unless transformers itself has
    one of that type for causal language models."""
    transformers = transformers_module()
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    kind = given.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise BadModelFolder(
            f"{origin} is of the type {str(kind)[:64]!r}, of which transformers "
            f"{transformers.__version__} has no causal language model; {OTHER_MODEL}"
        )
    named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    classes = (named,) if isinstance(named, str) else tuple(named)
    wanted = given.get("architectures")
    if wanted and not (isinstance(wanted, list) and wanted[0] in classes):
        raise BadModelFolder(
            f"{origin} names the architecture {str(wanted)[:64]}, and a model of type {kind} is "
            f"trained as {classes[0]}; {OTHER_MODEL}"
        )
    if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and given.get("is_decoder") is not True:
        raise BadModelFolder(
            f"{origin} describes a model that fills gaps, and sees the tokens behind them; "
            f"{OTHER_MODEL}, one that generates text"
        )
    found = guarded(lambda: transformers.CONFIG_MAPPING[kind], origin)
    if not found.__module__.startswith("transformers.models."):
        raise BadModelFolder(f"{origin} is of a type that is not transformers' own; {OTHER_MODEL}")
    return found


def _decoded(raw: bytes, origin: str) -> Json:
    try:
        found = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadModelFolder(f"{origin} cannot be read: {error}; {_REMEDY}") from None
    if not isinstance(found, dict):
        raise BadModelFolder(f"{origin} is no table of fields; {_REMEDY}")
    for name, value in _within(found, 0):
        if not _is_bounded(name, value):
            raise BadModelFolder(f"{origin}: {name[:64]!r} is {str(value)[:64]}; {OTHER_MODEL}")
    return found


def _within(value: object, depth: int, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield each value of a table with the name of its field, tables and lists too."""
    yield name, value if depth <= _MAX_DEPTH else "too deep" * _MAX_CHARACTERS
    if depth > _MAX_DEPTH:
        return
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _within(inner, depth + 1, str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _within(inner, depth + 1, name)


def _is_bounded(name: str, value: object) -> bool:
    if isinstance(value, bool) or value is None:
        return True
    if isinstance(value, int):
        return abs(value) <= (_MAX_REPEATED if _REPEATED.search(name) else _MAX_WHOLE)
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, str):
        return len(value) <= _MAX_CHARACTERS
    return isinstance(value, dict | list) and len(value) <= _MAX_ITEMS


def _require_unaided(given: Json, origin: str) -> None:
    """Refuse code that comes with a model, and weights that are not numbers."""
    if any(given.get(name) for name in _CODE):
        raise BadModelFolder(
            f"{origin} names code of its own, which is never run here; "
            "choose a model whose class is in transformers"
        )
    if given.get("quantization_config") or given.get("compression_config"):
        raise BadModelFolder(
            f"{origin} describes quantized weights, which cannot be trained; "
            "choose the model's original weights, in bf16, fp16 or fp32"
        )


def _require_trained(model: Theirs) -> None:
    """Refuse a class with values that peers would not exchange."""
    buffers = dict(model.named_buffers()).keys() & model.state_dict().keys()
    fixed = {name for name, x in model.named_parameters() if not x.requires_grad}
    if still := sorted(buffers | fixed):
        raise BadModelFolder(
            f"a model of class {type(model).__name__} keeps values that no gradient changes, such "
            f"as {still[0]}, and peers exchange weights only; {OTHER_MODEL}"
        )


def _require_within(sizes: Mapping[str, int], origin: str) -> None:
    for name, (low, high) in _LIMITS.items():
        if name in sizes and not low <= sizes[name] <= high:
            raise BadModelFolder(
                f"the model's {name} by its {origin} is {sizes[name]}; "
                f"it must lie between {low} and {high}"
            )


def _sizes_of(config: Theirs, model: Theirs) -> dict[str, int]:
    """Return the sizes of `ModelConfig` that estimates of memory take; the hidden width may be a
    guess."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or len(embedding.weight) < len(head.weight):
        raise BadModelFolder(f"a model of class {type(model).__name__} has no head; {OTHER_MODEL}")
    dim = _first(config, "hidden_size") or embedding.weight.shape[1]
    heads = _first(config, "num_attention_heads") or 1
    longest = _first(config, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    return {
        "vocab_size": len(head.weight),
        "dim": dim,
        "layers": _first(config, "num_hidden_layers") or 1,
        "heads": heads,
        "kv_heads": _first(config, "num_key_value_heads") or heads,
        "ffn_dim": _first(config, "intermediate_size", "ffn_dim", "n_inner") or 4 * dim,
        "context": min(longest or 0, MAX_HF_CONTEXT),
        "tied": embedding.weight is head.weight,
    }


def _first(config: Theirs, *names: str) -> int | None:
    """Return the first of these fields that is a number above 0."""
    for name in names:
        try:
            value = getattr(config, name, None)
        except Exception:  # transformers raises where a field differs from layer to layer
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _own_fields(config: Theirs) -> Json:
    """Return the fields that a configuration's class adds to those of all, with its parts'."""
    base = transformers_module().PretrainedConfig
    found: Json = {"model_type": config.model_type}
    for name in _own_names(type(config)):
        value = getattr(config, name)
        found[name] = _own_fields(value) if isinstance(value, base) else value
    plain: Json = msgspec.json.decode(_encoded(found))
    for name, value in _within(found, 0):
        if isinstance(value, float) and not math.isfinite(value):  # which JSON cannot say
            raise BadModelFolder(f"the model's {name} is {value}, without an end; {OTHER_MODEL}")
    return plain


def _own_names(kind: Theirs) -> tuple[str, ...]:
    every = {field.name for field in dataclasses.fields(kind)}
    return tuple(sorted(every - _base_names() - {"use_cache"}))


def _base_names() -> set[str]:
    return {field.name for field in dataclasses.fields(transformers_module().PretrainedConfig)}


def _encoded(fields: Json) -> bytes:
    return msgspec.json.encode(fields, order="sorted")


def _agrees(given: Json, found: Json) -> bool:
    """Return whether all that is given is found; a later version may have more fields, but not
    inside one: what a text leaves out there each version may fill in its own way."""
    return all(name in found and found[name] == one for name, one in given.items())


def _versions() -> str:
    found = transformers_module().__version__
    return f"use the founder's version of transformers (here it is {found})"


def guarded(work: Callable[[], ResultT], origin: str) -> ResultT:
    """Return the result of code of transformers, which may raise anything for odd fields."""
    try:
        return work()
    except (BadModelFolder, torch.OutOfMemoryError):
        raise
    except Exception as error:
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise BadModelFolder(f"{origin} is refused by transformers: {why}; {OTHER_MODEL}") from None


def transformers_module() -> Theirs:
    """Return transformers; raise `BadModelFolder` if it is not installed."""
    try:
        import transformers
    except ImportError:
        raise BadModelFolder(
            "the model's class is in transformers, which is not installed; "
            "pip install 'farflock[hf]'"
        ) from None
    return transformers
