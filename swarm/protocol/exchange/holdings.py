"""Reports of holdings: each member tells each other one what it holds, by difference.

A member's holdings are a row of changes. A message brings those that its receiver has not
confirmed, and says how many of the receiver's changes, and whether its offer, are known here: so
only what was lost is sent again.
"""

import struct
from collections.abc import Collection, Sequence

from farflock.swarm.messages import MAX_CHANGES, Holds, Key, Message

# A place, and the first bytes of the digest that is now held there (zeros: nothing).
_CHANGE = struct.Struct("<I8s")
RESEND_S = 0.5  # short against a deadline, so that a lost message costs little of it
CONFIRM_S = 0.2  # a report is small, and repeated only until it is confirmed
QUICK_REPEATS = 4  # after this time, before they become rarer: what is not lost may be late
# Between reports while holdings grow, so that each has many changes, and the longest wait before a
# message is repeated: a share of the deadline, at least `RESEND_S` and at most `MAX_COLLECT_S`.
COLLECT = 0.05
MAX_COLLECT_S = 10.0
# In a round of so many bundles offers are long, and reductions are fetched for long. They are first
# repeated after a time in which most members have shown that they know them.
MANY_BUNDLES = 32
OFFER_WAIT_S = 2.0  # of offers: a member that was not ready for the round misses them

HoldingsChange = tuple[int, bytes]


def collect_s(deadline_s: float) -> float:
    """Return the time between reports of holdings that grow, in a round with this deadline."""
    return min(max(COLLECT * deadline_s, RESEND_S), MAX_COLLECT_S)


def first_repeat_s(bundles: int, deadline_s: float) -> float:
    """Return the wait before an announcement is first repeated, in a round of so many bundles."""
    return collect_s(deadline_s) if bundles >= MANY_BUNDLES else 0.0


class Holdings:
    """The reports between this member and `others`; `changes` is the row of its own holdings."""

    def __init__(
        self,
        key: Key,
        view: bytes,
        others: Sequence[int],
        changes: Sequence[HoldingsChange],
        started_s: float,
        deadline_s: float,
    ) -> None:
        self._key, self._view, self._others, self._changes = key, view, others, changes
        self._known = dict.fromkeys(others, 0)  # of each other member's changes, here
        self._confirmed = dict.fromkeys(others, 0)  # of ours, there
        self._sent = dict.fromkeys(others, 0)  # of ours, on their way or there
        self._sent_s = dict.fromkeys(others, started_s)
        self._repeats = dict.fromkeys(others, 0)  # since the last confirmation
        self._collect_s = collect_s(deadline_s)
        self._unanswered: set[int] = set()  # members that sent news, or sent it again
        self.offered: set[int] = set()  # members that have our offer

    def hear(self, member: int, message: Holds) -> list[HoldingsChange]:
        """Note a report; return the changes that were not known here."""
        known = min(message.known, len(self._changes))
        if known > self._confirmed[member]:
            self._repeats[member] = 0
        self._confirmed[member] = known
        if message.offered:
            self.offered.add(member)
        changes = _changes_of(message.changes)
        if changes:
            self._unanswered.add(member)
        known = self._known[member]
        # What comes after a gap is sent again, once the sender knows of the gap.
        fresh = changes[known - message.first :] if message.first <= known else []
        self._known[member] += len(fresh)
        return fresh

    def answer(self, member: int) -> None:
        """Answer a member's message, even if there is nothing to report."""
        self._unanswered.add(member)

    def reports(
        self, now_s: float, offers: Collection[int], *, at_once: bool
    ) -> list[tuple[int, Message]]:
        """Return the reports to send now, with their receivers; `offers` names the members whose
        offers are here. `at_once`: holdings are complete, so news does not wait for more."""
        sends: list[tuple[int, Message]] = []
        for member in self._others:
            changes = self._due(member, now_s, at_once)
            if changes is None and member not in self._unanswered:
                continue
            self._unanswered.discard(member)
            first, known = self._confirmed[member], self._known[member]
            raw = b"".join(_CHANGE.pack(*change) for change in changes or ())
            report = Holds(
                self._key, self._view, first, raw, known, member in offers, changes is not None
            )
            sends.append((member, report))
        return sends

    def _due(self, member: int, now_s: float, at_once: bool) -> Sequence[HoldingsChange] | None:
        """Return the changes to send to a member now, perhaps none; None to send nothing."""
        first, count = self._confirmed[member], len(self._changes)
        waited_s = now_s - self._sent_s[member]
        news = count > self._sent[member] and at_once
        # While holdings grow, the next report brings what was lost of this one.
        unsure = self._sent[member] > first and at_once
        again = unsure and waited_s >= self._confirm_s(member)
        # Even without news: if the round is decided, the answer says so.
        if not (news or again or waited_s >= self._collect_s):
            return None
        self._repeats[member] += again
        changes = self._changes[first : first + MAX_CHANGES]
        self._sent[member], self._sent_s[member] = first + len(changes), now_s
        return changes

    def _confirm_s(self, member: int) -> float:
        """Return the wait for a confirmation before a report is repeated."""
        doublings = max(self._repeats[member] - QUICK_REPEATS, 0)
        return min(CONFIRM_S * 2.0**doublings, self._collect_s)


def _changes_of(raw: bytes) -> list[HoldingsChange]:
    """Return the changes in a message; a rest that is too short for one is ignored."""
    whole = len(raw) // _CHANGE.size * _CHANGE.size
    return list(_CHANGE.iter_unpack(raw[:whole]))
