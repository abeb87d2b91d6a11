"""A model's shape as Hugging Face's config.json says it, in both directions.

The native architectures are Llama's family: `LlamaForCausalLM`, and `MistralForCausalLM` and
`MixtralForCausalLM` where their window does not slide. A configuration says more than a shape, and
what would change the logits and is not native is refused here, before any weight is read.
"""

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from farflock.node.model.llama import ModelConfig, RopeScaling

CONFIG_NAME = "config.json"
MAX_CONFIG_BYTES = 1024 * 1024
_ROPES = ("default", "llama3")  # kinds of positions
_SILU = ("silu", "swish")  # two names of one function
_REMEDY = "name a folder that transformers' save_pretrained wrote"

FieldsT = TypeVar("FieldsT", bound=msgspec.Struct)


class BadModelFolder(ValueError):
    """A folder that is no model that this version trains; the message says why and what to do."""


class _Defaults(msgspec.Struct, frozen=True):
    """The values that an architecture's configuration means where it is silent."""

    kv_heads: int | None = None  # None: as many as heads
    window: int | None = None
    theta: float = 10_000.0
    norm_eps: float = 1e-6
    has_experts: bool = False


NATIVE = {
    "LlamaForCausalLM": _Defaults(),
    "MistralForCausalLM": _Defaults(kv_heads=8, window=4096),
    "MixtralForCausalLM": _Defaults(kv_heads=8, theta=1e6, norm_eps=1e-5, has_experts=True),
}
_BY_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
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

    architectures: list[str] | None = None
    model_type: str | None = None
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
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
    sliding_window: int | msgspec.UnsetType | None = msgspec.UNSET


class _Router(msgspec.Struct, frozen=True):
    """The fields of a config.json with experts that decide which of them compute."""

    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    router_aux_loss_coef: float = 0.001


class _Kind(msgspec.Struct, frozen=True, kw_only=True):
    """The fields by which a configuration is refused whatever else is in it."""

    architectures: list[str] | None = None
    model_type: str | None = None
    auto_map: Any = None
    trust_remote_code: Any = None
    quantization_config: Any = None


def config_in(folder: Path) -> ModelConfig:
    """Return the shape of the model in a folder; raise `BadModelFolder` if it is not native."""
    path = folder / CONFIG_NAME
    return config_of(config_bytes(path), str(path))


def config_bytes(path: Path) -> bytes:
    """Return the bytes of a config.json, and one more than the most if there are more; raise
    `BadModelFolder` if there is none."""
    try:
        with path.open("rb") as stream:
            return stream.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        folder, why = path.parent, f"{path}: {error.strerror}"
        raise BadModelFolder(
            f"{folder} is no folder of a Hugging Face model ({why}); {_REMEDY}"
        ) from None


def config_of(raw: bytes, origin: str = CONFIG_NAME) -> ModelConfig:
    """Return the shape that a config.json says; raise `BadModelFolder` if that cannot be read, or
    if the model is not native. `origin` is the file's name for messages."""
    if len(raw) > MAX_CONFIG_BYTES:
        raise BadModelFolder(
            f"{origin} is larger than {MAX_CONFIG_BYTES:,} bytes, and no configuration is; "
            f"{_REMEDY}"
        )
    kind = _decoded(raw, _Kind, origin)
    _require_plain(kind, origin)
    defaults = NATIVE[_native(kind, origin)]
    fields = _decoded(raw, _Fields, origin)
    _require_computable(fields, defaults, origin)
    rope = fields.rope_parameters or fields.rope_scaling or _Rope()
    theta = rope.rope_theta or fields.rope_theta or defaults.theta
    heads = fields.num_attention_heads
    router = _decoded(raw, _Router, origin) if defaults.has_experts else None
    try:
        return ModelConfig(
            vocab_size=fields.vocab_size,
            dim=fields.hidden_size,
            layers=fields.num_hidden_layers,
            heads=heads,
            kv_heads=fields.num_key_value_heads or defaults.kv_heads or heads,
            ffn_dim=fields.intermediate_size,
            context=fields.max_position_embeddings,
            tied=fields.tie_word_embeddings,
            rope_theta=theta,
            norm_eps=defaults.norm_eps if fields.rms_norm_eps is None else fields.rms_norm_eps,
            rope_scaling=_scaling(rope, origin),
            experts=None if router is None else router.num_local_experts,
            experts_per_token=None if router is None else router.num_experts_per_tok,
            balance=None if router is None else router.router_aux_loss_coef,
        )
    except ValueError as error:
        if isinstance(error, BadModelFolder):
            raise
        raise BadModelFolder(f"{origin} describes no native model: {error}") from None


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
            f"choose a model of a native architecture: {', '.join(NATIVE)}"
        )
    if kind.quantization_config:
        raise BadModelFolder(
            f"{origin} describes quantized weights, which cannot be trained; "
            "choose the model's original weights, in bf16, fp16 or fp32"
        )


def _native(kind: _Kind, origin: str) -> str:
    """Return the name of the architecture; raise `BadModelFolder` if it is not native."""
    named = (kind.architectures or [_BY_TYPE.get(kind.model_type or "", "")])[0]
    if named in NATIVE:
        return named
    said = named or kind.model_type or "none"
    raise BadModelFolder(
        f"{origin} names the architecture {said[:64]!r}, which is not native; "
        f"choose a model of one of these: {', '.join(NATIVE)}"
    )


def _require_computable(fields: _Fields, defaults: _Defaults, origin: str) -> None:
    """Raise `BadModelFolder` for what would change the logits and is not native."""
    width, heads = fields.hidden_size, fields.num_attention_heads
    window = fields.sliding_window
    slides = defaults.window if window is msgspec.UNSET else window
    rope = fields.rope_parameters or fields.rope_scaling or _Rope()
    partial = min(fields.partial_rotary_factor, rope.partial_rotary_factor)
    wrong = {
        "attention_bias is true, and native layers have no biases": fields.attention_bias,
        "mlp_bias is true, and native layers have no biases": fields.mlp_bias,
        f"hidden_act is {fields.hidden_act[:64]!r}, and native layers have silu": (
            fields.hidden_act not in _SILU
        ),
        f"its heads are {fields.head_dim} wide, and native ones {width} / {heads}": (
            fields.head_dim is not None and fields.head_dim * heads != width
        ),
        f"its attention slides over a window of {slides} tokens, and native attention sees all": (
            slides is not None and slides < fields.max_position_embeddings
        ),
        f"it rotates {partial:g} of each head, and native layers all of it": partial != 1.0,
        f"its positions are scaled as {rope.kind[:64]!r}, and native ones as llama3 or not": (
            rope.kind not in _ROPES
        ),
    }
    for why, is_wrong in wrong.items():
        if is_wrong:
            raise BadModelFolder(f"{origin}: {why}; choose another model")


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


def hugging_face_config(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of `LlamaConfig`, or of `MixtralConfig` for a model with experts, that the
    model determines, with `rope_theta` in both its old place and its new one."""
    rope = _rope_of(config)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_experts_of(config),
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
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tied,
        "pad_token_id": None,
        "dtype": "float32",
    }


def _experts_of(config: ModelConfig) -> dict[str, Any]:
    if config.experts is None:
        return {}
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "router_aux_loss_coef": config.balance,
        "sliding_window": None,
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
