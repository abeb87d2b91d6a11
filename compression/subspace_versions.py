"""A subspace codec whose basis changes while payloads are in flight: it holds several versions, and
each payload names its own.

The version of a microbatch is that of the weights that embedded it. What later layers add to the
residual stream lies in the subspace whatever the frozen embedding is, so a stage sends its output,
and the gradient of its input, in the version of its input. A version that is not held is refused: a
future one may be sent again later; an old one (`Superseded`) will never be read.

Deviation: `Subspace.followed_by` depends on epochs alone. Here the sender names the version of its
weights, since a peer that came late, or missed a download at the change, stays in the previous
version for a while.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

from torch import Tensor

from farflock.compression.activation import ActivationContext, CodecOffer, Incompatible, Scope
from farflock.compression.codec import Buffer, CorruptPayload
from farflock.compression.subspace import STAMP, Basis, Subspace, stamp_of


class Superseded(Incompatible):
    """Raised for a payload of a version that is no longer held; the payload's holder must start
    again."""


@dataclass(slots=True, eq=False)
class SubspaceVersions:
    """A subspace codec in the version `first` and those that follow.

    `spoken` is the version of this end's own weights, in which it encodes unless the context names
    another. Calls must come from one thread at a time."""

    first: Subspace
    spoken: int = field(init=False)
    _held: dict[int, Subspace] = field(init=False)

    scope: ClassVar[Scope] = "shared_params"

    def __post_init__(self) -> None:
        self.spoken = self.first.version
        self._held = {self.spoken: self.first}

    @property
    def held(self) -> Mapping[int, Basis]:
        """The held bases by version."""
        return MappingProxyType({version: codec.basis for version, codec in self._held.items()})

    def hold(self, basis: Basis) -> None:
        """Read this version too; raise `ValueError` for a basis of another size."""
        mine = self.first.basis
        if (basis.rank, basis.width, basis.fixed_VD.shape) != (
            mine.rank,
            mine.width,
            mine.fixed_VD.shape,
        ):
            raise ValueError(
                f"version {basis.version} of a basis has another size than version {mine.version}"
            )
        made = Subspace(basis, self.first.forward, self.first.gradient, outside=self.first.outside)
        self._held = {basis.version: made} | self._held  # a new dict: readers of the old one go on

    def speak(self, version: int) -> None:
        """Encode in this version; raise `ValueError` if it is not held."""
        if version not in self._held:
            raise ValueError(
                f"version {version} of {self.name} is not held; there are {sorted(self._held)}"
            )
        self.spoken = version

    def give_up(self, before: int) -> None:
        """Stop reading versions before this one, except those from `spoken` on."""
        self._held = {
            version: codec
            for version, codec in self._held.items()
            if version >= min(before, self.spoken)
        }

    def version_of(self, payload: Buffer) -> int:
        """Return a payload's version; raise `CorruptPayload` if it is too short to have one."""
        stamp = stamp_of(payload)
        if stamp is None:
            raise CorruptPayload(
                f"a payload of {self.name} begins with {STAMP.size} bytes, got {len(payload)}"
            )
        return stamp[0]

    @property
    def name(self) -> str:
        """`Subspace.name`, the same in all versions."""
        return self.first.name

    @property
    def version(self) -> int:
        """The version in which this end encodes."""
        return self.spoken

    @property
    def digest(self) -> bytes:
        """Digest of the version in which this end encodes."""
        return self._held[self.spoken].digest

    def offers(self, epoch: int) -> tuple[CodecOffer, ...]:
        """Return offers of all held versions, the spoken one first."""
        ordered = sorted(self._held, key=lambda version: (version != self.spoken, version))
        return tuple(
            CodecOffer(self.name, version, self._held[version].digest) for version in ordered
        )

    def max_bytes(self, ctx: ActivationContext) -> int:
        """Return the exact length, the same in any version."""
        return self.first.max_bytes(ctx)

    def encode(self, x: Tensor, ctx: ActivationContext, out: bytearray) -> int:
        """Encode as `Subspace.encode` does, in the context's version."""
        return self._sending(ctx).encode(x, ctx, out)

    def decode(self, payload: Buffer, ctx: ActivationContext) -> Tensor:
        """Decode as `Subspace.decode` does, in the payload's version."""
        return self._reading(payload).decode(payload, ctx)

    def encode_grad(self, grad: Tensor, ctx: ActivationContext, out: bytearray) -> int:
        """Encode as `Subspace.encode_grad` does, in the context's version."""
        return self._sending(ctx).encode_grad(grad, ctx, out)

    def decode_grad(self, payload: Buffer, ctx: ActivationContext) -> Tensor:
        """Decode as `Subspace.decode_grad` does, in the payload's version."""
        return self._reading(payload).decode_grad(payload, ctx)

    def _sending(self, ctx: ActivationContext) -> Subspace:
        return self._one(self.spoken if ctx.version is None else ctx.version)

    def _reading(self, payload: Buffer) -> Subspace:
        return self._one(self.version_of(payload))

    def _one(self, version: int) -> Subspace:
        found = self._held.get(version)
        if found is not None:
            return found
        held = ", ".join(map(str, sorted(self._held)))
        if version < min(self._held):
            raise Superseded(
                f"version {version} of the basis of {self.name} is over; "
                f"held are {held}: begin again"
            )
        raise Incompatible(
            f"version {version} of the basis of {self.name} is not here yet; "
            f"held are {held}: ask again"
        )
