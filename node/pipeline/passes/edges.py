"""Tensors between a trainer and its stage servers: tokens, activations and their gradients as payloads.

Every microbatch of a run has one shape, so a payload's size is known before it is fetched. Token ids are integers all the way,
with each activation: some codecs need them, and they are small beside it.

Shapes: B sequences, L positions, D model width.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from farflock.compression.activation import ActivationCodec, ActivationContext, Direction, Incompatible
from farflock.compression.activation_catalog import activation_codec, known_of, subspace_terms
from farflock.compression.aqsgd import AqSgd
from farflock.compression.subspace import Basis, Subspace, id_bytes, pack_tokens, stamp_of, unpack_tokens
from farflock.compression.subspace_versions import SubspaceVersions
from farflock.node.pipeline.passes.requests import Backward, Forward
from farflock.node.run.basis import require_digest, run_basis
from farflock.node.run.terms import PipelinePlan, RunPlan
from farflock.swarm.messages import MAX_CODECS, CodecId


@dataclass(frozen=True, slots=True)
class Edges:
    """What a peer knows of the edges between a run's stages: the `codec` that is preferred, and `others` that it reads and
    writes as well, in this order; `dtype` is that of the stages' weights. A codec that is None below is the preferred one."""

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
        """What payloads may be written in here: of codecs whose versions change, those that are held now."""
        offers = [offer for codec in (self.codec, *self.others) for offer in codec.offers(0)]
        return tuple(CodecId(offer.name, offer.version, offer.digest[:8]) for offer in offers[:MAX_CODECS])

    def knows(self, named: CodecId | None) -> bool:
        """Whether there is such a codec here. One whose ends share parameters looks at versions when it reads a payload."""
        return self._find(named) is not None

    def written_in(self, payload: bytes, asked: CodecId | None) -> CodecId | None:
        """What a payload is in that was `asked` for in some codec: where ends share parameters, it says so itself."""
        if not self.follows_weights:
            return asked
        stamp = stamp_of(payload)
        return None if stamp is None else CodecId(self.codec.name, *stamp)

    @property
    def follows_weights(self) -> bool:
        """Whether the sender's weights decide what its payloads are in."""
        return self.codec.scope == "shared_params"

    @property
    def token_bytes(self) -> int:
        """A payload of token ids, (B, L)."""
        return self.batch * self.seq * id_bytes(self.vocabulary)

    @property
    def tokens(self) -> int:
        """Of a microbatch."""
        return self.batch * self.seq

    def max_bytes(self, direction: Direction, named: CodecId | None = None) -> int:
        """The most that an activation, or its gradient, takes in this codec."""
        shape = (self.batch, self.seq, self.dim)
        return self._codec(named).max_bytes(ActivationContext(shape, self.dtype, direction=direction))

    def pack(self, tokens_BL: Tensor) -> bytes:
        """Token ids as a payload."""
        return pack_tokens(tokens_BL, self.vocabulary)

    def unpack(self, payload: bytes) -> Tensor:
        """Token ids of a payload; `CorruptPayload` for anything else."""
        return unpack_tokens(payload, self.batch, self.seq, self.vocabulary)

    def output(self, y_BLD: Tensor, request: Forward, tokens_BL: Tensor, came: bytes | None = None) -> bytes:
        """The payload of a stage's output, in the version of the codec that the payload of its input `came` in."""
        out = bytearray()
        context = self._context("forward", request.stage, request, tokens_BL, version=self._version_of(came))
        self._codec(request.sends).encode(y_BLD, context, out)
        return bytes(out)

    def input(self, payload: bytes, request: Forward | Backward, tokens_BL: Tensor) -> Tensor:
        """The stage's input, as `output` of the request's source made it."""
        context = self._context("forward", request.source, request, tokens_BL)
        return self._codec(request.came).decode(payload, context)

    def input_gradient(
        self, grad_BLD: Tensor, request: Backward, tokens_BL: Tensor, arrived_BLD: Tensor, came: bytes | None = None
    ) -> bytes:
        """The payload of the gradient of a stage's input, which `came` as this payload and arrived as `arrived_BLD`."""
        version = self._version_of(came)
        context = self._context("backward", request.source, request, tokens_BL, arrived_BLD, version)
        out = bytearray()
        self._codec(request.came).encode_grad(grad_BLD, context, out)
        return bytes(out)

    def output_gradient(
        self, payload: bytes, request: Backward, tokens_BL: Tensor, arrived_BLD: Tensor | None = None
    ) -> Tensor:
        """The gradient of a stage's output, as the stage after it made it with `input_gradient`."""
        context = self._context("backward", request.stage, request, tokens_BL, arrived_BLD)
        return self._codec(request.sends).decode_grad(payload, context)

    def arrived(self, payload: bytes, request: Backward, tokens_BL: Tensor) -> Tensor:
        """This stage's output as the stage after it read it."""
        context = self._context("forward", request.stage, request, tokens_BL)
        return self._codec(request.sends).decode(payload, context)

    def is_masked(self, named: CodecId | None = None) -> bool:
        """Whether gradients in this codec can be read only with the activation that they belong to."""
        return self._codec(named).name.endswith(",mask")

    @property
    def remembers(self) -> bool:
        """Whether the codec sends what changed since a sample's last visit: ends then hold values."""
        return self.codec.scope == "edge_sample"

    def _codec(self, named: CodecId | None) -> ActivationCodec:
        """`Incompatible` if it is not read here."""
        found = self._find(named)
        if found is None:
            raise Incompatible(f"{named} is not read here; these are: {', '.join(map(str, self.reads))}")
        return found

    def _find(self, named: CodecId | None) -> ActivationCodec | None:
        if named is None or (self.follows_weights and named.name == self.codec.name):
            return self.codec
        version = named.name, named.version
        return next((codec for codec in (self.codec, *self.others) if (codec.name, codec.version) == version), None)

    def _version_of(self, came: bytes | None) -> int | None:
        """The version that a payload is in, where the codec has several."""
        codec = self.codec
        return codec.version_of(came) if isinstance(codec, SubspaceVersions) and came is not None else None

    def _context(
        self,
        direction: Direction,
        source: int,
        request: Forward | Backward,
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
    """What this peer knows of the edges between a run's stages: the codecs that the run names, as far as this release has them.
    One alone may learn new versions."""
    config, names = plan.model, known_of(pipeline.codec)
    codec = activation_codec(names[0], basis=basis_of(plan, pipeline))
    others = tuple(activation_codec(name) for name in names[1:])
    if isinstance(codec, AqSgd) and pipeline.cache_bytes is not None:
        codec = replace(codec, max_cache_bytes=pipeline.cache_bytes)
    if pipeline.turns is not None and isinstance(codec, Subspace):
        codec = SubspaceVersions(codec)
    return Edges(codec, plan.batch, plan.seq, config.dim, config.vocab_size, plan.run_seed, plan.dtype, others)


def basis_of(plan: RunPlan, pipeline: PipelinePlan) -> Basis | None:
    """What all peers of a run share for its codec, if that needs something; `Incompatible` if this machine makes another one
    than the manifest names."""
    terms = subspace_terms(pipeline.codec)
    if terms is None:
        return None
    made = run_basis(plan.run_seed, plan.model.dim, terms.rank, plan.model.vocab_size)
    return require_digest(made, pipeline.basis)
