"""Microbatches in flight: their numbers, and the payloads kept until they count everywhere.

A trainer keeps each stage's input and the gradient of each stage's output, encoded as they arrived,
so that it can ask another server for any lost pass. Large ones stay with the servers that made them
(decision 028), and the trainer keeps only their names. Inputs are kept differently for a codec that
remembers samples (node/pipeline/contrib/sample_inputs.py).

Shapes: B sequences, L positions."""

import collections
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from farflock.node.model.batches_ahead import BatchesAhead, is_ready
from farflock.node.model.data import Batches
from farflock.node.pipeline.passes.edges import Edges
from farflock.node.pipeline.passes.requests import Forward, Version, Visit
from farflock.node.pipeline.trainer.blame import PayloadOrigins
from farflock.node.pipeline.trainer.stage_directory import ServerLife
from farflock.node.run.terms import WhenGone
from farflock.swarm.messages import CodecId
from farflock.swarm.paths.policy import NUMBERS, Microbatch, PathPolicy
from farflock.swarm.peer.payloads import Given, Left

LIVES = 2**29  # with distinct numbers


class KeptInput(Protocol):
    """A stage's input, as a trainer keeps it until its microbatch counts."""

    def payload(self, server: ServerLife) -> Given:
        """Return the payload for this server life, which may already hold a part of the input."""
        ...

    def taken(self, server: ServerLife, payload: Given, lacking: Sequence[int] = ()) -> bool:
        """Note that a server has read this payload, except the rows in `lacking`, whose references
        it did not hold.

        Return True if the server's claim is plausible; it may then be asked again at once."""
        ...


class ExpectedOutput(Protocol):
    """The output that a stage is asked for."""

    @property
    def visit(self) -> Visit | None:
        """The samples named in the forward request; None where the codec remembers none."""
        ...

    def read(self, payload: Given, request: Forward) -> KeptInput:
        """Read the output, which is the next stage's input; raise `CorruptPayload` if it cannot
        be one."""
        ...


class StageInputs(Protocol):
    """Reads, keeps and hands out the inputs of stages, for all microbatches of a trainer."""

    def expect(self, flight: "InFlight", stage: int) -> ExpectedOutput:
        """Return the expected output of a forward pass that is about to be requested."""
        ...

    def backward_visit(self, flight: "InFlight") -> Visit | None:
        """Return the samples named in the microbatch's backward requests."""
        ...

    @property
    def counts(self) -> Mapping[str, int]:
        """Counters for status reports, by name."""
        ...


@dataclass(slots=True)
class WholeInput:
    """A payload as it arrived or was left at its maker; every server gets the same."""

    raw: Given

    def payload(self, server: ServerLife) -> Given:
        """Return the payload, which is the same for every server."""
        return self.raw

    def taken(self, server: ServerLife, payload: Given, lacking: Sequence[int] = ()) -> bool:
        """Note that the server has the payload, in case its maker is lost; return True."""
        if isinstance(self.raw, Left):
            self.raw = self.raw.held_by(server.peer)
        return True


@dataclass(frozen=True, slots=True)
class WholeInputs:
    """Inputs of a codec that remembers no samples."""

    visit: None = None
    counts: Mapping[str, int] = field(default_factory=dict)

    def expect(self, flight: "InFlight", stage: int) -> ExpectedOutput:
        """Return this object, which reads every output in the same way."""
        return self

    def read(self, payload: Given, request: Forward) -> KeptInput:
        """Keep the payload encoded: the trainer never decodes activations."""
        return WholeInput(payload)

    def backward_visit(self, flight: "InFlight") -> None:
        """Return None: no samples are named."""


@dataclass(slots=True)
class PassWeights:
    """The weight versions that computed one microbatch's forward passes, by stage. Its backward
    passes name them (decision 016).

    `gone` says what happens once no server has a named version: the microbatch is dropped, or
    differentiated at the newest weights. It is None where each server has a single version,
    which passes do not name."""

    gone: WhenGone | None = None
    _versions: dict[int, Version] = field(default_factory=dict)

    def used(self, stage: int, version: Version | None) -> None:
        """Note the version that a server used, if it stated one."""
        if version is not None and self.gone is not None:
            self._versions[stage] = version

    def named(self, stage: int) -> Version | None:
        """Return the version for the stage's backward pass; None if the server uses the weights
        it has."""
        return self._versions.get(stage)

    def is_ahead(self, stage: int, round: int) -> bool:
        """True if a server of this stage at this round has yet to reach the named version."""
        version = self._versions.get(stage)
        return version is not None and round < version.round

    def give_up(self, stage: int) -> bool:
        """Give up the named version, which no server has. Return True if the newest weights may
        be used instead, or False if the rest of the walk is to be dropped."""
        return self.gone == "newest" and self._versions.pop(stage, None) is not None

    def forget(self) -> None:
        """Forget all versions: the walk begins again and may use others."""
        self._versions.clear()


@dataclass(slots=True, eq=False)
class InFlight:
    """One microbatch that does not count everywhere yet, as its trainer keeps it.

    By stage: `inputs`, the kept inputs; `gradients`, the payload of the gradient of its output
    (at the last stage the targets); `codecs`, the codec of its output and of that gradient;
    `servers`, those of the forward passes; and
    `lacked`, the number of servers that lacked the weights or a codec. `asking` holds the stages
    with a backward pass or confirmation in progress. `left` holds what stays with servers for
    this microbatch, the lives of those that made it, and their stages. `trip_s` is the total time
    of the successful calls, without their waits at servers."""

    microbatch: Microbatch
    order: tuple[int, ...]
    tokens: bytes
    epoch: int
    weights: PassWeights
    gradients: dict[int, Given]
    inputs: dict[int, KeptInput] = field(default_factory=dict)
    codecs: dict[int, CodecId | None] = field(default_factory=dict)
    servers: dict[int, ServerLife] = field(default_factory=dict)
    lacked: collections.Counter[int] = field(default_factory=collections.Counter)
    origins: PayloadOrigins = field(default_factory=PayloadOrigins)
    asking: set[int] = field(default_factory=set)
    left: list[tuple[Left, ServerLife, int]] = field(default_factory=list)
    trip_s: float = 0.0

    @property
    def number(self) -> int:
        """The microbatch's number, unique among all that its trainer ever draws."""
        return self.microbatch.step

    def source(self, stage: int) -> int:
        """Return the stage before, -1 for the first."""
        at = self.order.index(stage)
        return self.order[at - 1] if at else -1

    def after(self, stage: int) -> int | None:
        """Return the stage after, None for the last."""
        at = self.order.index(stage)
        return self.order[at + 1] if at + 1 < len(self.order) else None

    def due(self) -> int | None:
        """Return the stage whose forward pass is next on the way to the last stage's input; None
        if that input is there."""
        due, stage = None, self.order[-1]
        while stage not in self.inputs and (source := self.source(stage)) >= 0:
            due = stage = source
        return due

    def lacks_input(self, stage: int) -> bool:
        """True if the stage's input is not known, or was lost with the servers that held it."""
        return self.source(stage) >= 0 and stage not in self.inputs

    def replace(self, stage: int, old: Given, new: bytes | None) -> None:
        """Keep `new` here instead of a stage's input, or its output's gradient, that was left with
        its maker, or nothing if it is lost. One that was made again meanwhile stays."""
        kept = self.inputs.get(stage)
        if isinstance(kept, WholeInput) and kept.raw is old:
            del self.inputs[stage]
            if new is not None:
                self.inputs[stage] = WholeInput(new)
        elif self.gradients.get(stage) is old:
            del self.gradients[stage]
            if new is not None:
                self.gradients[stage] = new

    def set_out_again(self, epoch: int) -> None:
        """Forget the walk so far, which begins again at the first stage in round `epoch`."""
        # `gradients` stays: so far it holds only the targets
        self.epoch, self.trip_s = epoch, 0.0
        self.inputs.clear()
        self.servers.clear()
        self.codecs.clear()
        self.weights.forget()


def first_number(life: int) -> int:
    """Return the first microbatch number of this life of a trainer.

    Each life has `NUMBERS` numbers of its own, since a former life's microbatches may already
    count or still be in flight. The number modulo `NUMBERS` is the batch's index in the stream."""
    return life % LIVES * NUMBERS


class MicrobatchSource:
    """Draws and numbers one trainer life's microbatches, from `first` on (`first_number`).

    `policy` orders the stages that microbatches of `lane` visit; `gone` is as in `PassWeights`."""

    def __init__(
        self,
        batches: Batches | BatchesAhead,
        edges: Edges,
        policy: PathPolicy,
        lane: int = 0,
        first: int = 0,
        gone: WhenGone | None = None,
    ) -> None:
        self._batches, self._policy = batches, policy
        self.edges, self.lane, self._gone = edges, lane, gone
        self._first = self._next = self._uncounted = first
        # told, once rounds have counted some, the batch from which on another life begins
        self.counted: Callable[[int], object] = lambda batch: None

    def settle(self, kept: Collection[int]) -> None:
        """Note that rounds have counted all microbatches drawn so far but those that are kept."""
        lowest = min(kept, default=self._next)
        if lowest > self._uncounted:
            self._uncounted = lowest
            self.counted(lowest % NUMBERS)

    def is_ready(self) -> bool:
        """Return whether the next microbatch can be drawn without waiting for its samples."""
        return is_ready(self._batches, self._next % NUMBERS)

    @property
    def begun(self) -> int:
        """Microbatches drawn so far."""
        return self._next - self._first

    def next(self) -> Microbatch:
        """Return the next microbatch and advance the number."""
        self._next += 1
        return Microbatch(step=self._next - 1, index=0, lane=self.lane)

    def order(self, microbatch: Microbatch) -> tuple[int, ...]:
        """Return the stages that a microbatch visits, in order."""
        return self._policy.stage_order(microbatch)

    def batch(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """Return a microbatch's tokens and targets (B, L)."""
        return self._batches.batch(microbatch.step % NUMBERS)

    def draw(self, epoch: int) -> InFlight:
        """Draw the next microbatch. It sets out in round `epoch`, the newest round that is over."""
        microbatch = self.next()
        tokens, targets = map(self.edges.pack, self.batch(microbatch))
        order = self.order(microbatch)
        return InFlight(
            microbatch, order, tokens, epoch, PassWeights(self._gone), {order[-1]: targets}
        )
