"""Tensors between a trainer and its stage servers: tokens, activations and gradients as payloads.

Every microbatch of a run has one shape, so a payload's size is bounded before it is fetched. Token
ids travel as integers with each activation: some codecs need them, and they are small.

Shapes: B sequences, L positions, D model width."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from farflock.compression.activation import (
    ActivationCodec,
    ActivationContext,
    Direction,
    Incompatible,
)
from farflock.compression.activation_catalog import activation_codec, known_of, subspace_terms
from farflock.compression.aqsgd import AqSgd
from farflock.compression.codec import CorruptPayload
from farflock.compression.subspace import (
    Basis,
    Subspace,
    id_bytes,
    pack_tokens,
    stamp_of,
    unpack_tokens,
)
from farflock.compression.subspace_versions import SubspaceVersions
from farflock.node.pipeline.passes.requests import Backward, Forward, HeldOutForward, StagePass
from farflock.node.run.basis import require_digest, run_basis
from farflock.node.run.terms import PipelinePlan, RunPlan
from farflock.swarm.messages import MAX_CODECS, CodecId
from farflock.swarm.peer.payloads import Given

_LOSS = np.dtype("<f8")


@dataclass(frozen=True, slots=True)
class Edges:
    """A peer's codecs for the edges between a run's stages.

    The peer prefers `codec` and also reads and writes `others`, in this order; `dtype` is that
    of the stages' weights. Where a method takes a codec, None is the preferred one."""

    codec: ActivationCodec
    batch: int
    seq: int
    dim: int
    vocabulary: int
    run_seed: int
    dtype: torch.dtype = torch.float32
    others: tuple[ActivationCodec, ...] = ()

    @property
    def reads(self) -> tuple[CodecId, ...]:
        """The codecs readable here; where versions change, those held now."""
        offers = [offer for codec in (self.codec, *self.others) for offer in codec.offers(0)]
        return tuple(
            CodecId(offer.name, offer.version, offer.digest[:8]) for offer in offers[:MAX_CODECS]
        )

    def knows(self, named: CodecId | None) -> bool:
        """True if this codec is known here. The version of its shared parameters is checked on
        decoding."""
        return self._find(named) is not None

    def written_in(self, payload: Given, asked: CodecId | None) -> CodecId | None:
        """Return a payload's codec: the one `asked` for or, with shared parameters, the one that
        the payload names."""
        if not self.follows_weights:
            return asked
        assert isinstance(payload, bytes), "a payload whose codec the trainer must read was left"
        stamp = stamp_of(payload)
        return None if stamp is None else CodecId(self.codec.name, *stamp)

    @property
    def follows_weights(self) -> bool:
        """True if the sender's weights determine the codec of its payloads."""
        return self.codec.scope == "shared_params"

    @property
    def loss_bytes(self) -> int:
        """The size of a payload of losses (B,)."""
        return self.batch * _LOSS.itemsize

    @property
    def token_bytes(self) -> int:
        """The size of a payload of token ids (B, L)."""
        return self.batch * self.seq * id_bytes(self.vocabulary)

    @property
    def tokens(self) -> int:
        """The tokens of a microbatch."""
        return self.batch * self.seq

    def max_bytes(self, direction: Direction, named: CodecId | None = None) -> int:
        """Return the maximum size of an activation, or of its gradient, in this codec."""
        shape = (self.batch, self.seq, self.dim)
        context = ActivationContext(shape, self.dtype, direction=direction)
        return self._codec(named).max_bytes(context)

    def pack(self, tokens_BL: Tensor) -> bytes:
        """Encode token ids as a payload."""
        return pack_tokens(tokens_BL, self.vocabulary)

    def unpack(self, payload: bytes) -> Tensor:
        """Decode token ids; raise `CorruptPayload` for anything else."""
        return unpack_tokens(payload, self.batch, self.seq, self.vocabulary)

    def pack_losses(self, losses_B: Tensor) -> bytes:
        """Encode the mean loss of each sequence as a payload, little endian."""
        return losses_B.cpu().numpy().astype(_LOSS).tobytes()

    def unpack_losses(self, payload: bytes) -> Tensor:
        """Decode losses (B,), float64, which need not be finite; raise `CorruptPayload` for another
        number of them."""
        if len(payload) != self.loss_bytes:
            raise CorruptPayload(
                f"{len(payload)} bytes are not the losses of {self.batch} sequences"
            )
        return torch.from_numpy(np.frombuffer(payload, _LOSS).astype(np.float64))

    def output(
        self,
        y_BLD: Tensor,
        request: Forward | HeldOutForward,
        tokens_BL: Tensor,
        came: bytes | None = None,
    ) -> bytes:
        """Encode a stage's output, in the same version as `came`, the payload of the stage's
        input."""
        out = bytearray()
        version, stage = self._version_of(came), request.stage
        context = self._context("forward", stage, request, tokens_BL, version=version)
        self._codec(request.sends).encode(y_BLD, context, out)
        return bytes(out)

    def input(self, payload: bytes, request: StagePass, tokens_BL: Tensor) -> Tensor:
        """Decode the stage's input, as `output` wrote it at the request's source."""
        context = self._context("forward", request.source, request, tokens_BL)
        return self._codec(request.came).decode(payload, context)

    def input_gradient(
        self,
        grad_BLD: Tensor,
        request: Backward,
        tokens_BL: Tensor,
        arrived_BLD: Tensor,
        came: bytes | None = None,
    ) -> bytes:
        """Encode the gradient of a stage's input. `came` is the input's payload, and
        `arrived_BLD` is that payload decoded."""
        version, source = self._version_of(came), request.source
        context = self._context("backward", source, request, tokens_BL, arrived_BLD, version)
        out = bytearray()
        self._codec(request.came).encode_grad(grad_BLD, context, out)
        return bytes(out)

    def output_gradient(
        self,
        payload: bytes,
        request: Backward,
        tokens_BL: Tensor,
        arrived_BLD: Tensor | None = None,
    ) -> Tensor:
        """Decode the gradient of a stage's output, as `input_gradient` wrote it."""
        context = self._context("backward", request.stage, request, tokens_BL, arrived_BLD)
        return self._codec(request.sends).decode_grad(payload, context)

    def arrived(self, payload: bytes, request: Backward, tokens_BL: Tensor) -> Tensor:
        """Decode this stage's output as the next stage read it."""
        context = self._context("forward", request.stage, request, tokens_BL)
        return self._codec(request.sends).decode(payload, context)

    def is_masked(self, named: CodecId | None = None) -> bool:
        """True if gradients in this codec can be decoded only with their activation."""
        return self._codec(named).name.endswith(",mask")

    def may_stay(self, named: CodecId | None) -> bool:
        """True if the trainer reads nothing of payloads in this codec, so that they may go from
        server to server."""
        return not (self.follows_weights or self.remembers or self.is_masked(named))

    @property
    def remembers(self) -> bool:
        """True if the codec sends changes since a sample's last visit; both ends hold values."""
        return self.codec.scope == "edge_sample"

    def _codec(self, named: CodecId | None) -> ActivationCodec:
        """Return the codec; raise `Incompatible` if it is not read here."""
        found = self._find(named)
        if found is None:
            readable = ", ".join(map(str, self.reads))
            raise Incompatible(f"{named} is not read here; use one of: {readable}")
        return found

    def _find(self, named: CodecId | None) -> ActivationCodec | None:
        if named is None or (self.follows_weights and named.name == self.codec.name):
            return self.codec
        for codec in (self.codec, *self.others):
            if (codec.name, codec.version) == (named.name, named.version):
                return codec
        return None

    def _version_of(self, came: bytes | None) -> int | None:
        """Return the version that a payload is in; None if the codec has only one."""
        if came is None or not isinstance(self.codec, SubspaceVersions):
            return None
        return self.codec.version_of(came)

    def _context(
        self,
        direction: Direction,
        source: int,
        request: StagePass,
        tokens_BL: Tensor,
        arrived_BLD: Tensor | None = None,
        version: int | None = None,
    ) -> ActivationContext:
        return ActivationContext(
            (self.batch, self.seq, self.dim),
            self.dtype,
            microbatch=request.number,
            tokens=tokens_BL,
            edge=f"out of {source}",
            direction=direction,
            epoch=max(request.epoch, 0),
            run_seed=self.run_seed,
            arrived=arrived_BLD,
            version=version,
        )


def edges_of(plan: RunPlan, pipeline: PipelinePlan) -> Edges:
    """Return this peer's codecs for a run's edges: those that the run names and this release
    has. New versions of a codec are possible only in a run with a single codec."""
    config, names = plan.model, known_of(pipeline.codec)
    codec = activation_codec(names[0], basis=basis_of(plan, pipeline))
    others = tuple(activation_codec(name) for name in names[1:])
    if isinstance(codec, AqSgd) and pipeline.cache_bytes is not None:
        codec = replace(codec, max_cache_bytes=pipeline.cache_bytes)
    if pipeline.turns is not None and isinstance(codec, Subspace):
        codec = SubspaceVersions(codec)
    shape = plan.batch, plan.seq, config.dim
    return Edges(codec, *shape, config.vocab_size, plan.run_seed, plan.dtype, others)


def basis_of(plan: RunPlan, pipeline: PipelinePlan) -> Basis | None:
    """Return the basis that all peers of a run share; None if the run's codec needs none.

    Raise `Incompatible` if this machine computes another basis than the manifest names."""
    terms = subspace_terms(pipeline.codec)
    if terms is None:
        return None
    made = run_basis(plan.run_seed, plan.model.dim, terms.rank, plan.model.vocab_size)
    return require_digest(made, pipeline.basis)
