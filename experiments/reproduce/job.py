"""One run of one arm as data: everything that its numbers depend on, and its outcome.

Two recipes that ask for the same run get the same job, so it runs once. A job's key also covers the
code that it runs through.
"""

import hashlib
from typing import Any, Literal

import msgspec

from farflock.experiments.reproduce.version import code_version
from farflock.node.model.llama import ModelConfig
from farflock.node.run.terms import RunPlan
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.schedule import Schedule

RUN = "run"  # the data stream that all peers of a run share
EXACT_BYTES = 4  # per gradient value in the DDP baseline's ring all-reduce, which is exact: fp32


class Job(msgspec.Struct, frozen=True, kw_only=True, tag_field="what"):
    """A run; `batch` is the number of sequences in one step of all peers together."""

    seed: int
    model: ModelConfig
    corpus: str
    batch: int
    seq: int
    steps: int
    lr: float
    warmup: float
    floor: float
    weight_decay: float
    betas: tuple[float, float]
    clip: float
    optimizer: Literal["adamw", "sgd"]
    points: int
    held_out: int
    device: str

    @property
    def total_tokens(self) -> int:
        """Tokens of all peers."""
        return self.steps * self.batch * self.seq

    def plan(self, method: str, options: dict[str, Any], sequences: int) -> RunPlan:
        """Return the plan of a node that computes `sequences` sequences of each step."""
        return RunPlan(
            run_seed=self.seed,
            model=self.model,
            inner=InnerConfig(self.optimizer, self.lr, self.betas, self.weight_decay),
            schedule=Schedule(
                self.lr, self.total_tokens, int(self.warmup * self.total_tokens), self.floor
            ),
            method=method,
            options=options,
            batch=sequences,
            seq=self.seq,
            clip_norm=self.clip or None,
        )


class Line(Job, frozen=True, kw_only=True, tag="line"):
    """A baseline: one model in one process, on the first `batch` sequences of each step."""

    @property
    def title(self) -> str:
        """The name in messages."""
        return "line"


class Swarm(Job, frozen=True, kw_only=True, tag="swarm"):
    """A simulated swarm (experiments/reproduce/swarm_arm.py); `options` as in the recipe."""

    method: str
    options: dict[str, Any]
    peers: int
    late: float
    speeds: tuple[float, ...]
    step_s: float

    @property
    def title(self) -> str:
        """The name in messages."""
        return self.method


class Noise(msgspec.Struct, frozen=True, kw_only=True, tag_field="what", tag="noise"):
    """Consensus of replicas that get no gradient (experiments/reproduce/noise.py)."""

    seed: int
    peers: int
    rounds: int
    alpha: float
    gamma: float

    @property
    def title(self) -> str:
        """The name in messages."""
        return "noise"


AnyJob = Line | Swarm | Noise


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment.

    `tokens` counts all peers; `sent_bytes` is the mean per peer; `compute_s` leaves out transfers;
    `loss` is held out, in nats per token; `spread` is the weights' standard deviation over replicas
    (root mean square over weights).
    """

    tokens: int
    sent_bytes: float
    compute_s: float
    loss: float
    lr: float
    spread: float = 0.0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a job. Rules compare `metrics`, which is empty if the run diverged.

    `overlaps`: exchanges run while the model trains, so their transfers do not add to its time.
    """

    metrics: dict[str, float]
    curve: list[Point] = []
    diverged: bool = False
    overlaps: bool = False
    parameters: int = 0
    took_s: float = 0.0


class Diverged(Exception):
    """Raised when a loss is no longer finite."""


def key(job: AnyJob) -> str:
    """Return 64 hex digits, the same for two jobs exactly if code and configuration are."""
    return hashlib.sha256(msgspec.json.encode([job, code_version(job)], order="sorted")).hexdigest()
