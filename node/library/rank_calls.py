"""The processes of a program, as under torchrun, that are one peer: how its optimizer's calls go.

Each process makes the same calls. Rank 0 is the swarm's peer; the others do their part of a call,
and then what rank 0 orders for their shards, until it is done. Between calls only the program reads
or changes the model.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from farflock.node.errors import Failure, Usage
from farflock.node.library.averaged_buffers import AveragedBuffers, averaged_buffers
from farflock.node.library.background import stopped
from farflock.node.library.jump_watch import WeightChange
from farflock.node.library.loop_measures import RoundReport
from farflock.node.library.own_defaults import Closure
from farflock.node.library.swarm_status import SwarmStatus
from farflock.node.model.ranks import LEADER, Order, Ranks
from farflock.node.model.replica import PlainReplica

if TYPE_CHECKING:
    from farflock.node.model.replica_fsdp import FsdpReplica

Step = Callable[[Closure | None], Any]


class RankFacts(msgspec.Struct, frozen=True):
    """The swarm as rank 0 knows it at the end of a call, or why the call failed."""

    peer: str = ""
    method: str = ""
    invite: str = ""
    members: tuple[str, ...] = ()
    last_round: RoundReport | None = None
    tokens: int = 0
    run_steps: int = 0
    alone: bool = False
    seed: int = 0
    twin: str = ""
    status: SwarmStatus = SwarmStatus()
    error: str = ""


class RankReport(msgspec.Struct, frozen=True):
    """A process's view of its part of the model before a step: why its parameters are none of the
    run's any more, or how its weights were changed."""

    refused: str = ""
    change: WeightChange = WeightChange()


Reporting = Callable[[], RankReport]


def is_grouped() -> bool:
    """Return whether several processes run this program."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module that DDP wraps, whose parameters have the names that other peers know."""
    return model.module if isinstance(model, DistributedDataParallel) else model


class LoneRank:
    """A program of one process. `said` is None where a node knows more."""

    said: RankFacts | None = None

    def together(self) -> AbstractContextManager[bool]:
        """Let all ranks make the call of the block; yield whether this one has the node."""
        return contextlib.nullcontext(True)

    def step(self, work: Step, closure: Closure | None, report: Reporting) -> Any:  # noqa: ANN401 - torch's
        """Make a step by `work(closure)` in the rank with the node; return this rank's result.
        `report` is what another rank says before."""
        return work(closure)

    def change(self, own: WeightChange) -> WeightChange:
        """Return the change of weights that all ranks see together; raise `Usage` if one of them
        refuses the step. Only the rank with the node calls this."""
        return own

    def drop_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the gradients in all ranks; only the rank with the node calls this."""
        optimizer.zero_grad()

    def buffers(self, model: nn.Module, wished: str | None) -> AveragedBuffers | None:
        """Return the buffers to average, if that is wished."""
        return averaged_buffers(model, wished)

    def replica(self, model: nn.Module, inner: torch.optim.Optimizer) -> PlainReplica:
        """Return this rank's part of the model as methods see it."""
        return PlainReplica(model, inner, None)

    def end(self) -> None:
        """Make no more calls. It is safe to call this twice."""


class LeadingRank:
    """Rank 0: the swarm's peer."""

    said: RankFacts | None = None

    def __init__(self, facts: Callable[[], RankFacts]) -> None:
        self._facts, self._ranks, self._closed = facts, Ranks(), False
        self._ranks.hold()

    @contextlib.contextmanager
    def together(self) -> Iterator[bool]:
        """See `LoneRank`; then tell the followers how it went."""
        if self._closed:  # nobody listens, and the node says so
            yield True
            return
        self._ranks.resume()
        facts = RankFacts(error="it was interrupted")
        try:
            try:
                yield True
                facts = self._facts()
            except Exception as error:
                facts = RankFacts(error=str(error))
                raise
            finally:
                if not self._ranks.broken:
                    self._ranks.hold(Order("release", text=msgspec.msgpack.encode(facts)))
        except Exception as error:
            if (lost := self._ranks.lost()) is not None:
                raise lost from error
            raise

    def step(self, work: Step, closure: Closure | None, report: Reporting) -> Any:  # noqa: ANN401 - torch's
        """See `LoneRank`; each process computes its closure at the same time."""

        def in_all() -> Any:  # noqa: ANN401 - torch's
            assert closure is not None
            self._ranks.hold(Order("closure"))
            try:
                return closure()
            finally:
                self._ranks.resume()

        with self.together():
            return work(None if closure is None else in_all)

    def change(self, own: WeightChange) -> WeightChange:
        """See `LoneRank`."""
        for rank, text in enumerate(self._ranks.reports(), 1):
            report = msgspec.msgpack.decode(text, type=RankReport)
            if report.refused:
                raise Usage(f"rank {rank}", report.refused, "")
            own = own.beside(report.change)
        return own

    def drop_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """See `LoneRank`."""
        with self._ranks.call(Order("drop")):
            optimizer.zero_grad()

    def buffers(self, model: nn.Module, wished: str | None) -> AveragedBuffers | None:
        """See `LoneRank`."""
        return averaged_buffers(model, wished, self._ranks)

    def replica(self, model: nn.Module, inner: torch.optim.Optimizer) -> "FsdpReplica":
        """See `LoneRank`."""
        return _shared_replica(model, inner, self._ranks)

    def end(self) -> None:
        """See `LoneRank`. Nobody is told: after an error the others may be anywhere."""
        self._closed = True
        self._ranks.end(heard=False)


class FollowingRank:
    """Another rank: it knows of the swarm what rank 0 said at the last call."""

    def __init__(self) -> None:
        self._ranks, self._closed = Ranks(), False
        self.said: RankFacts | None = RankFacts()
        self._buffers: AveragedBuffers | None = None

    @contextlib.contextmanager
    def together(self) -> Iterator[bool]:
        """See `LoneRank`; an error of this rank's part waits until rank 0's call is over."""
        try:
            yield False
        finally:
            self._follow()

    def step(self, work: Step, closure: Closure | None, report: Reporting) -> Any:  # noqa: ANN401 - torch's
        """See `LoneRank`; here it is the result of the closure alone."""
        return self._follow(closure, report)

    def buffers(self, model: nn.Module, wished: str | None) -> AveragedBuffers | None:
        """See `LoneRank`."""
        self._buffers = averaged_buffers(model, wished, self._ranks)
        return self._buffers

    def replica(self, model: nn.Module, inner: torch.optim.Optimizer) -> "FsdpReplica":
        """See `LoneRank`."""
        self._shard, self._inner = _shared_replica(model, inner, self._ranks), inner
        return self._shard

    def change(self, own: WeightChange) -> WeightChange:
        """See `LoneRank`."""
        return own

    def drop_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """See `LoneRank`; here it is done at rank 0's word."""
        optimizer.zero_grad()

    def end(self) -> None:
        """See `LoneRank`."""
        self._closed = True

    def _follow(self, closure: Closure | None = None, report: Reporting | None = None) -> Any:  # noqa: ANN401 - torch's
        """Take part in what rank 0 does, until its call is over; return the closure's result."""
        if self._closed:
            raise stopped(None)
        returned = None
        while (order := self._ranks.hear()).act != "release":
            match order.act:
                case "closure":
                    if closure is None:
                        remedy = "pass one in every process"
                        raise Usage("step()", "rank 0 passes a closure", remedy)
                    with torch.enable_grad():
                        returned = closure()
                case "report":
                    said = RankReport() if report is None else report()
                    self._ranks.report(msgspec.msgpack.encode(said))
                case "drop":
                    self.drop_gradients(self._inner)
                case _:
                    known = self._buffers is not None and self._buffers.obey(order)
                    assert known or self._shard.obey(order), f"rank 0 says {order.act}"
        self.said = msgspec.msgpack.decode(order.text, type=RankFacts)
        if self.said.error:
            raise Failure("the call has failed in rank 0", self.said.error, "")
        return returned


def _shared_replica(model: nn.Module, inner: torch.optim.Optimizer, ranks: Ranks) -> "FsdpReplica":
    """Return this rank's part of a user's model, in shards or in copies; raise `Usage` for a
    placement of shards that is not known."""
    from farflock.node.model.replica_fsdp import FsdpReplica  # late: it loads FSDP

    try:
        return FsdpReplica(model, inner, None, ranks, copies=True)
    except ValueError as error:
        raise Usage("the model", str(error), "") from None


RankCalls = LoneRank | LeadingRank | FollowingRank


def rank_calls(facts: Callable[[], RankFacts]) -> RankCalls:
    """Return the part for this process; `facts` are said to the others, if there are any."""
    if not is_grouped():
        return LoneRank()
    return LeadingRank(facts) if dist.get_rank() == LEADER else FollowingRank()
