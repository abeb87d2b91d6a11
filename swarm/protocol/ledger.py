"""A trainer's account of its microbatches' gradients, so that each counts once: never twice, and exactly once as long as the
trainer and a quorum of the run's members live (decision 014).

A backward pass may be asked of several servers of a stage, one after the other, because one was silent or died. Each
keeps what it computed aside (swarm/protocol/gradient_leases.py) until this trainer confirms it, and the trainer confirms one
alone. A confirmed gradient counts once the close list of a round of the stage names its key; until then it is bound to
its server, and asked again of another one only when the group has closed every round in which that server could take
part.

    open -> sent(peer) -> bound(peer) -> merged(peer) -> committed          silence while sent: open again, another peer
              lost(peer), which is said after the last round that had this peer:  bound, merged -> open

Every request has an attempt; what is answered to an older one counts for nothing (an answer may come late, and twice). This is
our own; SWARM (Ryabinin et al., arXiv:2301.11913) asks again after a timeout without a key and may count a gradient twice.
Sans I/O: who owns the links asks what to send and tells what came.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from farflock.swarm.links import PeerId

Phase = Literal["open", "sent", "bound", "merged", "committed"]
StageVisit = tuple[int, int]  # microbatch, stage


@dataclass(slots=True)
class LedgerEntry:
    """One microbatch at one stage: how far it is, who has it, and how often it was asked for."""

    phase: Phase = "open"
    peer: PeerId | None = None
    attempt: int = 0

    def reopen(self) -> None:
        """Nobody has it, and no answer that is still on its way counts."""
        self.phase, self.peer, self.attempt = "open", None, self.attempt + 1


@dataclass(slots=True)
class Ledger:
    """All microbatches of one trainer that are not committed at every one of their stages, which are all `stages` where `begin`
    names none."""

    stages: int
    _entries: dict[StageVisit, LedgerEntry] = field(default_factory=dict)

    def begin(self, microbatch: int, order: Iterable[int] | None = None) -> None:
        """A new microbatch: nothing of it counts yet."""
        stages = range(self.stages) if order is None else order
        entries = {(microbatch, stage): LedgerEntry() for stage in stages}
        assert not entries.keys() & self._entries.keys(), f"microbatch {microbatch} is under way"
        self._entries |= entries

    def send(self, place: StageVisit, peer: PeerId) -> int:
        """The backward pass is asked of this peer; returns the attempt that the request carries."""
        entry = self._entries[place]
        assert entry.phase in ("open", "sent"), f"{place} is {entry.phase} at {entry.peer}, and is asked for again"
        entry.phase, entry.peer, entry.attempt = "sent", peer, entry.attempt + 1
        return entry.attempt

    def silent(self, place: StageVisit, attempt: int) -> None:
        """No answer to a request in time, or a refusal: somebody else may be asked."""
        entry = self._current(place, attempt)
        if entry is not None and entry.phase == "sent":
            entry.phase = "open"

    def replied(self, place: StageVisit, peer: PeerId, attempt: int) -> bool:
        """The input's gradient has come. If this is True it is the one to go on with, and what the peer has put aside is to be
        confirmed; if not, the peer may drop it."""
        entry = self._current(place, attempt)
        if entry is None or entry.peer != peer:
            return False
        if entry.phase in ("open", "sent"):
            entry.phase = "bound"
        return True

    def confirms(self) -> Iterator[tuple[StageVisit, PeerId, int]]:
        """The gradients to be confirmed, again and again until the peer says that it has merged it."""
        for place, entry in self._entries.items():
            if entry.phase == "bound":
                assert entry.peer is not None
                yield place, entry.peer, entry.attempt

    def merged(self, place: StageVisit, attempt: int) -> None:
        """The peer has added it to what it brings into its stage's next round."""
        entry = self._current(place, attempt)
        if entry is not None and entry.phase == "bound":
            entry.phase = "merged"

    def refused(self, place: StageVisit, attempt: int) -> None:
        """The peer no longer has what I confirm, and will never merge it under this attempt."""
        entry = self._current(place, attempt)
        if entry is not None and entry.phase == "bound":
            entry.reopen()

    def committed(self, stage: int, microbatches: Iterable[int]) -> None:
        """The close list of a round of this stage names these."""
        for microbatch in microbatches:
            entry = self._entries.get((microbatch, stage))
            if entry is not None:
                entry.phase = "committed"

    def lost(self, stage: int, peer: PeerId) -> None:
        """This peer has left its stage's group, and `committed` was called for every round that it could take part in. What
        was bound to it counts nowhere and is open again, and an answer of it that is still on its way counts for nothing."""
        gone = [
            entry
            for place, entry in self._entries.items()
            if place[1] == stage and entry.peer == peer and entry.phase != "committed"
        ]
        for entry in gone:
            entry.reopen()

    def phase(self, place: StageVisit) -> Phase:
        """Its progress; `committed` for what was forgotten."""
        entry = self._entries.get(place)
        return "committed" if entry is None else entry.phase

    def open(self) -> list[StageVisit]:
        """The visits that nobody has been asked for, or whose result nobody has any more."""
        return [place for place, entry in self._entries.items() if entry.phase == "open"]

    def finish(self) -> list[int]:
        """Microbatches that are committed at every stage; they are forgotten, and so may their tensors be."""
        rest = {microbatch for (microbatch, _), entry in self._entries.items() if entry.phase != "committed"}
        done = sorted({microbatch for microbatch, _ in self._entries} - rest)
        self._entries = {place: entry for place, entry in self._entries.items() if place[0] in rest}
        return done

    def __len__(self) -> int:
        """Places that it keeps, of microbatches that are not committed everywhere."""
        return len(self._entries)

    def _current(self, place: StageVisit, attempt: int) -> LedgerEntry | None:
        """The entry, if this attempt is its last one."""
        entry = self._entries.get(place)
        return entry if entry is not None and entry.attempt == attempt else None
