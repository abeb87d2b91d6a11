"""Base classes of methods: `Method`'s state functions, derived from declared fields
(optimizers/parts/state_fields.py), and the rounds of methods that exchange every N local steps."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, runtime_checkable

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
from farflock.optimizers.parts.blocks import is_zero, stored
from farflock.optimizers.parts.outer_state import Anchor
from farflock.optimizers.parts.round_book import RoundBook
from farflock.optimizers.parts.state import copies, kept, named, unnamed, zeros
from farflock.optimizers.parts.state_fields import (
    NESTED,
    Whose,
    become,
    dropped,
    forget,
    loaded,
    relocated,
    saved,
)

Mode = Literal["adopt", "carry"]


class LiveState(NamedTuple):
    """A method's state as it is stored, where that is possible: the next call of the method changes
    it. What joiners get, this peer's own, and the parameters to evaluate."""

    shared: State
    own: State
    model: Tensors


@runtime_checkable
class ShowsState(Protocol):
    """A method that shows its state as it is stored."""

    def live(self, replica: Replica) -> LiveState:
        """Return the state without copies of large tensors."""
        ...

    def evaluated(self, replica: Replica) -> Tensors:
        """Return the parameters to evaluate and export, as they are stored."""
        ...


@runtime_checkable
class StepSchedule(Protocol):
    """A method whose rounds are due after fixed numbers of local steps."""

    @property
    def due_steps(self) -> Mapping[str, tuple[int, int]]:
        """The local step of the run after which each stream's first round is due, and the steps
        from one round to the next."""
        ...

    def at_step(self, replica: Replica, step: int) -> None:
        """Take up the schedule of the others, who have made `step` local steps of the run. A
        pending message stays."""
        ...


class StatefulMethod(ABC):
    """A method that is a dataclass and keeps its state in the fields that it declares."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]
    equality: ClassVar[Literal["exact", "close", "per-peer"]]
    keeps_gradients: ClassVar[bool] = False

    def begin(self, replica: Replica) -> None:  # noqa: B027 - most have nothing to do here
        """Fix where the run begins, at the first call; called before any state is read."""

    def begun(self, replica: Replica) -> None:  # noqa: B027
        """Start this peer's part of a run: at first, and after taking over a snapshot."""

    def load(self, replica: Replica, state: State, *whose: Whose) -> Self:
        """Return a copy with these fields from a state; raise `WrongState` unless all fit."""
        return loaded(self, state, replica.shapes, *whose)

    @abstractmethod
    def move(self, replica: Replica, state: State, new: Self, mode: Mode) -> bool:
        """Move the replica to `new`, which is this method with the shared fields of `state`. Return
        whether this peer's own work is carried over."""

    def snapshot(self, replica: Replica) -> State:
        """Return copies of the shared fields."""
        return copies(self._shared(replica))

    def live(self, replica: Replica) -> LiveState:
        """Return the state without copies of large tensors."""
        shared = self._shared(replica)
        return LiveState(shared, saved(self, "own"), self.evaluated(replica))

    @abstractmethod
    def evaluated(self, replica: Replica) -> Tensors:
        """Return the parameters to evaluate and export, as they are stored."""

    def eval_params(self, replica: Replica) -> Tensors:
        """Return copies of the parameters to evaluate and export."""
        return copies(dict(self.evaluated(replica)))

    def _shared(self, replica: Replica) -> State:
        self.begin(replica)
        return saved(self, "shared")

    def restore(self, replica: Replica, state: State, mode: Mode) -> None:
        """Take over the shared fields; of this peer's own, keep only those of carried work."""
        read = self.load(replica, state, "shared")
        if mode == "adopt":
            dropped(self)  # or two states would be in memory
        new = relocated(read, replica.allocate)
        forget(new, carried=self.move(replica, state, new, mode))
        become(self, new)
        self.begun(replica)

    def personal(self, replica: Replica) -> State:
        """Return copies of the fields that are this peer's own."""
        self.begin(replica)
        return copies(saved(self, "own"))

    def resume(self, replica: Replica, state: State) -> None:
        """Continue where this peer stopped."""
        new = self.load(replica, state, "shared", "own")
        become(self, relocated(new, replica.allocate))

    def agreed(self, replica: Replica, stream: str) -> State:
        """Return all shared state of an exact method; otherwise nothing."""
        return self._shared(replica) if self.equality == "exact" else {}


class ReplicaMethod(StatefulMethod):
    """A method without outer parameters: a snapshot holds the replica's parameters, the inner
    `moments` that joiners need, and `rare_moments` if the inner optimizer has any."""

    __slots__ = ()
    moments: ClassVar[tuple[str, ...]] = ()
    rare_moments: ClassVar[tuple[str, ...]] = ()

    def _shared(self, replica: Replica) -> State:
        """Return parameters, moments and the shared fields."""
        state: State = {}
        for what in ("param", *self.moments, *self.rare_moments):
            if what not in self.rare_moments or _has(replica, what):
                state |= named(what, {name: stored(replica, name, what) for name in replica.names})
        return state | saved(self, "shared")

    def move(self, replica: Replica, state: State, new: Self, mode: Mode) -> bool:
        """Set parameters and moments to the snapshot's; `carry` keeps waiting gradients."""
        read = {"param": unnamed("param", state, replica.shapes)}
        read |= {what: unnamed(what, state, _shapes(replica, what)) for what in self.moments}
        for what in self.rare_moments:
            found = kept(what, state, _shapes(replica, what))
            read[what] = found or (zeros(_shapes(replica, what)) if _has(replica, what) else {})
        for what, tensors in read.items():
            replica.write(tensors, what)
        if mode == "adopt":
            replica.write(zeros(replica.shapes), "grad")
        return mode == "carry"

    def evaluated(self, replica: Replica) -> Tensors:
        """Return the replica's parameters."""
        return {name: stored(replica, name, "param") for name in replica.names}


class OuterMethod(StatefulMethod):
    """A method with outer parameters phi, held by its `_state`."""

    __slots__ = ()
    stream: ClassVar[str]  # its only stream, if it has one
    codec: str
    deadline_s: float
    _state: Anchor

    def begin(self, replica: Replica) -> None:
        """Set phi at the first call."""
        if self._state.begin(replica):
            self.begun(replica)

    def move(self, replica: Replica, state: State, new: Self, mode: Mode) -> bool:
        """Set the replica to the new phi; `carry` adds its work since the old one."""
        return self._state.move(replica, new._state, mode)

    def evaluated(self, replica: Replica) -> Tensors:
        """Return phi, the outer parameters."""
        self.begin(replica)
        return self._state.phi


@dataclass(slots=True)
class PeriodicMethod(OuterMethod):
    """A method with one stream: a message per `period` local steps, an outer step on its result."""

    period: int
    _book: RoundBook = field(init=False, default_factory=RoundBook, metadata=NESTED)

    def _exchange(self, tensors: Tensors, weight: float = 1.0) -> Exchange:
        """Return this round's exchange of these tensors: a mean among all."""
        key, back = (
            ExchangeKey(self.stream, self._book.number),
            getattr(self, "return_codec", "bf16"),
        )
        return Exchange(
            key, "mean", All(), tensors, weight, self.codec, back, deadline_s=self.deadline_s
        )

    @abstractmethod
    def _message(self, replica: Replica) -> Tensors:
        """Return this round's tensors."""

    @property
    def _recalls(self) -> bool:
        """True if a result is applied to where the replica stood at its message."""
        return False

    @abstractmethod
    def _take(self, replica: Replica, exchange: Exchange, result: Result) -> None:
        """Make the outer step of a round that did not fail, and move the replica."""

    def streams(self, replica: Replica) -> list[Exchange]:
        """Return one template, of tensors like the parameters."""
        return [self._exchange(zeros(replica.shapes))]

    def local_step(self, replica: Replica, progress: Progress) -> None:
        """Make the inner update; the first one records where the run began."""
        self.begin(replica)
        self._book.hold(replica, replica.names if self._recalls else ())
        replica.inner_step()
        self._book.since += 1

    @property
    def due_steps(self) -> Mapping[str, tuple[int, int]]:
        """As `StepSchedule.due_steps`."""
        return {self.stream: (self.period, self.period)}

    def at_step(self, replica: Replica, step: int) -> None:
        """As `StepSchedule.at_step`."""
        self.begin(replica)
        self._book.since = step % self.period

    def due(self, replica: Replica, progress: Progress) -> list[Exchange]:
        """Request the exchange `period` local steps after the last, unless its result is
        pending."""
        if not self._book.is_due(self.period):
            return []
        message = self._message(replica)
        self._book.leave(message)
        return [self._exchange(message)]

    def apply(self, replica: Replica, exchange: Exchange, result: Result) -> list[Exchange]:
        """Make the outer step, unless the round failed."""
        self._book.close(exchange, result)
        if result.status != "failed":
            self.begin(replica)
            self._take(replica, exchange, result)
        self._book.settled()
        return []


def live_state(method: Method, replica: Replica) -> LiveState:
    """Return a method's state without copies, if it is one of the catalog's."""
    if isinstance(method, ShowsState):
        return method.live(replica)
    shared, own = method.snapshot(replica), method.personal(replica)
    return LiveState(shared, own, method.eval_params(replica))


def evaluated_weights(method: Method, replica: Replica) -> Tensors:
    """Return the parameters to evaluate, without copies if the method is one of the catalog's."""
    if isinstance(method, ShowsState):
        return method.evaluated(replica)
    return method.eval_params(replica)


def mean_of(exchange: Exchange, result: Result) -> Tensors:
    """Return the mean of a round that did not fail."""
    assert result.mean is not None, f"{exchange.key}: {result.status} without a mean"
    return result.mean


def _has(replica: Replica, moment: str) -> bool:
    """Return whether a moment is nonzero anywhere."""
    return not all(
        is_zero(replica.block(name, moment, 0, math.prod(replica.shapes[name])))
        for name in replica.names
    )


def _shapes(replica: Replica, moment: str) -> dict[str, tuple[int, ...]]:
    """Return a moment's shapes: mostly the parameters', but the step count is a scalar."""
    return {name: tuple(stored(replica, name, moment).shape) for name in replica.names}
