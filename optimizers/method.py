"""The seam of the field's methods: a `Method` asks for `Exchange`s and applies `Result`s; it never sees a peer's
address, a byte count or a clock.

`Replica` is all a method sees of the model, `Progress` all it sees of time. The driver (node/train/driver.py) carries the
exchanges to the swarm and the results back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

Tensors = Mapping[str, Tensor]
MemberId = str
What = str  # "param", "grad", or a moment of the inner optimizer such as "exp_avg"
Ranges = Sequence[tuple[int, int]]  # half-open ranges of flat indices


@dataclass(frozen=True, slots=True)
class All:
    """Everybody in the stream's view, at most 64."""


@dataclass(frozen=True, slots=True)
class RandomGroups:
    """Disjoint groups of `size`, drawn anew each round from the run's seed and the view; the rest stay alone."""

    size: int = 2


@dataclass(frozen=True, slots=True)
class Members:
    """Exactly these peers."""

    ids: tuple[MemberId, ...]


GroupRule = All | RandomGroups | Members


@dataclass(frozen=True, slots=True)
class ExchangeKey:
    """Names one exchange for the life of the run; a key is used once (specs: idempotent application)."""

    stream: str
    round: int
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request of a method to the swarm.

    `tensors` are float32 snapshots that nobody changes afterwards. `weight` is this peer's share in the mean (1, or
    tokens). `apply_after` counts the inner steps until the result is wanted: 0 blocks, τ streams, H is a delay of one
    round. After `deadline_s` the peer trains on; the result still comes, once, when it is known.

    Rounds of all streams count on one axis, on which views begin; a stream has every `stride`-th round, from its
    specimen's on, so that streams with different periods move along it together. With `enough` above 0 a round closes as
    soon as so many contributions are whole, else when all members' are, or at the deadline.

    With `compensate`, what the return codec leaves out of a shard's mean is added to its next one: a coarse codec then delays
    and does not lose (kind mean, everybody).

    With `uniform` each contribution is in the mean as a whole or not at all; a member that dies at the wrong moment then costs
    the others' reducers a second reduction.
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
    deadline_s: float = 30.0
    min_participants: int = 1


@dataclass(frozen=True, slots=True)
class Result:
    """What the swarm says of an exchange, once. `next_round` is the stream's next one.

    `ok`: every member of the group is in. `partial`: some are. `alone`: no partner was to be had; `mean` is my own
    decoded payload. `failed`: nothing was agreed, nothing was taken, and outer state must not move.

    `participants` (sorted) is the only source of denominators. `mean` (kind mean) holds float32 tensors;
    `gathered` (kind gather) each participant's decoded tensors, in sorted order of peers. `sent` is my payload as
    the others decode it, None if I sent nothing (a round replayed from the log). `taken` says which flat ranges of
    each of my tensors the mean contains: everything, nothing, or the shards whose reducer had them in time.
    """

    status: Literal["ok", "partial", "alone", "failed"]
    next_round: int
    participants: tuple[MemberId, ...] = ()
    weights: tuple[float, ...] = ()
    mean: Tensors | None = None
    gathered: Mapping[MemberId, Tensors] | None = None
    sent: Tensors | None = None
    taken: Mapping[str, Ranges] = field(default_factory=dict)
    tokens: int = 0  # the run's agreed tokens after it, 0 if unknown
    notes: bytes = b""  # what went with the tensors and is no affair of a method's
    steps_since: int = 0  # inner steps that this peer took between the snapshot and now; filled in by the driver


@dataclass(frozen=True, slots=True)
class Progress:
    """The only clock of a method: own inner steps, the run's agreed tokens, run time in seconds. `weight` is how often the
    step's gradient counts, and is summed: of a pipeline's stage, once for each microbatch in it."""

    step: int
    tokens: int = 0
    run_time_s: float = 0.0
    weight: float = 1.0


class Drifted(Exception):
    """Raised by `apply`: this replica has parted from the others' farther than the method bears. Whoever runs the method drops
    what is pending and adopts a snapshot."""


State = dict[str, Tensor]  # a method's whole state: named tensors; counters are int64 scalars


class Replica(Protocol):
    """The model as a method sees it. Law (tests/node/model/test_replica.py), for every implementation:

    `read` returns full float32 copies on the CPU that later steps do not change; `write(read(...))` changes nothing;
    `write` with `mix` m sets x <- (1-m)·x + m·new; `inner_step` leaves gradients zeroed; names and shapes are equal
    on all peers of a run, in the same order.
    """

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...
    def read(self, names: Sequence[str], what: What) -> dict[str, Tensor]: ...
    def write(self, tensors: Tensors, what: What, mix: float = 1.0) -> None: ...
    def inner_step(self, lr: float | None = None) -> None:
        """Clip, step the inner optimizer at `lr` (None: the schedule's), zero the gradients."""
        ...


class Method(Protocol):
    """How peers keep one model although they train apart. A state machine without I/O, clock, rank, world size or
    global random numbers.

    Those of the catalog declare their state and have the functions about it from optimizers/parts/stateful.py.

    Law, for every method in `catalog.METHODS` (optimizers/testing/check.py; `check_method` holds any other to it):

    1. With one participant it runs and gives its section's documented degenerate result.
    2. `failed` leaves outer state untouched and keeps local work.
    3. Once `due` returned, later local steps do not change the exchange's tensors.
    4. A result is applied at most once; denominators come from `participants` alone.
    5. `exact` methods: equal state and equal results (but for `sent`, `taken`) give equal `snapshot()` bits.
    6. `restore(snapshot(), "adopt")` gives the same future as never having stopped, if the replica does too.
    7. So does `resume(snapshot() | personal())`, at any moment between two calls, also while an exchange is pending.
    8. Work in ranges that were not taken is kept: `taken` names flat ranges, tensor by tensor, and what lies outside of them
       stays in the replica, or in this peer's next message, however much of the rest was taken.
    """

    @property
    def equality(self) -> Literal["exact", "close", "per-peer"]:
        """What the group may compare after a sync: the state's hash, a tolerance, or only the result's hash."""
        ...

    def streams(self, replica: Replica) -> list[Exchange]:
        """One specimen of each stream that it will ever ask for, with the shapes of its tensors: peers open their streams
        before the first exchange, so that those who are still computing can reduce, hold and vote."""
        ...

    def local_step(self, replica: Replica, progress: Progress) -> None:
        """After `backward()`: an inner update, or only accumulation (DDP)."""
        ...

    def due(self, replica: Replica, progress: Progress) -> list[Exchange]:
        """What it wants exchanged now; called after every local step. Never asks for a key that is still pending."""
        ...

    def apply(self, replica: Replica, exchange: Exchange, result: Result) -> list[Exchange]:
        """Take any outcome in; may ask for a second phase. Results of one stream come in round order. `Drifted` if a result
        shows that this replica is no longer one of the group's (`close` methods)."""
        ...

    def snapshot(self, replica: Replica) -> State:
        """The state that a joiner downloads, copied."""
        ...

    def restore(self, replica: Replica, state: State, mode: Literal["adopt", "carry"]) -> None:
        """Take over a snapshot: `adopt` resets the replica to it, `carry` keeps local work on top of it."""
        ...

    def personal(self, replica: Replica) -> State:
        """What belongs to this peer alone and no joiner gets: counters, residuals, what a pending exchange needs."""
        ...

    def resume(self, replica: Replica, state: State) -> None:
        """Go on from `snapshot` and `personal` of the same peer, merged; the replica is restored by the caller."""
        ...

    def agreed(self, replica: Replica, stream: str) -> State:
        """What all members hold alike, bit for bit, when they begin a round of this stream (exact methods; else nothing): its
        hash goes into their offers, and who holds another state learns that it must adopt a snapshot."""
        ...

    def eval_params(self, replica: Replica) -> Tensors:
        """What to evaluate and export: the outer parameters if the method has them, else the replica's."""
        ...
