"""A subspace codec whose basis changes while payloads are on their way: several versions are held, each payload names its own.

The version of a microbatch is that of the weights which embedded it. What is added to the residual stream later lies in the
subspace whatever the frozen embedding is, so a stage sends its output, and the gradient of its input, in the version that its
input came in. A version that is not held is refused: one to come is to be asked for again, one that is over (`Superseded`)
never will be read.

Deviation: `Subspace.followed_by` goes by epochs alone. Here the sender says which version its weights are in, since a peer that
came late, or lacked a download at the change, is a while in the version before.
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
    """A payload of a version that was given up: whoever has it is to begin anew."""


@dataclass(slots=True, eq=False)
class SubspaceVersions:
    """`first`, and the versions that follow it. `spoken` is the one that this end's own weights are in: what is encoded without
    another version in its context. One thread at a time calls it."""

    first: Subspace
    spoken: int = field(init=False)
    _held: dict[int, Subspace] = field(init=False)

    scope: ClassVar[Scope] = "shared_params"

    def __post_init__(self) -> None:
        self.spoken = self.first.version
        self._held = {self.spoken: self.first}

    @property
    def held(self) -> Mapping[int, Basis]:
        """The bases, by version."""
        return MappingProxyType({version: codec.basis for version, codec in self._held.items()})

    def hold(self, basis: Basis) -> None:
        """Read this version too. `ValueError` for one of another size; one that is held stays as it is."""
        mine = self.first.basis
        if (basis.rank, basis.width, basis.fixed_VD.shape) != (mine.rank, mine.width, mine.fixed_VD.shape):
            raise ValueError(f"version {basis.version} of a basis has another size than version {mine.version}")
        made = Subspace(basis, self.first.forward, self.first.gradient, outside=self.first.outside)
        self._held = {basis.version: made} | self._held  # another one: who just reads the old one is not disturbed

    def speak(self, version: int) -> None:
        """Encode in this version, which is held."""
        if version not in self._held:
            raise ValueError(f"version {version} of {self.name} is not held; there are {sorted(self._held)}")
        self.spoken = version

    def give_up(self, before: int) -> None:
        """Read versions before this one no more, but for what this end still speaks itself."""
        self._held = {version: codec for version, codec in self._held.items() if version >= min(before, self.spoken)}

    def version_of(self, payload: Buffer) -> int:
        """The version that a payload says it is in; `CorruptPayload` if it is too short to say."""
        stamp = stamp_of(payload)
        if stamp is None:
            raise CorruptPayload(f"a payload of {self.name} begins with {STAMP.size} bytes, got {len(payload)}")
        return stamp[0]

    @property
    def name(self) -> str:
        """As `Subspace.name`: the same in all versions."""
        return self.first.name

    @property
    def version(self) -> int:
        """The one that is spoken."""
        return self.spoken

    @property
    def digest(self) -> bytes:
        """Of the one that is spoken."""
        return self._held[self.spoken].digest

    def offers(self, epoch: int) -> tuple[CodecOffer, ...]:
        """All that are held, the spoken one first."""
        ordered = sorted(self._held, key=lambda version: (version != self.spoken, version))
        return tuple(CodecOffer(self.name, version, self._held[version].digest) for version in ordered)

    def max_bytes(self, ctx: ActivationContext) -> int:
        """Exactly this, in any version."""
        return self.first.max_bytes(ctx)

    def encode(self, x: Tensor, ctx: ActivationContext, out: bytearray) -> int:
        """As `Subspace.encode`, in the context's version."""
        return self._sending(ctx).encode(x, ctx, out)

    def decode(self, payload: Buffer, ctx: ActivationContext) -> Tensor:
        """As `Subspace.decode`, in the payload's version."""
        return self._reading(payload).decode(payload, ctx)

    def encode_grad(self, grad: Tensor, ctx: ActivationContext, out: bytearray) -> int:
        """As `Subspace.encode_grad`, in the context's version."""
        return self._sending(ctx).encode_grad(grad, ctx, out)

    def decode_grad(self, payload: Buffer, ctx: ActivationContext) -> Tensor:
        """As `Subspace.decode_grad`, in the payload's version."""
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
            raise Superseded(f"version {version} of the basis of {self.name} is over; held are {held}: begin anew")
        raise Incompatible(f"version {version} of the basis of {self.name} is not here yet; held are {held}: ask again")
