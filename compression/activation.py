"""The seam between a pipeline's activations and bytes: `ActivationCodec`, its law, and the
agreement of two peers on a codec.

Activations go forward over an edge between two stages and their gradients come back over it. Unlike
a `Codec`, which sees flat tensors and is stateless, an activation codec may know tokens and
samples; `scope` declares what it requires of routes. docs/activation-format.md defines the wire
formats to the bit.

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

MAX_VALUES = 1 << 28  # per activation: 1 GiB as float32
MAX_OFFERS = 64  # read from a peer's record
MAX_NAME = 64  # characters in a codec's name
MAX_DIGEST_BYTES = 32
ID_TYPES = (torch.int64, torch.int32, torch.int16, torch.uint16, torch.uint8)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
EXACT_LENGTH = (
    "fp32",
    "fp16",
    "bf16",
    "int8",
    "int4",
    "fp4",
    "sign",
    "topk",
    "hadamard4",
    "hadamard8",
)


class Incompatible(Exception):
    """Raised if two peers' codecs, or a payload and its receiver, are incompatible; the message
    names the remedy."""


@dataclass(frozen=True, slots=True, eq=False)
class ActivationContext:
    """One transfer over an edge, equal at sender and receiver, taken from the checked header.

    `shape` is (B, L, D), the values are of `dtype`. `samples` are the ids of the B sequences and
    `tokens` (B, L) their integer token ids, both only if a codec needs them. `edge` names the
    directed pair of peers or stages, `epoch` the optimizer step. `arrived`, for a gradient, is the
    activation as `decode` returned it, known to both ends: its zeros are the forward mask.
    `version` is the sender's choice among the versions of the shared state; a receiver reads it
    from the payload. Impossible values raise `ValueError` before memory is allocated.
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
                f"an activation of shape {self.shape} is not allowed; "
                f"it has three dimensions and at most {MAX_VALUES} values: "
                "send smaller microbatches"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"activations of {self.dtype} cannot be sent; choose one of {DTYPES}")
        if self.direction not in ("forward", "backward"):
            raise ValueError(
                f"direction {self.direction!r} is not known; choose forward or backward"
            )
        if self.samples and len(self.samples) != self.shape[0]:
            raise ValueError(
                f"{len(self.samples)} sample ids for {self.shape[0]} sequences; "
                "give each sequence its id"
            )
        if self.tokens is not None:
            require_token_ids(self.tokens, self.shape[:2])
        if self.arrived is not None and tuple(self.arrived.shape) != self.shape:
            raise ValueError(
                f"the activation arrived as {tuple(self.arrived.shape)}, "
                f"its gradient is {self.shape}"
            )

    @property
    def count(self) -> int:
        """The number of values."""
        return math.prod(self.shape)

    def flat(self) -> Context:
        """Return the context of a codec of flat tensors."""
        return Context(
            self.run_seed,
            self.epoch,
            f"{self.edge} {self.direction}",
            self.microbatch,
            columns=self.shape[2],
        )


class ActivationCodec(Protocol):
    """An encoder of activations (B, L, D) to bytes and another of their gradients, with both
    decoders.

    Law, for every name of `activation_catalog` (tests/compression/test_activation.py):

    1. `decode` returns what `encode` wrote in the context's shape and dtype, finite and within the
       stated bound; so does `decode_grad`. `encode` takes contexts of direction forward,
       `encode_grad` of direction backward; any other raises `ValueError`.
    2. A tensor with a NaN or infinity, or of another shape or dtype than the context's, raises
       `UnencodableTensor` and leaves `out` unchanged.
    3. Any bytes at all decode to finite values, or raise `CorruptPayload` or `Incompatible` and
       change no state, or raise `ResyncNeeded` (see `AqSgd`). No payload is longer than
       `max_bytes(ctx)`; its exact length follows from the context (and for `aqsgd` its first bytes)
       and is checked before memory is allocated for values.
    4. All four are deterministic. Memoryless and edge-scoped codecs decode to the same bits on
       every machine (docs/architecture.md, "portable arithmetic"); the matrix products of
       `subspace` round as the machine's do.

    `scope` declares what the codec requires of routes: `memoryless` nothing; `shared_params` equal
    versions and digests at both ends; `edge_sample` one object for each end of one pinned edge,
    because it keeps state.
    """

    @property
    def name(self) -> str:
        """`FORWARD,GRADIENT`, as the catalog parses it: `int4,int8`."""
        ...

    @property
    def scope(self) -> Scope:
        """The requirements on routes."""
        ...

    @property
    def version(self) -> int:
        """Version of the format or shared state; peers of different versions are incompatible."""
        ...

    @property
    def digest(self) -> bytes:
        """Digest of the shared state, equal at both ends; empty if nothing is shared."""
        ...

    def offers(self, epoch: int) -> "tuple[CodecOffer, ...]":
        """Return the offers that this end can read in messages of this epoch; it writes the
        first."""
        ...

    def max_bytes(self, ctx: ActivationContext) -> int:
        """Return the most bytes of a payload in the context's direction."""
        ...

    def encode(self, x: Tensor, ctx: ActivationContext, out: bytearray) -> int:
        """Append the activation's payload to `out`; return the number of bytes appended."""
        ...

    def decode(self, payload: Buffer, ctx: ActivationContext) -> Tensor:
        """Return the activation (B, L, D), on the CPU, in the context's dtype."""
        ...

    def encode_grad(self, grad: Tensor, ctx: ActivationContext, out: bytearray) -> int:
        """Append the payload of the decoded activation's gradient; return the bytes appended."""
        ...

    def decode_grad(self, payload: Buffer, ctx: ActivationContext) -> Tensor:
        """Return the gradient (B, L, D) with respect to the encoded activation."""
        ...


@dataclass(frozen=True, slots=True)
class CodecOffer:
    """A codec that a peer supports, as its record and each of its messages state it."""

    name: str
    version: int
    digest: bytes = b""

    def __post_init__(self) -> None:
        if (
            len(self.name) > MAX_NAME
            or len(self.digest) > MAX_DIGEST_BYTES
            or not 0 <= self.version < 1 << 32
        ):
            raise ValueError(
                f"an offer needs a name of at most {MAX_NAME} characters, "
                f"a version below 2^32 and a digest of at most {MAX_DIGEST_BYTES} bytes, "
                f"got {self.name[:MAX_NAME]!r}, {self.version} and {len(self.digest)} bytes"
            )

    @classmethod
    def of(cls, codec: ActivationCodec) -> "CodecOffer":
        """Return the offer of a codec's newest version."""
        return cls(codec.name, codec.version, codec.digest)


def agree(mine: Sequence[CodecOffer], theirs: Sequence[CodecOffer]) -> CodecOffer:
    """Return the first of `mine`, the sender's offers in order of preference, that the receiver can
    read.

    Name, version and digest must be equal. `mine` is `codec.offers(epoch)[:1]` of one or several
    codecs, `theirs` the `offers` in the receiver's record, of which the first 64 are read. Raise
    `Incompatible` if none matches: the edge cannot be used.
    """
    heard = theirs[:MAX_OFFERS]
    for offer in mine:
        if offer in heard:
            return offer
    reasons = "; ".join(_difference(offer, heard) for offer in mine)
    raise Incompatible(
        f"no activation codec in common: {reasons or 'none is offered here'}. Route to another "
        "peer, or give both sides a codec without shared state, such as bf16"
    )


def _difference(offer: CodecOffer, heard: Sequence[CodecOffer]) -> str:
    """Return the reason why this offer is not among those that the peer announced, with a
    remedy."""
    versions = sorted({other.version for other in heard if other.name == offer.name})
    if not versions:
        return f"{offer.name} is not known there"
    if offer.version in versions:
        return (
            f"{offer.name} version {offer.version} has digest {offer.digest.hex()[:8] or 'none'} "
            "here and another there: fetch it again, by the digest that the run's record names"
        )
    return (
        f"{offer.name} is at version {offer.version} here and {versions} there: "
        "update the older one"
    )


class _Memoryless:
    """Base of activation codecs that keep no state and share nothing."""

    __slots__ = ()
    scope: ClassVar[Scope] = "memoryless"
    version: ClassVar[int] = 1
    digest: ClassVar[bytes] = b""

    def offers(self: ActivationCodec, epoch: int) -> tuple[CodecOffer, ...]:
        """Return an offer of the codec itself."""
        return (CodecOffer.of(self),)


class FlatGradient:
    """Gradients through `gradient`, a stateless codec of exact length."""

    __slots__ = ()
    gradient: Codec

    def encode_grad(self, grad: Tensor, ctx: ActivationContext, out: bytearray) -> int:
        """Append the gradient codec's payload of all values."""
        return self.gradient.encode(flattened(grad, ctx, "backward"), ctx.flat(), out)

    def decode_grad(self, payload: Buffer, ctx: ActivationContext) -> Tensor:
        """Check the payload's length and return the values."""
        return restored(decoded(self.gradient, payload, ctx, "backward"), ctx)


class _FlatForward(_Memoryless):
    """Activations through `forward`, a codec of exact length."""

    __slots__ = ()
    forward: Codec

    def encode(self, x: Tensor, ctx: ActivationContext, out: bytearray) -> int:
        """Append the forward codec's payload of all values."""
        return self.forward.encode(flattened(x, ctx, "forward"), ctx.flat(), out)

    def decode(self, payload: Buffer, ctx: ActivationContext) -> Tensor:
        """Check the payload's length and return the values."""
        return restored(decoded(self.forward, payload, ctx, "forward"), ctx)


@dataclass(frozen=True, slots=True)
class Flat(_FlatForward, FlatGradient):
    """One exact-length codec for the B·L·D values of an activation, row by row, and one for those
    of its gradient. The bounds are the codecs' own. Values are rounded to float32 first, and
    clamped to the range of the context's dtype last."""

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
        """Return the exact length."""
        codec = self.forward if ctx.direction == "forward" else self.gradient
        return codec.max_bytes(ctx.count)


@dataclass(frozen=True, slots=True)
class Masked(_FlatForward):
    """A sparse codec forward; backward, only the gradients of the values that arrived, as int8 in
    blocks of 256 without positions.

    The mask is where `ctx.arrived` is not 0. The gradient is thus that of the function that was
    computed, exact except for int8: dropped values had no influence on the loss. (Kept values that
    int8 rounded to 0 count as dropped.) For a gradient with a top-k of its own, use
    `Flat(TopK, TopK)`.
    """

    forward: Codec

    def __post_init__(self) -> None:
        require_exact_length(self.forward)

    @property
    def name(self) -> str:
        """`FORWARD,mask`."""
        return f"{self.forward.name},mask"

    def max_bytes(self, ctx: ActivationContext) -> int:
        """Return the exact length forward; backward, the length if every value arrived."""
        return (self.forward if ctx.direction == "forward" else Int8()).max_bytes(ctx.count)

    def encode_grad(self, grad: Tensor, ctx: ActivationContext, out: bytearray) -> int:
        """Append the gradient under the mask."""
        values = require_finite(flattened(grad, ctx, "backward"))
        return Int8().encode(values[self._mask(ctx)], ctx.flat(), out)

    def decode_grad(self, payload: Buffer, ctx: ActivationContext) -> Tensor:
        """Return the values in their places, 0 elsewhere."""
        require_direction(ctx, "backward")
        mask = self._mask(ctx)
        kept = int(mask.count_nonzero())
        require_length(
            payload, Int8().max_bytes(kept), f"{self.name} for {kept} values under the mask"
        )
        values, out = (
            torch.empty(kept, dtype=torch.float32),
            torch.zeros(ctx.count, dtype=torch.float32),
        )
        Int8().decode(payload, ctx.flat(), values)
        out[mask] = values
        return restored(out, ctx)

    def _mask(self, ctx: ActivationContext) -> Tensor:
        if ctx.arrived is None:
            raise ValueError(
                f"{self.name} needs the activation as it arrived; give it to the gradient's context"
            )
        return ctx.arrived.detach().cpu().reshape(-1) != 0


@dataclass(frozen=True, slots=True)
class Exact(_Memoryless):
    """The values as they are, in the context's dtype: for fast links and for comparisons."""

    name: ClassVar[str] = "raw,raw"

    def max_bytes(self, ctx: ActivationContext) -> int:
        """Return the exact length."""
        return ctx.count * ctx.dtype.itemsize

    def encode(self, x: Tensor, ctx: ActivationContext, out: bytearray) -> int:
        """Append the bytes of the values."""
        return self._write(x, ctx, out, "forward")

    def decode(self, payload: Buffer, ctx: ActivationContext) -> Tensor:
        """Return a copy of the values; refuse NaN and infinity."""
        return self._read(payload, ctx, "forward")

    def encode_grad(self, grad: Tensor, ctx: ActivationContext, out: bytearray) -> int:
        """Encode a gradient; the format is that of `encode`."""
        return self._write(grad, ctx, out, "backward")

    def decode_grad(self, payload: Buffer, ctx: ActivationContext) -> Tensor:
        """Decode a gradient; the format is that of `decode`."""
        return self._read(payload, ctx, "backward")

    def _write(
        self, x: Tensor, ctx: ActivationContext, out: bytearray, direction: Direction
    ) -> int:
        require_direction(ctx, direction)
        require_fitting(x, ctx)
        bad = int((~torch.isfinite(x)).sum())
        if bad:
            raise UnencodableTensor(
                f"{bad} of {x.numel()} values are NaN or infinite; refusing to send them"
            )
        return append(out, x.detach().cpu().contiguous().view(-1))

    def _read(self, payload: Buffer, ctx: ActivationContext, direction: Direction) -> Tensor:
        require_direction(ctx, direction)
        require_length(payload, self.max_bytes(ctx), f"{self.name} for {ctx.shape} of {ctx.dtype}")
        values = values_at(payload, 0, ctx.count, ctx.dtype)
        if not bool(torch.isfinite(values).all()):
            raise CorruptPayload(f"{self.name} payload holds NaN or infinity")
        return values.view(ctx.shape)


def require_exact_length(codec: Codec) -> Codec:
    """Return `codec`; raise `ValueError` unless the number of values alone determines the length of
    its payload."""
    if "+" in codec.name or codec.name.partition(":")[0] not in EXACT_LENGTH:
        raise ValueError(
            f"codec {codec.name!r} writes payloads whose length varies, "
            f"which activations do not use; choose one of {', '.join(EXACT_LENGTH)}"
        )
    return codec


def require_direction(ctx: ActivationContext, direction: Direction) -> None:
    """Raise `ValueError` unless the context has this direction; otherwise the ends would
    disagree."""
    if ctx.direction != direction:
        raise ValueError(
            f"a context of direction {ctx.direction!r} was given where {direction!r} goes"
        )


def require_fitting(x: Tensor, ctx: ActivationContext) -> None:
    """Raise `UnencodableTensor` unless `x` has the shape and dtype that the header will state."""
    if tuple(x.shape) != ctx.shape or x.dtype != ctx.dtype:
        raise UnencodableTensor(
            f"the header says {ctx.shape} of {ctx.dtype}, the tensor is {tuple(x.shape)} of "
            f"{x.dtype}"
        )


def require_token_ids(tokens: Tensor, shape: tuple[int, ...]) -> None:
    """Raise `ValueError` unless `tokens` are integers of this shape: bf16 is exact to 256 only."""
    if tokens.dtype not in ID_TYPES or tuple(tokens.shape) != shape:
        raise ValueError(
            f"token ids must be integers of shape {shape}, got {tokens.dtype} {tuple(tokens.shape)}"
        )


def flattened(x: Tensor, ctx: ActivationContext, direction: Direction) -> Tensor:
    """Return `x` as codecs take it: flat, float32, on the CPU. It may share memory with `x`."""
    require_direction(ctx, direction)
    require_fitting(x, ctx)
    return x.detach().to("cpu", torch.float32).reshape(-1)


def decoded(codec: Codec, payload: Buffer, ctx: ActivationContext, direction: Direction) -> Tensor:
    """Return the flat values; the payload's length is checked before memory is allocated."""
    require_direction(ctx, direction)
    require_length(payload, codec.max_bytes(ctx.count), f"{codec.name} for {ctx.shape} values")
    out = torch.empty(ctx.count, dtype=torch.float32)
    codec.decode(payload, ctx.flat(), out)
    return out


def restored(values: Tensor, ctx: ActivationContext) -> Tensor:
    """Return flat float32 values in the context's shape and dtype, clamped to stay finite."""
    if ctx.dtype in (torch.float16, torch.bfloat16):
        limit = torch.finfo(ctx.dtype).max
        values = values.clamp(-limit, limit)
    return values.view(ctx.shape).to(ctx.dtype)
