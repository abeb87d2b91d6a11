"""A Llama-style decoder: RMSNorm, rotary positions, SwiGLU, grouped queries, tied embeddings.

Farflock has its own decoder so that the core does not need transformers, models split at layer
boundaries, and weights come from generators of their own. Names and arithmetic are those of Hugging
Face's classes for Llama, Mistral, Qwen 2 and Qwen 3, so weights of either load in the other.

Shapes: B sequences, L positions, D model width, H heads, K width of a head, V vocabulary.
"""

import hashlib
import math
from typing import Any, Literal

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from farflock.node.model import loss
from farflock.node.model.kv_cache import KeyValueCache, LayerCache, causal

LossReduction = Literal["mean", "sum", "none"]  # of losses, as torch calls them
Architecture = Literal["llama", "mistral", "qwen2", "qwen3"]  # Hugging Face's `model_type`

_LIMITS = {  # bounds for a manifest, inclusive
    "vocab_size": (2, 1_048_576),
    "dim": (2, 65_536),
    "layers": (1, 1_024),
    "heads": (1, 1_024),
    "kv_heads": (1, 1_024),
    "ffn_dim": (1, 262_144),
    "context": (1, 131_072),
    "head_width": (2, 1_024),
}


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Positions for a longer context than a model was first trained on, as in Llama 3.1 (Hugging
    Face's type `llama3`).

    Frequencies of fewer than `low` turns in `trained_context` tokens are divided by `factor`; those
    of more than `high` turns stay; between them the divisor changes smoothly."""

    factor: float
    low: float
    high: float
    trained_context: int

    def __post_init__(self) -> None:
        if not (math.isfinite(self.factor) and self.factor >= 1):
            raise ValueError(
                f"rope_scaling.factor is {self.factor}; it must be finite and 1 or more"
            )
        if not (0 < self.low < self.high and math.isfinite(self.high)):
            raise ValueError(
                f"rope_scaling.low is {self.low} and high is {self.high}; "
                "low must be above 0, and high above low"
            )
        if not 1 <= self.trained_context <= _LIMITS["context"][1]:
            raise ValueError(
                f"rope_scaling.trained_context is {self.trained_context}; "
                f"it must lie between 1 and {_LIMITS['context'][1]}"
            )


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model's shape; `context` is in tokens, `tied` makes the token embedding the head.

    Architectures differ inside attention only: `qwen2` adds biases to queries, keys and values, and
    `qwen3` normalises queries and keys. `head_width` is the width of a head; without one it is
    dim / heads."""

    vocab_size: int = 256
    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn_dim: int
    context: int
    tied: bool = True
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    architecture: Architecture = "llama"
    head_width: int | None = None
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in _LIMITS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(
                    f"the model's {name} is {value}; it must lie between {low} and {high}"
                )
        if self.head_width is not None and self.head_width % 2:
            raise ValueError(f"head_width is {self.head_width}; make it even, as positions need")
        if self.head_width is None and self.dim % (2 * self.heads):
            raise ValueError(
                f"dim {self.dim} cannot be divided into {self.heads} heads of an even width; "
                f"make dim a multiple of {2 * self.heads}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} heads cannot share {self.kv_heads} key-value heads evenly; "
                f"make kv_heads a divisor of {self.heads}"
            )
        if not (math.isfinite(self.rope_theta) and self.rope_theta >= 1):
            raise ValueError(
                f"rope_theta is {self.rope_theta}; it must be finite and 1 or more, commonly 10000"
            )
        if not 0 < self.norm_eps < 1:
            raise ValueError(
                f"norm_eps is {self.norm_eps}; it must lie between 0 and 1, commonly 1e-5"
            )

    @property
    def head_dim(self) -> int:
        """The width of one head."""
        return self.head_width or self.dim // self.heads

    @property
    def has_qkv_bias(self) -> bool:
        """True if biases are added to queries, keys and values."""
        return self.architecture == "qwen2"

    @property
    def has_qk_norm(self) -> bool:
        """True if the queries and keys of each head are normalised."""
        return self.architecture == "qwen3"

    def parameters(self) -> int:
        """Return the number of weights without allocating any."""
        attention = 2 * self.dim * self.head_dim * (self.heads + self.kv_heads)
        attention += (self.heads + 2 * self.kv_heads) * self.head_dim * self.has_qkv_bias
        attention += 2 * self.head_dim * self.has_qk_norm
        layer = attention + 3 * self.dim * self.ffn_dim + 2 * self.dim
        embeddings = (1 if self.tied else 2) * self.vocab_size * self.dim
        return self.layers * layer + embeddings + self.dim


def _llama3(*, dim: int, layers: int, heads: int, ffn_dim: int, tied: bool = True) -> ModelConfig:
    return ModelConfig(
        dim=dim,
        layers=layers,
        heads=heads,
        kv_heads=8,
        ffn_dim=ffn_dim,
        context=8192,
        tied=tied,
        rope_theta=500_000.0,
    )


PRESETS = {
    "tiny": ModelConfig(dim=24, layers=2, heads=2, kv_heads=1, ffn_dim=48, context=64),
    "demo": ModelConfig(dim=96, layers=4, heads=4, kv_heads=4, ffn_dim=256, context=128),
    "10m": ModelConfig(dim=384, layers=6, heads=6, kv_heads=6, ffn_dim=1024, context=256),
    # Those below are named after their weights with a vocabulary of 50,000 tokens.
    "60m": ModelConfig(dim=512, layers=8, heads=8, kv_heads=8, ffn_dim=1408, context=1024),
    "125m": ModelConfig(dim=768, layers=12, heads=12, kv_heads=12, ffn_dim=2048, context=1024),
    "350m": ModelConfig(dim=1024, layers=24, heads=16, kv_heads=16, ffn_dim=2816, context=2048),
    # Llama 3's shapes (arXiv:2407.21783, table 3; model cards of Llama 3.2). Their contexts were
    # lengthened after training on 8,192 tokens.
    "1b": _llama3(dim=2048, layers=16, heads=32, ffn_dim=8192),
    "3b": _llama3(dim=3072, layers=28, heads=24, ffn_dim=8192),
    "8b": _llama3(dim=4096, layers=32, heads=32, ffn_dim=14_336, tied=False),
}


class Attention(nn.Module):
    """Causal self-attention: rotary (arXiv:2104.09864), grouped queries (arXiv:2305.13245)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.grouped = config.kv_heads != config.heads
        queries, pairs = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = _linear(config.dim, queries, bias=config.has_qkv_bias)
        self.k_proj = _linear(config.dim, pairs, bias=config.has_qkv_bias)
        self.v_proj = _linear(config.dim, pairs, bias=config.has_qkv_bias)
        self.o_proj = _linear(queries, config.dim)
        self.q_norm = nn.RMSNorm(config.head_dim, config.norm_eps) if config.has_qk_norm else None
        self.k_norm = nn.RMSNorm(config.head_dim, config.norm_eps) if config.has_qk_norm else None

    def forward(
        self, x_BLD: Tensor, cos_LK: Tensor, sin_LK: Tensor, cache: LayerCache | None = None
    ) -> Tensor:
        """Return (B, L, D): each position's mix of itself and the positions before it, of which the
        cache has those of earlier calls."""
        q_BHLK = rotate(self._heads(self.q_proj(x_BLD), self.q_norm), cos_LK, sin_LK)
        k_BHLK = rotate(self._heads(self.k_proj(x_BLD), self.k_norm), cos_LK, sin_LK)
        v_BHLK = self._heads(self.v_proj(x_BLD))
        if cache is not None:
            k_BHLK, v_BHLK = cache.extended(k_BHLK, v_BHLK)
        new, total = q_BHLK.shape[2], k_BHLK.shape[2]
        y_BHLK = F.scaled_dot_product_attention(
            *(q_BHLK, k_BHLK, v_BHLK),
            attn_mask=causal(new, total, x_BLD.device) if 1 < new < total else None,
            is_causal=new == total,
            enable_gqa=self.grouped,
        )
        mixed: Tensor = self.o_proj(y_BHLK.transpose(1, 2).flatten(2))
        return mixed

    def _heads(self, x_BLD: Tensor, norm: nn.RMSNorm | None = None) -> Tensor:
        batch, length, _ = x_BLD.shape
        x_BLHK = x_BLD.view(batch, length, -1, self.head_dim)
        if norm is not None:
            x_BLHK = norm(x_BLHK.to(norm.weight.dtype))  # autocast's products have another
        return x_BLHK.transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x)) (arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = _linear(config.dim, config.ffn_dim)
        self.up_proj = _linear(config.dim, config.ffn_dim)
        self.down_proj = _linear(config.ffn_dim, config.dim)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Map (B, L, D) to (B, L, D)."""
        y_BLD: Tensor = self.down_proj(F.silu(self.gate_proj(x_BLD)) * self.up_proj(x_BLD))
        return y_BLD


class Block(nn.Module):
    """One layer: normalised attention and normalised feed-forward net, each added to its input."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(
        self, x_BLD: Tensor, cos_LK: Tensor, sin_LK: Tensor, cache: LayerCache | None = None
    ) -> Tensor:
        """Map (B, L, D) to (B, L, D)."""
        x_BLD = x_BLD + self.self_attn(self.input_layernorm(x_BLD), cos_LK, sin_LK, cache)
        y_BLD: Tensor = x_BLD + self.mlp(self.post_attention_layernorm(x_BLD))
        return y_BLD


class Trunk(nn.Module):
    """All but the head. It is a module of its own because Hugging Face's names begin with
    `model.`."""

    def __init__(self, config: ModelConfig, span: range) -> None:
        super().__init__()
        self.embed_tokens = _Embedding(config.vocab_size, config.dim) if span.start == 0 else None
        self.layers = nn.ModuleDict({str(index): Block(config) for index in span})
        is_last = span.stop == config.layers
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps) if is_last else None


class TiedHead(torch.autograd.Function):
    """`F.linear` with the table of embeddings, for a backward pass that takes less memory.

    The gradient of the look-up is added to what this returns in place. To that of `F.linear`, a
    view, autograd adds it in a third tensor of the table's size. The bits are the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # noqa: ANN401 - torch's
        """Return the logits."""
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - torch's
        """Return the gradients of both; with autocast, the logits have another type than they."""
        (x, weight), (grad,) = ctx.saved_tensors, grads
        rows, columns = grad.flatten(0, -2), x.flatten(0, -2).to(grad.dtype)
        to_x, to_weight = grad @ weight.to(grad.dtype), rows.t() @ columns
        return to_x.to(x.dtype), to_weight.to(weight.dtype)


class Llama(nn.Module):
    """The decoder, or the stage of it that holds the layers of `span`, with the names of the whole
    model.

    The first stage embeds tokens; the last one ends in the norm and the head. The stages of any
    split together compute exactly what the whole model computes. Weights are empty until `build` or
    `load_state_dict` fills them.
    """

    def __init__(self, config: ModelConfig, span: range | None = None) -> None:
        super().__init__()
        self.config = config
        self.span = range(config.layers) if span is None else span
        self.checkpointing = False  # of activations: backward passes compute each layer again
        self.logits_at_once: int | None = None  # None: loss.MAX_LOGITS
        self.chunk_loss: loss.ChunkLoss = loss.in_place
        is_consecutive = len(self.span) > 0 and self.span.step == 1
        if not (is_consecutive and self.span.start >= 0 and self.span.stop <= config.layers):
            raise ValueError(
                f"a stage holds consecutive layers of 0 to {config.layers - 1}, got {self.span}"
            )
        if config.tied and len(self.span) < config.layers:
            raise ValueError(
                "a model with tied embeddings cannot be split into stages; set tied to false"
            )
        self.model = Trunk(config, self.span)
        headed = self.span.stop == config.layers and not config.tied
        self.lm_head = _linear(config.dim, config.vocab_size) if headed else None
        cos_LK, sin_LK = rotary(config)
        self.register_buffer("cos", cos_LK, persistent=False)
        self.register_buffer("sin", sin_LK, persistent=False)

    def forward(
        self, x: Tensor, targets_BL: Tensor | None = None, reduction: LossReduction = "mean"
    ) -> Tensor:
        """Run tokens (B, L) in the first stage, or activations (B, L, D) in another, through the
        layers.

        Return activations or, from the last stage, logits (B, L, V). With targets, return their
        cross-entropy in nats instead, as their mean or sum, or without gradients as that of each
        token (B, L); of a large vocabulary's logits, only a chunk exists at a time.
        """
        cos_LK, sin_LK = self._angles(0, x.shape[1])
        if self.model.embed_tokens is not None:
            x = self.model.embed_tokens(x)
        for block in self.blocks():
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(
                    block, x, cos_LK, sin_LK, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x = block(x, cos_LK, sin_LK)
        if self.model.norm is None:
            return x
        x = self.model.norm(x)
        return self._logits(x) if targets_BL is None else self._loss(x, targets_BL, reduction)

    def next_logits(self, ids_BL: Tensor, cache: KeyValueCache) -> Tensor:
        """Return the logits (B, V) of the token after `ids`, which follow the tokens of the cache's
        earlier calls, and add them to the cache. Raise `ValueError` beyond the context."""
        assert self.model.embed_tokens is not None, "tokens enter a model at its first stage"
        assert self.model.norm is not None, "logits leave a model at its last stage"
        cos_LK, sin_LK = self._angles(cache.length, cache.length + ids_BL.shape[1])
        x = self.model.embed_tokens(ids_BL)
        for block, layer in zip(self.blocks(), cache.layers, strict=True):
            x = block(x, cos_LK, sin_LK, layer)
        return self._logits(self.model.norm(x[:, -1]))

    def _angles(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines (L, K) of these positions."""
        if stop > self.config.context:
            raise ValueError(
                f"a sequence of {stop} tokens is longer than the model's context "
                f"{self.config.context}; shorten it"
            )
        return self.get_buffer("cos")[start:stop], self.get_buffer("sin")[start:stop]

    def blocks(self) -> list[nn.Module]:
        """Return this stage's layers in order; pipelines are cut between them, and FSDP wraps
        each."""
        return list(self.model.layers.values())

    def _head(self) -> Tensor:
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        assert head is not None, "the last stage has neither a head nor the embedding"
        return head.weight

    def _logits(self, x_BLD: Tensor) -> Tensor:
        weight = self._head()
        if self.lm_head is None and x_BLD.requires_grad and weight.requires_grad:
            tied: Tensor = TiedHead.apply(x_BLD, weight)  # type: ignore[no-untyped-call]
            return tied
        return F.linear(x_BLD, weight)

    def _loss(self, x_BLD: Tensor, targets_BL: Tensor, reduction: LossReduction) -> Tensor:
        tokens = loss.chunk_tokens(self.config.vocab_size, self.logits_at_once)
        if targets_BL.numel() <= tokens:
            return cross_entropy(self._logits(x_BLD), targets_BL, reduction)
        flat = x_BLD.flatten(0, 1), self._head(), targets_BL.flatten(), tokens
        if reduction == "none":
            return loss.token_losses(*flat).view(targets_BL.shape)
        total = loss.summed_loss(*flat, self.chunk_loss)
        return total / targets_BL.numel() if reduction == "mean" else total


def build(config: ModelConfig, seed: int, span: range | None = None) -> Llama:
    """Return a model with initial weights from `seed`; a stage's equal those of the whole model.

    Normal with standard deviation √(2 / 5·dim) ("SmallInit", arXiv:1910.05895; 0.02 at a width of
    1024), divided by √(2·layers) where a layer adds to its input (GPT-2's rule); ones for norms,
    zeros for biases.
    Each tensor has its own generator, keyed by its name; the global generator is not used. torch's
    normal numbers differ between CPUs, so a swarm starts from the founder's weights, not from the
    seed.
    """
    model = Llama(config, span)
    for name, weight in model.named_parameters():
        initialize(weight.detach(), name, config, seed)
    return model


def initialize(weight: Tensor, name: str, config: ModelConfig, seed: int) -> None:
    """Fill the tensor of this name as `build` does; it may be the only one in memory."""
    if weight.dim() == 1:
        weight.fill_(0.0 if name.endswith(".bias") else 1.0)
        return
    adds = name.endswith(("o_proj.weight", "down_proj.weight"))
    variance = 2 / (5 * config.dim) / (2 * config.layers if adds else 1)
    weight.normal_(0.0, math.sqrt(variance), generator=_generator(seed, name))


def next_token_loss(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per token, computed in float32."""
    return cross_entropy(logits_BLV, targets_BL)


def cross_entropy(
    logits_BLV: Tensor, targets_BL: Tensor, reduction: LossReduction = "mean"
) -> Tensor:
    """Return the cross-entropy in nats, computed in float32, or in float64 for such logits; for
    "none" that of each token (B, L)."""
    logits = logits_BLV if logits_BLV.dtype == torch.float64 else logits_BLV.float()
    if reduction == "none":
        return F.cross_entropy(logits.transpose(1, 2), targets_BL, reduction="none")
    return F.cross_entropy(logits.flatten(0, 1), targets_BL.flatten(), reduction=reduction)


def rotary(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles, float32 (context, K); K repeats K/2 angles."""
    powers = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = scaled(1.0 / config.rope_theta**powers, config.rope_scaling)
    angles = torch.arange(config.context, dtype=torch.float32)[:, None] * frequencies
    both = torch.cat((angles, angles), dim=-1)
    return both.cos(), both.sin()


def scaled(frequencies: Tensor, scaling: RopeScaling | None) -> Tensor:
    """Return the frequencies of a context that was lengthened, with Hugging Face's arithmetic."""
    if scaling is None:
        return frequencies
    turns = scaling.trained_context / (2 * math.pi / frequencies)
    smooth = (turns - scaling.low) / (scaling.high - scaling.low)
    between = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    slow = torch.where(turns < scaling.low, frequencies / scaling.factor, between)
    return torch.where(turns > scaling.high, frequencies, slow)


def rotate(x_BHLK: Tensor, cos_LK: Tensor, sin_LK: Tensor) -> Tensor:
    """Rotate the pairs (i, i + K/2) by their position, as Hugging Face does; the paper pairs
    (2i, 2i + 1)."""
    first, second = x_BHLK.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x_BHLK * cos_LK.to(x_BHLK.dtype) + turned * sin_LK.to(x_BHLK.dtype)


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"farflock-init-v1 {seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


class _Linear(nn.Linear):
    """A linear layer without the initial values that torch would draw from its global generator."""

    def reset_parameters(self) -> None:
        """Do nothing: `build` draws the values."""


class _Embedding(nn.Embedding):
    """An embedding without the initial values that torch would draw, like `_Linear`."""

    def reset_parameters(self) -> None:
        """Do nothing: `build` draws the values."""


def _linear(inputs: int, outputs: int, *, bias: bool = False) -> nn.Linear:
    return _Linear(inputs, outputs, bias=bias)
