"""Buffers of a program's model, such as BatchNorm's running statistics, averaged on wish with each
round of its method.

A round carries how far they have moved since the last one, and all peers add the mean of that to
the same values. Whole numbers, such as counts of batches, stay each peer's own.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from farflock.node.errors import Usage
from farflock.node.library.loop_measures import BUFFERS
from farflock.node.model.plain_names import in_plain_names
from farflock.node.model.ranks import Order, Ranks
from farflock.optimizers.method import (
    All,
    Exchange,
    ExchangeKey,
    Method,
    Progress,
    Replica,
    Result,
    State,
    Tensors,
)
from farflock.optimizers.parts.state import named, unnamed

PREFIX = "buffer"  # of their names in a state
AVERAGE = "average"


class AveragedBuffers:
    """The buffers of a model that are averaged: those of floats in its state dict.

    If several processes are one peer, the leader of these `ranks` reads their mean and sets all."""

    def __init__(self, model: nn.Module, ranks: Ranks | None = None) -> None:
        self._model, self._ranks = model, ranks
        self.agreed = self._own()

    def read(self) -> dict[str, Tensor]:
        """Return float32 copies on the CPU."""
        own = self._own()
        if self._ranks is not None:
            with self._ranks.call(Order("read buffers")):
                for values in own.values():
                    self._ranks.average(values)
        return own

    def agree(self, values: Tensors) -> None:
        """Set all of them to what the peers have agreed on."""
        self.agreed = {name: x.contiguous() for name, x in values.items()}
        if self._ranks is not None:
            with self._ranks.call(Order("set buffers")):
                for agreed in self.agreed.values():
                    self._ranks.broadcast(agreed)
        self._put()

    def obey(self, order: Order) -> bool:
        """Do a follower's part of such a call; return False if it is another one."""
        if order.act not in ("read buffers", "set buffers") or self._ranks is None:
            return False
        own = self._own()
        for values in own.values():
            if order.act == "read buffers":
                self._ranks.average(values)
            else:
                self._ranks.broadcast(values)
        if order.act == "set buffers":
            self.agreed = own
            self._put()
        return True

    def _own(self) -> dict[str, Tensor]:
        found = self._found().items()
        return {
            name: x.detach().to("cpu", torch.float32, copy=True).contiguous() for name, x in found
        }

    @torch.no_grad()
    def _put(self) -> None:
        for name, x in self._found().items():
            x.copy_(self.agreed[name])

    def _found(self) -> dict[str, Tensor]:
        # a module may put another tensor in the place of one, and a state dict has all that last
        kept = self._model.state_dict(keep_vars=True)
        named = {name: x for name, x in self._model.named_buffers() if name in kept}
        return {name: x for name, x in in_plain_names(named).items() if x.is_floating_point()}


def averaged_buffers(
    model: nn.Module, wished: str | None, ranks: Ranks | None = None
) -> AveragedBuffers | None:
    """Return the buffers to average, or None; raise `Usage` for a wish that cannot be met."""
    if wished is None:
        return None
    what = f"buffers={wished!r:.40}"
    if wished != AVERAGE:
        raise Usage(what, "no such choice is known", f"choose {AVERAGE!r}, or leave it out")
    found = AveragedBuffers(model, ranks)
    for name, x in found.agreed.items():
        if not bool(torch.isfinite(x).all()):
            why = f"buffer {name} has values that are not finite"
            raise Usage(what, why, "register it with persistent=False, which leaves it out")
    if not found.agreed:
        raise Usage(what, "the model has no buffers of floats", "leave it out")
    return found


def require_average(name: str, made: Method, replica: Replica) -> None:
    """Raise `Usage` unless a method has rounds among all peers, after which they are equal."""
    streams = made.streams(replica)
    if made.equality != "exact" or not streams or not isinstance(streams[0].group, All):
        why = f"method {name} has no rounds among all peers after which they are equal"
        raise Usage("buffers='average'", why, "leave it out, or choose diloco or ddp")


class WithBuffers:
    """A method that averages buffers beside what another one exchanges: they have a stream of their
    own, with a round for each of that one's first stream."""

    def __init__(self, method: Method, buffers: AveragedBuffers) -> None:
        self._method, self._buffers = method, buffers
        self._first = ""  # the other's first stream, once its streams are asked for

    @property
    def equality(self) -> Literal["exact", "close", "per-peer"]:
        """The other's, which is exact."""
        return self._method.equality

    @property
    def keeps_gradients(self) -> bool:
        """The other's."""
        return self._method.keeps_gradients

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - an option of the other
        if name.startswith("_"):  # while this object is made
            raise AttributeError(name)
        return getattr(self._method, name)

    def streams(self, replica: Replica) -> list[Exchange]:
        """Return the other's templates and one for the buffers."""
        templates = self._method.streams(replica)
        self._first = templates[0].key.stream
        return [*templates, self._beside(templates[0], replica)]

    def local_step(self, replica: Replica, progress: Progress) -> None:
        """Make the other's step."""
        self._method.local_step(replica, progress)

    def due(self, replica: Replica, progress: Progress) -> list[Exchange]:
        """Request the buffers' exchange with the other's first one."""
        asked = self._method.due(replica, progress)
        first = [each for each in asked if each.key.stream == self._first]
        return [*asked, *(self._beside(each, replica) for each in first)]

    def _beside(self, exchange: Exchange, replica: Replica) -> Exchange:
        """Return the exchange of the same round, of how far the buffers have moved."""
        home, agreed = replica.block(replica.names[0], "param", 0, 0).device, self._buffers.agreed
        moved = {name: (x - agreed[name]).to(home) for name, x in self._buffers.read().items()}
        return Exchange(
            ExchangeKey(BUFFERS, exchange.key.round),
            "mean",
            All(),
            moved,
            codec="fp32",
            return_codec="fp32",
            stride=exchange.stride,
            enough=exchange.enough,
            apply_after=exchange.apply_after,
            slack=exchange.slack,
            deadline_s=exchange.deadline_s,
        )

    def apply(self, replica: Replica, exchange: Exchange, result: Result) -> list[Exchange]:
        """Add the mean of how far the buffers have moved, or let the other apply its result."""
        if exchange.key.stream != BUFFERS:
            return self._method.apply(replica, exchange, result)
        if result.status != "failed":
            assert result.mean is not None, f"{exchange.key}: {result.status} without a mean"
            mean = {name: result.mean[name].cpu() for name in self._buffers.agreed}
            self._buffers.agree({name: x + mean[name] for name, x in self._buffers.agreed.items()})
        return []

    def snapshot(self, replica: Replica) -> State:
        """Return the other's and the buffers on which the last round agreed."""
        agreed = {name: x.clone() for name, x in self._buffers.agreed.items()}
        return self._method.snapshot(replica) | named(PREFIX, agreed)

    def restore(self, replica: Replica, state: State, mode: Literal["adopt", "carry"]) -> None:
        """Take over a snapshot; a state without buffers leaves those of the model."""
        rest, buffers = self._split(state)
        self._method.restore(replica, rest, mode)
        self._buffers.agree(buffers)

    def personal(self, replica: Replica) -> State:
        """Return the other's: where the buffers are is in the model's own state dict."""
        return self._method.personal(replica)

    def resume(self, replica: Replica, state: State) -> None:
        """Continue where this peer stopped, with the buffers that are in the model."""
        rest, buffers = self._split(state)
        self._method.resume(replica, rest)
        self._buffers.agreed = buffers

    def agreed(self, replica: Replica, stream: str) -> State:
        """Return the buffers of the last round, or the other's state."""
        if stream != BUFFERS:
            return self._method.agreed(replica, stream)
        return named(PREFIX, self._buffers.agreed)

    def eval_params(self, replica: Replica) -> Tensors:
        """Return the other's."""
        return self._method.eval_params(replica)

    def _split(self, state: State) -> tuple[State, dict[str, Tensor]]:
        """Return the other's part, and the buffers; raise `WrongState` if they do not fit."""
        rest = {name: x for name, x in state.items() if not name.startswith(f"{PREFIX}.")}
        if len(rest) == len(state):
            return rest, self._buffers.read()
        shapes = {name: tuple(x.shape) for name, x in self._buffers.agreed.items()}
        return rest, {name: x.cpu() for name, x in unnamed(PREFIX, state, shapes).items()}


def with_buffers(method: Method, buffers: AveragedBuffers | None) -> Method:
    """Return the method, which also averages these buffers, if any."""
    return method if buffers is None else WithBuffers(method, buffers)
