"""Serves chunks: what each asker wants waits in a queue of its own, and leaves in pieces."""

import collections
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from farflock.swarm.batch import BATCH_BYTES, answer, is_sensible
from farflock.swarm.chunk_store import Store
from farflock.swarm.links import Liveness, PeerId
from farflock.swarm.messages import Message, Miss, Piece, Probe, Probed, Want
from farflock.swarm.packing import packed
from farflock.swarm.uplink_share import UplinkShare

PIECE_BYTES = 64 * 1024  # the unit in which a chunk is asked for; a piece has one or more
MAX_PIECE_BYTES = 9 * PIECE_BYTES  # a long shard, 1 MiB and its head, takes two
SERVE_TIMEOUT_S = 5.0
MAX_WANTS = 64  # requests waiting to be served, per asker
MAX_BATCHES = 8  # of them, for batches: these requests are long
MAX_ASKERS = 256


class ChunkCarrier(Protocol):
    """The interface that chunks need: a peer's links, as in `PeerContext`, and its task group."""

    def send(self, peer: PeerId, message: Message, /) -> bool:
        """Send a message, best effort; return False if it was refused."""
        ...

    async def send_piece(
        self, peer: PeerId, piece: Piece | Probed, body: memoryview, timeout_s: float, /
    ) -> bool:
        """Send a piece with its bytes, or what follows it, in order; return False if no room became
        free in time."""
        ...

    def queued_bytes(self) -> int:
        """Return the bytes of pieces that wait for this peer's own line."""
        ...

    def life(self, peer: PeerId, /) -> Liveness:
        """Return the peer's apparent liveness."""
        ...

    def spawn(self, work: Coroutine[None, None, None], /) -> object:
        """Start a task owned by the peer."""
        ...


class ReadState(Protocol):
    """A state that peers read (swarm/protocol/state_readers.py)."""

    def followed(
        self, asker: PeerId, stream: str, applied: int, now_s: float, *, current: bool
    ) -> None:
        """Note up to which round of a stream a reader has all, and whether none is decided after
        that."""
        ...


@dataclass(slots=True)
class StateReaders:
    """The peers that read this peer's states, as the rest of it sees them
    (swarm/peer/snapshots.py)."""

    # told who asks for which chunk; for none, a probe
    asked: Callable[[PeerId, bytes], None] = lambda asker, digest: None
    # (a peer, a chunk) -> whether it joins by that: the chunk is of a state, or of the rounds since
    read: Callable[[PeerId, bytes], bool] = lambda asker, digest: False
    states: dict[str, ReadState] = field(default_factory=dict)  # by name
    # a stream -> the round after which they need all, and the most bytes of these
    wanted: Callable[[str], tuple[int, int] | None] = lambda stream: None
    outgrown: Callable[[], None] = lambda: None  # told that rounds are not kept any more


class ChunkServer:
    """Serves the chunks of a store over links."""

    def __init__(
        self, store: Store, carrier: ChunkCarrier, dropped: collections.Counter[str]
    ) -> None:
        self._store, self._carrier, self._dropped = store, carrier, dropped
        self._wants: dict[PeerId, collections.deque[Want | Probe]] = {}
        self.sent_bytes = 0
        self.readers = StateReaders()
        self._share = UplinkShare(carrier.queued_bytes)

    @property
    def wants(self) -> dict[PeerId, int]:
        """The numbers of requests that wait to be served, by asker."""
        return {asker: len(queue) for asker, queue in self._wants.items()}

    def receive(self, sender: PeerId, want: Want) -> None:
        """Queue a request, or drop and count it."""
        if not is_askable(want):
            self._dropped["senseless want"] += 1
            return
        self.readers.asked(sender, want.digest)
        if want.digest not in self._store:
            self._carrier.send(sender, Miss(want.digest))
            return
        queue = self._queue(sender)
        wants = [queued for queued in queue or () if isinstance(queued, Want)]
        if queue is None or is_queued(wants, want):
            return  # a repeated request: the bytes are on their way
        batches = sum(bool(queued.more) for queued in wants) if want.more else 0
        if len(queue) < MAX_WANTS and batches < MAX_BATCHES:
            queue.append(want)
        else:
            self._dropped["too many wants"] += 1

    def probe(self, sender: PeerId, probe: Probe) -> None:
        """Queue an answer behind all that the sender asked for."""
        self.readers.asked(sender, b"")
        queue = self._queue(sender)
        if queue is None:
            return
        if len(queue) < MAX_WANTS:
            queue.append(probe)
        else:
            self._dropped["too many wants"] += 1

    def _queue(self, asker: PeerId) -> collections.deque[Want | Probe] | None:
        """Return the requests of one peer, which are served from now on; None for one too many."""
        queue = self._wants.get(asker)
        if queue is None:
            if len(self._wants) >= MAX_ASKERS:
                self._dropped["too many askers"] += 1
                return None
            queue = self._wants[asker] = collections.deque()
            self._carrier.spawn(self._serve(asker, queue))
        return queue

    async def _serve(self, asker: PeerId, queue: collections.deque[Want | Probe]) -> None:
        """Send what one peer asked for, in order, as fast as its link takes it.

        The head of the queue is the request being served, shortened as pieces are sent."""
        try:
            while queue:
                want = queue[0]
                if isinstance(want, Probe):
                    answer = Probed(want.number)
                    await self._carrier.send_piece(asker, answer, memoryview(b""), SERVE_TIMEOUT_S)
                elif (data := self._store.view(want.digest)) is None:
                    self._carrier.send(asker, Miss(want.digest))
                elif want.start < min(want.stop, len(data)) and await self._serve_piece(
                    asker, want, data
                ):
                    start = want.stop if want.more else want.start + piece_bytes(want)
                    queue[0] = msgspec.structs.replace(want, start=start)
                    continue
                queue.popleft()
        finally:
            del self._wants[asker]

    async def _serve_piece(self, asker: PeerId, want: Want, data: memoryview) -> bool:
        if want.more and len(data) <= BATCH_BYTES:
            piece, body = answer(self._store, want, data)
        else:
            piece, body = _packed(*piece_of(want, data)) if want.packs else piece_of(want, data)
        joins = self.readers.read(asker, want.digest)
        if joins:
            await self._share.turn(len(body), self._others_wait)
        sent = await self._carrier.send_piece(asker, piece, body, SERVE_TIMEOUT_S)
        if sent and not joins:
            self._share.others_sent(len(body))
        self.sent_bytes += len(body) if sent else 0
        return sent

    def _others_wait(self) -> bool:
        """Return whether anything is asked for next by which nobody joins."""
        heads = ((asker, queue[0]) for asker, queue in self._wants.items() if queue)
        return any(
            isinstance(head, Want) and not self.readers.read(asker, head.digest)
            for asker, head in heads
        )


def piece_of(want: Want, data: memoryview) -> tuple[Piece, memoryview]:
    """Return the next piece of a chunk for a request, and its bytes."""
    stop = min(want.start + piece_bytes(want), max(want.stop, want.start + PIECE_BYTES))
    return Piece(want.digest, want.start, len(data)), data[want.start : stop]


def _packed(piece: Piece, body: memoryview) -> tuple[Piece, memoryview]:
    """Return a piece in fewer bytes, where that is possible."""
    short = packed(body)
    if short is None:
        return piece, body
    return msgspec.structs.replace(piece, packed=True), memoryview(short)


def is_askable(want: Want) -> bool:
    """Return whether a correct peer could have sent this request."""
    return want.start < want.stop and not want.start % PIECE_BYTES and is_sensible(want)


def is_queued(queue: Iterable[Want], want: Want) -> bool:
    """Return whether a request asks for nothing that is not asked for already."""
    same = [
        queued
        for queued in queue
        if queued.digest == want.digest and want.more in (b"", queued.more)
    ]
    return any(queued.start <= want.start and want.stop <= queued.stop for queued in same)


def piece_bytes(want: Want) -> int:
    """Return the length of the pieces that answer a request: whole units."""
    return max(PIECE_BYTES, min(want.piece, MAX_PIECE_BYTES) // PIECE_BYTES * PIECE_BYTES)
