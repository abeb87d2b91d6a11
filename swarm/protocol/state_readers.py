"""The versions of one state that a member serves, and their readers.

A version stays as it is while somebody reads it, so that nobody's download is started over by
somebody else's. A reader renews its claim with each request. Where rounds lead on from the state,
those that the slowest reader has not applied are kept, too, until they have as many bytes as the
state itself: from there a newer version is cheaper for it.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from farflock.swarm.links import PeerId
from farflock.swarm.messages import StateOffer

MAX_VERSIONS = 2  # read at once; a third newcomer gets the newer one
MAX_READERS = 64  # of one version, for whom it is kept; more may read it while it is there
READS_S = 30.0  # without a request, after which a reader is forgotten
# A version is given to a newcomer while the rounds after it have no more than this part, 1 in so
# many, of its bytes: the newcomer has to fetch these, too.
LATER_SHARE = 8


class LaterRounds(Protocol):
    """The logs of the streams that change a state."""

    @property
    def names(self) -> Collection[str]:
        """The streams."""
        ...

    def lead_on(self, number: int, firsts: Mapping[str, int], /) -> bool:
        """Return whether all rounds after this one are kept; of some streams, from these on."""
        ...

    def size_bytes(self, number: int, /) -> int:
        """Return the bytes of the kept rounds after this one."""
        ...


@dataclass(slots=True)
class StateReader:
    """A peer that reads a version until `read_s`, and then the rounds after it."""

    heard_s: float
    read_s: float
    applied: dict[str, int] = field(default_factory=dict)  # by stream, once it asks for later ones
    current: set[str] = field(default_factory=set)  # streams of which it has all


@dataclass(slots=True, eq=False)
class StateVersion:
    """A snapshot as it is served: `number` counts those of its state, `mark` says what it was made
    of, `touched` how far rounds were then, and `firsts` the first rounds of streams that are not in
    it, where some are further than its round."""

    number: int
    offer: StateOffer
    size_bytes: int
    made_s: float
    touched: int
    mark: int = 0
    firsts: Mapping[str, int] = field(default_factory=dict)
    stale: bool = False  # served to those that read it, and offered to nobody else
    readers: dict[PeerId, StateReader] = field(default_factory=dict)


@dataclass(slots=True)
class StateVersions:
    """The versions of one state, the newest last."""

    rounds: LaterRounds | None = None  # that lead on from it; None: it is this member's alone
    kept: list[StateVersion] = field(default_factory=list)
    made: int = 0

    def expire(self, now_s: float) -> None:
        """Forget the readers that have fallen silent."""
        for version in self.kept:
            silent = [
                peer
                for peer, reader in version.readers.items()
                if now_s - reader.heard_s >= READS_S
            ]
            for peer in silent:
                del version.readers[peer]

    def to_offer(
        self,
        asker: PeerId,
        now_s: float,
        is_fresh: Callable[[StateVersion], bool],
        suits: Callable[[StateVersion], bool] = lambda version: True,
    ) -> StateVersion | None:
        """Return the version to offer, which the asker reads from now on; None if one is to be
        made. What an earlier life of the asker reads need not suit this one."""
        self.expire(now_s)
        for version in self.kept:
            good = not version.stale and (self.rounds is not None or is_fresh(version))
            if asker in version.readers and good and suits(version):
                return version
            version.readers.pop(asker, None)
        newest = self.kept[-1] if self.kept else None
        if newest is None or newest.stale:
            return None
        all_read = len(self.kept) == MAX_VERSIONS and all(each.readers for each in self.kept)
        is_good = self.is_near(newest) and is_fresh(newest) and suits(newest)
        if not is_good and not all_read:
            return None
        if len(newest.readers) < MAX_READERS:
            newest.readers[asker] = StateReader(now_s, now_s)
        return newest

    def is_near(self, version: StateVersion) -> bool:
        """Return whether the rounds after a version are all kept, and are few against it."""
        if self.rounds is None:
            return True
        number, most = version.offer.round, version.size_bytes // LATER_SHARE
        return self._leads_on(version) and self.rounds.size_bytes(number) <= most

    def add(self, version: StateVersion, readers: Collection[PeerId]) -> None:
        """Keep a new version for these readers."""
        version.readers |= {peer: StateReader(version.made_s, version.made_s) for peer in readers}
        self.kept.append(version)

    def superseded(self, now_s: float) -> list[StateVersion]:
        """Remove and return the versions that nobody needs: those that are not the newest and are
        not read, too many, or so old that rounds after them are gone."""
        self.expire(now_s)
        last = self.kept[-1:]
        older = [each for each in self.kept[:-1] if each.readers][1 - MAX_VERSIONS :]
        stay = [each for each in (*older, *last) if self._leads_on(each)]
        gone = [each for each in self.kept if each not in stay]
        self.kept = stay
        return gone

    def _leads_on(self, version: StateVersion) -> bool:
        number, firsts = version.offer.round, version.firsts
        return self.rounds is None or self.rounds.lead_on(number, firsts)

    def renew(
        self, asker: PeerId, now_s: float, reads: Callable[[StateVersion], bool | None]
    ) -> None:
        """Note a request of a reader. `reads` tells whether it is about a version; None: about none
        in particular. Where rounds lead on from the state, it may be about these, too."""
        for version in self.kept:
            reader = version.readers.get(asker)
            if reader is None:
                continue
            about = reads(version)
            if about:
                reader.read_s = now_s
            if about is not False or self.rounds is not None:
                reader.heard_s = now_s

    def followed(
        self, asker: PeerId, stream: str, applied: int, now_s: float, *, current: bool
    ) -> None:
        """Note up to which round of a stream a reader has all; if that is `current` for each
        stream, it has ended. A member that reads a state goes on following rounds meanwhile: what
        it says of them then is not about that state."""
        if self.rounds is None or stream not in self.rounds.names:
            return
        for version in self.kept:
            reader = version.readers.get(asker)
            if reader is None or now_s - reader.read_s < READS_S:
                continue
            reader.applied[stream] = max(applied, reader.applied.get(stream, applied))
            if current:
                reader.current.add(stream)
            if reader.current.issuperset(self.rounds.names):
                del version.readers[asker]

    def wanted(self, stream: str) -> tuple[int, int] | None:
        """Return the round after which readers need all of a stream, and the most bytes of these;
        None if they need none."""
        if self.rounds is None or stream not in self.rounds.names:
            return None
        needs = [
            (reader.applied.get(stream, version.offer.round), version.size_bytes)
            for version in self.kept
            for reader in version.readers.values()
        ]
        if not needs:
            return None
        return min(number for number, _ in needs), max(size for _, size in needs)
