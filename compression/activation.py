"""The seam between a pipeline's activations and bytes: `ActivationCodec`, its law, and how two peers agree on one.

Activations go forward over an edge between two stages and their gradients come back over it. Unlike a `Codec`, which sees
flat tensors and remembers nothing, what is here may know tokens and samples, and says in `scope` what the routes must grant
it. Wire formats are written down to the bit in docs/activation-format.md.

Shapes: B sequences, L positions, D model width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from farflock.compression.codec import (
    Buffer,
    Codec,
    Context,
    CorruptPayload,
    UnencodableTensor,
    require_finite,
    require_length,
)
from farflock.compression.int8 import Int8
from farflock.compression.payload import append, values_at

Scope = Literal["memoryless", "shared_params", "edge_sample"]
Direction = Literal["forward", "backward"]

MAX_VALUES = 1 << 28  # of one activation: 1 GiB as float32
MAX_OFFERS = 64  # that are looked at in a peer's record
MAX_NAME = 64  # characters of a codec's name
MAX_DIGEST_BYTES = 32
ID_TYPES = (torch.int64, torch.int32, torch.int16, torch.uint16, torch.uint8)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
EXACT_LENGTH = ("fp32", "fp16", "bf16", "int8", "int4", "fp4", "sign", "topk", "hadamard4", "hadamard8")


class Incompatible(Exception):
    """Two peers, or a payload and its receiver, whose codecs do not fit; the message names the codec and the remedy."""


@dataclass(frozen=True, slots=True, eq=False)
class ActivationContext:
    """Names one passage over an edge and says what will come. Equal on sender and receiver, from the checked header.

    `shape` is (B, L, D) of values of `dtype`; `samples` are the ids of the B sequences, `tokens` their integer ids (B, L),
    both only where a codec needs them. `edge` names the directed pair of peers or stages, `epoch` the optimizer step.
    `arrived`, for a gradient, is the activation as `decode` gave it, which both ends know: its zeros are the forward mask.
    `version` is the sender's own choice of what both ends share, for codecs that have several; a receiver reads it off the
    payload. `ValueError` for what cannot be, before memory is taken for it.
    """

    shape: tuple[int, int, int]
    dtype: torch.dtype = torch.float32
    microbatch: int = 0
    samples: tuple[int, ...] = ()
    tokens: Tensor | None = None
    edge: str = ""
    direction: Direction = "forward"
    epoch: int = 0
    run_seed: int = 0
    arrived: Tensor | None = None
    version: int | None = None

    def __post_init__(self) -> None:
        if len(self.shape) != 3 or min(self.shape) < 0 or math.prod(self.shape) > MAX_VALUES:
            raise ValueError(
                f"an activation of shape {self.shape} is not possible; it has three dimensions and at most"
                f" {MAX_VALUES} values: send smaller microbatches"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"activations of {self.dtype} cannot be sent; choose one of {DTYPES}")
        if self.direction not in ("forward", "backward"):
            raise ValueError(f"direction {self.direction!r} is not known; choose forward or backward")
        if self.samples and len(self.samples) != self.shape[0]:
            raise ValueError(f"{len(self.samples)} sample ids for {self.shape[0]} sequences; give each sequence its id")
        if self.tokens is not None:
            require_token_ids(self.tokens, self.shape[:2])
        if self.arrived is not None and tuple(self.arrived.shape) != self.shape:
            raise ValueError(f"the activation arrived as {tuple(self.arrived.shape)}, its gradient is {self.shape}")

    @property
    def count(self) -> int:
        """How many values."""
        return math.prod(self.shape)

    def flat(self) -> Context:
        """What a codec of flat tensors is told."""
        return Context(
            self.run_seed, self.epoch, f"{self.edge} {self.direction}", self.microbatch, columns=self.shape[2]
        )


class ActivationCodec(Protocol):
    """Turns an activation (B, L, D), and separately its gradient, into bytes and back.

    Law, for every name of `activation_catalog` (tests/compression/test_activation.py):

    1. `decode` of what `encode` wrote has the context's shape and dtype and finite values within the stated bound; so has
       `decode_grad`. `encode` goes with contexts of direction forward, `encode_grad` with backward: else `ValueError`.
    2. NaN or infinity anywhere, another shape or dtype than the context's: `UnencodableTensor`, `out` as it was.
    3. Any bytes at all decode to finite values, or raise `CorruptPayload`, `Incompatible` or `ResyncNeeded`, and leave no
       trace. No payload is longer than `max_bytes(ctx)`; its exact length follows from the context (and, of `aqsgd`, its
       first bytes) and is checked before memory is taken for values.
    4. Deterministic. Memoryless and edge-scoped ones decode the same bits on every machine (docs/architecture.md,
       "portable arithmetic"); of `subspace`, matrix products round as this machine's do.

    `scope` says what the routes must grant: `memoryless` nothing; `shared_params` both ends with equal version and digest;
    `edge_sample` one object for each end of one pinned edge, for it remembers.
    """

    @property
    def name(self) -> str:
        """`FORWARD,GRADIENT`, as the catalogue reads it: `int4,int8`."""
        ...

    @property
    def scope(self) -> Scope:
        """What the routes must grant."""
        ...

    @property
    def version(self) -> int:
        """Of the format, or of what both ends share: peers of different versions do not understand each other."""
        ...

    @property
    def digest(self) -> bytes:
        """Of what both ends share: equal, or nothing may be decoded. Empty if nothing is shared."""
        ...

    def offers(self, epoch: int) -> "tuple[CodecOffer, ...]":
        """What is understood in messages of this epoch; the first is what is spoken."""
        ...

    def max_bytes(self, ctx: ActivationContext) -> int:
        """The most bytes that can be written in the context's direction."""
        ...

    def encode(self, x: Tensor, ctx: ActivationContext, out: bytearray) -> int:
        """Append the activation's payload to `out`; return the number of bytes appended."""
        ...

    def decode(self, payload: Buffer, ctx: ActivationContext) -> Tensor:
        """The activation (B, L, D), on the CPU, in the context's dtype."""
        ...

    def encode_grad(self, grad: Tensor, ctx: ActivationContext, out: bytearray) -> int:
        """Append the payload of the gradient with respect to the decoded activation; return the bytes appended."""
        ...

    def decode_grad(self, payload: Buffer, ctx: ActivationContext) -> Tensor:
        """The gradient (B, L, D) with respect to the activation that was encoded."""
        ...


@dataclass(frozen=True, slots=True)
class CodecOffer:
    """A codec that a peer can speak, as its record says and as every message repeats."""

    name: str
    version: int
    digest: bytes = b""

    def __post_init__(self) -> None:
        if len(self.name) > MAX_NAME or len(self.digest) > MAX_DIGEST_BYTES or not 0 <= self.version < 1 << 32:
            raise ValueError(
                f"an offer needs a name of at most {MAX_NAME} characters, a version below 2^32 and a digest of at most"
                f" {MAX_DIGEST_BYTES} bytes, got {self.name[:MAX_NAME]!r}, {self.version} and {len(self.digest)} bytes"
            )

    @classmethod
    def of(cls, codec: ActivationCodec) -> "CodecOffer":
        """The newest that this codec speaks."""
        return cls(codec.name, codec.version, codec.digest)


def agree(mine: Sequence[CodecOffer], theirs: Sequence[CodecOffer]) -> CodecOffer:
    """The first of `mine`, what the sender can speak in order of preference, that is among what the receiver understands.

    Name, version and digest must be equal (spec 4.9). `mine` is `codec.offers(epoch)[:1]` of one or several codecs,
    `theirs` the receiver's `offers`, from its record, of which the first 64 are looked at. `Incompatible` if there is
    none: the edge cannot be used.
    """
    heard = theirs[:MAX_OFFERS]
    for offer in mine:
        if offer in heard:
            return offer
    reasons = "; ".join(_difference(offer, heard) for offer in mine)
    raise Incompatible(
        f"no activation codec in common: {reasons or 'none is offered here'}. Route to another peer, or give both sides a"
        " codec without shared state, such as bf16"
    )


def _difference(offer: CodecOffer, heard: Sequence[CodecOffer]) -> str:
    """Why this offer is not among them, with what would help."""
    versions = sorted({other.version for other in heard if other.name == offer.name})
    if not versions:
        return f"{offer.name} is not known there"
    if offer.version in versions:
        return (
            f"{offer.name} version {offer.version} has digest {offer.digest.hex()[:8] or 'none'} here and another there:"
            " fetch it again, by the digest that the run's record names"
        )
    return f"{offer.name} is at version {offer.version} here and {versions} there: update the older one"


class _Memoryless:
    """Activation codecs that remember nothing and share nothing."""

    __slots__ = ()
    scope: ClassVar[Scope] = "memoryless"
    version: ClassVar[int] = 1
    digest: ClassVar[bytes] = b""

    def offers(self: ActivationCodec, epoch: int) -> tuple[CodecOffer, ...]:
        """Itself."""
        return (CodecOffer.of(self),)


class FlatGradient:
    """The gradient through a codec of exact length, `gradient`, which remembers nothing."""

    __slots__ = ()
    gradient: Codec

    def encode_grad(self, grad: Tensor, ctx: ActivationContext, out: bytearray) -> int:
        """Append the codec's payload of all values."""
        return self.gradient.encode(flattened(grad, ctx, "backward"), ctx.flat(), out)

    def decode_grad(self, payload: Buffer, ctx: ActivationContext) -> Tensor:
        """What the codec reads, once its length is right."""
        return restored(decoded(self.gradient, payload, ctx, "backward"), ctx)


class _FlatForward(_Memoryless):
    """The activation through a codec of exact length, `forward`."""

    __slots__ = ()
    forward: Codec

    def encode(self, x: Tensor, ctx: ActivationContext, out: bytearray) -> int:
        """Append the codec's payload of all values."""
        return self.forward.encode(flattened(x, ctx, "forward"), ctx.flat(), out)

    def decode(self, payload: Buffer, ctx: ActivationContext) -> Tensor:
        """What the codec reads, once its length is right."""
        return restored(decoded(self.forward, payload, ctx, "forward"), ctx)


@dataclass(frozen=True, slots=True)
class Flat(_FlatForward, FlatGradient):
    """Any codec of exact length for the activation's B·L·D values, row after row, and one for the gradient's.

    The bounds are those of the codecs. Values are rounded to float32 before, and cut to the range of the context's dtype after.
    """

    forward: Codec
    gradient: Codec

    def __post_init__(self) -> None:
        require_exact_length(self.forward)
        require_exact_length(self.gradient)

    @property
    def name(self) -> str:
        """`FORWARD,GRADIENT`."""
        return f"{self.forward.name},{self.gradient.name}"

    def max_bytes(self, ctx: ActivationContext) -> int:
        """Exactly this."""
        codec = self.forward if ctx.direction == "forward" else self.gradient
        return codec.max_bytes(ctx.count)


@dataclass(frozen=True, slots=True)
class Masked(_FlatForward):
    """A sparse codec forward; backward only what belongs to values that arrived, as int8 in blocks of 256 without positions.

    The mask is where `ctx.arrived` is not 0. So the gradient is that of the function which was computed, exactly but for int8:
    what was dropped had no influence on the loss. (Kept values so small that int8 made them 0 count as dropped.) The other
    way, a gradient with a top-k of its own, is `Flat(TopK, TopK)`.
    """

    forward: Codec

    def __post_init__(self) -> None:
        require_exact_length(self.forward)

    @property
    def name(self) -> str:
        """`FORWARD,mask`."""
        return f"{self.forward.name},mask"

    def max_bytes(self, ctx: ActivationContext) -> int:
        """Forward exactly this; backward if nothing is masked, otherwise fewer."""
        return (self.forward if ctx.direction == "forward" else Int8()).max_bytes(ctx.count)

    def encode_grad(self, grad: Tensor, ctx: ActivationContext, out: bytearray) -> int:
        """Append the gradient under the mask."""
        values = require_finite(flattened(grad, ctx, "backward"))
        return Int8().encode(values[self._mask(ctx)], ctx.flat(), out)

    def decode_grad(self, payload: Buffer, ctx: ActivationContext) -> Tensor:
        """The values at their places, 0 elsewhere."""
        require_direction(ctx, "backward")
        mask = self._mask(ctx)
        kept = int(mask.count_nonzero())
        require_length(payload, Int8().max_bytes(kept), f"{self.name} for {kept} values under the mask")
        values, out = torch.empty(kept), torch.zeros(ctx.count)
        Int8().decode(payload, ctx.flat(), values)
        out[mask] = values
        return restored(out, ctx)

    def _mask(self, ctx: ActivationContext) -> Tensor:
        if ctx.arrived is None:
            raise ValueError(f"{self.name} needs the activation as it arrived; give it to the gradient's context")
        return ctx.arrived.detach().cpu().reshape(-1) != 0


@dataclass(frozen=True, slots=True)
class Exact(_Memoryless):
    """The values as they are, in the context's dtype: for links that are fast and for comparisons."""

    name: ClassVar[str] = "raw,raw"

    def max_bytes(self, ctx: ActivationContext) -> int:
        """Exactly this."""
        return ctx.count * ctx.dtype.itemsize

    def encode(self, x: Tensor, ctx: ActivationContext, out: bytearray) -> int:
        """Append the bytes of the values."""
        return self._write(x, ctx, out, "forward")

    def decode(self, payload: Buffer, ctx: ActivationContext) -> Tensor:
        """A copy of the values; NaN and infinity are refused."""
        return self._read(payload, ctx, "forward")

    def encode_grad(self, grad: Tensor, ctx: ActivationContext, out: bytearray) -> int:
        """As `encode`."""
        return self._write(grad, ctx, out, "backward")

    def decode_grad(self, payload: Buffer, ctx: ActivationContext) -> Tensor:
        """As `decode`."""
        return self._read(payload, ctx, "backward")

    def _write(self, x: Tensor, ctx: ActivationContext, out: bytearray, direction: Direction) -> int:
        require_direction(ctx, direction)
        require_fitting(x, ctx)
        bad = int((~torch.isfinite(x)).sum())
        if bad:
            raise UnencodableTensor(f"{bad} of {x.numel()} values are NaN or infinite; refusing to send them")
        return append(out, x.detach().cpu().contiguous().view(-1))

    def _read(self, payload: Buffer, ctx: ActivationContext, direction: Direction) -> Tensor:
        require_direction(ctx, direction)
        require_length(payload, self.max_bytes(ctx), f"{self.name} for {ctx.shape} of {ctx.dtype}")
        values = values_at(payload, 0, ctx.count, ctx.dtype)
        if not bool(torch.isfinite(values).all()):
            raise CorruptPayload(f"{self.name} payload holds NaN or infinity")
        return values.view(ctx.shape)


def require_exact_length(codec: Codec) -> Codec:
    """Return `codec` if the number of values alone says how long its payloads are; `ValueError` otherwise."""
    if "+" in codec.name or codec.name.partition(":")[0] not in EXACT_LENGTH:
        raise ValueError(
            f"codec {codec.name!r} writes payloads whose length varies, which activations do not use; choose one of"
            f" {', '.join(EXACT_LENGTH)}"
        )
    return codec


def require_direction(ctx: ActivationContext, direction: Direction) -> None:
    """Raise `ValueError` if this context is of the other direction: the two ends would then not mean the same."""
    if ctx.direction != direction:
        raise ValueError(f"a context of direction {ctx.direction!r} was given where {direction!r} goes")


def require_fitting(x: Tensor, ctx: ActivationContext) -> None:
    """Raise `UnencodableTensor` unless `x` has the shape and dtype that the header will say."""
    if tuple(x.shape) != ctx.shape or x.dtype != ctx.dtype:
        raise UnencodableTensor(
            f"the header says {ctx.shape} of {ctx.dtype}, the tensor is {tuple(x.shape)} of {x.dtype}"
        )


def require_token_ids(tokens: Tensor, shape: tuple[int, ...]) -> None:
    """Raise `ValueError` unless `tokens` are integers of this shape: bf16 holds ids up to 256 only."""
    if tokens.dtype not in ID_TYPES or tuple(tokens.shape) != shape:
        raise ValueError(f"token ids must be integers of shape {shape}, got {tokens.dtype} {tuple(tokens.shape)}")


def flattened(x: Tensor, ctx: ActivationContext, direction: Direction) -> Tensor:
    """The values of `x` as codecs take them: flat, float32, on the CPU. It may share memory with `x`."""
    require_direction(ctx, direction)
    require_fitting(x, ctx)
    return x.detach().to("cpu", torch.float32).reshape(-1)


def decoded(codec: Codec, payload: Buffer, ctx: ActivationContext, direction: Direction) -> Tensor:
    """What `codec` reads, flat; the payload's length is checked before memory is taken."""
    require_direction(ctx, direction)
    require_length(payload, codec.max_bytes(ctx.count), f"{codec.name} for {ctx.shape} values")
    out = torch.empty(ctx.count)
    codec.decode(payload, ctx.flat(), out)
    return out


def restored(values: Tensor, ctx: ActivationContext) -> Tensor:
    """Flat float32 values in the context's shape and dtype, cut to its range: rounding must not make infinity of them."""
    if ctx.dtype in (torch.float16, torch.bfloat16):
        limit = torch.finfo(ctx.dtype).max
        values = values.clamp(-limit, limit)
    return values.view(ctx.shape).to(ctx.dtype)
