"""A run's training terms as data: a manifest resolves to these, and all peers have the same ones.

Nothing here has a swarm, a tensor's values or a thread. The code that does the work takes its terms
from here, so a manifest is read and checked without importing that code.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import nn

from farflock.compression.subspace import OVERLAP_EPOCHS
from farflock.node.model.llama import ModelConfig
from farflock.node.run.fit import SHARED_MOMENTS
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.portable_inner import make_portable
from farflock.optimizers.parts.schedule import Schedule
from farflock.optimizers.parts.small_adamw import MomentType
from farflock.swarm.paths.round_robin import BACKWARD_SIZE
from farflock.swarm.paths.skippipe import PathPlan
from farflock.swarm.protocol.rebalance import RebalanceRule

MAX_STAGES = 64
MAX_VISIT = 256  # sequences of a microbatch whose samples are named: requests are small
MAX_VERSIONS = 64  # each is a whole copy of the stage
FORWARD_TIMEOUT_S = 30.0
BACKWARD_TIMEOUT_S = FORWARD_TIMEOUT_S * BACKWARD_SIZE
EMERGENCY_S = 10.0  # a period: most checks look only at stages without servers
VERSION_LEAD = 1  # rounds between making a version and using it, for downloads
FIRST_VERSION = 1  # the version that every peer computes from the run's seed

Correction = Literal["none", "spike", "prediction", "spike+prediction", "braking", "nesterov"]
WhenGone = Literal["drop", "newest"]
Constrained = Literal["all", "pipelines"]


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The training terms that all nodes of a run share; a manifest resolves to it."""

    run_seed: int
    model: ModelConfig
    inner: InnerConfig
    schedule: Schedule
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    batch: int = 8
    seq: int = 64
    accumulate: int = 1
    clip_norm: float | None = 1.0
    autocast: bool = False
    samples: int = 0  # recurring ones of each trainer; 0: each sequence is new
    weights: str | None = None  # the hash of those that the run starts from; None: the seed's
    dtype: torch.dtype = torch.float32  # of the weights of a pipeline's stages

    def inner_of(
        self, model: nn.Module, *, fused: bool = False, moments: MomentType = "fp32"
    ) -> torch.optim.Optimizer:
        """Return the inner optimizer of a model or a stage, on its device. Where all replicas take
        the same steps, these have the same bits on every machine, and are not `fused`."""
        alike = self.method in SHARED_MOMENTS
        inner = self.inner.build(model, fused=fused and not alike, moments=moments)
        if alike:
            make_portable(inner)
        return inner


@dataclass(frozen=True, slots=True)
class ServerTerms:
    """A server's limits: `queue` waiting passes of each kind, up to `together` forward passes
    computed at once, `places` pending gradients, each for `lease_s`, and microbatches up to
    `staleness` rounds older than the stage."""

    queue: int = 32
    together: int = 4
    places: int = 4
    lease_s: float = 60.0
    staleness: int = 1


@dataclass(frozen=True, slots=True)
class TrainerTerms:
    """A trainer's limits: `window` microbatches in flight, fewer where that keeps all servers
    busy (swarm/protocol/depth.py), and `kept` in all, including those that wait for a round to
    name them. If `direct`, large activations and gradients go from server to server (decision
    028)."""

    window: int = 64
    kept: int = 256
    forward_timeout_s: float = FORWARD_TIMEOUT_S
    backward_timeout_s: float = BACKWARD_TIMEOUT_S
    direct: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.window <= self.kept:
            raise ValueError(
                f"a window of {self.window} microbatches with {self.kept} kept in total;"
                " choose a window from 1 to that number"
            )


@dataclass(frozen=True, slots=True)
class RebalanceTerms:
    """Terms for moving servers between stages: one may move every `every_s` seconds if `rule`
    says so. If `every_s` is 0, servers move only to stages that have none left."""

    every_s: float = 300.0
    rule: RebalanceRule = field(default_factory=RebalanceRule)

    def __post_init__(self) -> None:
        if self.every_s and not self.every_s >= EMERGENCY_S:
            raise ValueError(
                f"rebalancing every {self.every_s} s is too often;"
                f" choose {EMERGENCY_S} s or more, usually 300, or 0"
            )


@dataclass(frozen=True, slots=True)
class Asynchronous:
    """Terms for gradients of old weights. Servers keep the last `versions` weights, newest
    included, and `correction` corrects steps. `gone` applies to a microbatch whose version no
    server has any more: the rest of it is dropped, or differentiated at the `newest` weights,
    which is not the gradient of any function."""

    versions: int
    correction: Correction = "none"
    gone: WhenGone = "drop"

    def __post_init__(self) -> None:
        if not 1 <= self.versions <= MAX_VERSIONS:
            raise ValueError(
                f"a stage cannot keep {self.versions} versions;"
                f" choose 1 (only the newest) to {MAX_VERSIONS}"
            )
        if self.correction not in get_args(Correction):
            raise ValueError(
                f"correction {self.correction!r} is not known;"
                f" choose from {', '.join(get_args(Correction))}"
            )
        if self.gone not in get_args(WhenGone):
            raise ValueError(
                f"gone={self.gone!r} is not known; choose from {', '.join(get_args(WhenGone))}"
            )

    @property
    def predicts(self) -> bool:
        """True if passes compute with predicted weights, which no peer has yet."""
        return "prediction" in self.correction


@dataclass(frozen=True, slots=True)
class EmbeddingSchedule:
    """The rounds of the first stage at which versions change: one is made after every `every`
    rounds, and is dropped `overlap` rounds after its successor took effect."""

    every: int
    overlap: int = OVERLAP_EPOCHS

    def made(self, version: int) -> int:
        """Return the round whose average becomes this version; -1 for `FIRST_VERSION`."""
        return (version - FIRST_VERSION) * self.every - 1

    def newest(self, applied: int) -> int:
        """Return the last version made once round `applied` is in the weights."""
        return FIRST_VERSION + max(applied + 1, 0) // self.every

    def in_effect(self, applied: int) -> int:
        """Return the version that the weights use once round `applied` is in them."""
        return self.newest(applied - VERSION_LEAD)

    def oldest(self, applied: int) -> int:
        """Return the oldest version still in use once round `applied` is in the weights."""
        return self.in_effect(applied - self.overlap)

    @property
    def max_held(self) -> int:
        """The largest number of versions held at once."""
        return 1 - (-(VERSION_LEAD + self.overlap) // self.every)


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """The cut of a run's model into stages, and the terms for passes through them. A stage that
    all microbatches visit steps once its group has taken in `batch_tokens`, others once they
    have their share. `policy` names a path policy, `codec` an activation codec, or several, of
    which each edge uses the first that all its servers read; `basis` is the digest of the
    codec's shared basis, if the manifest names one. After every `end_copies` rounds, if any, the
    stages next to the first and the last copy the embedding, or the norm and the head. With a
    codec that remembers samples, each end of an edge holds at most `cache_bytes` of values.
    `constrain` says whether full replicas keep to the codec's subspace too; if only pipelines
    do, the frozen embedding has a new version after every `table_every` rounds of the first
    stage. Where microbatches are counted apart from the method's own rounds, that is after every
    `count_every` steps."""

    stages: tuple[range, ...]
    batch_tokens: int
    codec: str = "int8"
    policy: str = "swarm"
    server: ServerTerms = field(default_factory=ServerTerms)
    trainer: TrainerTerms = field(default_factory=TrainerTerms)
    balance: RebalanceTerms = field(default_factory=RebalanceTerms)
    end_copies: int = 0
    basis: str | None = None
    cache_bytes: int | None = None  # None: the codec's own bound
    asynchronous: Asynchronous | None = None  # None: backward passes use current weights
    paths: PathPlan | None = None  # for policy `planned`
    constrain: Constrained = "all"
    table_every: int = 0
    count_every: int = 1

    @property
    def turns(self) -> EmbeddingSchedule | None:
        """The schedule of frozen embeddings; None if the embedding never changes. A version is
        kept for as long as forward passes that set out with it may still need it."""
        if self.constrain == "all":
            return None
        return EmbeddingSchedule(self.table_every, max(OVERLAP_EPOCHS, self.server.staleness + 1))

    @property
    def layers(self) -> tuple[int, ...]:
        """The number of layers of each stage."""
        return tuple(map(len, self.stages))
