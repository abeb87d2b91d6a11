"""What a run says of its training, as data: a manifest resolves to these, and every peer knows them alike.

Nothing here has a swarm, a tensor's values or a thread. What does the work takes its terms from here, so a manifest is
read and checked without importing any of it.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from farflock.compression.subspace import OVERLAP_EPOCHS
from farflock.node.model.llama import ModelConfig
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.schedule import Schedule
from farflock.swarm.paths.round_robin import BACKWARD_SIZE
from farflock.swarm.paths.skippipe import PathPlan
from farflock.swarm.protocol.rebalance import RebalanceRule

MAX_STAGES = 64
MAX_VISIT = 256  # sequences of a microbatch whose samples are named: a request is small
MAX_VERSIONS = 64  # each is a whole copy of the stage
FORWARD_TIMEOUT_S = 30.0
BACKWARD_TIMEOUT_S = FORWARD_TIMEOUT_S * BACKWARD_SIZE
EMERGENCY_S = 10.0  # a period: only stages without servers are looked at in most of them
VERSION_LEAD = 1  # rounds between a version's making and its use, for downloads
FIRST_VERSION = 1  # the version that everybody makes from the run's seed

Correction = Literal["none", "spike", "prediction", "spike+prediction", "braking", "nesterov"]
WhenGone = Literal["drop", "newest"]
Constrained = Literal["all", "pipelines"]


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What all nodes of a run do alike; a manifest resolves to it."""

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
    samples: int = 0  # of each trainer, that come again; with 0 each sequence is drawn anew
    dtype: torch.dtype = torch.float32  # of the weights of a pipeline's stages


@dataclass(frozen=True, slots=True)
class ServerTerms:
    """What a server may take in: `queue` passes of each kind that wait, up to `together` forward ones computed at once,
    `places` gradients put aside, each for `lease_s`; and how many rounds older than the stage a microbatch may be when it
    comes."""

    queue: int = 32
    together: int = 4
    places: int = 4
    lease_s: float = 60.0
    staleness: int = 1


@dataclass(frozen=True, slots=True)
class TrainerTerms:
    """At most `window` microbatches are on their way, fewer where that keeps all servers busy
    (swarm/protocol/depth.py), and at most `kept` are there in all, with those that wait to be named."""

    window: int = 64
    kept: int = 256
    forward_timeout_s: float = FORWARD_TIMEOUT_S
    backward_timeout_s: float = BACKWARD_TIMEOUT_S

    def __post_init__(self) -> None:
        if not 1 <= self.window <= self.kept:
            raise ValueError(f"a window of {self.window} of {self.kept} microbatches: it needs 1 or more, and fits in")


@dataclass(frozen=True, slots=True)
class RebalanceTerms:
    """When servers move: every `every_s` seconds one of them may, where `rule` says so; 0 for never but to lost stages."""

    every_s: float = 300.0
    rule: RebalanceRule = field(default_factory=RebalanceRule)

    def __post_init__(self) -> None:
        if self.every_s and not self.every_s >= EMERGENCY_S:
            raise ValueError(f"rebalancing every {self.every_s} s; choose {EMERGENCY_S} s or more, usually 300, or 0")


@dataclass(frozen=True, slots=True)
class Asynchronous:
    """What is done about gradients of old weights: servers keep the last `versions` weights, newest included; steps are
    corrected; and of a microbatch whose version nobody has any more the rest is dropped, or differentiated at the `newest`
    weights, which is the gradient of no function."""

    versions: int
    correction: Correction = "none"
    gone: WhenGone = "drop"

    def __post_init__(self) -> None:
        if not 1 <= self.versions <= MAX_VERSIONS:
            raise ValueError(f"{self.versions} versions of a stage; choose 1 (none but the newest) to {MAX_VERSIONS}")
        if self.correction not in get_args(Correction):
            raise ValueError(
                f"correction {self.correction!r} is not known; choose from {', '.join(get_args(Correction))}"
            )
        if self.gone not in get_args(WhenGone):
            raise ValueError(f"gone={self.gone!r} is not known; choose from {', '.join(get_args(WhenGone))}")

    @property
    def predicts(self) -> bool:
        """Whether passes compute with weights that nobody has yet."""
        return "prediction" in self.correction


@dataclass(frozen=True, slots=True)
class EmbeddingSchedule:
    """When versions change, by rounds of the first stage: one is made after every `every` rounds, and given up `overlap` rounds
    after its successor took effect."""

    every: int
    overlap: int = OVERLAP_EPOCHS

    def made(self, version: int) -> int:
        """The round after which the averaged embedding is this version's; -1, before the first, for `FIRST_VERSION`."""
        return (version - FIRST_VERSION) * self.every - 1

    def newest(self, applied: int) -> int:
        """The last version that is made once round `applied` is in the weights."""
        return FIRST_VERSION + max(applied + 1, 0) // self.every

    def in_effect(self, applied: int) -> int:
        """The version that weights are in then."""
        return self.newest(applied - VERSION_LEAD)

    def oldest(self, applied: int) -> int:
        """The oldest version that is still read then."""
        return self.in_effect(applied - self.overlap)

    @property
    def most(self) -> int:
        """How many versions are held at once."""
        return 1 - (-(VERSION_LEAD + self.overlap) // self.every)


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
    balance: RebalanceTerms = field(default_factory=RebalanceTerms)
    end_copies: int = 0
    basis: str | None = None
    cache_bytes: int | None = None  # the codec's own bound
    asynchronous: Asynchronous | None = None  # backward passes use the weights that are there
    paths: PathPlan | None = None  # which policy `planned` follows
    constrain: Constrained = "all"
    table_every: int = 0

    @property
    def turns(self) -> EmbeddingSchedule | None:
        """When the frozen embedding changes; None where it stays as it is. A version is read as long as forward passes that it
        set out with may be."""
        if self.constrain == "all":
            return None
        return EmbeddingSchedule(self.table_every, max(OVERLAP_EPOCHS, self.server.staleness + 1))

    @property
    def layers(self) -> tuple[int, ...]:
        """How many each stage has."""
        return tuple(map(len, self.stages))
