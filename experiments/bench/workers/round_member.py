"""One member of a round of two, without a network: what it computes, phase by phase, and the memory
that this takes, on the CPU or on a device.

`python -m farflock.experiments.bench.workers.round_member SETTINGS` prints one JSON line for each
round. The other member's payloads are this one's own, in memory of their own. The other half of a
mean is reduced here too, but is not counted: it is the other member's work.
"""

import functools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TypeVar, cast

import msgspec
import torch
from torch import nn

from farflock.compression.catalog import codec
from farflock.experiments.bench.workers.memory_peer import Peak
from farflock.node.model.device import Device, choose
from farflock.node.model.replica import OnDevice, PlainReplica
from farflock.node.train.driver import Apply, Driver, EncodedExchange
from farflock.node.train.exchange_client import ExchangeClient, layout_of
from farflock.node.train.shards import Reducer
from farflock.optimizers.catalog import method
from farflock.optimizers.method import Exchange, Progress
from farflock.optimizers.parts.spread import in_turn, spread_over
from farflock.swarm.chunk_store import digest_of
from farflock.swarm.messages import Key
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.protocol.exchange.streams import RoundOutcome, Stream

DELTA = 1e-3  # deviation of what a round's steps change
RATE = 1e-3
ME = "me"
ME, OTHER = "me", "other"
RUN_SEED = 1
WIDTH = 2048  # columns of each matrix but the embedding
EMBEDDING = 4  # the embedding has one parameter in so many

Result = TypeVar("Result")


class Settings(msgspec.Struct, frozen=True):
    """The owner's settings."""

    method: str
    options: dict[str, str | int | float]
    parameters: int
    rounds: int
    moments: bool  # True for a method that reads the inner optimizer's
    codec_threads: int = 1  # above 1: of every second round
    device: str = "cpu"  # that has the model and the method's state


def matrices(parameters: int) -> dict[str, tuple[int, ...]]:
    """Return shapes as of a language model of about this size: an embedding, and layers of square
    matrices."""
    rows = max(parameters // EMBEDDING // WIDTH, 1)
    layers = max((parameters - rows * WIDTH) // WIDTH**2, 1)
    rows = max((parameters - layers * WIDTH**2) // WIDTH, 1)
    shapes: dict[str, tuple[int, ...]] = {"embedding": (rows, WIDTH)}
    return shapes | {f"layers_{number}": (WIDTH, WIDTH) for number in range(layers)}


@dataclass
class Clock:
    """The processor time of each phase of a round, and what it lasted, in seconds. On a device
    (None: the CPU) a phase lasts until the device's work is done."""

    device: Device | None = None
    phases: dict[str, float] = field(default_factory=dict)
    lasted: dict[str, float] = field(default_factory=dict)

    def timed(self, phase: str, work: Callable[[], Result]) -> Result:
        """Do a piece of work as part of a phase."""
        begin_s, begun_s = time.process_time(), time.perf_counter()
        result = work()
        if self.device is not None:
            self.device.wait()
        spent_s, lasted_s = time.process_time() - begin_s, time.perf_counter() - begun_s
        self.phases[phase] = self.phases.get(phase, 0.0) + spent_s
        self.lasted[phase] = self.lasted.get(phase, 0.0) + lasted_s
        return result


class Alone:
    """A peer without a network: it keeps the stream that is opened."""

    context: PeerContext
    stream: Stream

    def open(self, stream: Stream, after_round: int = -1, tokens: int = 0) -> None:
        """Keep the stream."""
        self.stream = stream

    async def exchange(
        self,
        name: str,
        number: int,
        shards: Sequence[bytes],
        *,
        weight: float,
        tokens: int,
        state: bytes,
    ) -> RoundOutcome:
        """Raise `AssertionError`: rounds are made by hand here."""
        raise AssertionError(f"{name} {number} is exchanged by hand")

    def decided(self, name: str, number: int) -> RoundOutcome | None:
        """Return None: no round is decided by others."""
        return None

    def has_passed(self, name: str, number: int) -> bool:
        """Return False: no round is known."""
        return False

    def run_s(self) -> float:
        """Return 0: no time passes."""
        return 0.0


class Member:
    """A method over parameters that are changed by hand, and the code that a node has around it."""

    def __init__(self, settings: Settings) -> None:
        self._chance = torch.Generator().manual_seed(1)
        device = choose(settings.device)
        self.device = None if device.place.type == "cpu" else device
        module = nn.Module()
        for name, shape in matrices(settings.parameters).items():
            zeros = torch.zeros(shape, device=device.place)
            module.register_parameter(name, nn.Parameter(zeros))
        self.count = sum(x.numel() for x in module.parameters())
        inner = (torch.optim.AdamW if settings.moments else torch.optim.SGD)(
            module.parameters(), lr=RATE
        )
        self.replica = PlainReplica(module, inner, None)
        if self.device is not None:
            self.replica.storage = OnDevice(device.place).allocate
        for what in ("param", *(("exp_avg", "exp_avg_sq") if settings.moments else ())):
            self._fill(what)
        self._peer = Alone()
        self._peer.context = cast(PeerContext, SimpleNamespace(me=ME))  # all that is asked of it
        made = method(settings.method, **settings.options)
        self.driver = Driver(made, self.replica)
        self.client = ExchangeClient(self._peer, RUN_SEED, home=self.replica.home)
        (template,) = self.driver.streams
        self.client.open(template)
        self.spread = spread_over(settings.codec_threads)
        self.steps, self.peak = 0, Peak()

    def _fill(self, what: str) -> None:
        for name, shape in self.replica.shapes.items():
            self.replica.write({name: torch.zeros(shape)}, what)
        self._add(what)

    def _add(self, what: str) -> None:
        """Add normal values, the same to all blocks of a size; to a mean of squares, their squares.

        Drawing all of a large model's values would take longer than the round."""
        squares = what == "exp_avg_sq"

        @functools.cache
        def drawn(count: int) -> torch.Tensor:
            values = DELTA * torch.randn(count, generator=self._chance)
            return (values.square() if squares else values).to(self.replica.home)

        def change(block: object, x: torch.Tensor) -> tuple[torch.Tensor]:
            return (x + drawn(x.numel()).view(x.shape),)

        self.replica.update(self.replica.names, (what,), change)

    def round(self) -> dict[str, object]:
        """Make one round; return the seconds of its phases, and bytes."""
        clock, driver, replica = Clock(self.device), self.driver, self.replica
        self.steps += 1
        # in turns, so that both see the same load on the machine
        self.client.spread = in_turn if self.steps % 2 else self.spread
        driver.method.local_step(replica, Progress(self.steps))
        self._add("param")
        self.peak.forget()
        before = self.peak.now_bytes()
        on_device = 0 if self.device is None else self.device.begin_peak()
        (exchange,) = clock.timed("due", lambda: driver.after_step(Progress(self.steps)))
        clock.timed("hash", lambda: driver.hashed(exchange, driver.claim(exchange)))
        claim = driver.claim(exchange)  # whose hash is known now
        offer = clock.timed("encode", lambda: driver.encoded(exchange, claim, self.client.encode))
        outcome, carried = self._exchanged(clock, offer)
        result = clock.timed(
            "decode", lambda: self.client.decode(exchange.key, outcome, offer.payloads)
        )
        assert result.status == "ok", f"the round ended {result.status}"
        driver.resolve(exchange.key, result)
        action = driver.next(Progress(self.steps))
        assert isinstance(action, Apply)
        clock.timed("apply", lambda: driver.apply(action, Progress(self.steps)))
        return {
            "seconds": clock.phases,
            "lasted": clock.lasted,
            "spread": self.client.spread is not in_turn,
            "extra_bytes": self.peak.highest_bytes() - before,
            "device_bytes": 0 if self.device is None else self.device.peak_bytes() - on_device,
            "payload_bytes": carried,
            "parameters": self.count,
        }

    def _exchanged(self, clock: Clock, offer: EncodedExchange) -> tuple[RoundOutcome, int]:
        """Return the outcome of a round of two with equal contributions, and the bytes in it."""
        exchange, mine = offer.exchange, offer.payloads
        clock.timed("digest", lambda: [digest_of(payload) for payload in mine])
        if exchange.kind == "gather":
            theirs = tuple(map(_copy, mine))
            clock.timed("digest", lambda: [digest_of(payload) for payload in theirs])
            clock.timed("check", lambda: self._check(exchange, theirs))
            outcome = _outcome(exchange, len(mine), gathered={ME: mine, OTHER: theirs})
            return outcome, sum(map(len, mine)) + sum(map(len, theirs))
        half = len(mine) // 2
        copies = [_copy(payload) for payload in mine[:half]]
        clock.timed("digest", lambda: [digest_of(payload) for payload in copies])
        reduced = clock.timed("reduce", lambda: list(self._reduced_here(exchange, mine, copies)))
        clock.timed("digest", lambda: [digest_of(payload) for payload in reduced])
        rest = list(self._reduced_there(exchange, mine, half))
        clock.timed("digest", lambda: [digest_of(payload) for payload in rest])
        everything = (*mine, *copies, *reduced, *rest)
        outcome = _outcome(exchange, len(mine), reduced=(*reduced, *rest))
        return outcome, sum(map(len, everything))

    def _reduced_here(
        self, exchange: Exchange, mine: Sequence[bytes], theirs: Sequence[bytes]
    ) -> Iterator[bytes]:
        """Yield the reductions of this member's half."""
        for index, payload in enumerate(theirs):
            inputs = [(ME, 1.0, mine[index]), (OTHER, 1.0, payload)]
            data = self._peer.stream.reduce(exchange.key.round, index, inputs).data
            assert data is not None
            yield data

    def _reduced_there(
        self, exchange: Exchange, mine: Sequence[bytes], first: int
    ) -> Iterator[bytes]:
        """Yield those of the other half, by a reducer that keeps no residual here."""
        layout = layout_of(exchange, RUN_SEED)
        reducer = Reducer(layout, codec(exchange.return_codec), compensate=False)
        for index in range(first, len(mine)):
            inputs = [(ME, 1.0, mine[index]), (OTHER, 1.0, mine[index])]
            data = reducer.reduce(exchange.key.round, index, inputs).data
            assert data is not None
            yield data

    def _check(self, exchange: Exchange, payloads: Sequence[bytes]) -> None:
        for index, payload in enumerate(payloads):
            assert self._peer.stream.check(exchange.key.round, index, payload)


def _copy(payload: bytes) -> bytes:
    return bytes(bytearray(payload))


def _outcome(
    exchange: Exchange,
    shards: int,
    reduced: tuple[bytes, ...] | None = None,
    gathered: dict[str, tuple[bytes, ...]] | None = None,
) -> RoundOutcome:
    return RoundOutcome(
        Key(exchange.key.stream, exchange.key.round),
        "ok",
        exchange.key.round + exchange.stride,
        (ME, OTHER),
        (1.0, 1.0),
        reduced,
        gathered,
        (True,) * shards,
    )


def main(settings: Settings) -> None:
    """Print the rounds."""
    torch.set_num_threads(1)
    member = Member(settings)
    for _ in range(settings.rounds):
        sys.stdout.write(json.dumps(member.round()) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Settings))
