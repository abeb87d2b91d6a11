"""The interface of all methods: a `Method` requests `Exchange`s and applies `Result`s.
It never sees a peer's address, a byte count or a clock.

A method sees the model only as a `Replica`, and time only as `Progress`. The driver
(node/train/driver.py) carries exchanges to the swarm and results back.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

Tensors = Mapping[str, Tensor]
MemberId = str
What = str  # "param", "grad", or a moment of the inner optimizer such as "exp_avg"
Ranges = Sequence[tuple[int, int]]  # half-open ranges of flat indices


class TensorBlock(NamedTuple):
    """The flat range [start, stop) of a tensor."""

    name: str
    start: int
    stop: int

    def of(self, x: Tensor) -> Tensor:
        """Return this range of a contiguous tensor, as a view."""
        return x.view(-1)[self.start : self.stop]

    def within(self, ranges: Ranges) -> Ranges:
        """Return what these ranges of the tensor cover of the block, counted from its start."""
        cut = [(max(low, self.start), min(high, self.stop)) for low, high in ranges]
        return [(low - self.start, high - self.start) for low, high in cut if low < high]


BlockChange = Callable[
    ..., Sequence[Tensor | None]
]  # (block, its values of each `what`) -> new values


@dataclass(frozen=True, slots=True)
class All:
    """All members of the stream's view, at most 64."""


@dataclass(frozen=True, slots=True)
class RandomGroups:
    """Disjoint groups of `size`, redrawn each round from run seed and view; the rest stay alone."""

    size: int = 2


@dataclass(frozen=True, slots=True)
class Members:
    """The group of exactly these peers."""

    ids: tuple[MemberId, ...]


GroupRule = All | RandomGroups | Members


@dataclass(frozen=True, slots=True)
class ExchangeKey:
    """The name of one exchange, used once per run, so that results apply idempotently."""

    stream: str
    round: int
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request of a method to the swarm.

    `tensors` are float32 values as they are when the exchange is requested. They may be computed
    when they are read (`LazyTensors`): the caller encodes them before it calls the method again,
    and may then drop them. `weight` is this peer's weight in the mean (1, or a token count).
    `apply_after` is the number of inner steps until the result is wanted: 0 blocks, τ overlaps with
    τ steps, H delays by one round. A result that is late by then is applied as soon as it is known;
    training waits for it only after `slack` more steps. At `deadline_s` the peer stops waiting and
    trains on; the result still arrives, once, when it is known.

    Rounds of all streams of a method are numbered on one axis, on which views begin. A stream has
    every `stride`-th round, counted from its template's, so that streams with different periods
    advance along it together. If `enough` is above 0, a round closes once that many contributions
    are complete; otherwise when those of all live members are, or halfway to the deadline with
    those that have arrived.

    With `compensate`, what the return codec drops from a shard's mean is added to the shard's next
    mean, so that a coarse codec delays values and does not lose them (kind mean, group `All`).

    With `uniform`, the mean contains each contribution entirely or not at all. A member that dies
    at the wrong moment then costs the other members' reducers a second reduction.
    """

    key: ExchangeKey
    kind: Literal["mean", "gather"]
    group: GroupRule
    tensors: Tensors
    weight: float = 1.0
    codec: str = "fp16"
    return_codec: str = "bf16"
    compensate: bool = False
    stride: int = 1
    enough: int = 0
    uniform: bool = False
    apply_after: int = 0
    slack: int = 0
    deadline_s: float = 30.0
    min_participants: int = 1


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of an exchange, delivered once. `next_round` is the stream's next round.

    `ok`: every member of the group contributed. `partial`: some did. `alone`: no partner was found;
    `mean` is this peer's own decoded payload. `failed`: nothing was agreed or taken, and outer
    state must not change.

    `participants` (sorted) is the only source of denominators. All tensors are decoded when they
    are read (`LazyTensors`), best in blocks. `mean` (kind mean) holds float32 tensors; `gathered`
    (kind gather) holds each participant's decoded tensors, in sorted order of peers. `sent` is this
    peer's payload as the others decode it, None if it sent nothing (a round replayed from the log).
    `taken` lists the flat ranges of each of this peer's tensors that the mean contains: everything,
    nothing, or the shards that reached their reducers in time.
    """

    status: Literal["ok", "partial", "alone", "failed"]
    next_round: int
    participants: tuple[MemberId, ...] = ()
    weights: tuple[float, ...] = ()
    mean: Tensors | None = None
    gathered: Mapping[MemberId, Tensors] | None = None
    sent: Tensors | None = None
    taken: Mapping[str, Ranges] = field(default_factory=dict)
    tokens: int = 0  # the run's agreed tokens after this round, 0 if unknown
    notes: bytes = b""  # opaque metadata carried with the tensors; methods must ignore it
    # inner steps of this peer between the snapshot and now; filled in by the driver
    steps_since: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """A method's only clock: own inner steps, the run's agreed tokens, run time in seconds.
    `weight` is how many times the step's gradient counts; weights are summed. At a pipeline stage
    it is the number of microbatches in the step. `step_tokens` are the tokens of one step of this
    peer."""

    step: int
    tokens: int = 0
    run_time_s: float = 0.0
    weight: float = 1.0
    step_tokens: int = 1


class Drifted(Exception):
    """Raised by `apply` when this replica is farther from the others than the method tolerates. The
    caller drops pending exchanges and adopts a snapshot."""


State = dict[str, Tensor]  # named tensors; counters are int64 scalars


class Replica(Protocol):
    """The model as a method sees it. Every implementation obeys these rules
    (tests/node/model/test_replica.py):

    `read` returns full float32 copies that later steps do not change; `write(read(...))` changes
    nothing; `write` with `mix` m sets x <- (1-m)·x + m·new; `inner_step` leaves gradients
    zeroed; names and shapes are the same, in the same order, on all peers of a run.

    `block` and `update` pass over tensors without a copy of the model (optimizers/parts/blocks.py).
    `block` returns the flat range [start, stop) of one tensor, perhaps the stored memory itself:
    use it before the next call, and do not change it. `update` calls `change` with each block of
    each tensor and its values of all `whats`, and sets them to what it returns (None: as they are).
    `allocate` returns float32 zeros for a method's state, wherever the machine keeps that: on the
    CPU or a device. Values that are read come there too, as do a result's tensors, so a method
    names no device: it makes tensors from those that it has.
    """

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...
    def read(self, names: Sequence[str], what: What) -> dict[str, Tensor]: ...
    def write(self, tensors: Tensors, what: What, mix: float = 1.0) -> None: ...
    def block(self, name: str, what: What, start: int, stop: int) -> Tensor: ...
    def update(self, names: Sequence[str], whats: Sequence[What], change: BlockChange) -> None: ...
    def allocate(self, shape: Sequence[int]) -> Tensor: ...
    def inner_step(self, lr: float | None = None) -> None:
        """Clip, step the inner optimizer at `lr` (None: the schedule's), zero the gradients."""
        ...


class Method(Protocol):
    """The way in which peers that train apart keep one model: a state machine without I/O, clock,
    rank, world size or global random numbers.

    Catalog methods declare their state and inherit the state functions from
    optimizers/parts/stateful.py.

    Law, for every method in `catalog.METHODS` (optimizers/testing/check.py; `check_method` checks
    any other method):

    1. With one participant it runs and gives the degenerate result that its module documents.
    2. `failed` leaves outer state untouched and keeps local work.
    3. After `due` returns, later local steps do not change the exchange's tensors. They can be read
       until its result is applied, unless the caller drops them before.
    4. A result is applied at most once; denominators come from `participants` alone.
    5. `exact` methods: equal state and equal results (except `sent` and `taken`) give equal
       `snapshot()` bits.
    6. `restore(snapshot(), "adopt")` gives the same future as never having stopped, if the replica
       is restored too.
    7. So does `resume(snapshot() | personal())`, at any moment between two calls, even with an
       exchange pending.
    8. Work in ranges that were not taken is kept: `taken` names flat ranges per tensor, and
       whatever lies outside of them stays in the replica or in this peer's next message, however
       much of the rest was taken.
    """

    @property
    def equality(self) -> Literal["exact", "close", "per-peer"]:
        """The comparison that holds after a round: equal state hashes, values within a tolerance,
        or only equal result hashes."""
        ...

    @property
    def keeps_gradients(self) -> bool:
        """True if gradients stay in the replica after a local step, to be sent later: nothing else
        may then zero them."""
        ...

    def streams(self, replica: Replica) -> list[Exchange]:
        """Return a template of each stream that the method will ever use, with the shapes of its
        tensors. Peers open their streams before the first exchange, so that members that are still
        computing can reduce, hold and vote."""
        ...

    def local_step(self, replica: Replica, progress: Progress) -> None:
        """Run after `backward()`: make an inner update, or only accumulate the gradient (DDP)."""
        ...

    def due(self, replica: Replica, progress: Progress) -> list[Exchange]:
        """Return the exchanges to start now, of no pending key; called after each local step."""
        ...

    def apply(self, replica: Replica, exchange: Exchange, result: Result) -> list[Exchange]:
        """Apply a result of any status; may return a second phase. A stream's results arrive in
        round order. Raise `Drifted` if a result shows that this replica has left the group (`close`
        methods)."""
        ...

    def snapshot(self, replica: Replica) -> State:
        """Return a copy of the state that a joiner downloads."""
        ...

    def restore(self, replica: Replica, state: State, mode: Literal["adopt", "carry"]) -> None:
        """Take over a snapshot: `adopt` resets the replica to it, `carry` keeps local work on
        top of it."""
        ...

    def personal(self, replica: Replica) -> State:
        """Return this peer's own state, which joiners do not get: counters, residuals, messages."""
        ...

    def resume(self, replica: Replica, state: State) -> None:
        """Continue from the peer's merged `snapshot` and `personal`; the caller restores the
        replica."""
        ...

    def agreed(self, replica: Replica, stream: str) -> State:
        """Return the state that all members hold bit for bit when they begin a round of this stream
        (exact methods; otherwise empty): the tensors themselves, to be hashed at once and not
        changed. Its hash goes into their offers, so that a member with a different state learns
        that it must adopt a snapshot."""
        ...

    def eval_params(self, replica: Replica) -> Tensors:
        """Return the parameters to evaluate and export: outer ones, if any, else the replica's."""
        ...
