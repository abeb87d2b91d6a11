"""A Llama-style decoder: RMSNorm, rotary positions, SwiGLU, grouped queries, tied embeddings.

Farflock has its own decoder so that the core does not need transformers, models split at layer
boundaries, and weights come from generators of their own. Names and arithmetic are those of Hugging
Face's `LlamaForCausalLM`, so exports load there.

Shapes: B sequences, L positions, D model width, H heads, K width of a head, V vocabulary.
"""

import hashlib
import math
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from farflock.node.model import loss
from farflock.node.model.experts import AddedLoss, Experts
from farflock.node.model.kv_cache import KeyValueCache, LayerCache, causal

LossReduction = Literal["mean", "sum", "none"]  # of losses, as torch calls them

_LIMITS = {  # bounds for a manifest, inclusive
    "vocab_size": (2, 2**32),
    "dim": (2, 65_536),
    "layers": (1, 1_024),
    "heads": (1, 1_024),
    "kv_heads": (1, 1_024),
    "ffn_dim": (1, 262_144),
    "context": (1, 131_072),
}


MAX_EXPERTS = 1_024  # of a layer


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

    With `experts`, each layer has that many SwiGLU blocks, and a router that sends each token to
    `experts_per_token` of them; `balance` is the weight of the loss that spreads tokens evenly
    (node/model/experts.py)."""

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
    rope_scaling: RopeScaling | None = None
    experts: int | None = None
    experts_per_token: int | None = None
    balance: float | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in _LIMITS.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(
                    f"the model's {name} is {value}; it must lie between {low} and {high}"
                )
        if self.dim % (2 * self.heads):
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
        _require_experts(self.experts, self.experts_per_token, self.balance)

    @property
    def used_experts(self) -> int:
        """The number of SwiGLU blocks of a layer that compute a token."""
        return self.experts_per_token or 1

    @property
    def head_dim(self) -> int:
        """The width of one head."""
        return self.dim // self.heads

    def parameters(self) -> int:
        """Return the number of weights without allocating any."""
        attention = 2 * self.dim * self.head_dim * (self.heads + self.kv_heads)
        net = 3 * self.dim * self.ffn_dim
        if self.experts is not None:
            net = self.experts * (net + self.dim)
        layer = attention + net + 2 * self.dim
        embeddings = (1 if self.tied else 2) * self.vocab_size * self.dim
        return self.layers * layer + embeddings + self.dim


def _require_experts(experts: int | None, used: int | None, balance: float | None) -> None:
    if experts is None:
        if used is not None or balance is not None:
            raise ValueError(
                "experts_per_token and balance are for a model with experts; "
                "set experts, or leave them out"
            )
        return
    if not 2 <= experts <= MAX_EXPERTS:
        raise ValueError(
            f"the model's experts is {experts}; it must lie between 2 and {MAX_EXPERTS}"
        )
    if used is None or not 1 <= used <= experts:
        raise ValueError(
            f"experts_per_token is {used}; it must lie between 1 and {experts}, commonly 2"
        )
    if balance is None or not 0 <= balance <= 1:
        raise ValueError(f"balance is {balance}; it must lie between 0 and 1, commonly 0.01")


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
        self.q_proj = _linear(config.dim, config.heads * config.head_dim)
        self.k_proj = _linear(config.dim, config.kv_heads * config.head_dim)
        self.v_proj = _linear(config.dim, config.kv_heads * config.head_dim)
        self.o_proj = _linear(config.heads * config.head_dim, config.dim)

    def forward(
        self, x_BLD: Tensor, cos_LK: Tensor, sin_LK: Tensor, cache: LayerCache | None = None
    ) -> Tensor:
        """Return (B, L, D): each position's mix of itself and the positions before it, of which
        the cache has those of earlier calls."""
        q_BHLK = rotate(self._heads(self.q_proj(x_BLD)), cos_LK, sin_LK)
        k_BHLK = rotate(self._heads(self.k_proj(x_BLD)), cos_LK, sin_LK)
        v_BHLK = self._heads(self.v_proj(x_BLD))
        if cache is not None:
            k_BHLK, v_BHLK = cache.extended(k_BHLK, v_BHLK)
        new, total = q_BHLK.shape[2], k_BHLK.shape[2]
        y_BHLK = F.scaled_dot_product_attention(
            *(q_BHLK, k_BHLK, v_BHLK),
            attn_mask=None if new == total else causal(new, total, x_BLD.device),
            is_causal=new == total,
            enable_gqa=self.grouped,
        )
        mixed: Tensor = self.o_proj(y_BHLK.transpose(1, 2).flatten(2))
        return mixed

    def _heads(self, x_BLD: Tensor) -> Tensor:
        batch, length, _ = x_BLD.shape
        return x_BLD.view(batch, length, -1, self.head_dim).transpose(1, 2)


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


class ExpertBlock(nn.Module):
    """One layer like `Block`, with experts in place of its feed-forward net, and the names of
    `MixtralForCausalLM`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.experts is not None, "a model without experts has other layers"
        self.input_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        sizes = config.dim, config.ffn_dim, config.experts, config.used_experts
        self.block_sparse_moe = Experts(*sizes, _linear)

    def forward(
        self, x_BLD: Tensor, cos_LK: Tensor, sin_LK: Tensor, cache: LayerCache | None = None
    ) -> tuple[Tensor, Tensor]:
        """Map (B, L, D) to (B, L, D), and return the balance of the experts beside it."""
        x_BLD = x_BLD + self.self_attn(self.input_layernorm(x_BLD), cos_LK, sin_LK, cache)
        y_BLD, balance = self.block_sparse_moe(self.post_attention_layernorm(x_BLD))
        return x_BLD + y_BLD, balance


class Trunk(nn.Module):
    """All but the head. It is a module of its own because Hugging Face's names begin with
    `model.`."""

    def __init__(self, config: ModelConfig, span: range) -> None:
        super().__init__()
        self.embed_tokens = _Embedding(config.vocab_size, config.dim) if span.start == 0 else None
        layer = Block if config.experts is None else ExpertBlock
        self.layers = nn.ModuleDict({str(index): layer(config) for index in span})
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
        # of activations and the head's weight, which may have fewer bits if it is not trained
        self.head_product: Callable[[Tensor, Tensor], Tensor] = F.linear
        # of experts, without targets too, where the loss will be summed over tokens
        self.adds_balance = False
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
        self,
        x: Tensor,
        targets_BL: Tensor | None = None,
        reduction: LossReduction = "mean",
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Run tokens (B, L) in the first stage, or activations (B, L, D) in another, through the
        layers.

        Return activations or, from the last stage, logits (B, L, V). With targets, return their
        cross-entropy in nats instead, as their mean or sum, or without gradients as that of each
        token (B, L); of a large vocabulary's logits, only a chunk exists at a time. Targets
        `loss.IGNORED` are left out; the mean of none is 0.

        With a cache, the tokens follow those of its earlier calls, and only the logits of the last
        one (B, 1, V) are computed.

        The balance of experts takes part in the gradients of a loss, and not in its value.
        """
        start = 0 if cache is None else cache.length
        stop = start + x.shape[1]
        if stop > self.config.context:
            raise ValueError(
                f"a sequence of {stop} tokens is longer than the model's context "
                f"{self.config.context}; shorten it"
            )
        if self.model.embed_tokens is not None:
            x = self.model.embed_tokens(x)
        cos_LK, sin_LK = self.get_buffer("cos")[start:stop], self.get_buffer("sin")[start:stop]
        x, balances = self._through_layers(x, cos_LK, sin_LK, cache)
        if cache is not None:
            cache.advance(stop - start)
            x = x[:, -1:]
        if self.model.norm is not None:
            x = self.model.norm(x)
        if self.model.norm is not None and targets_BL is not None:
            times = 1 if reduction == "mean" else targets_BL.numel()
            found = self._loss(x, targets_BL, reduction)
            return self._with_balance(found, balances, times, targets_BL)
        y = x if self.model.norm is None else self._logits(x)
        if not self.adds_balance:
            return y
        return self._with_balance(y, balances, y.shape[0] * y.shape[1])

    def _through_layers(
        self, x_BLD: Tensor, cos_LK: Tensor, sin_LK: Tensor, cache: KeyValueCache | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return what leaves this stage's layers, and the balance of each that has experts."""
        balances: list[Tensor] = []
        for index, block in zip(self.span, self.blocks(), strict=True):
            given = x_BLD, cos_LK, sin_LK
            if self.checkpointing and torch.is_grad_enabled():
                found = checkpoint(block, *given, use_reentrant=False, preserve_rng_state=False)
            elif cache is not None:
                found = block(*given, cache[index])
            else:
                found = block(*given)
            if self.config.experts is None:
                x_BLD = found
            else:
                x_BLD, balance = found
                balances.append(balance)
        return x_BLD, balances

    def _with_balance(
        self, y: Tensor, balances: list[Tensor], times: int, targets_BL: Tensor | None = None
    ) -> Tensor:
        """Return `y` itself, whose gradients have the mean balance of the model's layers in them,
        weighted, so many times; a stage adds its own layers'. With targets, one time stands for any
        that counts, and more for each."""
        weight = (self.config.balance or 0.0) * times / self.config.layers
        if not balances or not weight or not torch.is_grad_enabled():
            return y
        extra = torch.stack(balances).sum() * weight
        if targets_BL is not None:
            share = loss.counted_share(targets_BL, extra)
            extra = extra * (share.sign() if times == 1 else share)
        if not y.dim():  # a loss, whose own gradient may be scaled
            return y + (extra - extra.detach())
        added: Tensor = AddedLoss.apply(y, extra)  # type: ignore[no-untyped-call]
        return added

    def blocks(self) -> list[nn.Module]:
        """Return this stage's layers in order; pipelines are cut between them, and FSDP wraps
        each."""
        return list(self.model.layers.values())

    def empty_cache(self) -> KeyValueCache:
        """Return a cache for `forward` that has seen no token."""
        return KeyValueCache(self.config.layers, self.config.context)

    def _head(self) -> Tensor:
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        assert head is not None, "the last stage has neither a head nor the embedding"
        return head.weight

    def _logits(self, x_BLD: Tensor) -> Tensor:
        weight = self._head()
        if self.lm_head is None and x_BLD.requires_grad and weight.requires_grad:
            tied: Tensor = TiedHead.apply(x_BLD, weight)  # type: ignore[no-untyped-call]
            return tied
        return self.head_product(x_BLD, weight)

    def _loss(self, x_BLD: Tensor, targets_BL: Tensor, reduction: LossReduction) -> Tensor:
        tokens = loss.chunk_tokens(self.config.vocab_size, self.logits_at_once)
        if targets_BL.numel() <= tokens:
            return cross_entropy(self._logits(x_BLD), targets_BL, reduction)
        flat = x_BLD.flatten(0, 1), self._head(), targets_BL.flatten(), tokens
        if reduction == "none":
            return loss.token_losses(*flat).view(targets_BL.shape)
        total = loss.summed_loss(*flat, self.chunk_loss)
        return loss.mean_of(total, targets_BL) if reduction == "mean" else total


def build(config: ModelConfig, seed: int, span: range | None = None) -> Llama:
    """Return a model with initial weights from `seed`; a stage's equal those of the whole model.

    Normal with standard deviation √(2 / 5·dim) ("SmallInit", arXiv:1910.05895; 0.02 at a width of
    1024), divided by √(2·layers) where a layer adds to its input (GPT-2's rule); ones for norms.
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
        weight.fill_(1.0)
        return
    adds = name.endswith(("o_proj.weight", "down_proj.weight", ".w2.weight"))
    variance = 2 / (5 * config.dim) / (2 * config.layers if adds else 1)
    weight.normal_(0.0, math.sqrt(variance), generator=_generator(seed, name))


def next_token_loss(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per token that counts, computed in float32."""
    return cross_entropy(logits_BLV, targets_BL)


def cross_entropy(
    logits_BLV: Tensor, targets_BL: Tensor, reduction: LossReduction = "mean"
) -> Tensor:
    """Return the cross-entropy in nats, computed in float32, or in float64 for such logits; for
    "none" that of each token (B, L). Targets `loss.IGNORED` are left out; the mean of none is 0."""
    logits = logits_BLV if logits_BLV.dtype == torch.float64 else logits_BLV.float()
    if reduction == "none":
        return F.cross_entropy(
            logits.transpose(1, 2), targets_BL, reduction="none", ignore_index=loss.IGNORED
        )
    found = F.cross_entropy(
        logits.flatten(0, 1),
        targets_BL.flatten(),
        reduction=reduction,
        ignore_index=loss.IGNORED,
    )
    if reduction == "sum":
        return found
    # torch's mean of none is not a number; its gradient is 0
    return torch.where((targets_BL != loss.IGNORED).any(), found, 0.0)


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


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return _Linear(inputs, outputs, bias=False)
