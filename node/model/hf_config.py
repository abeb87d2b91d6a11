"""A model's shape as Hugging Face's config.json says it, in both directions.

A configuration says more than a shape. What would change the logits and is not native is refused
here, before any weight is read; so is code that comes with a model.
"""

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from farflock.node.model.llama import Architecture, ModelConfig, RopeScaling

CONFIG_NAME = "config.json"
MAX_CONFIG_BYTES = 1024 * 1024
CLASSES: dict[Architecture, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_NATIVE = {name: kind for kind, name in CLASSES.items()} | {kind: kind for kind in CLASSES}
_ROPES = ("default", "llama3")  # kinds of positions
_SILU = ("silu", "swish")  # two names of one function
_SLIDING = "sliding_attention"
_REMEDY = "name a folder that transformers' save_pretrained wrote"

FieldsT = TypeVar("FieldsT", bound=msgspec.Struct)


class BadModelFolder(ValueError):
    """A folder that is no model that this version trains; the message says why and what to do."""


class _Defaults(msgspec.Struct, frozen=True):
    """The values that an architecture's configuration means where it is silent."""

    kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: width / heads
    window: int | None = None
    theta: float = 10_000.0
    norm_eps: float = 1e-6


_DEFAULTS: dict[Architecture, _Defaults] = {
    "llama": _Defaults(),
    "mistral": _Defaults(kv_heads=8, window=4096),
    "qwen2": _Defaults(kv_heads=32, window=4096),
    "qwen3": _Defaults(kv_heads=32, head_dim=128, window=4096),
}


class _Rope(msgspec.Struct, frozen=True):
    """`rope_scaling`, or `rope_parameters` of later versions, which has the base too."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float = 1.0

    @property
    def kind(self) -> str:
        return self.rope_type or self.type or "default"


class _Fields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a config.json that decide what the model computes."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | msgspec.UnsetType | None = msgspec.UNSET
    head_dim: int | msgspec.UnsetType | None = msgspec.UNSET
    max_position_embeddings: int
    rms_norm_eps: float | None = None
    rope_theta: float | None = None
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    partial_rotary_factor: float = 1.0
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False

    @property
    def rope(self) -> _Rope:
        return self.rope_parameters or self.rope_scaling or _Rope()


class _Windows(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a config.json that say how far back attention sees."""

    num_hidden_layers: int
    sliding_window: int | msgspec.UnsetType | None = msgspec.UNSET
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[str] | None = None


class _Kind(msgspec.Struct, frozen=True, kw_only=True):
    """The fields by which a configuration is refused whatever else is in it."""

    architectures: list[str] | None = None
    model_type: str | None = None
    auto_map: Any = None
    trust_remote_code: Any = None
    quantization_config: Any = None


class _Ends(msgspec.Struct, frozen=True):
    """The tokens of a config.json that end a text."""

    eos_token_id: int | list[int] | None = None


def config_in(folder: Path, context: int | None = None) -> ModelConfig:
    """Return the shape of the model in a folder, with this context (None: all of its own); raise
    `BadModelFolder` if it is not native."""
    path = folder / CONFIG_NAME
    return config_of(_read(path), str(path), context)


def end_in(folder: Path) -> int | None:
    """Return the token that ends a text in a folder's model, the first if there are several; None
    if its configuration names none. Raise `BadModelFolder` if that cannot be read."""
    path = folder / CONFIG_NAME
    named = _decoded(_read(path), _Ends, str(path)).eos_token_id
    if isinstance(named, list):
        return named[0] if named else None
    return named


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return stream.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        folder, why = path.parent, f"{path}: {error.strerror}"
        raise BadModelFolder(
            f"{folder} is no folder of a Hugging Face model ({why}); {_REMEDY}"
        ) from None


def config_of(raw: bytes, origin: str = CONFIG_NAME, context: int | None = None) -> ModelConfig:
    """Return the shape that a config.json says, with this context (None: all of its own); raise
    `BadModelFolder` if it cannot be read, or if the model is not native. `origin` is the file's
    name for messages."""
    if len(raw) > MAX_CONFIG_BYTES:
        raise BadModelFolder(
            f"{origin} is larger than {MAX_CONFIG_BYTES:,} bytes, and no configuration is; "
            f"{_REMEDY}"
        )
    kind = _decoded(raw, _Kind, origin)
    _require_plain(kind, origin)
    architecture = _native(kind, origin)
    defaults, fields = _DEFAULTS[architecture], _decoded(raw, _Fields, origin)
    longest = fields.max_position_embeddings
    if context is not None and context > longest:
        raise BadModelFolder(
            f"{origin}: it has positions for {longest} tokens, and a context of {context} is "
            f"wanted; set model.context to {longest} or less"
        )
    _require_computable(fields, origin)
    window = _window(_decoded(raw, _Windows, origin), architecture)
    _require_unseen(window, longest if context is None else context, origin)
    try:
        return ModelConfig(
            architecture=architecture,
            vocab_size=fields.vocab_size,
            dim=fields.hidden_size,
            layers=fields.num_hidden_layers,
            heads=fields.num_attention_heads,
            kv_heads=_kv_heads(fields, defaults),
            head_width=_head_width(fields, defaults),
            ffn_dim=fields.intermediate_size,
            context=longest if context is None else context,
            tied=fields.tie_word_embeddings,
            rope_theta=fields.rope.rope_theta or fields.rope_theta or defaults.theta,
            norm_eps=defaults.norm_eps if fields.rms_norm_eps is None else fields.rms_norm_eps,
            rope_scaling=_scaling(fields.rope, origin),
        )
    except ValueError as error:
        if isinstance(error, BadModelFolder):
            raise
        raise BadModelFolder(
            f"{origin} describes no native model: {error}; choose another model"
        ) from None


def _decoded(raw: bytes, kind: type[FieldsT], origin: str) -> FieldsT:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadModelFolder(f"{origin} cannot be read: {error}; {_REMEDY}") from None


def _require_plain(kind: _Kind, origin: str) -> None:
    """Refuse code that comes with a model, and weights that are not numbers."""
    if kind.auto_map or kind.trust_remote_code:
        raise BadModelFolder(
            f"{origin} names code of its own (auto_map), which is never run here; "
            f"choose a model of a native architecture: {', '.join(CLASSES.values())}"
        )
    if kind.quantization_config:
        raise BadModelFolder(
            f"{origin} describes quantized weights, which cannot be trained; "
            "choose the model's original weights, in bf16, fp16 or fp32"
        )


def _native(kind: _Kind, origin: str) -> Architecture:
    """Return the architecture; raise `BadModelFolder` if it is not native."""
    said = (kind.architectures or [kind.model_type or "none"])[0]
    if said in _NATIVE:
        return _NATIVE[said]
    raise BadModelFolder(
        f"{origin} names the architecture {said[:64]!r}, which is not native; "
        f"choose a model of one of these: {', '.join(CLASSES.values())}"
    )


def _require_computable(fields: _Fields, origin: str) -> None:
    """Raise `BadModelFolder` for what would change the logits and is not native."""
    rope = fields.rope
    partial = min(fields.partial_rotary_factor, rope.partial_rotary_factor)
    wrong = {
        "attention_bias is true, and native attention adds biases to queries, keys and values of"
        " Qwen 2 only": fields.attention_bias,
        "mlp_bias is true, and native layers have no such biases": fields.mlp_bias,
        f"hidden_act is {fields.hidden_act[:64]!r}, and native layers have silu": (
            fields.hidden_act not in _SILU
        ),
        f"it rotates {partial:g} of each head, and native layers all of it": partial != 1.0,
        f"its positions are scaled as {rope.kind[:64]!r}, and native ones as llama3 or not": (
            rope.kind not in _ROPES
        ),
    }
    for why, is_wrong in wrong.items():
        if is_wrong:
            raise BadModelFolder(f"{origin}: {why}; choose another model")


def _require_unseen(window: int | None, context: int, origin: str) -> None:
    """Raise `BadModelFolder` if attention slides within the context."""
    if window is not None and window < context:
        raise BadModelFolder(
            f"{origin}: its attention slides over a window of {window} tokens, and native "
            f"attention sees all of a context of {context}; set model.context to {window} or less"
        )


def _window(fields: _Windows, architecture: Architecture) -> int | None:
    """Return the tokens that the attention of some layer sees; None if all see everything."""
    window = fields.sliding_window
    if window is msgspec.UNSET:
        window = _DEFAULTS[architecture].window
    if architecture == "mistral":
        return window
    types = fields.layer_types
    slides = fields.max_window_layers < fields.num_hidden_layers
    if types is not None:
        slides = _SLIDING in types
    uses = architecture != "llama" and fields.use_sliding_window and slides
    return window if uses else None


def _kv_heads(fields: _Fields, defaults: _Defaults) -> int:
    said = fields.num_key_value_heads
    if said is msgspec.UNSET:
        said = defaults.kv_heads
    return fields.num_attention_heads if said is None else said


def _head_width(fields: _Fields, defaults: _Defaults) -> int | None:
    """Return the width of a head, unless the model's width and its heads say the same."""
    said = fields.head_dim
    if said is msgspec.UNSET:
        said = defaults.head_dim
    is_usual = said is None or said * fields.num_attention_heads == fields.hidden_size
    return None if is_usual else said


def _scaling(rope: _Rope, origin: str) -> RopeScaling | None:
    if rope.kind != "llama3":
        return None
    low, high = rope.low_freq_factor, rope.high_freq_factor
    trained = rope.original_max_position_embeddings
    if rope.factor is None or low is None or high is None or trained is None:
        raise BadModelFolder(
            f"{origin}: its scaling of positions lacks one of factor, low_freq_factor, "
            "high_freq_factor and original_max_position_embeddings; take it from the original model"
        )
    return RopeScaling(factor=rope.factor, low=low, high=high, trained_context=trained)


def hugging_face_config(config: ModelConfig, end: int | None = None) -> dict[str, Any]:
    """Return the fields of transformers' configuration that the model determines, with
    `rope_theta` in both its old place and its new one; `end` is the token that ends a text."""
    rope = _rope_of(config)
    return {
        "architectures": [CLASSES[config.architecture]],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        **({} if config.rope_scaling is None else {"rope_scaling": rope}),
        "rope_parameters": rope | {"rope_theta": config.rope_theta},
        "hidden_act": "silu",
        **({"attention_bias": False, "mlp_bias": False} if config.architecture == "llama" else {}),
        **({} if config.architecture == "llama" else {"sliding_window": None}),
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tied,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": None,
        "dtype": "float32",
    }


def _rope_of(config: ModelConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_type": "default"}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low,
        "high_freq_factor": scaling.high,
        "original_max_position_embeddings": scaling.trained_context,
    }
