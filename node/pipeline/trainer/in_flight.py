"""Microbatches in flight: how a trainer draws and numbers them, and what it keeps of each until it
counts at every stage.

It keeps the input of each stage and the gradient of each stage's output, encoded as they came: so
whatever dies, the pass can be asked of another server.

A codec that remembers samples keeps inputs in another way (`StageInputs`, node/pipeline/contrib/sample_inputs.py).

Shapes: B sequences, L positions.
"""

import collections
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from farflock.node.model.data import Batches
from farflock.node.pipeline.passes.edges import Edges
from farflock.node.pipeline.passes.requests import Forward, Version, Visit
from farflock.node.pipeline.trainer.blame import PayloadOrigins
from farflock.node.run.terms import WhenGone
from farflock.swarm.messages import CodecId
from farflock.swarm.paths.policy import Microbatch, PathPolicy

NUMBERS, LIVES = 2**32, 2**29  # microbatches of one life, and lives whose numbers differ


class KeptInput(Protocol):
    """The input of a stage, as a trainer keeps it until its microbatch counts."""

    def payload(self, server: str) -> bytes:
        """The payload for this life of a server, which may know a part of the input already."""
        ...

    def taken(self, server: str, payload: bytes, lacking: Sequence[int] = ()) -> bool:
        """Note that a server has read this payload, all but the rows that it lacked something for.
        Return whether it was right to say so, and may be asked again at once."""
        ...


class ExpectedOutput(Protocol):
    """The output that a stage is asked for."""

    @property
    def visit(self) -> Visit | None:
        """What the forward request says of the samples, None where the codec remembers none."""
        ...

    def read(self, payload: bytes, request: Forward) -> KeptInput:
        """Take in the answer, which is the next stage's input; `CorruptPayload` if it cannot be the
        answer."""
        ...


class StageInputs(Protocol):
    """How a trainer takes in, keeps and hands out the inputs of stages, for all of its
    microbatches."""

    def expect(self, flight: "InFlight", stage: int) -> ExpectedOutput:
        """Prepare for a forward pass through a stage, which is about to be asked for."""
        ...

    def backward_visit(self, flight: "InFlight") -> Visit | None:
        """What the microbatch's backward requests say of its samples."""
        ...

    @property
    def counts(self) -> Mapping[str, int]:
        """Numbers for a status report, by name."""
        ...


@dataclass(frozen=True, slots=True)
class WholeInput:
    """The payload as it came, which every server gets."""

    raw: bytes

    def payload(self, server: str) -> bytes:
        """It refers to nothing that a server might not have."""
        return self.raw

    def taken(self, server: str, payload: bytes, lacking: Sequence[int] = ()) -> bool:
        """There is nothing to note."""
        return True


@dataclass(frozen=True, slots=True)
class WholeInputs:
    """Inputs of a codec that remembers nothing."""

    visit: None = None
    counts: Mapping[str, int] = field(default_factory=dict)

    def expect(self, flight: "InFlight", stage: int) -> ExpectedOutput:
        """Every output is read alike."""
        return self

    def read(self, payload: bytes, request: Forward) -> KeptInput:
        """It stays encoded: no stage's input is decoded by the trainer."""
        return WholeInput(payload)

    def backward_visit(self, flight: "InFlight") -> None:
        """No samples are named."""


@dataclass(slots=True)
class PassWeights:
    """The versions of weights that one microbatch met on its way, by stage: its backward passes name
    them, where servers keep versions (decision 016). `gone` says what becomes of it where no server
    has one of them any more: it is dropped, or differentiated at the newest weights. None: servers
    have one version, and none is named."""

    gone: WhenGone | None = None
    _versions: dict[int, Version] = field(default_factory=dict)

    def used(self, stage: int, version: Version | None) -> None:
        """Name the version that a server says that a pass used, if it is one."""
        if version is not None and self.gone is not None:
            self._versions[stage] = version

    def named(self, stage: int) -> Version | None:
        """The version that a backward pass is to use, None for whatever the server has."""
        return self._versions.get(stage)

    def is_ahead(self, stage: int, round: int) -> bool:
        """Whether a server that is at this round of the stage has yet to come to the named
        version."""
        version = self._versions.get(stage)
        return version is not None and round < version.round

    def give_up(self, stage: int) -> bool:
        """Give up the named version, which no server has any more. True if the backward pass is to
        use the newest now; if not, what is left of the microbatch's way is dropped."""
        return self.gone == "newest" and self._versions.pop(stage, None) is not None

    def forget(self) -> None:
        """Forget all versions: the walk begins again, and its passes may use others."""
        self._versions.clear()


@dataclass(slots=True, eq=False)
class InFlight:
    """One microbatch that does not count everywhere yet, as its trainer keeps it.

    By stage: the kept `inputs`; `gradients`, the payload of the gradient of its output, of the last
    stage the targets; `codecs`, which its output and that gradient are encoded in; and `lacked`,
    how many servers were asked in vain, for want of weights or of a codec. `asking` holds the
    stages where a backward pass or a confirmation is being asked for. `trip_s` adds up the passes
    that brought something, without the time that they waited at servers.
    """

    microbatch: Microbatch
    order: tuple[int, ...]
    tokens: bytes
    epoch: int
    weights: PassWeights
    gradients: dict[int, bytes]
    inputs: dict[int, KeptInput] = field(default_factory=dict)
    codecs: dict[int, CodecId | None] = field(default_factory=dict)
    lacked: collections.Counter[int] = field(default_factory=collections.Counter)
    origins: PayloadOrigins = field(default_factory=PayloadOrigins)
    asking: set[int] = field(default_factory=set)
    trip_s: float = 0.0

    @property
    def number(self) -> int:
        """Names it, of all that its trainer ever draws."""
        return self.microbatch.step

    def source(self, stage: int) -> int:
        """The stage before, -1 before the first."""
        at = self.order.index(stage)
        return self.order[at - 1] if at else -1

    def after(self, stage: int) -> int | None:
        """The stage after, None after the last."""
        at = self.order.index(stage)
        return self.order[at + 1] if at + 1 < len(self.order) else None

    def set_out_again(self, epoch: int) -> None:
        """Forget what its walk brought so far: it begins again at the first stage, in this
        round."""
        self.epoch, self.trip_s = epoch, 0.0
        self.inputs.clear()
        self.codecs.clear()
        self.weights.forget()


def first_number(life: int) -> int:
    """Where this life of a trainer begins to number its microbatches: not where a former one did,
    for those may count already or be somewhere on their way. The rest after `NUMBERS` says which of
    its stream's batches it is."""
    return life % LIVES * NUMBERS


class MicrobatchSource:
    """Draws and numbers the microbatches of one life of a trainer, from its first number on
    (`first_number`). They go through the stages as `policy` has it for `lane`; `gone` is what becomes
    of one whose weights are gone (`PassWeights`)."""

    def __init__(
        self,
        batches: Batches,
        edges: Edges,
        policy: PathPolicy,
        lane: int = 0,
        first: int = 0,
        gone: WhenGone | None = None,
    ) -> None:
        self._batches, self._policy = batches, policy
        self.edges, self.lane, self._gone = edges, lane, gone
        self._first = self._next = first

    def skip(self, tokens: int) -> None:
        """Begin in the stream where a run is that has trained on so many tokens. Called before the
        first draw."""
        self._first = self._next = self._first + tokens // self.edges.tokens

    @property
    def begun(self) -> int:
        """Microbatches so far."""
        return self._next - self._first

    def next(self) -> Microbatch:
        """Number the next one."""
        self._next += 1
        return Microbatch(step=self._next - 1, index=0, lane=self.lane)

    def order(self, microbatch: Microbatch) -> tuple[int, ...]:
        """Return the stages that it visits."""
        return self._policy.stage_order(microbatch)

    def batch(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """Draw its tokens and targets (B, L)."""
        return self._batches.batch(microbatch.step % NUMBERS)

    def draw(self, epoch: int) -> InFlight:
        """The next one, which sets out when `epoch` is the newest round that is over."""
        microbatch = self.next()
        tokens, targets = map(self.edges.pack, self.batch(microbatch))
        order = self.order(microbatch)
        return InFlight(microbatch, order, tokens, epoch, PassWeights(self._gone), {order[-1]: targets})
