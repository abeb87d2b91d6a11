"""One download of a state: its chunks come from all that hold them, a few at once, as long as
anything comes.

No limit is on the whole: a line may be slow. Without a byte for `SILENT_S`, or without a whole
chunk for `UNVERIFIED_S`, it ends. Chunks are verified one by one and are never fetched twice: not
after a break of the line, nor from another holder, nor, where they are kept on a disk, at the next
start. At a slow line few are on their way, so that each is complete soon.

The first seconds of a newcomer's download measure its line. If rounds would take most of it, that
is said; if they leave next to nothing, the download ends there (swarm/join_time.py).
"""

import asyncio
import collections
import contextlib
import itertools
import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import msgspec

from farflock.swarm.chunk_store import KeptChunks, is_intact
from farflock.swarm.join_time import HELP, JoinTime, RoundTraffic, clock, usual
from farflock.swarm.links import PeerId
from farflock.swarm.messages import Digest, Size, StateOffer
from farflock.swarm.pace import Watch
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.tasks import Silence

SILENT_S = 30.0  # without a byte, after which a download ends
# Without a whole chunk, which is verified, and for an offer: members may be writing the state.
UNVERIFIED_S = 120.0
MUTE_S = 15.0  # without a byte, after which the states of others are asked for
BREAK_S = 10.0  # for a holder that is gone to come back, before other states are asked for
LOOK_S = 0.5
SLOW = 2.0  # so many times slower than the fastest, a holder is replaced
MAX_LISTED = 65_536  # chunks in one listing, which is a chunk itself
MAX_LISTINGS = 64  # of one snapshot
PARALLEL = 16  # chunks on their way at once: enough to fill a fast line
AHEAD_S = 20.0  # that the chunks on their way take: each is complete soon, also at a slow line
MEASURED_S = 10.0  # over which the rate of the line is measured
VERDICTS = 3  # such measurements in a row, before a line is too slow for the rounds: others use it
MAX_STATES = 32  # that one download may begin: each replaced the one before, or was no state

DownloadProgress = Callable[[int, int], None]  # (bytes here, bytes in all), verified
Room = Callable[[int], memoryview]  # a size -> memory for so many bytes
ChunkName = tuple[bytes, int]  # digest and size

log = logging.getLogger(__name__)


class Listing(msgspec.Struct, frozen=True, array_like=True):
    """The content of a snapshot: the chunk that a `StateOffer` names. The `chunks` of a large
    snapshot are `listings` themselves."""

    chunks: Annotated[tuple[tuple[Digest, Size], ...], msgspec.Meta(max_length=MAX_LISTED)]
    listings: bool = False


class SnapshotUnavailable(Exception):
    """No member delivered a snapshot: what, why, and what to do."""

    def __init__(self, what: str, why: str = "", remedy: str = "") -> None:
        super().__init__("; ".join(filter(None, (": ".join(filter(None, (what, why))), remedy))))
        self.why, self.remedy = why, remedy


@dataclass(frozen=True, slots=True)
class StateProgress:
    """The progress of downloads: verified bytes, all bytes, the rate of the last seconds, bytes of
    chunks that are not whole yet, and the share of the line that the run's rounds take (0 if it is
    not known)."""

    here_bytes: int
    total_bytes: int
    bytes_per_s: float
    begun_bytes: int = 0
    rounds_share: float = 0.0

    @property
    def left_s(self) -> float | None:
        """The seconds that are left at this rate; None if nothing comes. The rounds that pass until
        then come after the state."""
        left_bytes = max(self.total_bytes - self.here_bytes - self.begun_bytes, 0)
        return left_bytes / self.bytes_per_s if self.bytes_per_s else None

    def __str__(self) -> str:
        here, total, rate = self.here_bytes, self.total_bytes, self.bytes_per_s
        said = f"{here / 1e6:,.1f} of {total / 1e6:,.1f} MB, {rate / 1e6:,.2f} MB/s"
        if self.left_s is None:
            return said
        said, busy = f"{said}, about {clock(self.left_s)} left", self.rounds_share
        return f"{said}; rounds take {busy:.0%} of this line" if busy else said


class LineRate:
    """The rate of a line over the last `MEASURED_S`."""

    def __init__(self) -> None:
        self._came: collections.deque[tuple[float, int]] = collections.deque()
        self._began_s, self.total_bytes = math.inf, 0

    def begin(self, now_s: float) -> None:
        """Note that something was asked for: a measurement begins with the first such request."""
        self._began_s = min(self._began_s, now_s)

    def heard(self, size: int, now_s: float) -> None:
        """Note that bytes came."""
        self.total_bytes += size
        self._came.append((now_s, size))
        while self._came[0][0] < now_s - 2 * MEASURED_S:
            self._came.popleft()

    def bytes_per_s(self, now_s: float) -> float:
        """Return the rate; 0 if it is not known."""
        since_s = max(self._began_s, now_s - MEASURED_S)
        came = sum(size for at_s, size in self._came if at_s >= since_s)
        return came / (now_s - since_s) if now_s > since_s else 0.0


@dataclass(slots=True)
class Wanted:
    """The aim of a download: the first useful round, the state that is `known` here and needs no
    chunks, the size beyond which none is begun, the memory for the chunks, how long nothing may
    come, and whether the peer `joins` with it."""

    stage: int | None
    min_round: int
    max_bytes: int | None
    known: bytes | None
    room: Room
    kept: KeptChunks | None = None
    progress: DownloadProgress = lambda here, total: None
    silent_s: float = SILENT_S
    joins: bool = False


@dataclass(slots=True)
class StateDownload:
    """A running download, with the offers by peer."""

    context: PeerContext
    name: str
    wanted: Wanted
    offers: dict[PeerId, StateOffer] = field(default_factory=dict)
    here_bytes: int = 0
    total_bytes: int = 0
    begun_bytes: int = 0  # came, and are not verified yet
    line: LineRate = field(default_factory=LineRate)
    silence: Silence = field(default_factory=Silence)
    time: JoinTime | None = None  # once the line of a peer that joins is measured
    states: int = 0  # begun
    mute: set[PeerId] = field(default_factory=set)  # that are there, and have sent nothing lately
    # since when members offer what is known to be false
    refused: dict[PeerId, float] = field(default_factory=dict)
    _here: dict[ChunkName, memoryview] = field(default_factory=dict)  # chunks, verified
    _stirred: asyncio.Event = field(default_factory=asyncio.Event)
    _worth: asyncio.Timeout = field(default_factory=lambda: asyncio.Timeout(None))
    _first: tuple[float, int] | None = None  # when a piece came first, and the line's bytes by then
    _hopeless: int = 0  # measurements in a row by which rounds leave next to nothing of the line

    @property
    def coming(self) -> StateProgress:
        """The progress of the download."""
        rate, begun = self.line.bytes_per_s(self.context.now()), max(self.begun_bytes, 0)
        share = self.time.rounds_share if self.time is not None else 0.0
        return StateProgress(self.here_bytes, self.total_bytes, rate, begun, share)

    @contextlib.asynccontextmanager
    async def while_worth_it(self) -> AsyncIterator[None]:
        """Let the block last unless rounds leave next to nothing of the line; then raise
        `SnapshotUnavailable`, with both rates."""
        try:
            async with self._worth:
                yield
        except TimeoutError:
            remedy = f"use {HELP}, or a faster line"
            raise SnapshotUnavailable(self._what, str(self.time), remedy) from None

    def _weigh(self) -> None:
        """Compare the line with the run's rounds, once pieces have come for `MEASURED_S`."""
        now_s, came = self.context.now(), self.line.total_bytes
        first_s, before = self._first = self._first or (now_s, came)
        if now_s - first_s < MEASURED_S:
            return
        offers = self.offers.values()
        traffic = usual(RoundTraffic(offer.round_bytes, offer.round_s) for offer in offers)
        left_bytes, rate = self.total_bytes - self.here_bytes, (came - before) / (now_s - first_s)
        time = JoinTime(left_bytes, rate, traffic)
        self._hopeless = self._hopeless + 1 if time.is_hopeless else 0
        if 0 < self._hopeless < VERDICTS:
            self._first = None  # measured again: somebody may have used the line for a moment
            return
        self.time = time
        if time.is_hopeless:
            self._worth.reschedule(now_s)
        elif time.is_slow:
            log.warning("%s; %s would leave more", time, HELP)

    def begin(self, offer: StateOffer) -> None:
        """Count a state that is begun; raise `SnapshotUnavailable` if there were too many."""
        self.states += 1
        if self.states > MAX_STATES:
            raise self.ended(f"{MAX_STATES} states were begun, and none came whole")

    @property
    def _what(self) -> str:
        return f"no snapshot of {self.name}"

    def ended(self, why: str) -> SnapshotUnavailable:
        """Return the error that ends this download."""
        if self.total_bytes:
            why += f"; {self.here_bytes / 1e6:,.1f} of {self.total_bytes / 1e6:,.1f} MB had come"
        kept = ", which goes on with what is here" if self.wanted.kept and self.here_bytes else ""
        remedy = f"check the network and that a member is running, and try again{kept}"
        return SnapshotUnavailable(self._what, why, remedy)

    def hears_members(self) -> None:
        """Note that members are there, who may be writing the state that they will offer."""
        self.silence.heard("byte")

    async def get(
        self, offer: StateOffer, holders: Sequence[PeerId]
    ) -> tuple[memoryview, ...] | None:
        """Return the chunks of an offered state; None if its holders do not deliver all of it."""
        self.begin(offer)
        while (chunks := await self._get(offer, holders)) is None:
            if not await self._comes_back(holders):
                return None
        return chunks

    async def _comes_back(self, holders: Sequence[PeerId]) -> bool:
        """Return True if the holders were gone, and one of them is back soon; those that said
        goodbye are not waited for."""
        until_s = self.context.now() + BREAK_S
        if any(map(self._lives, holders)):
            return False
        while not (back := any(map(self._lives, holders))) and self.context.now() < until_s:
            if all(map(self.context.left, holders)):
                return False
            await asyncio.sleep(LOOK_S)
        return back

    def stays(self, peer: PeerId) -> bool:
        """Return True if a holder is there, and has not said goodbye."""
        return self._lives(peer) and not self.context.left(peer)

    def _lives(self, peer: PeerId) -> bool:
        return self.context.life(peer) not in ("suspect", "dead")

    async def _get(
        self, offer: StateOffer, holders: Sequence[PeerId]
    ) -> tuple[memoryview, ...] | None:
        source = _Source(self, holders)
        listed = await source.list(offer)
        if listed is None:
            return None
        size_bytes, most = sum(size for _, size in listed), self.wanted.max_bytes
        if most is not None and size_bytes > most:
            self.context.drop("snapshot too large")
            return None
        places = _Places(listed)
        # what an attempt before this one has brought; all else of it is dropped
        self._here = {what: body for what, body in self._here.items() if what in places.of}
        kept = self.wanted.kept
        if kept is not None:
            await self.context.compute(partial(kept.keep_only, {what[0] for what in places.of}))
        room = await self.context.compute(partial(self.wanted.room, size_bytes))
        self.here_bytes, self.total_bytes, self.begun_bytes = 0, size_bytes, 0
        self._first = None  # the time without holders is none of the line
        if not await self._land_all(source, places, room):
            return None
        return tuple(room[at] for at in places.all)

    async def _land_all(self, source: "_Source", places: "_Places", room: memoryview) -> bool:
        """Bring all chunks to their places; return False once one of them cannot be had."""
        left, largest = list(reversed(places.of)), max((size for _, size in places.of), default=1)
        failed = False

        async def work(number: int) -> None:
            nonlocal failed
            while left and not failed:
                if number >= self._at_once(largest):
                    await self._stir()
                    continue
                what = left.pop()
                there = places.of[what]
                if await self._land(what, source, [room[at] for at in there]):
                    self.here_bytes += what[1] * len(there)
                    self.wanted.progress(self.here_bytes, self.total_bytes)
                else:
                    failed = True
                self._stirred.set()

        workers = min(PARALLEL, len(left))
        await asyncio.gather(*(work(number) for number in range(workers)))
        return not failed

    def _at_once(self, largest: int) -> int:
        """Return how many chunks may be on their way: two more than the line has lately carried, in
        case another holder makes it faster; a single one where two would take too long."""
        rate, size = self.line.bytes_per_s(self.context.now()), max(largest, 1)
        if self.line.total_bytes and rate * UNVERIFIED_S / 2 < 2 * size:
            return 1
        return min(PARALLEL, math.ceil(rate * AHEAD_S / size) + 2)

    async def _stir(self) -> None:
        """Wait until anything has come, or for a moment."""
        self._stirred.clear()
        look = asyncio.get_running_loop().call_later(LOOK_S, self._stirred.set)
        try:
            await self._stirred.wait()
        finally:
            look.cancel()

    def heard(self, size: int) -> None:
        """Note new bytes, which are not verified yet."""
        self.line.heard(size, self.context.now())
        self.begun_bytes += size
        if size:
            self.silence.heard("byte")
        if size and self.time is None and self.total_bytes and self.wanted.joins:
            self._weigh()
        self._stirred.set()

    async def _land(self, what: ChunkName, source: "_Source", places: list[memoryview]) -> bool:
        """Fetch a chunk, unless it is here, and copy it to its places; it does not stay in the
        store."""
        (digest, size), store, kept = what, self.context.store, self.wanted.kept
        pin = ("landing", digest)
        try:
            body = self._here.get(what)
            if body is None and kept is not None:
                body = await self.context.compute(partial(_intact, kept, digest, size))
            is_new = body is None
            if body is None and await source.fetch(digest, size, pin):
                body = store.view(digest)
            if body is None or len(body) != size:
                return False
            # in a worker: the system may let whoever writes to a mapped file wait for the disk
            await self.context.compute(partial(_fill, places, body))
            if is_new:
                self.begun_bytes -= size
            if is_new and kept is not None:
                await self.context.compute(partial(kept.put, digest, places[0]))
            if what not in self._here:  # what an attempt before this one brought is no news
                self.silence.heard("byte")
                self.silence.heard("chunk")
            self._here[what] = places[0]
            return True
        finally:
            store.forget(pin)


class _Source:
    """The holders of one offered state. A peer that sent a false chunk is asked for no more."""

    def __init__(self, download: StateDownload, holders: Sequence[PeerId]) -> None:
        self._download, self._holders, self._liars = download, holders, set[PeerId]()
        now = download.context.now
        self._watch = Watch(download.heard, SLOW, lambda: download.line.bytes_per_s(now()))

    async def fetch(self, digest: bytes, size: int, pin: object) -> bool:
        """Fetch a chunk into the store and pin it; return False if no holder has it."""
        download, chunks = self._download, self._download.context.chunks
        download.line.begin(download.context.now())
        try:
            async with download.silence.limited(MUTE_S, "byte"):
                return await chunks.fetch(
                    digest,
                    size,
                    lambda: self._holders,
                    pin,
                    None,
                    final=True,
                    gently=True,
                    liars=self._liars,
                    watch=self._watch,
                )
        except TimeoutError:
            download.mute.update(self._holders)
            return False

    async def list(self, offer: StateOffer) -> list[ChunkName] | None:
        """Return the chunks of an offered state, or None if a listing cannot be had or read."""
        context, pin = self._download.context, ("download", self._download.name)
        listed: list[ChunkName] = []
        left = [(offer.digest, offer.size)]
        while left:
            digest, size = left.pop(0)
            if not await self.fetch(digest, size, pin):
                return None
            try:
                listing = msgspec.msgpack.decode(context.store.get(digest) or b"", type=Listing)
            except (msgspec.MsgspecError, RecursionError):
                context.drop("undecodable snapshot listing")
                return None
            if not listing.listings:
                listed += listing.chunks
            elif digest == offer.digest and len(listing.chunks) <= MAX_LISTINGS:
                left += listing.chunks
            else:  # only the first lists others, or a listing could name itself
                context.drop("snapshot listing too deep")
                return None
        return listed


class _Places:
    """The places of a snapshot's chunks, one after the other; equal ones are fetched once."""

    def __init__(self, listed: Sequence[ChunkName]) -> None:
        ends = list(itertools.accumulate(size for _, size in listed))
        self.all = [slice(end - size, end) for (_, size), end in zip(listed, ends, strict=True)]
        self.of: dict[ChunkName, list[slice]] = {}
        for what, place in zip(listed, self.all, strict=True):
            self.of.setdefault(what, []).append(place)


def _fill(places: list[memoryview], body: memoryview) -> None:
    for place in places:
        place[:] = body


def _intact(kept: KeptChunks, digest: bytes, size: int) -> memoryview | None:
    """Return a chunk that was kept, if it is what its name says."""
    body = kept.get(digest, size)
    return memoryview(body) if body is not None and is_intact(body, digest) else None
