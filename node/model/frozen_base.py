"""The weights of a model that are not trained, held in less memory: in bf16, int8 or NF4.

Where only adapters are trained and exchanged (lora.py), each peer chooses how it holds what is
beside them. In bf16, the weights of layers and the tables of tokens take two bytes a value. In
int8, a layer's weights take one byte, and each of their rows has a scale, its largest magnitude
over 127. In NF4 (QLoRA, arXiv:2305.14314, section 3), they take four bits, and each block of 64 has
a scale; bitsandbytes does that. Norms and the routers of experts stay float32, and tables of tokens
are never smaller than bf16.

A product is computed in the type of its activations, or in autocast's. Its weight is in that type
while the product is computed, and again in the backward pass, but not in between.

Shapes: D inputs, E outputs of a layer.
"""

import functools
import importlib
import logging
import math
import sys
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farflock.node.model.device import CPU, Device
from farflock.node.model.llama import Llama, ModelConfig, rotary
from farflock.node.model.stage_tensors import shapes_of

BasePrecision = Literal["fp32", "bf16", "int8", "nf4"]

BASE_PRECISIONS: tuple[BasePrecision, ...] = get_args(BasePrecision)
NF4_BLOCK = 64  # values that share a scale
_LEVELS = 127  # of int8, on each side of 0
_TABLES = ("model.embed_tokens.weight", "lm_head.weight")
_ROUTER = ".gate.weight"
_LARGEST_ERROR = 0.2  # of NF4, as a share of the largest magnitude; levels are up to 0.304 apart
_Shape = tuple[int, ...]


class BaseUnavailable(ValueError):
    """A precision that cannot be had here; the message says why and what to do."""


def obstacle_to(precision: BasePrecision, device: Device) -> str:
    """Return why weights cannot be held in this precision on a device, or "" if they can; NF4 is
    tried on a small weight."""
    if precision != "nf4":
        return ""
    if device.place.type == "mps":  # bitsandbytes would load its kernels from the network
        return "bitsandbytes computes NF4 on Apple's GPUs with code that is not part of it"
    try:
        _load_bitsandbytes()
        tried = torch.linspace(-1, 1, 2 * NF4_BLOCK, dtype=torch.float32).view(2, NF4_BLOCK)
        there = FrozenLinear(*_held(tried.to(device.place), "nf4"), (2, NF4_BLOCK)).whole().cpu()
    except BaseUnavailable as error:
        return str(error)
    except Exception as error:  # a library without kernels for a device may raise anything
        said = " ".join(str(error).split()) or type(error).__name__
        return f"bitsandbytes does not compute on {device.name} ({said[:200]})"
    if not bool((there - tried).abs().max() < _LARGEST_ERROR):
        return f"bitsandbytes computes something else on {device.name}"
    return ""


@functools.cache
def frozen_bytes(config: ModelConfig, precision: BasePrecision) -> int:
    """Return the bytes that a model's own weights take in this precision, without any adapters."""
    shapes = shapes_of(config, range(config.layers))
    return sum(
        _bytes_of(shape, _precision_of(name, shape, precision)) for name, shape in shapes.items()
    )


def _bytes_of(shape: _Shape, precision: BasePrecision) -> int:
    values = math.prod(shape)
    match precision:
        case "fp32":
            return 4 * values
        case "bf16":
            return 2 * values
        case "int8":
            return values + 4 * shape[0]
        case "nf4":
            return -(-values // 2) + 4 * -(-values // NF4_BLOCK)


def _precision_of(name: str, shape: _Shape, precision: BasePrecision) -> BasePrecision:
    """Return the precision of one of the weights, where the model's is given."""
    if precision == "fp32" or len(shape) < 2 or name.endswith(_ROUTER):
        return "fp32"
    return "bf16" if name in _TABLES else precision


def frozen_model(
    config: ModelConfig,
    fill: Callable[[str, Tensor], None],
    precision: BasePrecision = "fp32",
    place: torch.device = CPU,
) -> Llama:
    """Return a model of which nothing is trained. `fill` puts the weight of a name into an empty
    float32 tensor on the CPU; one such tensor exists at a time.

    Raise `BaseUnavailable` if bitsandbytes is needed and missing."""
    with torch.device("meta"):
        model = Llama(config)
    for name, angles in zip(("cos", "sin"), rotary(config), strict=True):
        model.register_buffer(name, angles.to(place), persistent=False)
    for name, weight in list(model.named_parameters()):
        whole = torch.empty(weight.shape, dtype=torch.float32)
        fill(name, whole)
        _put(model, name, whole.to(place), precision)
    return model


def hold_base(model: Llama, precision: BasePrecision) -> None:
    """Hold the weights of a model that are frozen in this precision, one after the other; those
    that are trained stay as they are.

    Raise `ValueError` if they are not in float32 any more, and `BaseUnavailable` if bitsandbytes is
    needed and missing."""
    for name in [name for name, _ in model.named_parameters()]:  # which lets each weight go
        weight = model.get_parameter(name)
        if weight.requires_grad:
            continue
        if weight.dtype != torch.float32:
            raise ValueError(
                f"{name} is held as {weight.dtype} already, and its first values are gone; "
                "read the model again"
            )
        _put(model, name, weight.detach(), precision)


def _put(model: Llama, name: str, weight: Tensor, precision: BasePrecision) -> None:
    """Put a float32 weight into the model's place of this name, in its precision there."""
    kept = _precision_of(name, tuple(weight.shape), precision)
    path = name.removesuffix(".weight")
    above, _, leaf = path.rpartition(".")
    owner = model.get_submodule(path)
    if isinstance(owner, FrozenLinear):
        owner.hold(weight, kept)
    elif kept == "fp32" or name == _TABLES[1]:
        owner.weight = nn.Parameter(_held(weight, kept)[0], requires_grad=False)
    elif name == _TABLES[0]:
        setattr(model.get_submodule(above), leaf, HeldEmbedding(weight.to(torch.bfloat16)))
    else:
        held = FrozenLinear(*_held(weight, kept), tuple(weight.shape))
        setattr(model.get_submodule(above), leaf, held)
    if name in _TABLES and kept != "fp32":
        model.head_product = frozen_product


class FrozenLinear(nn.Module):
    """A linear layer without a bias, whose weight (E, D) is not trained and may be held in fewer
    bits.

    `weight` has that many bits, so in int8 and NF4 it is no weight by itself: `whole` is."""

    scales: Tensor | None

    def __init__(self, values: Tensor, scales: Tensor | None, shape: _Shape) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(values, requires_grad=False)
        self.register_buffer("scales", scales, persistent=False)

    def hold(self, weight_ED: Tensor, precision: BasePrecision) -> None:
        """Hold another weight, in this precision."""
        values, self.scales = _held(weight_ED.detach(), precision)
        self.weight = nn.Parameter(values, requires_grad=False)

    def whole(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight (E, D), as the layer computes with it."""
        return _widened(self.weight.detach(), self.scales, self.shape, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., D) to (..., E)."""
        if self.scales is None and self.weight.dtype != torch.bfloat16:
            return F.linear(x, self.weight)
        return _product(x, self.weight, self.scales, self.shape)


class HeldEmbedding(nn.Module):
    """A table of tokens that is not trained, in bf16; what is looked up is float32, as activations
    are."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values, requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Map tokens (B, L) to (B, L, D)."""
        return F.embedding(ids, self.weight).float()


def frozen_product(x: Tensor, weight_ED: Tensor) -> Tensor:
    """Return `F.linear` with a frozen weight that may have fewer bits than the activations."""
    return _product(x, weight_ED, None, tuple(weight_ED.shape))


def _product(x: Tensor, values: Tensor, scales: Tensor | None, shape: _Shape) -> Tensor:
    place = x.device.type
    is_lower = torch.is_autocast_enabled(place)
    dtype = torch.get_autocast_dtype(place) if is_lower else x.dtype
    y: Tensor = FrozenProduct.apply(  # type: ignore[no-untyped-call]
        x, values, scales, shape, dtype
    )
    return y


class FrozenProduct(torch.autograd.Function):
    """`F.linear` with a frozen weight, which is kept for the backward pass as it is held."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's
        x: Tensor,
        values: Tensor,
        scales: Tensor | None,
        shape: _Shape,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return the product, computed in `dtype`."""
        ctx.save_for_backward(values, scales)
        ctx.shape, ctx.given = shape, x.dtype
        return F.linear(x.to(dtype), _widened(values, scales, shape, dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - torch's
        """Return the gradient of the activations."""
        values, scales = ctx.saved_tensors
        to_x = grads[0] @ _widened(values, scales, ctx.shape, grads[0].dtype)
        return to_x.to(ctx.given), None, None, None, None


def _held(weight_ED: Tensor, precision: BasePrecision) -> tuple[Tensor, Tensor | None]:
    """Return a float32 weight in this precision, and the scales that belong to it."""
    match precision:
        case "fp32":
            return weight_ED, None
        case "bf16":
            return weight_ED.to(torch.bfloat16), None
        case "int8":
            scales_E = weight_ED.abs().amax(1) / _LEVELS
            divisors_E = torch.where(scales_E > 0, scales_E, 1.0)  # of a row of zeros
            return (weight_ED / divisors_E[:, None]).round_().to(torch.int8), scales_E
        case "nf4":
            _load_bitsandbytes()
            packed: tuple[Tensor, Tensor] = torch.ops.bitsandbytes.quantize_4bit(
                weight_ED, NF4_BLOCK, "nf4", torch.uint8
            )
            return packed


def _widened(values: Tensor, scales: Tensor | None, shape: _Shape, dtype: torch.dtype) -> Tensor:
    """Return a weight (E, D) in a type that can be multiplied."""
    if scales is None:
        return values.to(dtype)
    if values.dtype == torch.int8:
        return values.to(dtype).mul_(scales[:, None])
    whole: Tensor = torch.ops.bitsandbytes.dequantize_4bit(
        values, scales, NF4_BLOCK, "nf4", list(shape), dtype
    )
    return whole


def _load_bitsandbytes() -> None:
    """Let torch know the operators of bitsandbytes; raise `BaseUnavailable` if it is missing.

    While it is imported on some CPUs, it fetches compiled code from the network if the package
    `kernels` is there, and complains if it is not. That code is not needed here."""
    if sys.modules.get("bitsandbytes") is not None:
        return
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    hidden = sys.modules.get("kernels")
    sys.modules["kernels"] = None  # type: ignore[assignment]  # so an import of it fails
    try:
        importlib.import_module("bitsandbytes")
    except ImportError:
        raise BaseUnavailable(
            'NF4 is computed by the package bitsandbytes; pip install "farflock[quantized]"'
        ) from None
    finally:
        del sys.modules["kernels"]
        if hidden is not None:
            sys.modules["kernels"] = hidden
