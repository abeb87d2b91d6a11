"""An in-memory directory for simulations and tests, with the real one's faults drawn from a seed.

Callers must cope with stale reads, lost stores and split views, so these happen reproducibly here:
nothing in this module has a clock or randomness of its own.
"""

import collections
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal, NamedTuple

from farflock.swarm.dht.validator import MAX_HEAD_BYTES
from farflock.swarm.links import PeerId
from farflock.swarm.record import BadRecord, unseal

HEAD_LIFETIME_S = 300.0  # as in kademlia.py, whose import needs hivemind

TableName = Literal["records", "heads"]


@dataclass(frozen=True, slots=True)
class DirectoryFaults:
    """Reads show the table up to `stale_s` ago; a share `lost` of all stores has no effect."""

    stale_s: float = 0.0
    lost: float = 0.0


class _Version(NamedTuple):
    payload: bytes
    stored_s: float
    expires_s: float


class MemoryTable:
    """The state that all directories of one run share; `now` is the clock of the simulation.

    Each peer draws from its own generator, so that no peer's actions change another's faults.
    `fired` counts lost stores and stale entries read.
    """

    def __init__(
        self, run: str, seed: int, now: Callable[[], float], faults: DirectoryFaults | None = None
    ) -> None:
        self.run, self.faults = run, faults or DirectoryFaults()
        self.fired: collections.Counter[str] = collections.Counter()
        self._seed, self._now = seed, now
        self._randoms: dict[PeerId, random.Random] = {}
        self._open: dict[PeerId, MemoryDirectory] = {}
        self._islands: tuple[frozenset[PeerId], ...] = ()
        self._versions: dict[tuple[TableName, PeerId], list[_Version]] = {}  # oldest first

    def directory(self, peer: PeerId) -> "MemoryDirectory":
        """Return this peer's directory; for a peer seen before, that of its next life."""
        self._randoms.setdefault(peer, random.Random(f"{self._seed}/directory/{peer}"))
        self._open[peer] = MemoryDirectory(self, peer)
        return self._open[peer]

    def close(self, peer: PeerId) -> None:
        """Close a peer's directory: it holds nothing for others, but its own items stay."""
        del self._open[peer]

    def is_open(self, directory: "MemoryDirectory") -> bool:
        """Return whether this directory belongs to its peer's present life."""
        return self._open.get(directory.me) is directory

    def split(self, *islands: Collection[PeerId]) -> None:
        """Let peers see only the items of their own island; a peer in none is isolated."""
        self._islands = tuple(frozenset(island) for island in islands)

    def heal(self) -> None:
        """End the split; all peers see unexpired items stored meanwhile."""
        self._islands = ()

    def put(self, shelf: TableName, writer: PeerId, payload: bytes, lifetime_s: float) -> bool:
        """Store a writer's newest payload; False if no other peer is there yet to see it."""
        if self._randoms[writer].random() < self.faults.lost:
            self.fired["lost"] += 1
        else:
            self._append(shelf, writer, payload, lifetime_s)
        return any(other != writer and self._connected(other, writer) for other in self._open)

    def seen(self, shelf: TableName, reader: PeerId) -> list[bytes]:
        """Return a reader's possibly stale view of the table, without items expired by now."""
        now_s = self._now()
        then_s = now_s - self._randoms[reader].uniform(0, self.faults.stale_s)
        found = []
        for (kind, writer), versions in sorted(self._versions.items()):
            if kind == shelf and self._connected(reader, writer):
                newest = [version for version in versions if version.stored_s <= then_s][-1:]
                found += [version.payload for version in newest if version.expires_s > now_s]
                if newest != versions[-1:]:
                    self.fired["stale"] += 1
        return found

    def _append(self, shelf: TableName, writer: PeerId, payload: bytes, lifetime_s: float) -> None:
        """Add a version; drop those too old for any stale read."""
        now_s, known = self._now(), self._versions.get((shelf, writer), [])
        known = [*known, _Version(payload, now_s, now_s + lifetime_s)]
        replaced_s = [after.stored_s for after in known[1:]] + [now_s]
        self._versions[shelf, writer] = [
            version
            for version, until_s in zip(known, replaced_s, strict=True)
            if until_s >= now_s - self.faults.stale_s
        ]

    def _connected(self, one: PeerId, other: PeerId) -> bool:
        return (
            one == other
            or not self._islands
            or any({one, other} <= island for island in self._islands)
        )


class MemoryDirectory:
    """`Directory` over a `MemoryTable`: one run, one peer. Refuses what `DhtDirectory` refuses."""

    addresses: tuple[str, ...] = ()  # nobody dials in memory

    def __init__(self, table: MemoryTable, me: PeerId) -> None:
        """Use `MemoryTable.directory`."""
        self._table, self.me = table, me

    async def announce(self, run: str, record: bytes) -> bool:
        """Store my sealed record until it expires; False if no other peer is there to hold it.

        Raise `BadRecord` for a record that is not mine or not of this run.
        """
        self._only(run)
        mine = unseal(record, run)
        if mine.peer != self.me:
            raise BadRecord(f"{self.me} cannot announce a record of {mine.peer}")
        return self._put("records", record, mine.lifetime_s)

    async def peers(self, run: str) -> list[bytes]:
        """Return each owner's newest live record visible from here, mine included."""
        self._only(run)
        return self._read("records")

    async def publish_head(self, run: str, head: bytes) -> bool:
        """Re-publish the manifest's head under my name for `HEAD_LIFETIME_S`."""
        self._only(run)
        if not 1 <= len(head) <= MAX_HEAD_BYTES:
            raise ValueError(f"a manifest's head has 1 to {MAX_HEAD_BYTES} bytes, got {len(head)}")
        return self._put("heads", head, HEAD_LIFETIME_S)

    async def heads(self, run: str) -> list[bytes]:
        """Return every distinct published head."""
        self._only(run)
        return sorted(set(self._read("heads")))

    async def close(self) -> None:
        """Store and see nothing from here from now on."""
        if self._table.is_open(self):
            self._table.close(self.me)

    def _only(self, run: str) -> None:
        if run != self._table.run:
            raise ValueError(
                f"this directory was opened for run {self._table.run}; "
                f"open another one for run {run}"
            )

    def _put(self, shelf: TableName, payload: bytes, lifetime_s: float) -> bool:
        return self._table.is_open(self) and self._table.put(shelf, self.me, payload, lifetime_s)

    def _read(self, shelf: TableName) -> list[bytes]:
        return self._table.seen(shelf, self.me) if self._table.is_open(self) else []
