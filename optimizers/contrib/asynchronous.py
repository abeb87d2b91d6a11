"""Asynchronous local SGD with delayed Nesterov momentum, dynamic local steps and staleness weights
(Liu et al., arXiv:2401.09135, section 5). There is no server: a log of rounds collects arrivals,
and every peer applies it.

For each arrival g = weight(staleness)·(theta_pulled - theta_end), N being the buffer's size:

    buf <- buf + g;  n <- n + 1
    n mod N = 0:  m <- beta·m + buf/N;  theta <- theta - lr·((1 - cN + c)·beta·m + g/N);  buf <- 0
    else:         theta <- theta - lr·(c·beta·m + g/N)

Every member applies a closed round's arrivals in sorted order of peers. A peer in the round pulls,
and starts a local round of max(1, floor(v / v_fastest · period)) steps (DyLU); a peer that missed
it sends its message again in the next round.

Deviations: staleness counts the rounds that moved theta since the pull, so all arrivals of one
round are equally stale; a message carries that count, because a small number survives every codec.
A closed round cannot wait for stragglers, but `enough` arrivals batch as the paper's grace period
does. An arrival of weight 0 does not count.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from farflock.compression.payload import divided
from farflock.optimizers.method import (
    All,
    Exchange,
    ExchangeKey,
    MemberId,
    Progress,
    Replica,
    Result,
    State,
    Tensors,
)
from farflock.optimizers.parts.options import require_options
from farflock.optimizers.parts.outer import scaled
from farflock.optimizers.parts.outer_state import Anchor, OuterState
from farflock.optimizers.parts.round_book import RoundBook
from farflock.optimizers.parts.state import (
    Shapes,
    WrongState,
    counter,
    named,
    numbers,
    unnamed,
    zeros,
)
from farflock.optimizers.parts.state_fields import Kind, Whose, nested, own, shared
from farflock.optimizers.parts.stateful import Mode, OuterMethod
from farflock.optimizers.trial_options import Disaster, TrialOptions

STREAM = "arrivals"
HEARD_ROUNDS = 64  # a peer silent for this many rounds counts neither as fastest nor as a worker
FASTEST = 1e6  # steps per second; higher claims are ignored
STALEST = 2**20
TICK = 1_000_000  # run time is kept in whole microseconds

StalenessRule = Literal["none", "polynomial", "hinge", "drop"]
RULES: tuple[StalenessRule, ...] = ("none", "polynomial", "hinge", "drop")


Speeds = dict[MemberId, tuple[int, float]]  # (version at its last arrival, steps per second)


def _written_speeds(key: str, speeds: Speeds) -> State:
    state = numbers({key: len(speeds)})
    for who, (heard, speed) in speeds.items():
        state |= {
            f"heard.{who}": torch.tensor(heard),
            f"speed.{who}": torch.tensor(speed, dtype=torch.float32),
        }
    return state


def _read_speeds(key: str, state: State, shapes: Shapes) -> Speeds:
    peers = [name.removeprefix("speed.") for name in state if name.startswith("speed.")]
    speeds = {who: FLOAT.read(f"speed.{who}", state, shapes) for who in peers}
    if counter(key, state) != len(peers) or any(
        not 0 <= speed <= FASTEST for speed in speeds.values()
    ):
        raise WrongState(
            f"{key} must be {len(peers)} numbers from 0 to {FASTEST:g}; ask another member"
        )
    return {who: (counter(f"heard.{who}", state), speed) for who, speed in speeds.items()}


def _read_float(key: str, state: State, shapes: Shapes) -> float:
    prefix, _, name = key.partition(".")
    return float(unnamed(prefix, state, {name: ()})[name])


FLOAT = Kind(lambda key, value: {key: torch.tensor(value, dtype=torch.float32)}, _read_float)
SPEEDS = Kind(_written_speeds, _read_speeds)


@dataclass(slots=True)
class Async(OuterMethod):
    """Asynchronous DiLoCo with delayed Nesterov momentum.

    `period` is the number of local steps of the fastest peer. `buffer` None means the number of
    workers, `dylu` False gives every peer `period` steps, `enough` arrivals close a round.

    `staleness` sets the weight of an arrival that is s versions late: 1 for none, (1 + s)^-1/2 for
    polynomial, 1 / (hinge_slope·(s - hinge_free) + 1) above `hinge_free` for hinge, and 0 above
    `drop_above` for drop.
    """

    period: int = 50
    lr: float = 0.7
    momentum: float = 0.9
    buffer: int | None = None
    c: float = 0.0
    staleness: StalenessRule = "none"
    hinge_slope: float = 10.0
    hinge_free: int = 4
    drop_above: int = 10
    dylu: bool = True
    enough: int = 1
    codec: str = "fp16"
    deadline_s: float = 30.0

    equality: ClassVar[Literal["exact"]] = "exact"
    trial: ClassVar[TrialOptions] = TrialOptions(
        law={"enough": 0},
        rest=6,
        disasters=(Disaster({"period": 6, "enough": 2, "codec": "int8"}, 8),),
    )
    _book: RoundBook = nested(RoundBook)  # `since` the last pull
    _version: int = shared(0)  # rounds that moved phi
    _arrived: int = shared(0)  # since the buffer was emptied
    _size: int = shared(1)  # of the buffer being filled
    _state: OuterState = nested(OuterState)
    _buffer: dict[str, Tensor] = shared(dict)
    _speeds: Speeds = shared(dict, kind=SPEEDS)
    _pulled: int = own(0)  # the version of `_base`
    _quota: int = own(0, stays=True)  # steps of this local round; 0: `period`
    _began: int = own(0)  # the run's time at the first of them, in microseconds
    _speed: float = own(lambda: 0.0, "own.speed", FLOAT, stays=True)  # as last measured
    _base: dict[str, Tensor] = own(dict)  # phi as pulled
    _message: dict[str, Tensor] = own(dict)  # the pseudo-gradient that was not taken yet

    def __post_init__(self) -> None:
        require_options(self, "arrivals have no feedback; choose fp16, bf16 or int8")
        if not 0 < self.lr <= 10 or not 0 <= self.momentum < 1:
            raise ValueError(
                f"lr={self.lr} lies in (0, 10] (0.7), momentum={self.momentum} in [0, 1) (0.9)"
            )
        if self.buffer is not None and self.buffer < 1:
            raise ValueError(
                f"a buffer of {self.buffer} is out of range; "
                "choose 1 or more, or None for the number of workers"
            )
        if not 0 <= self.c <= 1 / (self.buffer or 1):
            raise ValueError(
                f"c={self.c} lies in [0, 1/buffer] (0): above it momentum would turn round"
            )
        if self.c and self.buffer is None:
            raise ValueError(
                f"c={self.c} needs a buffer of known size; "
                "choose one, e.g. the number of workers, or c=0"
            )
        if self.staleness not in RULES:
            raise ValueError(
                f"staleness {self.staleness!r} is not known; choose from {', '.join(RULES)}"
            )
        if not 0 <= self.hinge_slope < math.inf or self.hinge_free < 0 or self.drop_above < 0:
            raise ValueError(
                f"hinge_slope={self.hinge_slope}, hinge_free={self.hinge_free}, "
                f"drop_above={self.drop_above}: all are 0 or more (10, 4, 10)"
            )
        if self.enough < 0:
            raise ValueError(
                f"enough={self.enough} arrivals is out of range; "
                "choose 1 or more, or 0 for everybody's"
            )

    def streams(self, replica: Replica) -> list[Exchange]:
        """Return one template, of the arrivals."""
        return [self._exchange(zeros(replica.shapes))]

    def local_step(self, replica: Replica, progress: Progress) -> None:
        """Make the inner update; the first one since a pull starts the clock."""
        self.begin(replica)
        if self._book.since == 0:
            self._began = max(int(progress.run_time_s * TICK), 0)
        replica.inner_step()
        self._book.since += 1

    def due(self, replica: Replica, progress: Progress) -> list[Exchange]:
        """Request the next exchange when the local round is over, or again after a failed one."""
        if self._book.pending:
            return []
        if not self._message:
            if self._book.since < (self._quota or self.period):
                return []
            theta = replica.read(replica.names, "param")
            self._message = {name: self._base[name] - theta[name] for name in replica.names}
            lasted = int(progress.run_time_s * TICK) - self._began
            self._speed = _float32(self._book.since * TICK / lasted) if lasted > 0 else self._speed
            self._book.since = 0
        return [self._ask()]

    def _ask(self) -> Exchange:
        self._book.pending = True
        return self._exchange(self._message)

    def apply(self, replica: Replica, exchange: Exchange, result: Result) -> list[Exchange]:
        """Apply a round's arrivals; pull if this peer's is among them, else send it again."""
        self.begin(replica)
        self._book.close(exchange, result)
        if result.status == "failed":
            return []
        assert result.gathered is not None, (
            f"{exchange.key}: {result.status} without what was gathered"
        )
        self._hear(result.gathered)
        arrivals = [self._arrive(result.gathered[peer]) for peer in sorted(result.gathered)]
        self._version += any(arrivals)
        if not exchange.tensors:
            return []
        if not result.taken:
            return [self._ask()]
        self._pull(replica, result)
        return []

    def _hear(self, gathered: Mapping[MemberId, Tensors]) -> None:
        """Note which peers are present, and how fast they are."""
        for peer, payload in gathered.items():
            speed = float(payload["speed"])
            self._speeds[peer] = (self._version, speed if 0 < speed <= FASTEST else 0.0)
        self._speeds = {
            who: said
            for who, said in self._speeds.items()
            if self._version - said[0] < HEARD_ROUNDS
        }

    def _arrive(self, payload: Tensors) -> bool:
        """Make one delayed Nesterov step; return whether the arrival counted."""
        weight = self._weight(min(max(round(float(payload["staleness"])), 0), STALEST))
        if weight == 0:
            return False
        if self._arrived == 0:
            self._size = self.buffer or len(self._speeds)
        self._arrived += 1
        size, beta = self._size, self.momentum
        full = self._arrived >= size
        share = (1 - self.c * size + self.c if full else self.c) * beta
        for name, phi in self._state.phi.items():
            g = scaled(payload[f"delta.{name}"], weight)
            buffered = self._buffer[name] + g
            if full:
                self._state.momentum[name] = scaled(self._state.momentum[name], beta) + divided(
                    buffered, size
                )
                buffered = torch.zeros_like(phi)
            self._buffer[name] = buffered
            moved = divided(g, size)
            if share:
                moved = scaled(self._state.momentum[name], share) + moved
            self._state.phi[name] = phi - scaled(moved, self.lr)
        self._arrived = 0 if full else self._arrived
        return True

    def _weight(self, staleness: int) -> float:
        if self.staleness == "polynomial":
            return 1 / math.sqrt(1 + staleness)
        if self.staleness == "hinge":
            return 1 / (self.hinge_slope * max(staleness - self.hinge_free, 0) + 1)
        return 0.0 if self.staleness == "drop" and staleness > self.drop_above else 1.0

    def _pull(self, replica: Replica, result: Result) -> None:
        """Begin a local round: theta <- phi plus the steps made since."""
        assert result.sent is not None
        new = dict(self._state.phi)
        if self._book.since:
            theta = replica.read(replica.names, "param")
            new = {
                n: x + (theta[n] - (self._base[n] - result.sent[f"delta.{n}"]))
                for n, x in new.items()
            }
        replica.write(new, "param")
        self._base, self._message, self._pulled = dict(self._state.phi), {}, self._version
        fastest = max(speed for _, speed in self._speeds.values())
        mine = float(result.sent["speed"])
        if self.dylu and 0 < mine <= fastest:
            self._quota = max(1, math.floor(mine / fastest * self.period))

    def begun(self, replica: Replica) -> None:
        """Place the replica at phi, as if it had just pulled."""
        self._base, self._pulled = dict(self._state.phi), self._version
        self._buffer = self._buffer or dict(self._state.momentum)

    def load(self, replica: Replica, state: State, *whose: Whose) -> Self:
        """Load phi, momentum, buffer, counters and all peers' speeds."""
        new = OuterMethod.load(self, replica, state, *whose)
        if new._arrived >= new._size:
            raise WrongState(
                f"size must be above {new._arrived}, the number of arrivals, got {new._size}; "
                "ask another member"
            )
        return new

    def move(self, replica: Replica, state: State, new: Self, mode: Mode) -> bool:
        """Move to the new phi; `carry` puts this replica's work since its last pull on top."""
        return Anchor(self._base).move(replica, new._state, mode)

    def agreed(self, replica: Replica, stream: str) -> State:
        """Return phi and the counters, hashed at each request; the rest soon affects them."""
        self.begin(replica)
        counts = {
            "round": self._book.number,
            "version": self._version,
            "arrived": self._arrived,
            "size": self._size,
        }
        return named("phi", self._state.phi) | numbers(counts)

    def _exchange(self, message: Tensors) -> Exchange:
        says = {"staleness": float(self._version - self._pulled), "speed": self._speed}
        like = next(iter(message.values()))  # which may be on a device
        tensors = {
            what: like.new_tensor([value], dtype=torch.float32) for what, value in says.items()
        }
        tensors |= {f"delta.{name}": x for name, x in message.items()}
        key, codec, wait = ExchangeKey(STREAM, self._book.number), self.codec, self.deadline_s
        return Exchange(
            key, "gather", All(), tensors, 1.0, codec, codec, enough=self.enough, deadline_s=wait
        )


def _float32(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float32))
