"""Blame for payloads of the right size that cannot be decoded or overflow in the next stage.

The server that made such a payload answers in time, so no path policy avoids it, and the payload
would be refused forever. The refusing server may itself be at fault, so one refusal does not
prove much: once two servers of a stage refuse a payload, or its only server does, the trainer
has the payload made again, or gives up the gradients that depend on it. The maker is quarantined
only if two servers refuse; after that it is asked only if the path policy names no other server."""

from dataclasses import dataclass, field

from farflock.node.pipeline.passes.requests import Made
from farflock.swarm.links import PeerId

WITNESSES = 2  # refusals that convict a maker: one server alone may lie or be faulty itself
QUARANTINE_S = 60.0  # not forever: the maker may be repaired, or the witnesses were wrong

PayloadKey = tuple[int, Made]  # the stage that reads it, and its kind


@dataclass(slots=True)
class PayloadOrigins:
    """The makers of one microbatch's payloads, and the servers that have refused each."""

    _makers: dict[PayloadKey, PeerId] = field(default_factory=dict)
    _refusals: dict[PayloadKey, set[PeerId]] = field(default_factory=dict)

    def made(self, payload: PayloadKey, maker: PeerId) -> None:
        """Note the maker of a new payload and forget refusals of the one it replaces."""
        self._makers[payload] = maker
        self._refusals.pop(payload, None)

    def refused(self, payload: PayloadKey, by: PeerId, servers: int) -> bool:
        """Note that `by` refused a payload, and return True if it is useless to ask others.
        `servers` is the number of servers of the stage that reads the payload."""
        refusals = self._refusals.setdefault(payload, set())
        refusals.add(by)
        return len(refusals) >= min(WITNESSES, servers)

    def refusers(self, stage: int) -> set[PeerId]:
        """Return the servers that refused a payload for this stage; they are asked again last."""
        given = [refusals for (where, _), refusals in self._refusals.items() if where == stage]
        return set().union(*given)

    def to_blame(self, payload: PayloadKey) -> PeerId | None:
        """Return the maker of a payload if enough servers refused it; None otherwise, or if the
        trainer itself made the payload."""
        refusals = self._refusals.get(payload, ())
        return self._makers.get(payload) if len(refusals) >= WITNESSES else None


@dataclass(slots=True)
class Quarantine:
    """Servers that a trainer avoids for a while, each at the stage where it made a bad payload."""

    _until_s: dict[tuple[int, PeerId], float] = field(default_factory=dict)

    def add(self, stage: int, maker: PeerId, now_s: float) -> None:
        """Avoid this server at this stage for `QUARANTINE_S` from now."""
        rest = [(entry, until_s) for entry, until_s in self._until_s.items() if until_s > now_s]
        self._until_s = dict(rest)
        self._until_s[stage, maker] = now_s + QUARANTINE_S

    def at(self, stage: int, now_s: float) -> set[PeerId]:
        """Return the servers of a stage that are in quarantine now."""
        entries = self._until_s.items()
        return {peer for (where, peer), until_s in entries if where == stage and until_s > now_s}

    def __len__(self) -> int:
        """Return the number of entries, including expired ones, which `add` removes."""
        return len(self._until_s)
