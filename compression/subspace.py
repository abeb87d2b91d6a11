"""Subspace pipelines: send K numbers per token instead of D, without loss, because everything that
writes into the residual stream stays in one K-dimensional subspace.

In a pre-norm transformer the stream is the embedding plus a sum of projections' outputs. If the
outputs of all these matrices lie in span(U), then so does the stream minus the frozen part of the
embedding, and K coordinates determine it (Protocol Models, Ramasinghe et al., arXiv:2506.01260, as
in PluralisResearch/node0). All peers know the frozen part and look it up by token ids, which are
sent as integers next to the payload. A gradient also needs only its coordinates: whatever it
reaches upstream is projected onto span(U) anyway.

Deviations: ids are integers (node0 sends them as a float channel, which is wrong above 256 in
bf16); no special optimizer is needed, since `project` is called after every change of the weights;
the basis moves by projected ascent with a QR retraction, because the paper's own schedule was not
available.

Shapes: D model width, K rank, V vocabulary, L positions, N tokens. A basis is (D, K) with
orthonormal columns.
"""

import copy
import hashlib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from farflock.compression.activation import (
    MAX_VALUES,
    ActivationContext,
    CodecOffer,
    Direction,
    Incompatible,
    Scope,
    flattened,
    require_direction,
    require_exact_length,
    restored,
)
from farflock.compression.codec import (
    Buffer,
    Codec,
    CorruptPayload,
    UnencodableTensor,
    require_finite,
    require_length,
)
from farflock.compression.exact_product import SLICES, product
from farflock.compression.floats import Half
from farflock.compression.payload import append, values_at

OVERLAP_EPOCHS = 2  # for this long receivers hold the old basis after a change
MAX_WIDTH = 65_536
ORTHONORMAL = 1e-6  # the largest error of an entry of UᵀU
OUTSIDE = 0.05  # share of an activation's norm outside the subspace; 40 bf16 layers make 0.014
KEPT = 8  # error, in last-place units of a tensor's largest value, that is not projected away
ROWS = 2048  # rows of a tensor that are projected at once; another number changes the last bits
MAX_PASSES = 3  # one is enough unless a tensor's rounding errors add up in one place
LARGEST = 2.0**60  # coordinates' limit, so that their products with the basis stay finite

STAMP = struct.Struct("<I8s")  # version, first bytes of the digest
_HEAD = struct.Struct("<IIIII")  # version, D, K, V, L


@dataclass(frozen=True, slots=True, eq=False)
class Basis:
    """One version of what both ends share: the basis `columns_DK`, the frozen embedding `fixed_VD`
    and the frozen positions `fixed_LD`. All are float32; the two tables may have no rows. The
    digest covers everything. Raise `ValueError` unless the columns are orthonormal to 1e-6 and all
    magnitudes are at most 2^60."""

    version: int
    columns_DK: Tensor
    fixed_VD: Tensor
    fixed_LD: Tensor
    digest: bytes = field(init=False)
    exact_DK: Tensor = field(init=False)  # the columns, orthonormal to float64

    def __post_init__(self) -> None:
        width, rank = self.columns_DK.shape
        if not 1 <= rank <= width <= MAX_WIDTH or not 0 <= self.version < 1 << 32:
            raise ValueError(
                f"a basis of {rank} columns of {width}, version {self.version}, is not allowed"
            )
        tables = (self.columns_DK, self.fixed_VD, self.fixed_LD)
        if any(
            x.dtype != torch.float32 or not x.is_cpu or not bool((x.abs() <= LARGEST).all())
            for x in tables
        ):
            raise ValueError(
                "a basis and its tables are float32 CPU tensors without NaN and values above 2^60"
            )
        if (
            self.fixed_VD.dim() != 2
            or self.fixed_LD.dim() != 2
            or {self.fixed_VD.shape[1], self.fixed_LD.shape[1]} != {width}
        ):
            raise ValueError(
                f"the tables beside a basis of width {width} must have rows of {width} values"
            )
        wide_DK = self.columns_DK.double()
        error = float((wide_DK.T @ wide_DK - torch.eye(rank, dtype=torch.float64)).abs().amax())
        if error > ORTHONORMAL:
            raise ValueError(
                f"the columns of the basis are orthonormal to {error:.1e} only; "
                f"{ORTHONORMAL:.0e} is needed"
            )
        object.__setattr__(self, "digest", hashlib.sha256(self.to_bytes()).digest())
        object.__setattr__(self, "exact_DK", _sharpened(wide_DK))

    @classmethod
    def drawn(cls, width: int, rank: int, seed: int, version: int = 1) -> "Basis":
        """Return a random basis without tables. One peer draws it and sends its bytes to the
        others, because QR rounds differently on different machines."""
        chance = torch.Generator().manual_seed(seed)
        normal_DK = torch.randn(width, rank, dtype=torch.float64, generator=chance)
        empty = torch.empty(0, width, dtype=torch.float32)
        return cls(version, _orthonormal(normal_DK).float(), empty, empty)

    @property
    def width(self) -> int:
        """D, the width of the model."""
        return self.columns_DK.shape[0]

    @property
    def rank(self) -> int:
        """K, the rank of the basis."""
        return self.columns_DK.shape[1]

    def on(self, place: torch.device) -> Self:
        """Return this version with its tensors on a device, for projections there. Codecs take the
        one on the CPU. The device needs float64."""
        if self.columns_DK.device == place:
            return self
        there = copy.copy(self)
        for name in ("columns_DK", "fixed_VD", "fixed_LD", "exact_DK"):
            object.__setattr__(there, name, getattr(self, name).to(place))
        return there

    def columns(self, dtype: torch.dtype) -> Tensor:
        """Return U for products in this precision; for float64 it is orthonormal to float64."""
        return self.exact_DK if dtype == torch.float64 else self.columns_DK

    def to_bytes(self) -> bytes:
        """Return the bytes sent to a newcomer: five numbers, then the three matrices row by row."""
        head = _HEAD.pack(
            self.version, self.width, self.rank, len(self.fixed_VD), len(self.fixed_LD)
        )
        out = bytearray(head)
        for table in (self.columns_DK, self.fixed_VD, self.fixed_LD):
            append(out, table.reshape(-1))
        return bytes(out)

    @classmethod
    def from_bytes(cls, payload: Buffer, digest: bytes) -> "Basis":
        """Return the basis that `to_bytes` wrote. Raise `CorruptPayload` unless it has this digest,
        which the run's record states."""
        if hashlib.sha256(payload).digest() != digest:
            raise CorruptPayload(
                f"a basis with digest {digest.hex()[:8]} was asked for and another came"
            )
        if len(payload) < _HEAD.size:
            raise CorruptPayload(f"a basis begins with {_HEAD.size} bytes, got {len(payload)}")
        version, width, rank, vocabulary, positions = _HEAD.unpack_from(payload)
        require_length(payload, _HEAD.size + 4 * width * (rank + vocabulary + positions), "a basis")
        tables, at = [], _HEAD.size
        for shape in ((width, rank), (vocabulary, width), (positions, width)):
            tables.append(values_at(payload, at, math.prod(shape), torch.float32).view(shape))
            at += 4 * math.prod(shape)
        try:
            return cls(version, *tables)
        except ValueError as error:
            raise CorruptPayload(str(error)) from None

    def with_tables(self, fixed_VD: Tensor, fixed_LD: Tensor | None = None) -> "Basis":
        """Return this basis with other frozen tables."""
        return Basis(
            self.version, self.columns_DK, fixed_VD, self.fixed_LD if fixed_LD is None else fixed_LD
        )

    def moved(self, energy_DD: Tensor, rate: float, inside_VD: Tensor) -> tuple["Basis", Tensor]:
        """Return the owner's next version, and the embedding's trainable part for it.

        `energy_DD` is Σ GᵀG over gradients of the last compressed boundary before their projection.
        One step of projected ascent on tr(UᵀCU), where C = energy / its trace, with signs as in U:

            U ← qr(U + rate·(I − UUᵀ)CU)

        The share of the embedding's trainable part that lies outside the new subspace moves to the
        frozen part, so their sum stays the same. The model's matrices must be projected onto the
        new basis when it takes effect; only that changes the loss.
        """
        columns_DK, energy = self.columns_DK.double(), energy_DD.double()
        steep_DK = energy @ columns_DK / energy.trace().clamp_min(torch.finfo(torch.float64).tiny)
        rising_DK = steep_DK - columns_DK @ (columns_DK.T @ steep_DK)
        new_DK = _orthonormal(columns_DK + rate * rising_DK).float()
        inside_VD, fixed_VD = settled(inside_VD, self.fixed_VD, new_DK)
        return Basis(self.version + 1, new_DK, fixed_VD, self.fixed_LD), inside_VD


def _orthonormal(columns_DK: Tensor) -> Tensor:
    """Return the orthonormal columns of QR, signed like the original columns."""
    q_DK, r_KK = torch.linalg.qr(columns_DK)
    signed_DK: Tensor = q_DK * torch.where(r_KK.diagonal() < 0, -1.0, 1.0)
    return signed_DK


def _sharpened(columns_DK: Tensor) -> Tensor:
    """Return nearly orthonormal columns refined to float64, with the same bits on every machine.
    Newton's step for the polar factor squares the error."""
    for _ in range(2):
        error_KK = product(columns_DK.T, columns_DK) - torch.eye(
            columns_DK.shape[1], dtype=torch.float64
        )
        columns_DK = columns_DK - product(columns_DK, error_KK) / 2
    return columns_DK


def settled(inside_VD: Tensor, fixed_VD: Tensor, columns_DK: Tensor) -> tuple[Tensor, Tensor]:
    """Project an embedding's trainable part and move what that removes into the frozen part; return
    both. Their sum does not change. It is used for the first split (a whole table against zeros),
    for a change of basis, and after an outer optimizer has averaged embeddings (Heterogeneous
    SparseLoCo, arXiv:2601.02360, eq. 3 and 4)."""
    whole_VD = fixed_VD.double() + inside_VD.double()
    columns = columns_DK.double()
    kept_VD = ((inside_VD.double() @ columns) @ columns.T).to(inside_VD.dtype)
    return kept_VD, (whole_VD - kept_VD.double()).to(fixed_VD.dtype)


@torch.no_grad()
def project(
    tensors: Mapping[str, Tensor],
    names: Mapping[str, int],
    basis: Basis,
    around: Mapping[str, Tensor] | None = None,
) -> None:
    """Project the named tensors into the subspace, in place.

    Call it after every step, averaging and state download. `names` says which dimension of each
    tensor is the residual stream's: 0 for weights and biases of linear layers that write into it, 1
    for an embedding. For a tensor in `around`, only its difference from the one there is projected.
    Raise `ValueError` if a tensor is missing or that dimension is not D long. Averages of projected
    tensors stay inside up to rounding; quantised and sparse ones, and steps of weight decay and
    Adam, do not.

    The result has the same bits on every machine, and a tensor that already lies inside, to its
    precision, is not changed: what one peer projects and sends keeps its bits when another projects
    it.
    """
    for name, dim in names.items():
        residual_last = _residual_last(tensors, name, dim, basis)
        for _ in range(MAX_PASSES):
            inside = _inside(residual_last, (around or {}).get(name), basis)
            moved = float((inside - residual_last).abs().amax()) if inside.numel() else 0.0
            if moved <= KEPT * torch.finfo(inside.dtype).eps * float(
                residual_last.abs().amax() if moved else 0.0
            ):
                break
            residual_last.copy_(inside)


def _inside(residual_last: Tensor, around: Tensor | None, basis: Basis) -> Tensor:
    """Return the projection of a tensor in parts, because float64 products take many times its
    memory."""
    rows_ND = residual_last.reshape(-1, basis.width)
    around_ND = (
        rows_ND.new_zeros(1, basis.width, dtype=torch.float32).expand(rows_ND.shape)
        if around is None
        else around
    )
    pairs = zip(
        torch.split(rows_ND, ROWS), torch.split(around_ND.to(rows_ND.device), ROWS), strict=True
    )
    return torch.cat([_inside_rows(rows, frozen, basis) for rows, frozen in pairs]).view(
        residual_last.shape
    )


def _inside_rows(rows_ND: Tensor, around_ND: Tensor, basis: Basis) -> Tensor:
    """Return around + (rows - around) P, in the rows' dtype."""
    slices = SLICES if rows_ND.dtype == torch.float64 else 2
    varying_ND, columns_DK = (
        rows_ND.double() - around_ND.double(),
        basis.exact_DK.to(rows_ND.device),
    )
    inside_ND = product(product(varying_ND, columns_DK, slices), columns_DK.T, slices)
    return (inside_ND + around_ND.double()).to(rows_ND.dtype)


@torch.no_grad()
def outside(
    tensors: Mapping[str, Tensor],
    names: Mapping[str, int],
    basis: Basis,
    around: Mapping[str, Tensor] | None = None,
) -> float:
    """Return the largest ‖W(I − P)‖ / ‖W‖ (Frobenius) of these tensors, about 0 once projected."""
    worst = 0.0
    for name, dim in names.items():
        wide, columns_DK = _residual_last(tensors, name, dim, basis).double(), basis.exact_DK
        columns_DK = columns_DK.to(wide.device)
        varying = wide if around is None or name not in around else wide - around[name].to(wide)
        left = varying - (varying @ columns_DK) @ columns_DK.T
        worst = max(worst, float(left.norm()) / (float(wide.norm()) or 1.0))
    return worst


def _residual_last(tensors: Mapping[str, Tensor], name: str, dim: int, basis: Basis) -> Tensor:
    """Return a view of the named tensor with the residual stream's dimension last."""
    if name not in tensors:
        raise ValueError(
            f"the model has no tensor {name!r} to project; the plan was made for another model"
        )
    tensor = tensors[name]
    if not 0 <= dim < tensor.dim() or tensor.shape[dim] != basis.width:
        raise ValueError(
            f"dimension {dim} of {name!r} {tuple(tensor.shape)} is not the model's width "
            f"{basis.width}"
        )
    return tensor.detach().movedim(dim, -1)


@dataclass(frozen=True, slots=True, eq=False)
class Subspace:
    """Coordinates in the basis instead of values: N·K numbers through `forward`, and those of the
    gradient through `gradient`.

    A codec of None sends them as they are, in the stage's dtype. The sender uses `basis` from epoch
    `since` on and `old` before; a receiver takes the one that the payload's stamp names, the old
    one until two epochs after `since`, and raises `Incompatible` for any other. The part of an
    activation in the subspace is restored within the rounding of float32 products and the bound of
    the coordinates' codec. If more than `outside` of its norm is elsewhere, a weight was not
    projected and `encode` raises `UnencodableTensor`. The part of a gradient outside is dropped, as
    upstream would drop it.
    """

    basis: Basis
    forward: Codec | None = field(default_factory=lambda: Half("bf16"))
    gradient: Codec | None = field(default_factory=lambda: Half("bf16"))
    old: Basis | None = None
    since: int = 0
    outside: float = OUTSIDE

    scope: ClassVar[Scope] = "shared_params"

    def __post_init__(self) -> None:
        for codec in (self.forward, self.gradient):
            if codec is not None:
                require_exact_length(codec)
        if self.old is not None and (self.old.rank, self.old.width) != (
            self.basis.rank,
            self.basis.width,
        ):
            raise ValueError(
                "a basis is followed by one of the same width and rank; "
                "start another run for another size"
            )

    @property
    def name(self) -> str:
        """`subspace:K+FORWARD,GRADIENT`."""
        return f"subspace:{self.basis.rank}+{_named(self.forward)},{_named(self.gradient)}"

    @property
    def version(self) -> int:
        """Version of the newest basis."""
        return self.basis.version

    @property
    def digest(self) -> bytes:
        """Digest of the newest basis and its tables."""
        return self.basis.digest

    def offers(self, epoch: int) -> tuple[CodecOffer, ...]:
        """Return an offer for each basis accepted in this epoch, the one for sending first."""
        held = (self._spoken(epoch), *self._held(epoch))
        return tuple(
            dict.fromkeys(CodecOffer(self.name, basis.version, basis.digest) for basis in held)
        )

    def followed_by(self, basis: Basis, since: int) -> "Subspace":
        """Return the codec with the next basis, which takes effect at epoch `since`."""
        if basis.version != self.basis.version + 1 or since < self.since + OVERLAP_EPOCHS:
            raise ValueError(
                f"basis {self.basis.version} in effect since epoch {self.since} can be followed by "
                f"version {self.basis.version + 1} from epoch {self.since + OVERLAP_EPOCHS} on, "
                f"not by {basis.version} at {since}"
            )
        return Subspace(basis, self.forward, self.gradient, self.basis, since, self.outside)

    def max_bytes(self, ctx: ActivationContext) -> int:
        """Return the exact length."""
        self._coordinates(ctx)
        return payload_bytes(
            self.basis.rank, self.forward if ctx.direction == "forward" else self.gradient, ctx
        )

    def encode(self, x: Tensor, ctx: ActivationContext, out: bytearray) -> int:
        """Append the stamp, and the coordinates of the activation minus the frozen tables' rows."""
        basis = self._spoken(ctx.epoch)
        values_ND = _rows(x, ctx, "forward")
        columns_DK = basis.columns(values_ND.dtype)
        varying_ND = values_ND - self._fixed(basis, ctx)
        inside_NK = varying_ND @ columns_DK
        left = float((varying_ND - inside_NK @ columns_DK.T).norm()), float(varying_ND.norm())
        if not left[0] <= self.outside * left[1] + 1e-6 * float(values_ND.norm()):
            raise UnencodableTensor(
                f"{left[0]:.3g} of an activation of norm {left[1]:.3g} lies outside the subspace "
                f"of {self.name} version {basis.version}: project the weights after every change, "
                "and send the right token ids"
            )
        return self._write(self.forward, basis, inside_NK, ctx, out)

    def decode(self, payload: Buffer, ctx: ActivationContext) -> Tensor:
        """Return the coordinates times the basis, plus the frozen tables' rows."""
        require_direction(ctx, "forward")
        basis, inside_NK = self._read(self.forward, payload, ctx)
        fixed_ND = self._fixed(basis, ctx)
        return restored((inside_NK @ basis.columns(inside_NK.dtype).T).add_(fixed_ND).view(-1), ctx)

    def encode_grad(self, grad: Tensor, ctx: ActivationContext, out: bytearray) -> int:
        """Append the stamp and the gradient's coordinates."""
        basis = self._spoken(ctx.epoch)
        values_ND = _rows(grad, ctx, "backward")
        return self._write(
            self.gradient, basis, values_ND @ basis.columns(values_ND.dtype), ctx, out
        )

    def decode_grad(self, payload: Buffer, ctx: ActivationContext) -> Tensor:
        """Return the part of the gradient that lies in the subspace."""
        require_direction(ctx, "backward")
        basis, inside_NK = self._read(self.gradient, payload, ctx)
        return restored((inside_NK @ basis.columns(inside_NK.dtype).T).view(-1), ctx)

    def _spoken(self, epoch: int) -> Basis:
        return self.old if self.old is not None and epoch < self.since else self.basis

    def _held(self, epoch: int) -> tuple[Basis, ...]:
        overlapping = self.old is not None and epoch < self.since + OVERLAP_EPOCHS
        return (self.basis, self.old) if overlapping and self.old else (self.basis,)

    def _coordinates(self, ctx: ActivationContext) -> int:
        if ctx.shape[2] != self.basis.width:
            raise ValueError(
                f"{self.name} is for a width of {self.basis.width}, "
                f"the activation has {ctx.shape[2]}"
            )
        return ctx.shape[0] * ctx.shape[1] * self.basis.rank

    def _write(
        self,
        codec: Codec | None,
        basis: Basis,
        inside_NK: Tensor,
        ctx: ActivationContext,
        out: bytearray,
    ) -> int:
        payload = bytearray(STAMP.pack(basis.version, basis.digest[:8]))
        limit = min(LARGEST, torch.finfo(ctx.dtype).max)
        inside = inside_NK.clamp(-limit, limit).reshape(-1)
        if codec is None:
            append(payload, inside.to(ctx.dtype))
        else:
            codec.encode(inside.float(), ctx.flat(), payload)
        out += payload
        return len(payload)

    def _read(
        self, codec: Codec | None, payload: Buffer, ctx: ActivationContext
    ) -> tuple[Basis, Tensor]:
        """Return the basis that the stamp names, and the coordinates (N, K)."""
        count = self._coordinates(ctx)
        require_length(payload, self.max_bytes(ctx), f"{self.name} for {ctx.shape}")
        version, digest = STAMP.unpack_from(payload)
        held = self._held(ctx.epoch)
        basis = next(
            (one for one in held if (one.version, one.digest[:8]) == (version, digest)), None
        )
        if basis is None:
            raise Incompatible(
                f"{self.name} came with basis {version} ({digest.hex()}), "
                f"held in epoch {ctx.epoch} are "
                f"{', '.join(f'{one.version} ({one.digest[:8].hex()})' for one in held)}: "
                "fetch the basis that the run's record names, or let the sender take one that is "
                "held"
            )
        if codec is None:
            inside = values_at(payload, STAMP.size, count, ctx.dtype)
        else:
            inside = torch.empty(count, dtype=torch.float32)
            codec.decode(memoryview(payload)[STAMP.size :], ctx.flat(), inside)
        if count and not float(inside.abs().amax()) <= 2 * LARGEST:
            raise CorruptPayload(f"a coordinate of {self.name} is above 2^61 or is not a number")
        return basis, inside.view(-1, basis.rank).to(_wide(ctx.dtype))

    def _fixed(self, basis: Basis, ctx: ActivationContext) -> Tensor:
        """Return the sum of the frozen tables' rows for this microbatch, (N, D), or one row of
        zeros if there are no frozen tables."""
        batch, length, width = ctx.shape
        fixed = torch.zeros(1, 1, width, dtype=torch.float32)
        if not len(basis.fixed_VD) + len(basis.fixed_LD):
            return fixed[0]
        if len(basis.fixed_VD):
            if ctx.tokens is None:
                raise ValueError(
                    f"{self.name} needs the token ids (B, L); "
                    "send them as integers beside the payload"
                )
            fixed = fixed + basis.fixed_VD[_known(ctx.tokens, len(basis.fixed_VD), ValueError)]
        if len(basis.fixed_LD):
            if length > len(basis.fixed_LD):
                raise ValueError(
                    f"{self.name} knows {len(basis.fixed_LD)} positions, "
                    f"the microbatch has {length}"
                )
            fixed = fixed + basis.fixed_LD[:length]
        return fixed.expand(batch, length, width).reshape(-1, width)


def payload_bytes(rank: int, codec: Codec | None, ctx: ActivationContext) -> int:
    """Return the bytes of a payload with `rank` coordinates per position."""
    count = ctx.shape[0] * ctx.shape[1] * rank
    return STAMP.size + (count * ctx.dtype.itemsize if codec is None else codec.max_bytes(count))


def stamp_of(payload: Buffer) -> tuple[int, bytes] | None:
    """Return a payload's basis version and its digest's first bytes; None if it is too short."""
    if len(payload) < STAMP.size:
        return None
    version, digest = STAMP.unpack_from(payload)
    return int(version), bytes(digest)


def _named(codec: Codec | None) -> str:
    return "raw" if codec is None else codec.name


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a stage of this dtype computes its products."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _rows(x: Tensor, ctx: ActivationContext, direction: Direction) -> Tensor:
    """Return the finite values to send, (N, D), in the dtype of the products."""
    narrow = require_finite(flattened(x, ctx, direction))
    wide = x.detach().cpu().reshape(-1) if ctx.dtype == torch.float64 else narrow
    return wide.view(-1, ctx.shape[2])


def _known(tokens: Tensor, vocabulary: int, error: type[Exception]) -> Tensor:
    """Return the ids as int64; raise `error` unless all are below the vocabulary's size."""
    ids = tokens.detach().cpu().to(torch.int64)
    if ids.numel() and not 0 <= int(ids.amin()) <= int(ids.amax()) < vocabulary:
        raise error(
            f"token ids {int(ids.amin())} to {int(ids.amax())} came, "
            f"the vocabulary has {vocabulary}"
        )
    return ids


def id_bytes(vocabulary: int) -> int:
    """Return the bytes per id of a vocabulary of this size: 1 to 4."""
    if not 1 <= vocabulary <= 1 << 32:
        raise ValueError(f"a vocabulary of {vocabulary} is not allowed; choose 1 to 2^32")
    return max(1, ((vocabulary - 1).bit_length() + 7) // 8)


def pack_tokens(tokens: Tensor, vocabulary: int) -> bytes:
    """Return integer ids row by row, `id_bytes(vocabulary)` bytes each; they travel next to the
    payload, never as floats."""
    width = id_bytes(vocabulary)
    if tokens.is_floating_point():
        raise UnencodableTensor(
            f"token ids are integers, got {tokens.dtype}, which holds few of them exactly"
        )
    ids = _known(tokens, vocabulary, UnencodableTensor).reshape(-1).numpy()
    return ids.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width].tobytes()


def unpack_tokens(payload: Buffer, batch: int, length: int, vocabulary: int) -> Tensor:
    """Return the ids (B, L) as int64; refuse another length and ids outside the vocabulary."""
    width = id_bytes(vocabulary)
    if min(batch, length) < 0 or batch * length > MAX_VALUES:
        raise ValueError(f"{batch} x {length} token ids are not allowed; send smaller microbatches")
    require_length(
        payload,
        width * batch * length,
        f"{batch} x {length} token ids of a vocabulary of {vocabulary}",
    )
    padded = np.zeros((batch * length, 8), dtype=np.uint8)
    padded[:, :width] = np.frombuffer(payload, dtype=np.uint8).reshape(-1, width)
    return _known(
        torch.from_numpy(padded.view("<i8").reshape(batch, length)), vocabulary, CorruptPayload
    )
