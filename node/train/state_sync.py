"""A node's state in the run: the state it serves and adopts, what it missed, and how far the run is.

Everything here is the same in a process and in the simulator; what computes goes through the injected `compute`.
"""

import asyncio
import logging
import math
from collections.abc import Mapping
from typing import Protocol

import safetensors.torch
import torch

from farflock.node.train.driver import Apply, Driver, RunPosition
from farflock.node.train.exchange_client import ExchangeClient
from farflock.optimizers.method import ExchangeKey, State
from farflock.optimizers.parts.state import WrongState, counter, state_hash
from farflock.swarm.compute import Compute
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.peer.snapshots import DownloadProgress, Snapshot, Snapshots

STATE = "state"  # the name under which a method's whole state is served
MARK = "mark."  # in a snapshot, before a name of `StateSync.marks`
NEXT = "next."  # in a snapshot, before a stream's name: its first round that is not in the state
CHUNK_BYTES = 1024 * 1024
STATE_COPIES = 8  # of the model in fp32: methods keep one to four, with moments and anchors
HEAD_BYTES = 1024 * 1024  # names, shapes and counters

log = logging.getLogger(__name__)


class CorruptSnapshot(Exception):
    """A downloaded snapshot that is not what its hash says, or not a state at all."""


class StatePeer(Protocol):
    """A peer, as its node's state sync sees it (swarm/peer/peer.py)."""

    context: PeerContext
    snapshots: Snapshots

    def reach(self, stage: int | None = None) -> int:
        """The earliest round from which the logs of a stage's streams go on; -1 where none is open."""
        ...


class StateSync:
    """One node's state in one run, for one method: of the stage of its exchange client, or of the whole
    model."""

    def __init__(self, peer: StatePeer, driver: Driver, client: ExchangeClient, compute: Compute) -> None:
        self._peer, self._driver, self._client, self._compute = peer, driver, client, compute
        self._state_name = STATE if client.stage is None else f"{STATE}/{client.stage}"
        self.marks: dict[str, int] = {}  # numbers that go with the state: a peer that adopts it has them too

    def open(self, rounds: Mapping[str, int] | None = None, tokens: int = 0) -> None:
        """Begin all streams of the method, after these rounds of them, and serve its state to joiners."""
        self._driver.begin(rounds or {}, tokens)
        begun = self._driver.position.rounds
        for number, template in enumerate(self._driver.streams):
            noted = self._driver.contributions is not None and not number
            self._client.open(template, begun[template.key.stream], 0 if number else tokens, noted=noted)
        self._peer.context.progress_tokens = lambda: self._driver.tokens
        self._peer.snapshots.serve(self._state_name, self._snapshot)

    @property
    def feedback(self) -> State:
        """The residuals of this node as a reducer, for a checkpoint."""
        return self._client.feedback()

    def load_state(self, position: RunPosition, feedback: State) -> None:
        """Open the streams again where a checkpoint was written."""
        self.open(position.rounds, position.agreed_tokens)
        self._client.load_state(feedback)
        self._driver.load_position(position)

    @property
    def applied_round(self) -> int:
        """The last round of any stream in the method's state; below 0 before the first."""
        return max(self._driver.position.rounds.values(), default=-1)

    @property
    def next_rounds(self) -> dict[str, int]:
        """The first round of each stream that is not in the method's state, by the swarm's name of the stream."""
        return {self._client.name(key.stream): key.round for key in self._next_keys()}

    @property
    def is_behind(self) -> bool:
        """Whether a round is known to be decided that is not in the method's state, and no exchange of its
        stream is open."""
        return any(self._client.newest(key.stream) >= key.round for key in self._next_keys(idle=True))

    def missed(self) -> Apply | None:
        """The next round that was decided without this node, if its stream is idle and the content is
        here; of several streams the first on their axis."""
        for key in sorted(self._next_keys(idle=True), key=lambda key: key.round):
            result = self._client.replay(key.stream, key.round)
            if result is not None:
                return self._driver.missed(key, result)
        return None

    def _next_keys(self, *, idle: bool = False) -> list[ExchangeKey]:
        busy = {pending.stream for pending in self._driver.pending} if idle else set()
        rounds = self._driver.position.rounds
        keys = [
            ExchangeKey(entry.key.stream, rounds[entry.key.stream] + entry.stride) for entry in self._driver.streams
        ]
        return [key for key in keys if key.stream not in busy]

    async def adopt(self, timeout_s: float, downloaded: DownloadProgress = lambda here, total: None) -> None:
        """Download the run's state, verify it and make it ours: pending exchanges and local work are given up.

        A snapshot that is not what its hash says, or fits another model, is not used, and another one is asked for."""
        method, replica = self._driver.method, self._driver.replica
        async with asyncio.timeout(timeout_s):
            while True:
                least, most = self._peer.reach(self._client.stage), most_state_bytes(replica.shapes)
                snapshot = await self._peer.snapshots.fetch(
                    self._state_name, timeout_s, downloaded, least, self._client.stage, most
                )
                try:
                    state = decode_state(snapshot)
                    rounds = self._rounds_in(state)
                    await self._compute(lambda: method.restore(replica, state, "adopt"))  # noqa: B023 - awaited here
                    break
                except (CorruptSnapshot, WrongState) as error:
                    log.warning("a snapshot is not used: %s", error)
                    self._peer.snapshots.distrust(self._state_name)
        self._driver.forget()
        self.open(rounds, snapshot.tokens)

    def _rounds_in(self, state: State) -> dict[str, int]:
        """By stream, the last round in a snapshot; its entries are taken out, for no method knows them."""
        found = {
            entry.key.stream: counter(NEXT + entry.key.stream, state) - entry.stride for entry in self._driver.streams
        }
        for name in found:
            del state[NEXT + name]
        self.marks = {name[len(MARK) :]: int(state.pop(name)) for name in list(state) if name.startswith(MARK)}
        return found

    async def _snapshot(self) -> Snapshot:
        return await self._compute(self._snapshot_now)

    def _snapshot_now(self) -> Snapshot:
        """Runs in the worker that applies results: the state and the rounds that are in it belong together."""
        driver, position = self._driver, self._driver.position
        state = driver.method.snapshot(driver.replica)
        for key in self._next_keys():
            state[NEXT + key.stream] = torch.tensor(key.round)
        state |= {MARK + name: torch.tensor(number) for name, number in self.marks.items()}
        return encode_state(state, min(position.rounds.values(), default=-1), position.agreed_tokens)


def most_state_bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """What the state of any method takes at most for parameters of these shapes: whoever serves more is not downloaded."""
    return HEAD_BYTES + STATE_COPIES * 4 * sum(math.prod(shape) for shape in shapes.values())


def encode_state(state: State, round_number: int, tokens: int) -> Snapshot:
    """These tensors as they are served, as of a round (less than 0: before the first)."""
    encoded = safetensors.torch.save(dict(state))
    chunks = tuple(encoded[at : at + CHUNK_BYTES] for at in range(0, len(encoded), CHUNK_BYTES))
    return Snapshot(max(round_number, -1), state_hash(state), tokens, chunks)


def decode_state(snapshot: Snapshot) -> State:
    """A snapshot's tensors, verified against its hash; `CorruptSnapshot` otherwise. safetensors runs no code."""
    try:
        state = safetensors.torch.load(b"".join(snapshot.chunks))
    except (safetensors.SafetensorError, ValueError) as error:
        raise CorruptSnapshot(f"the snapshot of round {snapshot.round} cannot be read: {error}") from None
    if state_hash(state) != snapshot.state:
        raise CorruptSnapshot(f"the snapshot of round {snapshot.round} is not what its hash says; ask another member")
    return state
