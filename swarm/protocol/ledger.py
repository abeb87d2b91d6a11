"""A trainer's account of its microbatches' gradients, so that none counts twice.

Each counts exactly once as long as the trainer and a quorum of the run's members live (decision
014). A backward pass may be requested from several servers of a stage in turn, if one is silent or
dies. Each holds its result (swarm/protocol/gradient_leases.py) until this trainer confirms it, and
the trainer confirms only one. A confirmed gradient counts once the close list of one of the stage's
rounds names its key; until then it is bound to its server, and requested from another only when the
group has closed every round in which that server could take part.

    open -> sent(peer) -> bound(peer) -> merged(peer) -> committed
    silence: sent -> open, for another peer       lost(peer): all but committed -> open

Every request has an attempt number; answers to older attempts do not count (an answer may come
late, and twice). This is our own; SWARM (Ryabinin et al., arXiv:2301.11913) asks again after a
timeout without a key and may count a gradient twice. Sans I/O: the owner of the links asks what to
send and reports what arrived.
"""

import collections
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from farflock.swarm.links import PeerId

Phase = Literal["open", "sent", "bound", "merged", "committed"]
StageVisit = tuple[int, int]  # (microbatch, stage)


@dataclass(slots=True)
class LedgerEntry:
    """One microbatch at one stage: its phase, the server that has it, and the last attempt."""

    phase: Phase = "open"
    peer: PeerId | None = None
    attempt: int = 0

    def reopen(self) -> None:
        """Open the entry again; answers still on their way do not count."""
        self.phase, self.peer, self.attempt = "open", None, self.attempt + 1


@dataclass(slots=True)
class Ledger:
    """The microbatches of one trainer that are not yet committed at all their stages.

    A microbatch visits all `stages` unless `begin` names fewer."""

    stages: int
    _entries: dict[StageVisit, LedgerEntry] = field(default_factory=dict)
    # by stage, the microbatches that are not committed there
    _uncommitted: collections.Counter[int] = field(default_factory=collections.Counter)

    def begin(self, microbatch: int, order: Iterable[int] | None = None) -> None:
        """Add a new microbatch, which visits the stages in `order` (None: all)."""
        stages = range(self.stages) if order is None else order
        entries = {(microbatch, stage): LedgerEntry() for stage in stages}
        assert not entries.keys() & self._entries.keys(), f"microbatch {microbatch} is under way"
        self._entries |= entries
        self._uncommitted.update(stage for _, stage in entries)

    def send(self, place: StageVisit, peer: PeerId) -> int:
        """Note a backward request to this peer; return the attempt that the request carries."""
        entry = self._entries[place]
        assert entry.phase in ("open", "sent"), (
            f"{place} is {entry.phase} at {entry.peer}, and is requested again"
        )
        entry.phase, entry.peer, entry.attempt = "sent", peer, entry.attempt + 1
        return entry.attempt

    def silent(self, place: StageVisit, attempt: int) -> None:
        """Reopen a request that was refused or not answered in time: another peer may be asked."""
        entry = self._current(place, attempt)
        # The attempt number stays: the answer may still come, and is then as good as another's.
        if entry is not None and entry.phase == "sent":
            entry.phase = "open"

    def unanswered(self) -> list[tuple[StageVisit, int]]:
        """Return the requests that wait for an answer, with their attempts."""
        entries = self._entries.items()
        return [(place, entry.attempt) for place, entry in entries if entry.phase == "sent"]

    def replied(self, place: StageVisit, peer: PeerId, attempt: int) -> bool:
        """Note the answer with the input's gradient; True if it is the one to use.

        Then the peer's staged gradient is to be confirmed; otherwise the peer may drop it."""
        entry = self._current(place, attempt)
        if entry is None or entry.peer != peer:
            return False
        if entry.phase in ("open", "sent"):
            entry.phase = "bound"
        return True

    def confirms(self) -> Iterator[tuple[StageVisit, PeerId, int]]:
        """Yield (place, peer, attempt) to confirm, repeatedly until the peer has merged it."""
        for place, entry in self._entries.items():
            if entry.phase == "bound":
                assert entry.peer is not None
                yield place, entry.peer, entry.attempt

    def merged(self, place: StageVisit, attempt: int) -> None:
        """Note that the peer added the gradient to its contribution to the stage's next round."""
        entry = self._current(place, attempt)
        if entry is not None and entry.phase == "bound":
            entry.phase = "merged"

    def refused(self, place: StageVisit, attempt: int) -> None:
        """Note that the peer lacks the gradient, and will never merge it under this attempt."""
        entry = self._current(place, attempt)
        if entry is not None and entry.phase == "bound":
            entry.reopen()

    def committed(self, stage: int, microbatches: Iterable[int]) -> None:
        """Note that the close list of one of the stage's rounds names these microbatches."""
        for microbatch in microbatches:
            entry = self._entries.get((microbatch, stage))
            if entry is not None and entry.phase != "committed":
                entry.phase = "committed"
                self._uncommitted[stage] -= 1

    def lost(self, stage: int, peer: PeerId) -> None:
        """Reopen everything that was bound to a peer that left its stage's group.

        Call it after `committed` for every round that the peer could take part in: one of them may
        name its gradients. Answers still on their way do not count."""
        gone = [
            entry
            for place, entry in self._entries.items()
            if place[1] == stage and entry.peer == peer and entry.phase != "committed"
        ]
        for entry in gone:
            entry.reopen()

    @property
    def uncommitted(self) -> int:
        """The number of microbatches that no round of a stage names yet, at the stage that has most
        of them."""
        return max(self._uncommitted.values(), default=0)

    def phase(self, place: StageVisit) -> Phase:
        """Return a visit's phase; `committed` if it was forgotten."""
        entry = self._entries.get(place)
        return "committed" if entry is None else entry.phase

    def open(self) -> list[StageVisit]:
        """Return the visits that no peer has been asked for, or whose result was lost."""
        return [place for place, entry in self._entries.items() if entry.phase == "open"]

    def finish(self) -> list[int]:
        """Forget and return microbatches committed at every stage; their tensors may go too."""
        rest = {
            microbatch
            for (microbatch, _), entry in self._entries.items()
            if entry.phase != "committed"
        }
        done = sorted({microbatch for microbatch, _ in self._entries} - rest)
        self._entries = {place: entry for place, entry in self._entries.items() if place[0] in rest}
        return done

    def __len__(self) -> int:
        """Return the number of visits of unfinished microbatches."""
        return len(self._entries)

    def _current(self, place: StageVisit, attempt: int) -> LedgerEntry | None:
        """Return the entry if this attempt is its last one, else None."""
        entry = self._entries.get(place)
        return entry if entry is not None and entry.attempt == attempt else None
