"""How a run's model is cut into stages and what is agreed upon the way through it: what all of its peers know alike, before
any of them has a swarm, a tensor or a thread."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from farflock.compression.activation_catalog import activation_codec, known_of, subspace_terms
from farflock.compression.aqsgd import AqSgd
from farflock.compression.subspace import OVERLAP_EPOCHS, Basis, Subspace
from farflock.compression.subspace_versions import SubspaceVersions
from farflock.node.assembly.node import Plan
from farflock.node.model.llama import Llama
from farflock.node.pipeline.life.rebalancer import Balance
from farflock.node.pipeline.passes.edges import Edges
from farflock.node.pipeline.server.server import ServerTerms
from farflock.node.pipeline.trainer.trainer import TrainerTerms
from farflock.node.pipeline.versions.table_versions import Turns
from farflock.node.pipeline.versions.versions import Asynchronous
from farflock.node.run.basis import require_digest, run_basis
from farflock.node.run.policies import shares_of
from farflock.optimizers.method import Tensors, What
from farflock.optimizers.schedule import Schedule
from farflock.swarm.paths.skippipe import Plan as Paths

Constrained = Literal["all", "pipelines"]


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """How a run's model is cut, and what is agreed upon the way through it. A stage that all microbatches visit steps once its
    group has taken in `batch_tokens`, others once they have their share; `policy` is a path policy's name, `codec` an
    activation codec's, or those of several, of which the first is taken that all servers of an edge read; `basis` is the digest
    of what all peers share for it, if the manifest names one. After every `end_copies` rounds, if any, the stages beside the
    ends copy what those hold besides layers. Of a codec that remembers samples each end of an edge holds at most `cache_bytes`
    of values. `constrain` says whether full replicas keep to the codec's subspace too; where only pipelines do, the frozen
    embedding has a new version after every `table_every` rounds of the first stage."""

    stages: tuple[range, ...]
    batch_tokens: int
    codec: str = "int8"
    policy: str = "swarm"
    server: ServerTerms = field(default_factory=ServerTerms)
    trainer: TrainerTerms = field(default_factory=TrainerTerms)
    balance: Balance = field(default_factory=Balance)
    end_copies: int = 0
    basis: str | None = None
    cache_bytes: int | None = None  # the codec's own bound
    asynchronous: Asynchronous | None = None  # backward passes use the weights that are there
    paths: Paths | None = None  # which policy `planned` follows
    constrain: Constrained = "all"
    table_every: int = 0

    @property
    def turns(self) -> Turns | None:
        """When the frozen embedding changes; None where it stays as it is. A version is read as long as forward passes that it
        set out with may be."""
        if self.constrain == "all":
            return None
        return Turns(self.table_every, max(OVERLAP_EPOCHS, self.server.staleness + 1))

    @property
    def layers(self) -> tuple[int, ...]:
        """How many each stage has."""
        return tuple(map(len, self.stages))

    def share(self, stage: int) -> Fraction:
        """Of all microbatches, how many visit this stage."""
        return shares_of(self.policy, self.layers, self.paths)[stage]


@dataclass(frozen=True, slots=True)
class Shapes:
    """A replica of which only the shapes are known: enough to say which streams a method has."""

    shapes: Mapping[str, tuple[int, ...]]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tensors, in order."""
        return tuple(self.shapes)

    def read(self, names: Sequence[str], what: What) -> dict[str, Tensor]:
        """Zeros."""
        return {name: torch.zeros(self.shapes[name]) for name in names}

    def write(self, tensors: Tensors, what: What, mix: float = 1.0) -> None:
        """There is nothing to write to."""

    def inner_step(self, lr: float | None = None) -> None:
        """There is nothing to step."""


def of_share(schedule: Schedule, share: Fraction) -> Schedule:
    """The same schedule for a stage that this share of the microbatches visit: it is as far along after as much less."""
    return replace(
        schedule,
        total_tokens=max(int(schedule.total_tokens * share), 1),
        warmup_tokens=int(schedule.warmup_tokens * share),
    )


def clip_of(plan: Plan, stage: Llama) -> float | None:
    """The greatest norm of a stage's gradient: that of the whole model's by the root of the stage's share of the parameters, as
    if all were of one size (node0's rule; a norm of the whole is known to nobody)."""
    if plan.clip_norm is None:
        return None
    share = sum(parameter.numel() for parameter in stage.parameters()) / plan.model.parameters()
    return plan.clip_norm * math.sqrt(share)


def edges_of(plan: Plan, pipeline: PipelinePlan) -> Edges:
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


def basis_of(plan: Plan, pipeline: PipelinePlan) -> Basis | None:
    """What all peers of a run share for its codec, if that needs something; `Incompatible` if this machine makes another one
    than the manifest names."""
    terms = subspace_terms(pipeline.codec)
    if terms is None:
        return None
    made = run_basis(plan.run_seed, plan.model.dim, terms.rank, plan.model.vocab_size)
    return require_digest(made, pipeline.basis)
