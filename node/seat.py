"""A node's seat in the run: the state it serves and adopts, what it missed, and how far the run is.

Everything here is the same in a process and in the simulator; what computes goes through the injected `compute`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import safetensors.torch

from farflock.node.courier import Courier
from farflock.node.driver import Driver
from farflock.optimizers.method import Exchange, Key, Progress, Result, State
from farflock.optimizers.state import WrongState, state_hash
from farflock.swarm.peer import Peer
from farflock.swarm.snapshots import Progress as Downloaded
from farflock.swarm.snapshots import Snapshot

STATE = "state"  # the name under which a method's whole state is served
CHUNK_BYTES = 1024 * 1024

log = logging.getLogger(__name__)


class CorruptSnapshot(Exception):
    """A downloaded snapshot that is not what its hash says, or not a state at all."""


@dataclass(frozen=True, slots=True)
class Place:
    """How far a node is in its run: the last round in its method's state, the run's agreed tokens after it, this node's own
    tokens since then, and how many members it last knew."""

    round: int = -1
    agreed_tokens: int = 0
    own_tokens: int = 0
    members: int = 1


class Seat:
    """One node's place in one run, for one method."""

    def __init__(
        self, peer: Peer, driver: Driver, courier: Courier, compute: Callable[[Callable[[], Any]], Awaitable[Any]]
    ) -> None:
        self._peer, self._driver, self._courier, self._compute = peer, driver, courier, compute
        self._streams = driver.method.streams(driver.replica)
        self._applied = -1  # the last collective round in the method's state
        self._agreed_tokens = 0
        self._own_tokens = 0  # mine since those
        self._offered: dict[Key, int] = {}
        self.members = 1

    def open(self, after_round: int = -1, tokens: int = 0) -> None:
        """Begin all streams of the method, and serve its state to joiners."""
        self._applied, self._agreed_tokens, self._own_tokens = after_round, tokens, 0
        for specimen in self._streams:
            self._courier.open(specimen, after_round, tokens)
        self._peer.port.progress_tokens = self._estimate
        self._peer.snapshots.serve(STATE, self._snapshot)

    @property
    def place(self) -> Place:
        """What a checkpoint remembers of the run."""
        return Place(self._applied, self._agreed_tokens, self._own_tokens, self.members)

    def take_up(self, place: Place) -> None:
        """Open the streams again where a checkpoint was written."""
        self.open(place.round, place.agreed_tokens)
        self._own_tokens, self.members = place.own_tokens, place.members

    @property
    def applied_round(self) -> int:
        """The last collective round in the method's state; -1 before the first, and for pairs."""
        return self._applied

    def trained(self, tokens: int) -> None:
        """Count tokens of a local step. The dead train none, although the view still lists them."""
        self._own_tokens += tokens
        port = self._peer.port
        peers = port.chain.newest.peers if port.chain is not None else (port.me,)
        self.members = sum(port.life(peer) != "dead" for peer in peers)

    def progress(self, step: int) -> Progress:
        """Where the run is: the agreed tokens, and what everybody has presumably trained since."""
        return Progress(step, self._estimate(), self._peer.run_s())

    def _estimate(self) -> int:
        return self._agreed_tokens + self._own_tokens * self.members

    async def carry(self, exchange: Exchange) -> Result:
        """Take an exchange to the swarm; `OutOfStep` if this node must adopt a snapshot first."""
        method, replica = self._driver.method, self._driver.replica
        exact = method.equality == "exact"
        state = await self._compute(lambda: state_hash(method.snapshot(replica))) if exact else b""
        self._offered[exchange.key] = self._own_tokens
        return await self._courier.carry(exchange, self._own_tokens if exact else self._estimate(), state)

    def applied(self, key: Key, result: Result) -> None:
        """Note what a result says of the run's progress."""
        offered = self._offered.pop(key, 0)
        if result.status == "failed" and not result.tokens:
            return
        self._applied = max(self._applied, key.round)
        self._agreed_tokens = max(self._agreed_tokens, result.tokens)
        if result.taken or self._driver.method.equality != "exact":
            self._own_tokens -= offered

    def missed(self) -> tuple[Key, Result] | None:
        """The next round that was decided without this node, if its stream is idle and the content is here."""
        for specimen in self._streams:
            key = Key(specimen.key.stream, self._applied + 1)
            if all(pending.stream != key.stream for pending in self._driver.pending):
                result = self._courier.replay(key.stream, key.round)
                if result is not None:
                    return key, result
        return None

    async def adopt(self, timeout_s: float, downloaded: Downloaded = lambda here, total: None) -> None:
        """Download the run's state, verify it and make it ours: pending exchanges and local work are given up.

        A snapshot that is not what its hash says, or fits another model, is not used, and another one is asked for."""
        method, replica = self._driver.method, self._driver.replica
        async with asyncio.timeout(timeout_s):
            while True:
                snapshot = await self._peer.snapshots.fetch(STATE, timeout_s, downloaded)
                try:
                    state = decode_state(snapshot)
                    await self._compute(lambda: method.restore(replica, state, "adopt"))  # noqa: B023 - awaited here
                    break
                except (CorruptSnapshot, WrongState) as error:
                    log.warning("a snapshot is not used: %s", error)
                    self._peer.snapshots.distrust(STATE)
        self._driver.forget()
        self._offered.clear()
        self.open(snapshot.round, snapshot.tokens)

    async def _snapshot(self) -> Snapshot:
        driver = self._driver
        state = await self._compute(lambda: driver.method.snapshot(driver.replica))
        tokens = self._agreed_tokens
        applied = self._applied
        encoded = await self._compute(lambda: safetensors.torch.save(state))
        chunks = tuple(encoded[at : at + CHUNK_BYTES] for at in range(0, len(encoded), CHUNK_BYTES))
        return Snapshot(applied, state_hash(state), tokens, chunks)


def decode_state(snapshot: Snapshot) -> State:
    """A snapshot's tensors, verified against its hash; `CorruptSnapshot` otherwise. safetensors runs no code."""
    try:
        state = safetensors.torch.load(b"".join(snapshot.chunks))
    except (safetensors.SafetensorError, ValueError) as error:
        raise CorruptSnapshot(f"the snapshot of round {snapshot.round} cannot be read: {error}") from None
    if state_hash(state) != snapshot.state:
        raise CorruptSnapshot(f"the snapshot of round {snapshot.round} is not what its hash says; ask another member")
    return state
