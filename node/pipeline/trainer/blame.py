"""Payloads that cannot be decoded: of the right size, and nothing that their codec writes, or
numbers that overflow in the next stage. Their maker answers in time, so no path policy avoids it,
and what it made would be refused forever.

The server that refuses may be the one at fault, so its word alone does not weigh much. Where two
servers of a stage refuse the same payload, or the only one does, a trainer has it made again, or
gives up what depends on it. The maker is put into quarantine only if two servers say so; then it is
asked only where the path policy names nobody else.
"""

from dataclasses import dataclass, field

from farflock.node.pipeline.passes.requests import Made
from farflock.swarm.links import PeerId

WITNESSES = 2
QUARANTINE_S = 60.0

PayloadKey = tuple[int, Made]  # the stage that it is for, and what it is there


@dataclass(slots=True)
class PayloadOrigins:
    """The payloads of one microbatch: which server made each, and which servers have refused it
    since."""

    _makers: dict[PayloadKey, PeerId] = field(default_factory=dict)
    _refusals: dict[PayloadKey, set[PeerId]] = field(default_factory=dict)

    def made(self, payload: PayloadKey, maker: PeerId) -> None:
        """Note a new payload, which no server has refused yet."""
        self._makers[payload] = maker
        self._refusals.pop(payload, None)

    def refused(self, payload: PayloadKey, by: PeerId, servers: int) -> bool:
        """Note that one of `servers` could not decode it; return whether it is useless to ask
        another one."""
        refusals = self._refusals.setdefault(payload, set())
        refusals.add(by)
        return len(refusals) >= min(WITNESSES, servers)

    def refusers(self, stage: int) -> set[PeerId]:
        """Servers that have refused what this stage is given: the others are asked before any of
        them again."""
        given = [refusals for (where, _), refusals in self._refusals.items() if where == stage]
        return set().union(*given)

    def to_blame(self, payload: PayloadKey) -> PeerId | None:
        """Its maker, if enough servers refused it; None for what the trainer made itself."""
        refusals = self._refusals.get(payload, ())
        return self._makers.get(payload) if len(refusals) >= WITNESSES else None


@dataclass(slots=True)
class Quarantine:
    """Servers that one trainer avoids for a while, each at the stage where it made what could not
    be decoded."""

    _until_s: dict[tuple[int, PeerId], float] = field(default_factory=dict)

    def add(self, stage: int, maker: PeerId, now_s: float) -> None:
        """Avoid it for `QUARANTINE_S` from now on."""
        rest = [(entry, until_s) for entry, until_s in self._until_s.items() if until_s > now_s]
        self._until_s = dict(rest)
        self._until_s[stage, maker] = now_s + QUARANTINE_S

    def at(self, stage: int, now_s: float) -> set[PeerId]:
        """Servers of this stage that are in quarantine now."""
        entries = self._until_s.items()
        return {peer for (where, peer), until_s in entries if where == stage and until_s > now_s}

    def __len__(self) -> int:
        """How many entries are kept, those that are over included until the next one is added."""
        return len(self._until_s)
