"""Low-rank adapters (LoRA, arXiv:2106.09685): small matrices that are trained beside frozen ones.

A linear layer W gets A, which maps its inputs to `r` values, and B, which maps these to its
outputs; the layer then computes W·x + (alpha / r)·B·A·x. A begins with random values and B with
zeros, so that a model with new adapters computes what it did without. Names and arithmetic are
those of the package peft.

Shapes: D inputs, E outputs of a layer, R rank.
"""

import functools
import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import cast

import msgspec
import torch
from torch import Tensor, nn

from farflock.node.errors import nearest
from farflock.node.model.frozen_base import FrozenLinear
from farflock.node.model.llama import Llama, ModelConfig
from farflock.node.model.stage_tensors import shapes_of

MAX_ADAPTER_RANK = 1_024
ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
NET_TARGETS = ("gate_proj", "up_proj", "down_proj")
ADAPTER_TARGETS = (*ATTENTION_TARGETS, *NET_TARGETS)
_A, _B, _OWN = ".lora_A.weight", ".lora_B.weight", ".weight"


class LoraTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The adapters of a run: their rank `r`; `alpha`, which over `r` is the factor of what they
    add; and the layers of each block that have one."""

    r: int
    alpha: float
    targets: tuple[str, ...] = ("q_proj", "v_proj")

    def __post_init__(self) -> None:
        if not 1 <= self.r <= MAX_ADAPTER_RANK:
            raise ValueError(
                f"lora.r is {self.r}; it must lie between 1 and {MAX_ADAPTER_RANK}, commonly 8 to"
                " 64"
            )
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(
                f"lora.alpha is {self.alpha}; it must be finite and above 0, commonly 2 r"
            )
        if not self.targets:
            raise ValueError(
                f"lora.targets is empty; name layers, out of {', '.join(ADAPTER_TARGETS)}"
            )
        for name in self.targets:
            if name not in ADAPTER_TARGETS:
                raise ValueError(
                    f"lora.targets names {name[:64]!r}, which has no adapters; "
                    f"{nearest(name, ADAPTER_TARGETS)}"
                )
        if len(set(self.targets)) < len(self.targets):
            raise ValueError("lora.targets names a layer twice; name each once")

    @property
    def scale(self) -> float:
        """The factor of what adapters add."""
        return self.alpha / self.r


class AdaptedLinear(FrozenLinear):
    """A frozen linear layer with an adapter beside it."""

    def __init__(self, base: nn.Linear | FrozenLinear, rank: int, scale: float) -> None:
        values = base.weight.detach()
        scales = base.scales if isinstance(base, FrozenLinear) else None
        shape = base.shape if isinstance(base, FrozenLinear) else tuple(values.shape)
        super().__init__(values, scales, shape)
        self.scale = scale
        like = torch.empty(0, dtype=torch.float32, device=values.device)
        self.lora_A = _linear(like.new_empty(rank, shape[1]), is_trained=True)
        self.lora_B = _linear(like.new_zeros(shape[0], rank), is_trained=True)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., D) to (..., E)."""
        added: Tensor = self.lora_B(self.lora_A(x)) * self.scale
        return super().forward(x) + added

    def merged(self) -> Tensor:
        """Return the weight (E, D) of a layer that computes the same without an adapter."""
        return _merged(self.whole(), self.lora_A.weight, self.lora_B.weight, self.scale)


def add_adapters(model: Llama, terms: LoraTerms, seed: int) -> None:
    """Freeze all weights of a model, and put adapters beside those that the terms name; these are
    then all that is trained.

    A is drawn uniformly between ±1/√D, as peft does, and each one from a generator of its own,
    keyed by seed and name; B is zero. Adapters are float32 on their layer's device. Raise
    `ValueError` for layers that the model lacks, or if it has adapters."""
    _require_targets(model.config, terms)
    model.requires_grad_(False)
    for path, layer in list(model.named_modules()):
        above, _, leaf = path.rpartition(".")
        if leaf not in terms.targets:
            continue
        if isinstance(layer, AdaptedLinear):
            raise ValueError(f"{path} has an adapter already; merge it first, or read the model")
        made = AdaptedLinear(cast("nn.Linear | FrozenLinear", layer), terms.r, terms.scale)
        drawn = torch.empty(made.lora_A.weight.shape, dtype=torch.float32)
        nn.init.kaiming_uniform_(drawn, math.sqrt(5), generator=_generator(seed, path + _A))
        with torch.no_grad():
            made.lora_A.weight.copy_(drawn)
        setattr(model.get_submodule(above), leaf, made)


def adapter_shapes(config: ModelConfig, terms: LoraTerms) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a model's adapters, in its order, without allocating any;
    raise `ValueError` for layers that the model lacks."""
    return dict(_shapes(config, terms))


@functools.cache
def _shapes(config: ModelConfig, terms: LoraTerms) -> Mapping[str, tuple[int, ...]]:
    _require_targets(config, terms)
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes_of(config, range(config.layers)).items():
        path = name.removesuffix(_OWN)
        if path.rpartition(".")[2] in terms.targets:
            found |= {path + _A: (terms.r, shape[1]), path + _B: (shape[0], terms.r)}
    return found


def merge_adapters(model: Llama) -> None:
    """Replace each layer with an adapter by a plain one that computes the same, with a float32
    weight that is not trained."""
    for path, layer in adapted_layers(model):
        above, _, leaf = path.rpartition(".")
        plain = _linear(layer.merged(), is_trained=False)
        setattr(model.get_submodule(above), leaf, plain)


def adapted_layers(model: Llama) -> Iterator[tuple[str, AdaptedLinear]]:
    """Yield each layer of a model that has an adapter, with its name."""
    for path, layer in list(model.named_modules()):
        if isinstance(layer, AdaptedLinear):
            yield path, layer


def merged_weights(
    weights: Mapping[str, Tensor], adapters: Mapping[str, Tensor], terms: LoraTerms
) -> dict[str, Tensor]:
    """Return the weights of a model with its adapters merged, in float32; those without an adapter
    are the ones that were given. Raise `ValueError` if an adapter belongs to none of them."""
    merged, left = dict(weights), dict(adapters)
    for name, weight in weights.items():
        path = name.removesuffix(_OWN)
        if path + _A in left and path + _B in left:
            merged[name] = _merged(weight, left.pop(path + _A), left.pop(path + _B), terms.scale)
    if left:
        raise ValueError(
            f"{len(left)} tensors of adapters do not belong to this model, such as "
            f"{min(left)[:200]}; take the model that they were trained with"
        )
    return merged


@torch.no_grad()
def _merged(weight_ED: Tensor, a_RD: Tensor, b_ER: Tensor, scale: float) -> Tensor:
    return weight_ED.float() + (b_ER.float() @ a_RD.float()) * scale


def _linear(weight_ED: Tensor, *, is_trained: bool) -> nn.Linear:
    """Return a linear layer without a bias that has this weight."""
    made = nn.Linear(weight_ED.shape[1], weight_ED.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight_ED, requires_grad=is_trained)
    return made


def _require_targets(config: ModelConfig, terms: LoraTerms) -> None:
    lacking = [name for name in terms.targets if name in NET_TARGETS]
    if config.experts is not None and lacking:
        raise ValueError(
            f"lora.targets names {', '.join(lacking)}, and this model has experts in their place, "
            f"which have no adapters; choose from {', '.join(ATTENTION_TARGETS)}"
        )


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"farflock-lora-v1 {seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
