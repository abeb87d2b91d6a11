"""Passes of one stage, from payloads to payloads: their admission and their computation.

A request is admitted by its fields and by the sizes of its payloads, before the payloads are
fetched. Payloads are read and written on the CPU; the stage computes on its device.

Shapes: B sequences, L positions, D model width."""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from farflock.compression.activation import Incompatible
from farflock.compression.codec import CorruptPayload, UnencodableTensor
from farflock.compression.subspace_versions import Superseded
from farflock.node.pipeline.passes.coming import Coming, coming
from farflock.node.pipeline.passes.graphs import KeptGraphs, within_memory
from farflock.node.pipeline.passes.requests import (
    Backward,
    Confirm,
    Foreign,
    Forward,
    Gone,
    HeldOutForward,
    Lacks,
    Made,
    Refused,
    Revoke,
    StageAnswer,
    StagePass,
    StageRequest,
    Stale,
    Version,
)
from farflock.node.pipeline.passes.stage import MicrobatchGradient, Stage
from farflock.node.pipeline.server.edge_ends import EdgeEnds, NotHeld
from farflock.node.pipeline.server.weight_versions import MissingVersion, WeightVersions
from farflock.swarm.links import PeerId
from farflock.swarm.protocol.gradient_leases import GradientKey

Unread = Refused | Lacks  # the input cannot be read


@dataclass(frozen=True, slots=True)
class PassRequest:
    """A pass that the trainer `caller` asks for, with the request's payloads."""

    caller: PeerId
    request: StagePass
    payloads: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class BackwardResult:
    """A computed backward pass: the gradient of the weights, the payload of the input's gradient
    (none at the first stage), and at the last stage the loss, in nats summed over tokens."""

    staged: MicrobatchGradient
    payloads: tuple[bytes, ...]
    loss_sum: float | None


class _Backwards(NamedTuple):
    """A backward pass that a device computes: its gradient stays there, the rest comes."""

    staged: MicrobatchGradient
    input_gradient: Coming | None
    loss_sum: Coming | None
    is_finite: Coming


ForwardReplies = tuple[list[bytes | Unread | Stale], Version | None]
BackwardReply = tuple[BackwardResult | Unread | Gone, Version | None]


class StagePasses:
    """The passes of stage `index` at one server. From a forward pass to the backward pass, `graphs`
    keeps what saves computing it again.

    Only the compute thread calls `forward`, `backward`, what begins them and what that returns. A
    pass that was begun has the weights of that moment. A microbatch may arrive at most
    `staleness` rounds behind the stage; `applied()` is the last round in the weights."""

    def __init__(
        self,
        index: int,
        stage: Stage,
        ends: EdgeEnds,
        versions: WeightVersions,
        applied: Callable[[], int],
        staleness: int,
    ) -> None:
        self._index, self.stage, self.ends, self.versions = index, stage, ends, versions
        self._applied, self._staleness = applied, staleness
        self.graphs = KeptGraphs(stage)

    # admission

    def refusal(
        self, asked: StageRequest, sizes: tuple[int, ...], *, known: bool
    ) -> StageAnswer | None:
        """Return the answer that refuses a request, or None to admit it; change nothing. The
        caller checks for room in the queue. `known` says that the pass already runs or that its
        gradient is pending."""
        if asked.stage != self._index:
            return Refused(f"this peer serves stage {self._index}, not {asked.stage}")
        if isinstance(asked, Confirm | Revoke):
            return Refused("a confirmation or a revocation has no payloads") if sizes else None
        refused = self._misfit(asked) or self._oversize(asked, sizes)
        if refused is not None:
            return refused
        if isinstance(asked, Forward):
            late = self._applied() - asked.epoch > self._staleness
            return Stale(self._applied()) if late else None
        return None if known or isinstance(asked, HeldOutForward) else self._lack(asked)

    def _misfit(self, asked: StagePass) -> StageAnswer | None:
        """Return a refusal if this stage cannot compute such a pass, else None."""
        if (asked.source < 0) != self.stage.is_first or asked.source == self._index:
            return Refused(f"stage {self._index} takes no output of {asked.source}")
        if (unfit := self.ends.misfit(asked)) is not None:
            return Refused(unfit)
        edges = self.ends.edges
        known = edges.knows(asked.came) and edges.knows(asked.sends)
        return None if known else Foreign(edges.reads)

    def _oversize(self, asked: StagePass, sizes: tuple[int, ...]) -> StageAnswer | None:
        """Return a refusal if the number or sizes of the payloads do not fit the request."""
        limits = self._max_sizes(asked)
        if len(sizes) == len(limits) and all(map(operator.le, sizes, limits)):
            return None
        return Refused(f"payloads of {sizes} bytes; at most {limits} belong to it")

    def _max_sizes(self, asked: StagePass) -> tuple[int, ...]:
        """Return the maximum size of each payload of a request, in bytes."""
        edges = self.ends.edges
        given = () if self.stage.is_first else (edges.max_bytes("forward", asked.came),)
        if self.stage.is_last and not isinstance(asked, Forward):
            return (edges.token_bytes, *given, edges.token_bytes)
        if not isinstance(asked, Backward):
            return (edges.token_bytes, *given)
        arrived = (edges.max_bytes("forward", asked.sends),) if edges.is_masked(asked.sends) else ()
        return (edges.token_bytes, *given, edges.max_bytes("backward", asked.sends), *arrived)

    def _lack(self, asked: Backward) -> Gone | None:
        """Return `Gone` if this server does not have the weights of the pass's forward pass,
        else None."""
        lack = self.versions.lack(asked.version) if asked.version is not None else None
        return None if lack is None else Gone(self._applied(), lack == "late")

    # computing

    def forward(self, asked: Sequence[PassRequest]) -> ForwardReplies:
        """Compute forward passes together; return payloads or refusals, and the version."""
        return self.begin_forward(asked)()

    def begin_forward(self, asked: Sequence[PassRequest]) -> Callable[[], ForwardReplies]:
        """Let the device compute forward passes together; return what waits for it, and then does
        what `forward` does. One with an unreadable input is refused alone."""
        with self.versions.using(None) as version:
            read = [self.read_or_stale(each) for each in asked]
            inputs = [
                (_key(each), entry[1])
                for each, entry in zip(asked, read, strict=True)
                if isinstance(entry, tuple)
            ]
            outputs = self._outputs(inputs, version)
        return lambda: (self._replies(asked, read, outputs), version)

    def _replies(
        self,
        asked: Sequence[PassRequest],
        read: Sequence[tuple[Tensor, Tensor] | Unread | Stale],
        outputs: Iterable[Coming],
    ) -> list[bytes | Unread | Stale]:
        """Return the payload of each output, or why there is none."""
        made = iter(outputs)
        replies: list[bytes | Unread | Stale] = []
        for each, entry in zip(asked, read, strict=True):
            if not isinstance(entry, tuple):
                replies.append(entry)
                continue
            try:
                replies.append(self.output(each, next(made).wait(), entry[0]))
            except UnencodableTensor as error:
                replies.append(Refused(str(error)[:200], None if self.stage.is_first else "input"))
        return replies

    def _outputs(
        self, inputs: Sequence[tuple[GradientKey, Tensor]], version: Version | None
    ) -> list[Coming]:
        """Compute one output for each input: alone where its graph is kept, the rest together if
        there is room."""

        def computed(alone: bool) -> list[Coming]:
            kept = [self.graphs.forward(key, x, version) for key, x in inputs]
            rest = [x for (_, x), y in zip(inputs, kept, strict=True) if y is None]
            groups = [[x] for x in rest] if alone else [rest] if rest else []
            outputs = (
                output
                for group in groups
                for output in self._coming(self.stage.forward(torch.cat(group))).split(
                    len(group[0])
                )
            )
            return [next(outputs) if y is None else self._coming(y) for y in kept]

        return within_memory([self.graphs], computed)

    def backward(self, asked: PassRequest) -> BackwardReply:
        """Compute a backward pass at the weights that it names; return its result and their
        version."""
        return self.begin_backward(asked)()

    def begin_backward(self, asked: PassRequest) -> Callable[[], BackwardReply]:
        """Let the device compute a backward pass; return what waits for it, and then does what
        `backward` does."""
        assert isinstance(asked.request, Backward)
        try:
            with self.versions.using(asked.request.version) as version:
                begun = self._begin_backward(asked, version)
        except MissingVersion as reason:  # dropped while the request waited
            gone = Gone(self._applied(), reason.lack == "late")
            return lambda: (gone, None)
        except Superseded:  # no peer may use this version any longer
            gone = Gone(self._applied(), late=True)
            return lambda: (gone, None)

        def ended() -> BackwardReply:
            try:
                return self._ended(asked, *begun) if isinstance(begun, tuple) else begun, version
            except Superseded:
                return Gone(self._applied(), late=True), None

        return ended

    def _begin_backward(
        self, asked: PassRequest, version: Version | None
    ) -> tuple[tuple[Tensor, Tensor], _Backwards] | Unread:
        """Return what was read and is being computed, or why nothing is."""
        request, read = asked.request, self.read(asked)
        assert isinstance(request, Backward)
        if not isinstance(read, tuple):
            return read
        tokens_BL, x = read
        try:
            outside = self._outside(asked, request, tokens_BL)
        except Superseded:
            raise
        except (CorruptPayload, Incompatible) as error:
            return self._spoilt(str(error))

        def computed(_: bool) -> _Backwards:
            graph = self.graphs.take(_key(asked), x, version) or self.stage.graph(x)
            back = self.stage.gradients(graph, outside)
            input_gradient, loss_sum = (
                None if x is None else self._coming(x) for x in (back.input_gradient, back.loss_sum)
            )
            is_finite = self._coming(finite(back.staged.gradients.values()))
            return _Backwards(back.staged, input_gradient, loss_sum, is_finite)

        return read, within_memory([self.graphs], computed)

    def _ended(
        self, asked: PassRequest, read: tuple[Tensor, Tensor], back: _Backwards
    ) -> BackwardResult | Unread:
        """Wait for a backward pass; may raise `Superseded`."""
        payloads: tuple[bytes, ...] = ()
        assert isinstance(asked.request, Backward)
        try:
            if back.input_gradient is not None:
                given = back.input_gradient.wait(), asked.request, *read, self._came(asked)
                payloads = (self.ends.edges.input_gradient(*given),)
        except Superseded:
            raise
        except (CorruptPayload, Incompatible, UnencodableTensor) as error:
            return self._spoilt(str(error))
        if not bool(back.is_finite.wait()):
            # one such gradient would spoil the sum of the whole group
            return self._spoilt("its gradient is not finite")
        loss_sum = None if back.loss_sum is None else float(back.loss_sum.wait())
        return BackwardResult(back.staged, payloads, loss_sum)

    def _coming(self, x: Tensor) -> Coming:
        return coming(x, ahead=self.stage.runs_ahead)

    def output(self, asked: PassRequest, y_BLD: Tensor, tokens_BL: Tensor) -> bytes:
        """Encode a stage's output; raise `UnencodableTensor` if it is not finite."""
        assert not isinstance(asked.request, Backward)
        return self.ends.output(asked.caller, y_BLD, asked.request, tokens_BL, self._came(asked))

    def _came(self, asked: PassRequest) -> bytes | None:
        """Return the payload of the stage's input, None for tokens."""
        return None if self.stage.is_first else asked.payloads[1]

    def read_or_stale(self, asked: PassRequest) -> tuple[Tensor, Tensor] | Unread | Stale:
        """Read the input of a pass that goes forward; return `Stale` if its codec version is
        superseded."""
        try:
            return self.read(asked)
        except Superseded:
            return Stale(self._applied())

    def read(self, asked: PassRequest) -> tuple[Tensor, Tensor] | Unread:
        """Read the token ids (B, L) and the stage's input; may raise `Superseded`."""
        try:
            tokens_BL = self.ends.edges.unpack(asked.payloads[0])
        except CorruptPayload as error:
            return Refused(str(error)[:200])
        if self.stage.is_first:
            return tokens_BL, tokens_BL
        given = asked.caller, asked.payloads[1], asked.request, tokens_BL
        try:
            return tokens_BL, self.ends.input(*given)
        except NotHeld as lacking:
            return Lacks(lacking.rows)
        except Superseded:
            raise
        except (CorruptPayload, Incompatible) as error:
            return Refused(str(error)[:200], "input")

    def _outside(self, asked: PassRequest, request: Backward, tokens_BL: Tensor) -> Tensor:
        """Read the backward pass's other input: the targets (B, L) at the last stage, elsewhere
        the gradient of the stage's output (B, L, D)."""
        edges, at = self.ends.edges, 1 if self.stage.is_first else 2
        if self.stage.is_last:
            return edges.unpack(asked.payloads[at])
        arrived = None
        if edges.is_masked(request.sends):
            arrived = edges.arrived(asked.payloads[at + 1], request, tokens_BL)
        return edges.output_gradient(asked.payloads[at], request, tokens_BL, arrived)

    def _spoilt(self, why: str) -> Refused:
        """Refuse a backward pass whose input was readable: blame the gradient from the next
        stage, or at the last stage the input."""
        made: Made = "gradient" if not self.stage.is_last else "input"
        return Refused(why[:200], None if self.stage.is_first and self.stage.is_last else made)


def _key(asked: PassRequest) -> GradientKey:
    return asked.caller, asked.request.number


def finite(tensors: Iterable[Tensor]) -> Tensor:
    """Return whether all values are finite, on their device: the least and the greatest of a tensor
    are NaN if any is."""
    ends = [end for x in tensors for end in torch.aminmax(x)]
    return torch.stack(ends).isfinite().all()
