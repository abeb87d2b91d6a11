"""The one bulk primitive: chunks of bytes, named by their SHA-256, fetched from whoever holds them.

The receiver asks for ranges that it has room for (`Want`), so nobody can fill its memory; pieces that were not asked
for are dropped and counted. A chunk is verified before anybody sees it. A holder that stays silent for `STALL_S` is
left for the next one, and only what is missing is asked for again.
"""

import asyncio
import collections
import contextlib
import hashlib
from collections.abc import Callable, Collection, Coroutine, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from farflock.swarm.byte_budget import ByteBudget
from farflock.swarm.links import Liveness, PeerId
from farflock.swarm.messages import MAX_CHUNK_BYTES, Message, Miss, Piece, Want

PIECE_BYTES = 64 * 1024
WINDOW_BYTES = 2 * 1024 * 1024  # asked for and not yet here, per holder
ASK_BYTES = 20 * PIECE_BYTES  # asked for at once unless less is missing: a whole shard, so that chunks come one by one
INBOUND_BYTES = 64 * 1024 * 1024  # buffers of unfinished fetches, in total
STALL_S = 1.0
GAP_S = 0.3  # between pieces of one request, which come one after the other
SERVE_TIMEOUT_S = 5.0
MAX_WANTS = 64  # waiting to be served, per asker
MAX_ASKERS = 256


class ChunkCarrier(Protocol):
    """The carrier of the chunk protocol: a peer's links, as `PeerContext` offers them, and its task group."""

    def send(self, peer: PeerId, message: Message, /) -> bool:
        """Best effort; False if the message was refused."""
        ...

    async def send_piece(self, peer: PeerId, piece: Piece, body: memoryview, timeout_s: float, /) -> bool:
        """Send a piece with its bytes; False if there was no room for it in time."""
        ...

    def life(self, peer: PeerId, /) -> Liveness:
        """The peer's liveness, as it seems."""
        ...

    def spawn(self, work: Coroutine[None, None, None], /) -> object:
        """Start a task that the peer owns."""
        ...


def digest_of(data: bytes | bytearray | memoryview) -> bytes:
    """The name of a chunk."""
    return hashlib.sha256(data).digest()


def is_intact(data: bytes | bytearray, digest: bytes) -> bool:
    """True if these are the bytes that the name stands for."""
    return digest_of(data) == digest


class Store:
    """Chunks in memory: kept while pinned by somebody, and after that while the budget lasts, oldest out first."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._chunks: collections.OrderedDict[bytes, bytes] = collections.OrderedDict()
        self._pins: dict[bytes, set[Hashable]] = {}
        self._pinned_by: dict[Hashable, dict[bytes, None]] = {}  # in their order: it decides which goes out first
        self.size_bytes = 0

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._chunks

    def get(self, digest: bytes) -> bytes | None:
        """The chunk, or None."""
        return self._chunks.get(digest)

    def put(self, data: bytes, pin: Hashable, verified: bytes | None = None) -> bytes:
        """Keep a chunk at least until `pin` is released; returns its digest, or takes it from who has `verified` it."""
        digest = verified or digest_of(data)
        if digest not in self._chunks:
            self._chunks[digest] = data
            self.size_bytes += len(data)
        self.pin(digest, pin)
        self._trim()
        return digest

    def pin(self, digest: bytes, pin: Hashable) -> None:
        """Keep a chunk that is here for one more user."""
        self._pins.setdefault(digest, set()).add(pin)
        self._pinned_by.setdefault(pin, {})[digest] = None

    def release(self, pin: Hashable) -> None:
        """This user needs its chunks no longer; they stay while there is room."""
        self.keep_only((), pin)

    def keep_only(self, digests: Collection[bytes], pin: Hashable) -> None:
        """This user needs no more than these of its chunks; the others stay while there is room."""
        pinned, wanted = self._pinned_by.pop(pin, {}), set(digests)
        if kept := {digest: None for digest in pinned if digest in wanted}:
            self._pinned_by[pin] = kept
        for digest in (digest for digest in pinned if digest not in kept):
            pins = self._pins[digest]
            pins.discard(pin)
            if not pins:
                del self._pins[digest]
                if digest in self._chunks:
                    self._chunks.move_to_end(digest)
        self._trim()

    def _trim(self) -> None:
        loose = [digest for digest in self._chunks if digest not in self._pins] if self._over() else []
        for digest in loose:
            if not self._over():
                break
            self.size_bytes -= len(self._chunks.pop(digest))

    def _over(self) -> bool:
        return self.size_bytes > self._budget_bytes


@dataclass(slots=True)
class _Fetching:
    """One chunk on its way in."""

    digest: bytes
    data: bytearray
    missing: set[int]  # indices of pieces
    mixing: bool  # whether several holders may serve one copy: faster, but a false copy then convicts nobody
    without: set[PeerId]  # who said that it has no such chunk
    asked: set[PeerId] = field(default_factory=set)  # nobody else's pieces are taken
    refused: set[PeerId] = field(default_factory=set)  # silent or without it: asked again when nobody else is left
    served: set[PeerId] = field(default_factory=set)
    holder: PeerId | None = None  # who is asked now
    window: ByteBudget | None = None  # its window, of which
    room_bytes: int = 0  # are taken for what it has not sent yet
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def begin_again(self) -> None:
        """Forget what has come so far."""
        self.missing = set(range(_pieces(len(self.data))))
        self.served.clear()

    def give(self, size: int) -> None:
        """Some of what was asked for is here: others may ask the same holder for as much."""
        given = min(size, self.room_bytes)
        self.room_bytes -= given
        if self.window is not None:
            self.window.give(given)


class Chunks:
    """Fetches and serves chunks over links; one per peer, driven by its owner's receive loop and task group."""

    def __init__(self, store: Store, carrier: ChunkCarrier) -> None:
        self.store = store
        self._carrier = carrier
        self._incoming: dict[bytes, _Fetching] = {}
        self._wants: dict[PeerId, collections.deque[Want]] = {}
        self._inbound = ByteBudget(INBOUND_BYTES)
        self._windows: dict[PeerId, ByteBudget] = {}  # of the holders that are asked now
        self._heard_s: dict[PeerId, float] = {}
        self.dropped: collections.Counter[str] = collections.Counter()

    async def fetch(
        self,
        digest: bytes,
        size: int,
        holders: Callable[[], Sequence[PeerId]],
        pin: Hashable,
        timeout_s: float,
        *,
        final: bool = False,
    ) -> bool:
        """Get a chunk into the store, pinned; False if nobody delivered it in time. `holders` is asked anew whenever
        one is needed, so that peers which come to hold it meanwhile are used. If `final`, who is gone or says that it has
        no such chunk will never have it: False as soon as nobody else is left."""
        if digest in self.store:
            self.store.pin(digest, pin)
            return True
        if size > MAX_CHUNK_BYTES:
            return False
        if size == 0:  # one chunk has no bytes, and needs nobody to send it; for any other no piece would ever come
            return digest == self.store.put(b"", pin)
        try:
            async with asyncio.timeout(timeout_s):
                data = await self._fetch_whole(digest, size, holders, final)
        except TimeoutError:
            return False
        if data is None:
            return False
        self.store.put(data, pin, verified=digest)
        return True

    def receive(self, sender: PeerId, message: Want | Piece | Miss, body: memoryview | bytes) -> None:
        """Take in a message of the chunk protocol."""
        match message:
            case Want():
                self._enqueue(sender, message)
            case Piece():
                self._take_piece(sender, message, body)
            case Miss(digest=digest):
                fetching = self._incoming.get(digest)
                if fetching is not None and sender in fetching.asked:
                    fetching.refused.add(sender)
                    fetching.without.add(sender)
                    fetching.changed.set()

    async def _fetch_whole(
        self, digest: bytes, size: int, holders: Callable[[], Sequence[PeerId]], final: bool
    ) -> bytes | None:
        liars: set[PeerId] = set()  # who alone served a chunk that was not what its name says
        without: set[PeerId] = set()  # who said that it has none

        def asked() -> Sequence[PeerId]:
            honest = _honest(holders, liars)
            return [peer for peer in honest if peer not in without] if final else honest

        mixing = True
        while True:
            already = self._incoming.get(digest)
            if already is not None:  # another task fetches the same chunk: wait for it, then look again
                await already.changed.wait()
                await asyncio.sleep(STALL_S / 20)
            elif not self._living(asked()):
                if final:
                    return None
                await asyncio.sleep(STALL_S / 2)  # without any of the budget, which others can use meanwhile
            else:
                fetching = await self._fetch_once(digest, size, mixing, asked, without)
                if not fetching.missing:
                    if is_intact(fetching.data, digest):
                        return bytes(fetching.data)
                    self.dropped["content differs from its digest"] += 1
                    mixing = False
                    if len(fetching.served) == 1:
                        liars |= fetching.served
            if (stored := self.store.get(digest)) is not None:
                return stored

    async def _fetch_once(
        self,
        digest: bytes,
        size: int,
        mixing: bool,
        holders: Callable[[], Sequence[PeerId]],
        without: set[PeerId],
    ) -> _Fetching:
        """One copy, unverified; pieces are missing if no holder is alive any more. Who has no such chunk comes into
        `without`."""
        fetching = self._incoming[digest] = _Fetching(digest, bytearray(), set(), mixing, without)
        taken = 0
        try:
            taken = await self._inbound.take(size, size)
            fetching.data = bytearray(size)
            fetching.begin_again()
            while fetching.missing and await self._ask_somebody(fetching, holders()):
                pass
        finally:
            self._inbound.give(taken)
            del self._incoming[digest]
            fetching.changed.set()
        return fetching

    async def _ask_somebody(self, fetching: _Fetching, holders: Sequence[PeerId]) -> bool:
        """Ask one holder for what is missing, within its window, and wait until it delivers, refuses or stalls; False
        if none is alive."""
        living = self._living(holders)
        holder = max((peer for peer in living if peer not in fetching.refused), key=self._room, default=None)
        if holder is None:
            fetching.refused.clear()
            await asyncio.sleep(STALL_S / 2)
            return bool(living)
        window = self._windows.setdefault(holder, ByteBudget(WINDOW_BYTES))
        fetching.room_bytes = await window.take(*self._wanted(fetching), ahead=bool(fetching.served))
        fetching.holder, fetching.window = holder, window
        try:
            if self._carrier.life(holder) not in ("suspect", "dead"):  # the turn may have been long in coming
                await self._ask(fetching, holder, fetching.room_bytes)
        finally:
            fetching.give(fetching.room_bytes)
            fetching.holder = None
            if window.idle and self._windows.get(holder) is window:
                del self._windows[holder]
        return True

    def _wanted(self, fetching: _Fetching) -> tuple[int, int]:
        """The bytes to ask a holder for next: at least `ASK_BYTES` if so much is missing, at most all."""
        first = min(fetching.missing) * PIECE_BYTES
        least = max(min(ASK_BYTES, len(fetching.data) - first), WINDOW_BYTES // MAX_WANTS)
        return least, max(least, min(WINDOW_BYTES, len(fetching.data) - first))

    async def _ask(self, fetching: _Fetching, holder: PeerId, room_bytes: int) -> None:
        """Ask for the first stretch of missing pieces that fits."""
        if not fetching.mixing and fetching.served - {holder}:
            fetching.begin_again()
        first = stop = min(fetching.missing, default=0)
        while stop in fetching.missing and (stop == first or (stop + 1 - first) * PIECE_BYTES <= room_bytes):
            stop += 1
        if stop == first:
            return  # all has come while this request waited its turn
        fetching.asked.add(holder)
        end = min(stop * PIECE_BYTES, len(fetching.data))
        if self._carrier.send(holder, Want(fetching.digest, first * PIECE_BYTES, end)):
            await self._until_delivered(fetching, holder, set(range(first, stop)))
        else:
            fetching.refused.add(holder)

    async def _until_delivered(self, fetching: _Fetching, holder: PeerId, asked: set[int]) -> None:
        """Wait for the pieces asked for. A holder that sends nothing is left for another one; one that has begun and
        falls silent has lost some on the way, and is asked again for what is missing."""
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        while fetching.missing & asked and holder not in fetching.refused:
            fetching.changed.clear()
            began = not asked <= fetching.missing
            heard_s = max(asked_s, self._heard_s.get(holder, asked_s))
            left_s = heard_s + (GAP_S if began else STALL_S) - loop.time()
            gone = self._carrier.life(holder) in ("suspect", "dead")
            if left_s <= 0 or gone:
                if gone or not began:
                    fetching.refused.add(holder)  # until everybody has been asked
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, STALL_S / 4)):
                    await fetching.changed.wait()

    def _living(self, holders: Iterable[PeerId]) -> list[PeerId]:
        return [peer for peer in holders if self._carrier.life(peer) not in ("suspect", "dead")]

    def _room(self, holder: PeerId) -> int:
        window = self._windows.get(holder)
        return window.free_bytes if window is not None else WINDOW_BYTES

    def _take_piece(self, sender: PeerId, piece: Piece, body: memoryview | bytes) -> None:
        fetching = self._incoming.get(piece.digest)
        index, offset = divmod(piece.start, PIECE_BYTES)
        if fetching is None or sender not in fetching.asked or offset or index not in fetching.missing:
            self.dropped["piece not asked for"] += 1
            return
        expected = min(PIECE_BYTES, len(fetching.data) - piece.start)
        if piece.size != len(fetching.data) or len(body) != expected:
            self.dropped["piece of the wrong size"] += 1
            return
        fetching.data[piece.start : piece.start + expected] = body
        fetching.missing.discard(index)
        fetching.served.add(sender)
        if sender == fetching.holder:
            fetching.give(expected)
        self._heard_s[sender] = asyncio.get_running_loop().time()
        if len(self._heard_s) > MAX_ASKERS:
            del self._heard_s[next(iter(self._heard_s))]
        fetching.changed.set()

    def _enqueue(self, sender: PeerId, want: Want) -> None:
        if want.start >= want.stop or want.start % PIECE_BYTES:
            self.dropped["senseless want"] += 1
            return
        if want.digest not in self.store:
            self._carrier.send(sender, Miss(want.digest))
            return
        queue = self._wants.get(sender)
        if queue is None:
            if len(self._wants) >= MAX_ASKERS:
                self.dropped["too many askers"] += 1
                return
            queue = self._wants[sender] = collections.deque()
            self._carrier.spawn(self._serve(sender, queue))
        if any(_covers(queued, want) for queued in queue):
            return  # an impatient asker: it is on its way
        if len(queue) < MAX_WANTS:
            queue.append(want)
        else:
            self.dropped["too many wants"] += 1

    async def _serve(self, asker: PeerId, queue: collections.deque[Want]) -> None:
        """Send what one asker wants, in order, as fast as its link takes it; ends when there is nothing left. The first
        in the queue is the one being served, as far as it has not been sent yet."""
        try:
            while queue:
                want = queue[0]
                data = self.store.get(want.digest)
                if data is None:
                    self._carrier.send(asker, Miss(want.digest))
                elif want.start < min(want.stop, len(data)) and await self._serve_piece(asker, want, data):
                    queue[0] = msgspec.structs.replace(want, start=want.start + PIECE_BYTES)
                    continue
                queue.popleft()
        finally:
            del self._wants[asker]

    async def _serve_piece(self, asker: PeerId, want: Want, data: bytes) -> bool:
        piece = Piece(want.digest, want.start, len(data))
        body = memoryview(data)[want.start : want.start + PIECE_BYTES]
        return await self._carrier.send_piece(asker, piece, body, SERVE_TIMEOUT_S)


def _covers(queued: Want, want: Want) -> bool:
    return queued.digest == want.digest and queued.start <= want.start and want.stop <= queued.stop


def _pieces(size: int) -> int:
    return -(-size // PIECE_BYTES)


def _honest(holders: Callable[[], Sequence[PeerId]], liars: set[PeerId]) -> Sequence[PeerId]:
    """The holders that have not lied yet; all of them again when nobody else is left."""
    return [peer for peer in holders() if peer not in liars] or holders()
