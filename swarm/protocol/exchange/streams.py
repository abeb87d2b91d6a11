"""A stream as the swarm sees it: its shards, two callbacks of the node, a round's outcome."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from farflock.swarm.links import PeerId
from farflock.swarm.messages import Key
from farflock.swarm.protocol.exchange.availability import RoundItem
from farflock.swarm.protocol.exchange.bundles import max_shards
from farflock.swarm.protocol.exchange.close_list import CloseList, RoundTerms, last_bundles

RoundStatus = Literal["ok", "partial", "alone", "failed", "lost"]


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduced shard, without the corrupt payloads of `rejected` peers.

    `data` is None if no payload was usable."""

    data: bytes | None
    rejected: tuple[PeerId, ...] = ()


# (round, shard, inputs)
ReduceShard = Callable[[int, int, Sequence[tuple[PeerId, float, bytes]]], Reduction]
# (round, shards, inputs with the payloads of all of them), one result for each shard
ReduceRun = Callable[[int, range, Sequence[tuple[PeerId, float, Sequence[bytes]]]], list[Reduction]]
CheckShard = Callable[[int, int, bytes], bool]  # (round, shard, payload)


@dataclass(frozen=True, slots=True)
class Cadence:
    """The rounds of a stream: `first` and every `stride`-th after it.

    Streams of whole models share one axis of rounds, and so do the streams of each stage
    (swarm/protocol/axes.py)."""

    first: int = 0
    stride: int = 1

    def upto(self, number: int) -> int:
        """Return the last round up to `number`, or the one before the first if there is none."""
        return self.first + max((number - self.first) // self.stride, -1) * self.stride

    def since(self, number: int) -> int:
        """Return the first round from `number` on."""
        return self.upto(number - 1) + self.stride


@dataclass(frozen=True, slots=True)
class Stream:
    """Tensors that are synchronised together: opaque shards and two callbacks that read them.

    `max_shard_bytes` bounds each fetch. A stream with a `stage` belongs to the peers that serve it;
    all others only vote in its rounds. `wants` selects the shards that this peer fetches of rounds
    to which it does not contribute: "all", of a state that it holds; "last", which tells a
    pipeline's trainer what the round is about; or "none"."""

    name: str
    terms: RoundTerms
    max_shard_bytes: int
    reduce: ReduceShard
    check: CheckShard
    cadence: Cadence = Cadence()
    stage: int | None = None
    wants: Literal["all", "last", "none"] = "all"
    reduce_run: ReduceRun | None = None  # does what `reduce` does for several small shards at once

    def __post_init__(self) -> None:
        terms, first, stride = self.terms, self.cadence.first, self.cadence.stride
        if stride < 1 or first < 0 or terms.enough < 0:
            raise ValueError(
                f"stream {self.name}: first {first}, stride {stride}, enough {terms.enough}; "
                "the stride must be at least 1, the others at least 0"
            )
        gathers_all = terms.kind == "gather" and not self.is_paired
        if terms.enough and not gathers_all:
            raise ValueError(
                f"stream {self.name}: enough {terms.enough}; only a gather of all members knows "
                "`enough`, so set it to 0"
            )
        most = max_shards(terms.kind)
        if not 1 <= terms.shards <= most:
            raise ValueError(
                f"stream {self.name}: a {terms.kind} has 1 to {most} shards, "
                f"got {terms.shards}; cut larger ones"
            )

    @property
    def is_paired(self) -> bool:
        """True if its exchanges are between two peers each (swarm/peer/pairing.py)."""
        return self.terms.group == 2

    def reduced(
        self, round_number: int, run: range, inputs: Sequence[tuple[PeerId, float, Sequence[bytes]]]
    ) -> list[Reduction]:
        """Reduce neighbouring shards, of which each input has the payloads."""
        if self.reduce_run is not None and len(run) > 1:
            return self.reduce_run(round_number, run, inputs)
        by_shard = (
            [(peer, weight, payloads[place]) for peer, weight, payloads in inputs]
            for place in range(len(run))
        )
        return list(map(functools.partial(self.reduce, round_number), run, by_shard))

    def wanted(self, close: CloseList) -> list[RoundItem]:
        """Return the items of a round that this peer fetches without contributing to it."""
        match self.wants:
            case "all":
                return list(close.items)
            case "last":
                return last_bundles(close, self.terms.bundles)
            case "none":
                return []


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """The outcome of an exchange: `reduced` by shard, or `gathered` by peer (pairs and gathers).

    `taken` tells for each shard whether this peer's contribution is in it. `tokens` are the run's
    agreed tokens after the round, `state` the hash of the state before it that most members had.
    `twins` are members that offered exactly this peer's bytes to a collective round."""

    key: Key
    status: RoundStatus
    next_round: int
    participants: tuple[PeerId, ...] = ()
    weights: tuple[float, ...] = ()
    reduced: tuple[bytes, ...] | None = None
    gathered: dict[PeerId, tuple[bytes, ...]] | None = None
    taken: tuple[bool, ...] = ()
    tokens: int = 0
    state: bytes = b""
    twins: tuple[PeerId, ...] = ()
