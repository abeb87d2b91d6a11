"""The one bulk primitive: chunks of bytes, named by their BLAKE3 hash, fetched from any holder.

The receiver asks for ranges that it has room for (`Want`), so no peer can fill its memory;
unrequested pieces are dropped and counted. A chunk is verified before it is used. A holder
silent for `STALL_S` is given up for the next, which is asked only for what is missing.

The receiver also says how long the pieces may be: about what the holder has lately sent in
`PIECE_S`. Long pieces cost little work a byte; on a slow line they would look like silence. Of
small chunks it asks for as many at once as fit into such a piece (swarm/batch.py).
"""

import asyncio
import collections
import contextlib
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from farflock.swarm.batch import Batch, SizedChunk, absent, fitting
from farflock.swarm.byte_budget import ByteBudget, SharedBudget
from farflock.swarm.chunk_server import (
    MAX_BATCHES,
    MAX_PIECE_BYTES,
    MAX_WANTS,
    PIECE_BYTES,
    ChunkCarrier,
    ChunkServer,
    is_askable,
)
from farflock.swarm.chunk_store import Store, is_intact
from farflock.swarm.fetching import GAP_S, Fetching, ahead_s
from farflock.swarm.lending import Lending
from farflock.swarm.links import PeerId
from farflock.swarm.messages import MAX_CHUNK_BYTES, ChunkMessage, Miss, Piece, Probe, Probed, Want
from farflock.swarm.pace import (
    REPLACE_S,
    SLOW,
    STRAY_S,
    LineSpeed,
    Pace,
    Probing,
    Watch,
    faster,
)
from farflock.swarm.packing import unpacked
from farflock.swarm.tasks import Silence

WINDOW_BYTES = 3 * 1024 * 1024  # requested and not yet received, per holder
# least request, if so much is missing: a whole shard, so that chunks arrive one by one
ASK_BYTES = 20 * PIECE_BYTES
INBOUND_BYTES = 64 * 1024 * 1024  # buffers of unfinished fetches, in total
# of them, for fetches that one holder is asked for first: if those that wait for its window could
# take all, the lines of the others would be idle
SHARE_BYTES = 8 * 1024 * 1024
GENTLE_PIECES = 2  # asked for at once of a chunk that is fetched gently
GENTLE_SILENCE_S = 30.0  # without a byte of such chunks, after which they are given up
GENTLE_CHUNK_S = 120.0  # without a byte of one of them, whatever comes of others
STALL_S = 1.0
BATCH_TRIES = 2  # requests for a batch, before its chunks are fetched elsewhere or one by one
MAX_PACES = 256  # of holders asked lately


class Chunks:
    """Fetches and serves chunks over links; one per peer, driven by its receive loop and tasks."""

    def __init__(self, store: Store, carrier: ChunkCarrier) -> None:
        self.store = store
        self._carrier = carrier
        self._incoming: dict[bytes, Fetching] = {}
        self._batched: dict[bytes, Batch] = {}  # by the digest of each of its chunks
        self._inbound = SharedBudget(INBOUND_BYTES, SHARE_BYTES)
        self._windows: dict[PeerId, ByteBudget] = {}  # of holders being asked now
        # Of their own, or what is not fetched gently would wait for what is.
        self._gentle_windows: dict[PeerId, ByteBudget] = {}
        self._paces: dict[PeerId, Pace] = {}  # of holders asked lately
        self.last_heard_s = -math.inf  # when a piece came last that was not fetched gently
        self.dropped: collections.Counter[str] = collections.Counter()
        self.server = ChunkServer(store, carrier, self.dropped)
        self.lending = Lending(self.server, carrier, self.dropped)
        self._silence = Silence()  # of what is fetched gently
        self._line = LineSpeed()

    async def fetch(
        self,
        digest: bytes,
        size: int,
        holders: Callable[[], Sequence[PeerId]],
        pin: Hashable,
        timeout_s: float | None,
        *,
        final: bool = False,
        gently: bool = False,
        liars: set[PeerId] | None = None,
        watch: Watch | None = None,
    ) -> bool:
        """Fetch a chunk into the store and pin it; return False if no holder delivered it in time.

        `holders` is called again whenever a holder is needed, so new ones are used. If `final`, a
        peer that is gone, lacks the chunk or sent a false one never gets it: return False once no
        other is left. If `gently`, ask a holder for no more than it sends in a moment, so that what
        it sends to others waits no longer, prefer faster holders, and end once no such chunk gets
        a byte for `GENTLE_SILENCE_S`, or this one for `GENTLE_CHUNK_S`; so `timeout_s` may be None.
        A caller with a `watch` ends the silence itself. Peers that sent a false copy are added to
        `liars`."""
        if digest in self.store:
            self.store.pin(digest, pin)
            return True
        if size > MAX_CHUNK_BYTES:
            return False
        # the empty chunk needs no sender; no piece would ever come for another digest
        if size == 0:
            return digest == self.store.put(b"", pin)
        limit = _while_heard(self._silence, gently and watch is None, GENTLE_SILENCE_S)
        if timeout_s is not None:
            timeout_s += ahead_s(self._incoming.values(), self._line.bytes_per_s, size)
        known_liars = set[PeerId]() if liars is None else liars
        try:
            async with asyncio.timeout(timeout_s), limit:
                data = await self._fetch_whole(
                    digest, size, holders, final, gently, known_liars, watch
                )
        except TimeoutError:
            return False
        if data is None:
            return False
        self.store.put(data, pin, verified=digest)
        return True

    async def fetch_batch(
        self,
        entries: Iterable[SizedChunk],
        holders: Callable[[], Sequence[PeerId]],
        pin: Hashable,
        timeout_s: float,
    ) -> list[SizedChunk]:
        """Fetch small chunks together into the store and pin them; return those that did not come,
        for `fetch`, which finds out who lacks or falsifies them."""
        wanted = dict(entries)
        asked: set[PeerId] = set()  # of these no more is expected
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while len(left := self._untouched(wanted)) > 1 and (
                    able := [peer for peer in self._living(holders()) if peer not in asked]
                ):
                    holder = min(able, key=self._inbound.load)
                    some = fitting(left, self._pace(holder).piece_bytes)
                    if not await self._ask_batch(Batch(holder, some), pin):
                        asked.add(holder)
        missing = absent(wanted, self.store)
        for digest in wanted:
            if digest not in missing:
                self.store.pin(digest, pin)
        return list(missing.items())

    def receive(self, sender: PeerId, message: ChunkMessage, body: memoryview | bytes) -> None:
        """Handle a message of the chunk protocol."""
        match message:
            case Want():
                self._receive_want(sender, message)
            case Piece():
                self._take_piece(sender, message, body)
            case Probe():
                self.server.probe(sender, message)
            case Probed(number=number) if sender in self._paces:
                self._paces[sender].probed(number)
            case Miss(digest=digest):
                fetching, batch = self._incoming.get(digest), self._batched.get(digest)
                if fetching is not None and sender in fetching.asked:
                    fetching.refused.add(sender)
                    fetching.without.add(sender)
                    fetching.changed.set()
                elif batch is not None and batch.holder == sender:
                    batch.ended = True
                    batch.changed.set()

    def _receive_want(self, sender: PeerId, want: Want) -> None:
        lent = want.digest not in self.store and want.digest in self.lending
        (self.lending if lent and is_askable(want) else self.server).receive(sender, want)

    @property
    def idle(self) -> bool:
        """True if no fetch is in progress and no request waits to be served."""
        windows = self._windows or self._gentle_windows
        under_way = self._incoming or self._batched or windows or self.server.wants
        return self._inbound.idle and self.lending.idle and not under_way

    def heard_s(self, holder: PeerId) -> float:
        """Return when a holder last sent a piece, on the loop's clock; -inf if it never did."""
        pace = self._paces.get(holder)
        return -math.inf if pace is None else pace.heard_s

    @property
    def fetching_bytes(self) -> int:
        """The room that the fetches in progress take."""
        batches = {id(batch): batch.size_bytes for batch in self._batched.values()}
        return sum(fetching.size for fetching in self._incoming.values()) + sum(batches.values())

    @property
    def wants(self) -> dict[PeerId, int]:
        """The numbers of requests that wait to be served, by asker."""
        return self.server.wants

    async def _fetch_whole(
        self,
        digest: bytes,
        size: int,
        holders: Callable[[], Sequence[PeerId]],
        final: bool,
        gently: bool,
        liars: set[PeerId],  # sole servers of a copy that did not match its digest
        watch: Watch | None = None,
    ) -> bytes | None:
        without: set[PeerId] = set()  # peers that do not have it

        def asked() -> Sequence[PeerId]:
            if final:
                return [peer for peer in holders() if peer not in without | liars]
            return _honest(holders, liars)

        mixing = True
        while True:
            already = self._under_way(digest)
            if already is not None:  # another task fetches this chunk: wait, then look again
                await already.changed.wait()
                await asyncio.sleep(STALL_S / 20)
            elif not (living := self._living(asked())):
                if final:
                    return None
                await asyncio.sleep(STALL_S / 2)  # holds none of the budget meanwhile
            else:
                first = min(living, key=self._inbound.load)
                strict = liars if final else None
                fetching = Fetching(digest, 0, set(), mixing, without, gently, watch, strict)
                await self._fetch_once(fetching, size, first, asked)
                if not fetching.missing:
                    data = fetching.whole()
                    if is_intact(data, digest):
                        return data
                    self.dropped["content differs from its digest"] += 1
                    mixing = False
                    if len(fetching.served) == 1:
                        liars |= fetching.served
            if (stored := self.store.get(digest)) is not None:
                return stored

    async def _fetch_once(
        self, fetching: Fetching, size: int, first: PeerId, holders: Callable[[], Sequence[PeerId]]
    ) -> None:
        """Fetch one copy, unverified, in the share of the budget of its `first` holder; pieces are
        missing if no holder is left alive."""
        digest = fetching.digest
        self._incoming[digest] = fetching
        taken = 0
        user: Hashable = ("gently", first) if fetching.gently else first
        try:
            await self._inbound.take(user, size)
            taken = size
            fetching.size = size
            fetching.begin_again()
            timed = fetching.gently and fetching.watch is None
            async with _while_heard(self._silence, timed, GENTLE_CHUNK_S, digest):
                while fetching.missing and await self._ask_somebody(fetching, holders()):
                    pass
        finally:
            self._inbound.give(user, taken)
            del self._incoming[digest]
            fetching.changed.set()

    async def _ask_somebody(self, fetching: Fetching, holders: Sequence[PeerId]) -> bool:
        """Ask one holder for the missing pieces and wait until it delivers, refuses or stalls.

        The request fits the holder's window. Return False if no holder is alive."""
        living = self._living(holders)
        able = [peer for peer in living if peer not in fetching.refused]
        if fetching.gently:
            new = [peer for peer in able if peer not in self._paces]  # to learn their speed
            able = new or _fast(fetching, able, self._paces)
        windows = self._gentle_windows if fetching.gently else self._windows
        holder = max(able, key=lambda peer: _room(windows, peer), default=None)
        if holder is None:
            fetching.refused.clear()
            await asyncio.sleep(STALL_S / 2)
            return bool(living)
        window = windows.setdefault(holder, ByteBudget(WINDOW_BYTES))
        fetching.room_bytes = await window.take(
            *self._wanted(fetching, holder), ahead=bool(fetching.served)
        )
        fetching.holder, fetching.window = holder, window
        try:
            if self._carrier.life(holder) not in ("suspect", "dead"):  # it may have died meanwhile
                fetching.alone, fetching.others = len(able) == 1, living
                await self._ask(fetching, holder, fetching.room_bytes)
        finally:
            fetching.give(fetching.room_bytes)
            fetching.holder = None
            _drop_idle(windows, holder, window)
        return True

    def _wanted(self, fetching: Fetching, holder: PeerId) -> tuple[int, int]:
        """Return the (least, most) bytes to request next; `ASK_BYTES` or more, if missing."""
        first = min(fetching.missing) * PIECE_BYTES
        if fetching.gently:
            some = min(GENTLE_PIECES * self._pace(holder).piece_bytes, fetching.size - first)
            return 2 * (max(some, WINDOW_BYTES // MAX_WANTS),)
        least = max(min(ASK_BYTES, fetching.size - first), WINDOW_BYTES // MAX_WANTS)
        return least, max(least, min(WINDOW_BYTES, fetching.size - first))

    async def _ask(self, fetching: Fetching, holder: PeerId, room_bytes: int) -> None:
        """Request the first run of missing pieces that fits."""
        if not fetching.mixing and fetching.served - {holder}:
            fetching.begin_again()
        first = stop = min(fetching.missing, default=0)
        limit = first * PIECE_BYTES + room_bytes
        # The last unit may be short, and fits where a whole one would not.
        while stop in fetching.missing and (
            stop == first or min((stop + 1) * PIECE_BYTES, fetching.size) <= limit
        ):
            stop += 1
        if stop == first:
            return  # everything arrived while this request waited for the window
        fetching.asked.add(holder)
        end, pace = min(stop * PIECE_BYTES, fetching.size), self._pace(holder)
        # what is watched, a state, gets shorter on a line that is slow
        packs = fetching.watch is not None and pace.piece_bytes < MAX_PIECE_BYTES
        want = Want(fetching.digest, first * PIECE_BYTES, end, pace.piece_bytes, packs=packs)
        if self._carrier.send(holder, want):
            now_s = asyncio.get_running_loop().time()
            number = pace.asked(now_s)
            self._line.asked(now_s)
            fetching.probing = None if fetching.watch is None else Probing(number, now_s)
            fetching.due = set(range(first, stop))
            await self._until_delivered(fetching, holder, len(fetching.due))
        else:
            fetching.refused.add(holder)

    async def _until_delivered(self, fetching: Fetching, holder: PeerId, asked: int) -> None:
        """Wait for the requested pieces.

        A holder that sends nothing is given up for another. If it fell silent after a start, pieces
        were lost on the way, and it is asked again."""
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        while fetching.due and holder not in fetching.refused:
            fetching.changed.clear()
            began = len(fetching.due) < asked
            heard_s = max(asked_s, self._pace(holder).heard_s)
            silent_s = _silent_s(fetching, self._pace(holder), began)
            left_s = (
                heard_s
                + silent_s
                + ahead_s(self._incoming.values(), _rate(fetching, self._line))
                - loop.time()
            )
            gone = self._carrier.life(holder) in ("suspect", "dead")
            if fetching.probing is not None and self._is_over(fetching.probing, fetching, holder):
                return
            if left_s <= 0 or gone:
                if gone or not began:
                    fetching.refused.add(holder)  # skipped until all have been asked
                return
            look_s = STALL_S / 4 if fetching.probing is None else STRAY_S / 3
            look = loop.call_later(min(left_s, look_s), fetching.changed.set)
            try:
                await fetching.changed.wait()
            finally:
                look.cancel()

    def _is_over(self, probing: Probing, fetching: Fetching, holder: PeerId) -> bool:
        """Return whether what is due was lost, or another holder is much faster; probe in time."""
        now_s = asyncio.get_running_loop().time()
        if probing.is_due(now_s):
            self._carrier.send(holder, Probe(probing.number))
        late = now_s - probing.asked_s >= REPLACE_S + ahead_s(
            self._incoming.values(), _rate(fetching, self._line)
        )
        return probing.is_lost(self._pace(holder).over, now_s) or (
            late and holder not in _fast(fetching, self._living(fetching.others), self._paces)
        )

    def _untouched(self, wanted: Mapping[bytes, int]) -> list[SizedChunk]:
        """Return the chunks that are not here, and that no other task fetches."""
        left = absent(wanted, self.store)
        return [entry for entry in left.items() if not self._under_way(entry[0])]

    def _under_way(self, digest: bytes) -> Fetching | Batch | None:
        return self._incoming.get(digest) or self._batched.get(digest)

    async def _ask_batch(self, batch: Batch, pin: Hashable) -> bool:
        """Ask a holder for a batch, and keep what comes; return True if all of it did.

        It takes room as the fetch of one chunk does."""
        holder, size, taken = batch.holder, batch.size_bytes, 0
        self._batched |= dict.fromkeys((digest for digest, _ in batch.entries), batch)
        try:
            await self._inbound.take(holder, size)
            taken = size
            window = self._windows.setdefault(holder, ByteBudget(WINDOW_BYTES))
            room = await window.take(*2 * (_room_of(batch),))
            try:
                await self._until_answered(batch)
            finally:
                window.give(room)
                _drop_idle(self._windows, holder, window)
            chunks, false = batch.intact()
            if false:
                self.dropped["content differs from its digest"] += false
            for digest, data in chunks.items():
                self.store.put(data, pin, verified=digest)
        finally:
            self._inbound.give(holder, taken)
            for digest, _ in batch.entries:
                del self._batched[digest]
            batch.changed.set()
        return len(chunks) == len(batch.entries)

    async def _until_answered(self, batch: Batch) -> None:
        """Request a batch until it is answered; a late answer to the first request counts too."""
        for _ in range(BATCH_TRIES):
            if not self._carrier.send(batch.holder, batch.want):
                return
            await self._until_silent(batch)
            if batch.ended or not self._living([batch.holder]):
                return

    async def _until_silent(self, batch: Batch) -> None:
        """Wait for the answer as long as the holder sends anything."""
        loop, pace = asyncio.get_running_loop(), self._pace(batch.holder)
        asked_s = loop.time()
        pace.asked(asked_s)
        while not batch.ended and self._living([batch.holder]):
            batch.changed.clear()
            left_s = max(asked_s, pace.heard_s) + STALL_S - loop.time()
            if left_s <= 0:
                return
            look = loop.call_later(min(left_s, STALL_S / 4), batch.changed.set)
            try:
                await batch.changed.wait()
            finally:
                look.cancel()

    def _take_answer(self, batch: Batch, piece: Piece, body: memoryview | bytes) -> None:
        if batch.ended or not batch.fill(piece, body):
            self.dropped["piece of the wrong size"] += 1
            return
        window = self._windows.get(batch.holder)
        taken_bytes = 0 if window is None else window.size_bytes - window.free_bytes
        more = taken_bytes > _room_of(batch)  # others are due
        self._pace(batch.holder).heard(len(body), asyncio.get_running_loop().time(), more)
        batch.changed.set()

    def _living(self, holders: Iterable[PeerId]) -> list[PeerId]:
        return [peer for peer in holders if self._carrier.life(peer) not in ("suspect", "dead")]

    def _take_piece(self, sender: PeerId, piece: Piece, body: memoryview | bytes) -> None:
        fetching, batch = self._incoming.get(piece.digest), self._batched.get(piece.digest)
        if batch is not None and sender == batch.holder and piece.digest == batch.entries[0][0]:
            self._take_answer(batch, piece, body)
            return
        index, offset = divmod(piece.start, PIECE_BYTES)
        if (
            fetching is None
            or sender not in fetching.asked
            or offset
            or index not in fetching.missing
        ):
            self.dropped["piece not asked for"] += 1
            return
        if piece.packed:
            body = unpacked(body, MAX_PIECE_BYTES)
        stop = piece.start + len(body)
        if (
            piece.size != fetching.size
            or not 0 < len(body) <= MAX_PIECE_BYTES
            or not (stop == fetching.size or (stop < fetching.size and stop % PIECE_BYTES == 0))
        ):
            self.dropped["piece of the wrong size"] += 1
            if piece.size != fetching.size or not body:
                fetching.blame(sender)
            return
        filled_bytes = fetching.fill(piece.start, body)
        fetching.served.add(sender)
        if fetching.watch is not None:
            fetching.watch.heard(filled_bytes)
        elif fetching.gently:
            self._silence.heard(fetching.digest)
        if sender == fetching.holder:
            fetching.give(filled_bytes)
            if fetching.probing is not None:
                fetching.probing.heard(asyncio.get_running_loop().time())
        windows = self._gentle_windows if fetching.gently else self._windows
        more = (window := windows.get(sender)) is not None and not window.idle
        now_s = asyncio.get_running_loop().time()
        if not fetching.gently:
            self.last_heard_s = now_s
        self._pace(sender).heard(len(body), now_s, more)
        self._line.heard(len(body), now_s, len(self._incoming) > 1)
        if not fetching.due:
            fetching.changed.set()

    def _pace(self, holder: PeerId) -> Pace:
        """Return what is known of a holder's speed; what was used longest ago is forgotten."""
        pace = self._paces.pop(holder, None) or Pace()
        self._paces[holder] = pace
        if len(self._paces) > MAX_PACES:
            del self._paces[next(iter(self._paces))]
        return pace


def _room_of(batch: Batch) -> int:
    """Return the part of a holder's window that a batch takes: no more wait there than it takes."""
    return max(batch.size_bytes, WINDOW_BYTES // MAX_BATCHES)


def _room(windows: Mapping[PeerId, ByteBudget], holder: PeerId) -> int:
    window = windows.get(holder)
    return window.free_bytes if window is not None else WINDOW_BYTES


def _drop_idle(windows: dict[PeerId, ByteBudget], holder: PeerId, window: ByteBudget) -> None:
    if window.idle and windows.get(holder) is window:
        del windows[holder]


def _fast(
    fetching: Fetching, holders: Sequence[PeerId], paces: Mapping[PeerId, Pace]
) -> list[PeerId]:
    """Return the holders but for those that are much slower than the fastest."""
    now_s = asyncio.get_running_loop().time()
    return faster(holders, paces, now_s, fetching.watch.slow if fetching.watch else SLOW)


def _rate(fetching: Fetching, line: LineSpeed) -> float:
    """Return the speed of this peer's line, as a caller's watch or all fetches have measured it."""
    return line.bytes_per_s if fetching.watch is None else fetching.watch.bytes_per_s()


def _while_heard(
    silence: Silence, gently: bool, seconds: float, digest: bytes | None = None
) -> contextlib.AbstractAsyncContextManager[None]:
    """Return what ends a gentle fetch once no byte comes for so long, of this chunk or of any."""
    return silence.limited(seconds, digest) if gently else contextlib.nullcontext()


def _silent_s(fetching: Fetching, pace: Pace, began: bool) -> float:
    """Return how long a holder may be silent. What is fetched gently may come slowly, and would be
    sent twice if it were asked for again, which costs most where nobody else has it."""
    min_s = GAP_S if began else STALL_S
    if not fetching.gently:
        return min_s
    max_s = GENTLE_SILENCE_S * (0.9 if fetching.alone else 1 / 3)
    if fetching.watch is not None:
        return max_s  # what is lost is found out
    if not pace.bytes_per_s:
        return max_s if fetching.alone else min_s
    asked_s = GENTLE_PIECES * PIECE_BYTES / pace.bytes_per_s
    return max(min_s, min(2 * asked_s, max_s))


def _honest(holders: Callable[[], Sequence[PeerId]], liars: set[PeerId]) -> Sequence[PeerId]:
    """Return the holders that have not lied; all of them if no other is left."""
    return [peer for peer in holders() if peer not in liars] or holders()
