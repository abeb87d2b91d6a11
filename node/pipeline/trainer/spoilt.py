"""Payloads that nobody can read: of the right size, and nothing that their codec writes, or numbers that overflow in the next
stage. Their maker answers in time, so that no path policy passes it by, and what it made would be refused for ever.

Who refuses may be the one at fault, so one word does not weigh much. Where two servers of a stage refuse the same payload, or
the only one does, a trainer has it made anew, or gives up what depends on it; the maker is passed by for a while only if two
say so, and somebody else is there to ask.
"""

from dataclasses import dataclass, field

from farflock.node.pipeline.passes.requests import Made
from farflock.swarm.links import PeerId

WITNESSES = 2
SHUNNED_S = 60.0

Payload = tuple[int, Made]  # for which stage, and what it is there


@dataclass(slots=True)
class Origins:
    """Of one microbatch: who made each payload, and who has refused it since."""

    _makers: dict[Payload, PeerId] = field(default_factory=dict)
    _refusals: dict[Payload, set[PeerId]] = field(default_factory=dict)

    def made(self, payload: Payload, maker: PeerId) -> None:
        """A new one, which nobody has refused yet."""
        self._makers[payload] = maker
        self._refusals.pop(payload, None)

    def refused(self, payload: Payload, by: PeerId, servers: int) -> bool:
        """One of so many servers could not read it; whether it is not worth asking another one."""
        refusals = self._refusals.setdefault(payload, set())
        refusals.add(by)
        return len(refusals) >= min(WITNESSES, servers)

    def refusers(self, stage: int) -> set[PeerId]:
        """Who has refused what this stage is given: another one is asked before any of them again."""
        return {peer for (where, _), refusals in self._refusals.items() if where == stage for peer in refusals}

    def to_blame(self, payload: Payload) -> PeerId | None:
        """Its maker, if enough say so; None for what the trainer made itself."""
        return self._makers.get(payload) if len(self._refusals.get(payload, ())) >= WITNESSES else None


@dataclass(slots=True)
class Shunned:
    """Servers that one trainer passes by for a while, each at the stage where it made what nobody could read."""

    _until_s: dict[tuple[int, PeerId], float] = field(default_factory=dict)

    def shun(self, stage: int, maker: PeerId, now_s: float) -> None:
        """From now on, for `SHUNNED_S`."""
        self._until_s = {who: until_s for who, until_s in self._until_s.items() if until_s > now_s}
        self._until_s[stage, maker] = now_s + SHUNNED_S

    def at(self, stage: int, now_s: float) -> set[PeerId]:
        """Who is shunned there now."""
        return {peer for (where, peer), until_s in self._until_s.items() if where == stage and until_s > now_s}
