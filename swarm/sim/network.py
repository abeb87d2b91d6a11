"""A network in virtual time: bytes, rates and distances set the delay of frames, a seed their loss.

`SimLinks` implements `Links`; everything above it is the product's own code. Each directed pair of
peers draws from its own generator, so that pairs do not change each other's faults.
"""

import asyncio
import collections
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from farflock.swarm.links import MAX_FRAME_BYTES, Liveness, PeerId, Sendable, Transport, joined

SUSPECT_S = 0.9  # after a silent cut, as measured on ZMTP heartbeats
NOTICE_S = 0.1  # after a closed connection
DEAD_S = 5.0
INBOX_FRAMES = 4096
OUTBOX_BYTES = 8 * 1024 * 1024  # unsent bulk of one peer; beyond it `send_bulk` waits
HELD_FRAMES = 2048  # of a stopped peer
GRAIN_S = 1e-4  # shorter transfers arrive at once: not worth an event of their own

Tap = Callable[[float, PeerId, PeerId, bytes], bytes | None]


@dataclass(frozen=True, slots=True)
class LinkModel:
    """One peer's line: rates in bytes per second, one-way seconds, and the share of lost frames."""

    up_bytes_per_s: float = 12.5e6
    down_bytes_per_s: float = 12.5e6
    latency_s: float = 0.02
    jitter_s: float = 0.005
    loss: float = 0.0


@dataclass(frozen=True, slots=True)
class Faults:
    """Faults that hit a share of all frames, regardless of their sender."""

    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0  # held back by up to `delay_s`
    corrupt: float = 0.0  # one bit is flipped: deliberately worse than links promise
    delay_s: float = 0.5


class SimNetwork:
    """All peers' lines and their faults."""

    def __init__(self, seed: int, link: LinkModel | None = None) -> None:
        self._seed, self._link = seed, link or LinkModel()
        self._models: dict[PeerId, LinkModel] = {}
        self._lines: dict[PeerId, SimLinks] = {}
        self._twins: dict[PeerId, SimLinks] = {}  # second ones of a key
        self._randoms: dict[tuple[PeerId, PeerId], random.Random] = {}
        # Since when, and whether the connection closed (else it is silent).
        self._unreachable_s: dict[PeerId, dict[PeerId, tuple[float, bool]]] = {}
        self._islands: tuple[frozenset[PeerId], ...] = ()
        self._cuts: set[tuple[PeerId, PeerId]] = set()
        self._killed: dict[PeerId, float] = {}
        self._stopped: dict[PeerId, float] = {}
        self.faults = Faults()
        self.tap: Tap | None = None
        # Bytes that a frame of bulk takes on the lines: more, if its content stands for more.
        self.line_bytes: Callable[[bytes], int] = len
        self.fired: collections.Counter[str] = collections.Counter()
        self.bytes: collections.Counter[str] = collections.Counter()  # see `missing_bytes`
        self.flying_bytes = 0

    # peers

    def links(self, peer: PeerId) -> "SimLinks":
        """Return a live endpoint; for a killed peer, its next life with empty queues."""
        self._killed.pop(peer, None)
        self._stopped.pop(peer, None)
        self._twins.pop(peer, None)
        for line in self._lines.values():
            line.forget(peer)
        self._lines[peer] = SimLinks(self, peer)
        self._touch([peer])
        return self._lines[peer]

    def beside(self, peer: PeerId) -> "SimLinks":
        """Return a second endpoint of a living peer, as of a copied folder: both send, and what
        others send arrives at both. Real links let others hear one of the two at a time only."""
        self._twins[peer] = SimLinks(self, peer)
        return self._twins[peer]

    def end_beside(self, line: "SimLinks") -> None:
        """End one of the two endpoints of a key."""
        other = self._twins.pop(line.me)
        if other is not line:
            self._lines[line.me] = other

    def set_link(self, peer: PeerId, model: LinkModel) -> None:
        """Replace one peer's line."""
        self._models[peer] = model

    def model(self, peer: PeerId) -> LinkModel:
        """Return a peer's line."""
        return self._models.get(peer, self._link)

    def slow(self, peer: PeerId, factor: float) -> None:
        """Slow a peer's line down: divide its rates, multiply its latency."""
        line = self.model(peer)
        self._models[peer] = replace(
            line,
            up_bytes_per_s=line.up_bytes_per_s / factor,
            down_bytes_per_s=line.down_bytes_per_s / factor,
            latency_s=line.latency_s * factor,
        )

    # what goes wrong

    def kill(self, peer: PeerId) -> None:
        """End a peer as SIGKILL does: its frames stop, and partners see the connection close."""
        self._killed[peer] = _now()
        self._touch([peer])

    def stop(self, peer: PeerId) -> None:
        """Freeze a peer as SIGSTOP does: frames in and out are held until `cont`."""
        self._stopped[peer] = _now()
        self._touch([peer])

    def cont(self, peer: PeerId) -> None:
        """Resume a stopped peer and release its held frames."""
        if self._stopped.pop(peer, None) is not None:
            self._touch([peer])
            for line in self._lines.values():
                line.release(peer)

    def partition(self, *islands: Collection[PeerId]) -> None:
        """Let only peers of one island hear each other; a peer in none is isolated."""
        self._islands = tuple(frozenset(island) for island in islands)
        self._touch(list(self._lines))

    def heal(self) -> None:
        """End the partition and every cut."""
        self._islands = ()
        self._cuts.clear()
        self._touch(list(self._lines))

    def cut(self, one: PeerId, other: PeerId) -> None:
        """Silently drop everything between two peers, both ways."""
        self._cuts |= {(one, other), (other, one)}
        self._touch([one])

    def missing_bytes(self) -> int:
        """Return bytes neither arrived, nor on their way, nor known to be lost: always 0."""
        ended = sum(self.bytes[end] for end in ("delivered", "lost", "cut", "overflowed", "held"))
        return self.bytes["sent"] + self.bytes["copied"] - ended - self.flying_bytes

    # what the links ask

    def reachable(self, one: PeerId, other: PeerId) -> bool:
        """Return whether frames arrive now; a stopped peer counts, since its frames are kept."""
        if (
            other not in self._lines
            or one in self._killed
            or other in self._killed
            or (one, other) in self._cuts
        ):
            return False
        return not self._islands or any(
            one in island and other in island for island in self._islands
        )

    def stopped(self, peer: PeerId) -> bool:
        """Return whether a peer is frozen."""
        return peer in self._stopped

    def life(self, me: PeerId, peer: PeerId) -> Liveness:
        """Return what ZMTP heartbeats would have told `me` by now."""
        if peer not in self._lines:
            return "unknown"
        unreachable_s = self._unreachable_s.get(me)
        if not unreachable_s or peer not in unreachable_s:
            return "alive"
        since_s, closed = unreachable_s[peer]
        silent_s = _now() - since_s
        if silent_s >= DEAD_S:
            return "dead"
        return "suspect" if silent_s >= (NOTICE_S if closed else SUSPECT_S) else "alive"

    def random(self, sender: PeerId, receiver: PeerId) -> random.Random:
        """Return the random generator for frames from `sender` to `receiver`."""
        key = (sender, receiver)
        if key not in self._randoms:
            self._randoms[key] = random.Random(f"{self._seed}/{sender}/{receiver}")
        return self._randoms[key]

    def line(self, peer: PeerId) -> "SimLinks":
        """Return a peer's current endpoint."""
        return self._lines[peer]

    def twin(self, peer: PeerId) -> "SimLinks | None":
        """Return the second endpoint of a key, if there is one."""
        return self._twins.get(peer)

    def is_current(self, line: "SimLinks") -> bool:
        """Return whether an endpoint is one of its key's life."""
        return self._lines[line.me] is line or self._twins.get(line.me) is line

    def _touch(self, changed: Collection[PeerId]) -> None:
        """Record since when each pair with a changed peer is cut off; heartbeats need both
        directions."""
        for one in changed:
            for other in self._lines if one in self._lines else ():
                both = self.reachable(one, other) and self.reachable(other, one)
                is_cut = not both or one in self._stopped or other in self._stopped
                for me, peer in ((one, other), (other, one)):
                    entries = self._unreachable_s.setdefault(me, {})
                    if not is_cut:
                        entries.pop(peer, None)
                    elif peer not in entries:
                        entries[peer] = (_now(), peer in self._killed)


class SimLinks:
    """One peer's endpoint on a `SimNetwork`."""

    def __init__(self, network: SimNetwork, me: PeerId) -> None:
        self._network, self._me = network, me
        self.record: Callable[[], bytes] = bytes  # seals this peer's own; its owner sets it
        self._inbox: asyncio.Queue[tuple[PeerId, bytes]] = asyncio.Queue(INBOX_FRAMES)
        self._held: dict[PeerId, collections.deque[tuple[PeerId, bytes]]] = {}
        self._up_free_s = self._down_free_s = 0.0
        self.sent_bytes = self.received_bytes = 0
        self.sent_frames = 0
        self.dropped: collections.Counter[str] = collections.Counter()

    @property
    def me(self) -> PeerId:
        """My peer id."""
        return self._me

    def send(self, peer: PeerId, frame: bytes) -> bool:
        """Send a control frame, which overtakes queued bulk: it waits for its own bytes only."""
        now_s = _now()
        return self._transmit(peer, frame, now_s + len(frame) / self._model.up_bytes_per_s)

    async def send_bulk(self, peer: PeerId, frame: Sendable, timeout_s: float) -> bool:
        """Queue a frame behind my other bulk; wait while more than `OUTBOX_BYTES` are queued."""
        whole, rate = joined(frame), self._model.up_bytes_per_s
        wait_s = self._up_free_s - _now() - OUTBOX_BYTES / rate
        if wait_s > timeout_s:
            return False
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        line_bytes = self._network.line_bytes(whole)
        self._up_free_s = max(self._up_free_s, _now()) + line_bytes / rate
        return self._transmit(peer, whole, self._up_free_s, line_bytes)

    async def receive(self) -> tuple[PeerId, bytes]:
        """Return the next sender and frame."""
        return await self._inbox.get()

    def life(self, peer: PeerId) -> Liveness:
        """See `SimNetwork.life`."""
        return self._network.life(self._me, peer)

    def road(self, peer: PeerId) -> Transport:
        """Return "direct" or "none"."""
        return "direct" if self._network.reachable(self._me, peer) else "none"

    def rtt_s(self, peer: PeerId) -> float | None:
        """Return twice the sum of both lines' latencies."""
        return 2 * (self._model.latency_s + self._network.model(peer).latency_s)

    def learn(self, record: bytes) -> bool:
        """Accept any record: every peer is known here."""
        return True

    def total_bytes(self) -> tuple[int, int]:
        """Return the bytes of the frames sent and received."""
        return self.sent_bytes, self.received_bytes

    def queued_bytes(self) -> int:
        """Return the bytes of bulk that have not left."""
        return max(0, int((self._up_free_s - _now()) * self._model.up_bytes_per_s))

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""

    @property
    def _model(self) -> LinkModel:
        return self._network.model(self._me)

    def _transmit(
        self, peer: PeerId, frame: bytes, leaves_s: float, line_bytes: int | None = None
    ) -> bool:
        """Send a frame that leaves this peer's line at `leaves_s`, subject to faults.

        It takes `line_bytes` of the receiver's line; None: as many as it has."""
        if len(frame) > MAX_FRAME_BYTES:
            raise ValueError(
                f"a frame of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}"
            )
        network = self._network
        if not network.reachable(self._me, peer):
            self.dropped["unreachable"] += 1
            return peer not in network._killed and peer in network._lines
        if network.tap is not None:
            tapped = network.tap(_now(), self._me, peer, frame)
            if tapped is None:
                return True
            frame = tapped
        self.sent_bytes += len(frame)
        self.sent_frames += 1
        network.bytes["sent"] += len(frame)
        self._send_to(network.line(peer), frame, leaves_s, line_bytes)
        if (twin := network.twin(peer)) is not None:
            network.bytes["copied"] += len(frame)
            self._send_to(twin, frame, leaves_s, line_bytes)
        return True

    def _send_to(
        self, there: "SimLinks", frame: bytes, leaves_s: float, line_bytes: int | None
    ) -> None:
        network, loop = self._network, asyncio.get_running_loop()
        for copy, late_s in self._fates(there.me, frame):
            network.flying_bytes += len(copy)
            taken = len(copy) if line_bytes is None else line_bytes
            loop.call_at(leaves_s + late_s, self._arrive, there, copy, taken)

    def _fates(self, peer: PeerId, frame: bytes) -> list[tuple[bytes, float]]:
        """Return the copies of a frame that arrive, each with its delay after leaving."""
        network, faults, draw = (
            self._network,
            self._network.faults,
            self._network.random(self._me, peer),
        )
        there = network.model(peer)
        if draw.random() < 1 - (1 - self._model.loss) * (1 - there.loss) * (1 - faults.loss):
            network.fired["loss"] += 1
            network.bytes["lost"] += len(frame)
            return []
        late_s = (
            self._model.latency_s
            + there.latency_s
            + draw.uniform(0, self._model.jitter_s + there.jitter_s)
        )
        if faults.reorder and draw.random() < faults.reorder:
            network.fired["reorder"] += 1
            late_s += draw.uniform(0, faults.delay_s)
        if faults.corrupt and draw.random() < faults.corrupt:
            network.fired["corrupt"] += 1
            altered = bytearray(frame)
            altered[draw.randrange(len(altered))] ^= 1 << draw.randrange(8)
            frame = bytes(altered)
        if faults.duplicate and draw.random() < faults.duplicate:
            network.fired["duplicate"] += 1
            network.bytes["copied"] += len(frame)
            return [(frame, late_s), (frame, late_s + draw.uniform(0, faults.delay_s))]
        return [(frame, late_s)]

    def _arrive(self, there: "SimLinks", frame: bytes, line_bytes: int) -> None:
        """Pass a frame on to the receiver's downlink, if both ends are still in the same life."""
        network, now_s = self._network, _now()
        alive = network.is_current(self) and network.is_current(there)
        if not alive or not network.reachable(self._me, there.me):
            self.dropped["cut on the way"] += 1
            network.flying_bytes -= len(frame)
            network.bytes["cut"] += len(frame)
            return
        there._down_free_s = (
            max(there._down_free_s, now_s) + line_bytes / there._model.down_bytes_per_s
        )
        if there._down_free_s - now_s < GRAIN_S:
            there._land(self._me, frame)
        else:
            asyncio.get_running_loop().call_at(there._down_free_s, there._land, self._me, frame)

    def _land(self, sender: PeerId, frame: bytes) -> None:
        self._network.flying_bytes -= len(frame)
        self._deliver(sender, frame)

    def _deliver(self, sender: PeerId, frame: bytes) -> None:
        network = self._network
        if network.stopped(self._me) or network.stopped(sender):
            held = self._held.setdefault(
                self._me if network.stopped(self._me) else sender, collections.deque()
            )
            if len(held) < HELD_FRAMES:
                held.append((sender, frame))
                network.bytes["held"] += len(frame)
            else:
                self._overflowed("held back too many", frame)
        elif self._inbox.full():
            self._overflowed("inbox full", frame)
        else:
            self.received_bytes += len(frame)
            network.bytes["delivered"] += len(frame)
            self._inbox.put_nowait((sender, frame))

    def _overflowed(self, queue: str, frame: bytes) -> None:
        self.dropped[queue] += 1
        self._network.bytes["overflowed"] += len(frame)

    def release(self, peer: PeerId) -> None:
        """Deliver the frames held for or from a peer that runs again."""
        for sender, frame in self._held.pop(peer, ()):
            self._network.bytes["held"] -= len(frame)
            self._deliver(sender, frame)

    def forget(self, peer: PeerId) -> None:
        """Drop the frames held for or from a stopped peer that died."""
        for _, frame in self._held.pop(peer, ()):
            self._network.bytes["held"] -= len(frame)
            self._network.bytes["cut"] += len(frame)


def _now() -> float:
    return asyncio.get_running_loop().time()
