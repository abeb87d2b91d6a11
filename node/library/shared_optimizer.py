"""`SwarmOptimizer` in a program that several processes run, as under torchrun: they are one peer.

Each process makes the same calls. In rank 0 they do what they do elsewhere; the others take part
in what that means for their shards, and return once rank 0 is done. Between calls nobody reads or
changes the model but the program.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from farflock.node.errors import Failure, Usage
from farflock.node.library.loop_measures import RoundReport
from farflock.node.library.swarm_optimizer import (
    MEMBERS_TIMEOUT_S,
    InnerSpec,
    SwarmOptimizer,
    inner_optimizer,
)
from farflock.node.model.ranks import Order, Ranks
from farflock.node.model.replica_fsdp import FsdpReplica
from farflock.node.run.fit import SHARED_MOMENTS
from farflock.node.run.user_terms import fingerprint
from farflock.optimizers.parts.portable_inner import make_portable


class _Facts(msgspec.Struct, frozen=True):
    """The followers' knowledge of the swarm after a call, or why the call failed."""

    peer: str = ""
    method: str = ""
    invite: str = ""
    members: tuple[str, ...] = ()
    last_round: RoundReport | None = None
    tokens: int = 0
    adopted_moments: bool = False
    seed: int = 0
    error: str = ""


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module that DDP wraps, whose parameters have the names that other peers know."""
    return model.module if isinstance(model, DistributedDataParallel) else model


class LeadingOptimizer(SwarmOptimizer):
    """Rank 0 of a program: the swarm's peer."""

    def __init__(self, model: nn.Module, *given: Any, **options: Any) -> None:  # noqa: ANN401
        self._ranks = Ranks()
        self._ranks.hold()
        with self._together():
            super().__init__(unwrapped(model), *given, **options)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401 - torch's
        """See `SwarmOptimizer.step`; each process computes its closure at the same time."""

        def in_all() -> Any:  # noqa: ANN401
            assert closure is not None
            self._ranks.hold(Order("closure"))
            try:
                return closure()
            finally:
                self._ranks.resume()

        with self._together():
            return super().step(None if closure is None else in_all)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See `SwarmOptimizer.zero_grad`."""
        with self._together():
            super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's shards, with the method's under "swarm"."""
        with self._together():
            return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See `SwarmOptimizer.load_state_dict`."""
        with self._together():
            super().load_state_dict(state_dict)

    def eval_params(self) -> dict[str, torch.Tensor]:
        """See `SwarmOptimizer.eval_params`."""
        with self._together():
            return super().eval_params()

    def wait_for_members(self, count: int, timeout_s: float = MEMBERS_TIMEOUT_S) -> None:
        """See `SwarmOptimizer.wait_for_members`."""
        with self._together():
            super().wait_for_members(count, timeout_s)

    def finish(self) -> None:
        """See `SwarmOptimizer.finish`."""
        with self._together():
            super().finish()

    def close(self, patient: bool = True) -> None:
        """See `SwarmOptimizer.close`. Only a patient leader tells the others, because after an
        error they may be anywhere."""
        try:
            if patient and self._end.alive:
                with self._together():
                    super().close(patient)
        finally:
            self._ranks.end(heard=False)
            super().close(patient=False)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Let the followers take part while the block runs; then tell them how it went."""
        self._ranks.resume()
        facts = _Facts(error="it was interrupted")
        try:
            yield
            facts = self._facts_now()
        except Exception as error:
            facts = _Facts(error=str(error))
            if (lost := self._ranks.lost()) is not None:
                raise lost from error
            raise
        finally:
            self._release(facts)

    def _release(self, facts: _Facts) -> None:
        if self._ranks.broken:
            return
        try:
            self._ranks.hold(Order("release", text=msgspec.msgpack.encode(facts)))
        except RuntimeError as error:
            if (lost := self._ranks.lost()) is not None:
                raise lost from error
            raise

    def _replica_of(self, model: nn.Module) -> FsdpReplica:
        return shared_replica(model, self._inner, self._ranks)

    def _facts_now(self) -> _Facts:
        if not self._end.alive:
            return _Facts()
        alone = self._here.founder and len(self.members) == 1
        try:
            invite = self.invite
        except (Failure, Usage):  # no address that others could reach
            invite = ""
        return _Facts(
            self.peer,
            self.method,
            invite,
            self.members,
            self.last_round,
            self.tokens,
            not alone and self.method in SHARED_MOMENTS,
            self.seed,
        )


class FollowingOptimizer(SwarmOptimizer):
    """Another rank of a program: it knows of the swarm what rank 0 said at the last call."""

    def __init__(
        self,
        model: nn.Module,
        method: str | None = None,
        invite: object = None,
        *,
        inner: InnerSpec = "adamw",
        lr: float | None = None,
        tokens_per_step: int = 1,
        **options: Any,  # noqa: ANN401 - rank 0 checks them
    ) -> None:
        self._ranks = Ranks()
        model = unwrapped(model)
        self._inner = inner_optimizer(model, inner, lr)
        self._ready = False
        torch.optim.Optimizer.__init__(self, self._inner.param_groups, self._inner.defaults)
        self._share_inner()
        fingerprint(model, self._inner)  # rank 0 gathers frozen parameters in it
        self._shard = shared_replica(model, self._inner, self._ranks)
        self._facts, self._tokens_per_step, self._closed = _Facts(), tokens_per_step, False
        self._follow()
        if self.method in SHARED_MOMENTS:
            make_portable(self._inner)
        self._ready = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401 - torch's
        """Take part in rank 0's step; return this process' own closure's result."""
        return self._follow(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop this process' gradients, but keep what a method has yet to send."""
        torch.optim.Optimizer.zero_grad(self, set_to_none)
        self._follow()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's shards; rank 0 has the method's."""
        self._follow()
        return {**self._inner.state_dict(), "swarm": None}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore this rank's shards, if rank 0 does."""
        if not self._facts.adopted_moments:
            self._inner.load_state_dict({k: v for k, v in state_dict.items() if k != "swarm"})
            self._share_inner()
        self._follow()

    def eval_params(self) -> dict[str, torch.Tensor]:
        """Take part in rank 0's call, and return nothing."""
        self._follow()
        return {}

    def measures(self) -> dict[str, float]:
        """Return nothing: rank 0 measures."""
        return {}

    def wait_for_members(self, count: int, timeout_s: float = MEMBERS_TIMEOUT_S) -> None:
        """Return once rank 0 has seen them."""
        self._follow()

    def finish(self) -> None:
        """Take part in rank 0's call."""
        torch.optim.Optimizer.zero_grad(self)
        self._follow()

    def close(self, patient: bool = True) -> None:
        """Leave with rank 0."""
        try:
            if patient and not self._closed:
                self._follow()
        finally:
            self._closed = True

    @property
    def invite(self) -> str:
        """The word with which other peers join."""
        return self._facts.invite

    @property
    def method(self) -> str:
        """The name of the run's method."""
        return self._facts.method

    @property
    def peer(self) -> str:
        """The id of the peer that these processes are."""
        return self._facts.peer

    @property
    def seed(self) -> int:
        """The seed of all randomness of the run."""
        return self._facts.seed

    @property
    def members(self) -> tuple[str, ...]:
        """The peers of the view at rank 0's last call."""
        return self._facts.members

    @property
    def last_round(self) -> RoundReport | None:
        """The last round that was applied by then."""
        return self._facts.last_round

    @property
    def tokens(self) -> int:
        """The run's progress by then."""
        return self._facts.tokens

    @property
    def tokens_per_step(self) -> int:
        """The number that was set here; rank 0's counts."""
        return self._tokens_per_step

    @tokens_per_step.setter
    def tokens_per_step(self, tokens: int) -> None:
        self._tokens_per_step = tokens

    def _follow(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401
        """Take part in what rank 0 does, until its call is over; return the closure's result."""
        if self._closed:
            raise Failure(
                "the optimizer is closed", "it has left its run", "make a new one to continue"
            )
        returned = None
        while (order := self._ranks.hear()).act != "release":
            if order.act != "closure":
                assert self._shard.obey(order), f"rank 0 says {order.act}"
                continue
            if closure is None:
                raise Usage("step()", "rank 0 passes a closure", "pass one in every process")
            with torch.enable_grad():
                returned = closure()
        self._facts = msgspec.msgpack.decode(order.text, type=_Facts)
        if self._facts.error:
            raise Failure("the call has failed in rank 0", self._facts.error, "")
        return returned


def shared_replica(model: nn.Module, inner: torch.optim.Optimizer, ranks: Ranks) -> FsdpReplica:
    """Return this rank's part of a user's model, in shards or in copies; raise `Usage` for a
    placement of shards that is not known."""
    try:
        return FsdpReplica(model, inner, None, ranks, copies=True)
    except ValueError as error:
        raise Usage("the model", str(error), "") from None
