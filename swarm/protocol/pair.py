"""Two peers swap payloads: the leader decides, the follower applies only on its word.

Sans I/O. A pair has no majority: if the last message is lost, the leader may have applied the
payload and the follower not ("unsure"). Methods that cannot tolerate that use a collective.

The leader (first in the seeded order) proposes. The follower reserves itself for the round and
accepts. Both fetch, and the follower reports what it holds. The leader decides, and records the
decision before it announces it.

The table has the states by role. Every state ends at the deadline at the latest, as "aborted".

- *open*: the partner's offer is not known.
- *matched*: both offers are known ("offered"); the partner's payload is being fetched.
- *held*: its payload is here, whole ("fetched").
- *done*: applied on both sides' word ("committed"), or ended without that: by the partner's
  refusal, or because one side has left the other ("aborted").
"""

import hashlib
from dataclasses import dataclass, field
from typing import Literal

from farflock.swarm.links import PeerId
from farflock.swarm.messages import (
    Key,
    Message,
    Offer,
    PairAbort,
    PairAccept,
    PairCommit,
    PairHave,
    PairPropose,
    PairRefuse,
)
from farflock.swarm.protocol.agreement.transitions import after

RESEND_S = 0.4  # short against a deadline, so that a lost message costs little of it
# The leader no longer decides in this last fraction of the time: a follower that does not hear of
# the decision in time is left unsure.
COMMIT_MARGIN = 0.1

PairVerdict = Literal["applied", "alone", "failed"]
PairRole = Literal["leader", "follower"]
PairPhase = Literal["open", "matched", "held", "done"]
PairEvent = Literal["offered", "refused", "fetched", "committed", "aborted"]

_LEADER: dict[tuple[PairPhase, PairEvent], PairPhase] = {
    ("open", "offered"): "matched",
    ("open", "refused"): "done",
    ("open", "aborted"): "done",
    ("matched", "fetched"): "held",
    ("matched", "aborted"): "done",
    ("held", "committed"): "done",
    ("held", "aborted"): "done",
}
PAIR_TABLES: dict[PairRole, dict[tuple[PairPhase, PairEvent], PairPhase]] = {
    "leader": _LEADER,
    # A follower is not refused: it proposes nothing.
    "follower": {entry: following for entry, following in _LEADER.items() if entry[1] != "refused"},
}


@dataclass(slots=True)
class Pair:
    """One round of one pair as one side sees it; `theirs` is the partner's offer once known."""

    key: Key
    me: PeerId
    partner: PeerId
    leader: bool
    offer: Offer
    started_s: float
    deadline_s: float

    stage: PairPhase = "open"
    verdict: PairVerdict | None = None
    unsure: bool = False  # the follower reported what it holds, and never heard the decision
    theirs: Offer | None = None
    outbox: list[Message] = field(default_factory=list)
    _heard_have: bytes | None = None
    _sent_s: float = 0.0

    @property
    def ends_s(self) -> float:
        """The time at which this exchange ends at the latest."""
        return self.started_s + self.deadline_s

    def start(self, now_s: float) -> None:
        """Begin; the leader proposes, the follower waits for the proposal."""
        if self.leader:
            self._send(now_s, PairPropose(self.offer))

    def receive(self, now_s: float, message: Message) -> None:
        """Handle a message of the partner about this key."""
        if self.stage == "done":
            self._answer_done(message)
            return
        match message:
            case PairPropose(offer=offer) if not self.leader:
                self._matched(now_s, offer)
                self._send(now_s, PairAccept(self.offer))
            case PairAccept(offer=offer) if self.leader:
                self._matched(now_s, offer)
            # Once the offers have met, a refusal is a late answer to a repeated proposal.
            case PairRefuse() if self.leader and self.stage == "open":
                self._end("refused")
            case PairHave(digest=digest) if self.leader:
                self._heard_have = digest  # It may come before our own fetch has ended.
                self._decide(now_s)
            case PairCommit() if not self.leader and self.stage == "held":
                self._end("committed")
            case PairAbort():
                self._end("aborted")

    def complete(self, now_s: float) -> None:
        """Note that the partner's payload is here, whole and verified."""
        if self.stage != "matched":
            return
        self._move("fetched")
        if self.leader:
            self._decide(now_s)
        else:
            self._send(now_s, PairHave(self.key, self.joint_digest))

    def lost(self, now_s: float) -> None:
        """Leave the partner at once: it is suspect, or its payload is corrupt."""
        if self.stage == "done":
            return
        self.unsure = self.stage == "held" and not self.leader
        self.outbox.append(PairAbort(self.key))
        self._end("aborted")

    def tick(self, now_s: float) -> None:
        """Repeat messages that may have been lost; end the exchange at its deadline."""
        if self.stage == "done":
            return
        if now_s >= self.ends_s:
            self.lost(now_s)
        elif now_s - self._sent_s >= RESEND_S:
            self._repeat(now_s)

    @property
    def joint_digest(self) -> bytes:
        """One hash of both payloads: equal on both sides, or nothing is applied."""
        assert self.theirs is not None, f"{self.key}: no partner's offer yet"
        both = sorted(
            ((self.me, self.offer), (self.partner, self.theirs)), key=lambda side: side[0]
        )
        text = b"".join(peer.encode() + b"\x00" + b"".join(offer.digests) for peer, offer in both)
        return hashlib.sha256(text).digest()

    def _matched(self, now_s: float, offer: Offer) -> None:
        if self.stage == "open":
            self._move("offered")
            self.theirs, self._sent_s = offer, now_s

    def _decide(self, now_s: float) -> None:
        """Commit, as the leader, once both hold the same and the follower can still hear of it."""
        in_time = now_s < self.ends_s - COMMIT_MARGIN * self.deadline_s
        if self.stage == "held" and self._confirmed() and in_time:
            # Recorded before it is said: a repeated `PairHave` must get the same answer.
            self._end("committed")
            self.outbox.append(PairCommit(self.key))

    def _confirmed(self) -> bool:
        return self._heard_have == self.joint_digest

    def _repeat(self, now_s: float) -> None:
        if self.leader and self.stage == "open":
            self._send(now_s, PairPropose(self.offer))
        elif not self.leader and self.stage == "held":
            self._send(now_s, PairHave(self.key, self.joint_digest, ask=True))

    def _answer_done(self, message: Message) -> None:
        """Answer a follower that asks again, or a proposal that came too late."""
        if isinstance(message, PairHave) and self.leader:
            decided = self.verdict == "applied" and message.digest == self.joint_digest
            self.outbox.append(PairCommit(self.key) if decided else PairAbort(self.key))
        elif isinstance(message, PairPropose | PairAccept) and self.verdict != "applied":
            self.outbox.append(PairAbort(self.key))

    def _end(self, event: Literal["refused", "committed", "aborted"]) -> None:
        """Set the verdict: "applied" if committed, "failed" if the sides met, else "alone"."""
        met = self.stage != "open"
        self._move(event)
        self.verdict = "applied" if event == "committed" else "failed" if met else "alone"

    def _move(self, event: PairEvent) -> None:
        self.stage = after(PAIR_TABLES["leader" if self.leader else "follower"], self.stage, event)

    def _send(self, now_s: float, message: Message) -> None:
        self.outbox.append(message)
        self._sent_s = now_s
