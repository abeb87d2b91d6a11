"""Payloads of answers that stay with the server that made them, for later calls to other servers.

They are kept until their caller drops them, stops renewing their lease or is gone, within bounds
for each caller and for all. Beyond these an answer brings its payloads, as any other does. The
server also keeps what it fetched from other holders for such a call: if one of them is lost, this
copy is left.
"""

import collections
from collections.abc import Collection
from dataclasses import dataclass, field

from farflock.swarm.context import PeerContext
from farflock.swarm.links import PeerId
from farflock.swarm.messages import Answer

LEFT_LEASE_S = 60.0  # several renewals may be lost
# Less travels inside an answer. A home line gains more by not carrying this much than the further
# round trip costs (decision 028).
MIN_LEFT_BYTES = 150_000
MAX_LEFT_BYTES = 512 * 1024 * 1024  # at one server, for all callers
MAX_LEFT_BYTES_EACH = 256 * 1024 * 1024  # the same, for each caller
MAX_LEFT_EACH = 4096  # calls of a caller, so that the tables stay small

CallKey = tuple[PeerId, int, int]  # (caller, incarnation, call id)


@dataclass(slots=True)
class _LeftCall:
    """An answer whose payloads are kept under its key as a pin, and the end of their lease."""

    answer: Answer
    held_bytes: int
    until_s: float


@dataclass(slots=True)
class LeftPayloads:
    """The payloads that calls of other peers have left here."""

    _context: PeerContext
    _calls: dict[CallKey, _LeftCall] = field(default_factory=dict)
    # by caller; what it fetched and what it made count alike
    _held_bytes: collections.Counter[PeerId] = field(default_factory=collections.Counter)
    _counts: collections.Counter[PeerId] = field(default_factory=collections.Counter)

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, key: CallKey) -> bool:
        return key in self._calls

    @property
    def held_bytes(self) -> int:
        """The bytes that are kept, of all callers."""
        return self._held_bytes.total()

    def has_room(self, caller: PeerId, size: int) -> bool:
        """True if payloads of an answer may stay: they are large enough, and there is room."""
        return (
            size >= MIN_LEFT_BYTES
            and self._held_bytes[caller] + size <= MAX_LEFT_BYTES_EACH
            and self.held_bytes + size <= MAX_LEFT_BYTES
            and self._counts[caller] < MAX_LEFT_EACH
        )

    def add(self, key: CallKey, answer: Answer) -> None:
        """Keep an answer, and the payloads that its key pins."""
        size = self._context.store.pinned_bytes(key)
        self._calls[key] = _LeftCall(answer, size, self._context.now() + LEFT_LEASE_S)
        self._held_bytes[key[0]] += size
        self._counts[key[0]] += 1

    def answer(self, key: CallKey) -> Answer:
        """Return the answer to a call that left its payloads here."""
        return self._calls[key].answer

    def keep(self, caller: PeerId, incarnation: int, ids: Collection[int]) -> None:
        """Renew the leases of these calls."""
        for number in ids:
            if (left := self._calls.get((caller, incarnation, number))) is not None:
                left.until_s = self._context.now() + LEFT_LEASE_S

    def drop(self, key: CallKey) -> None:
        """Forget a call and its payloads."""
        self._held_bytes[key[0]] -= self._calls.pop(key).held_bytes
        self._counts[key[0]] -= 1
        if not self._counts[key[0]]:
            del self._held_bytes[key[0]], self._counts[key[0]]
        self._context.store.release(key)

    def over(self) -> list[CallKey]:
        """Return the calls whose lease has ended or whose caller is gone."""
        now_s = self._context.now()
        return [
            key
            for key, left in self._calls.items()
            if left.until_s <= now_s or self._context.life(key[0]) == "dead"
        ]
