"""Gradients that a stage server holds for trainers: computed, but not counted until confirmed.

    running -> staged -> merged -> offered(round) -> committed
                  |         ^----------'  the round closed without this server's contribution
                  '-> dropped: revoked, or its lease ran out

A key is (trainer, microbatch). A staged gradient takes memory of a stage's size, so there are few
places and each has a lease; a merged one is in the stage's sum and costs nothing more. Only a
confirmation of the staged attempt merges it: the trainer may have given up an older attempt and
asked another server. An attempt whose confirmation was refused is never merged, even if a late
copy of its request arrives: after the refusal its trainer may ask another server. The other side is
swarm/protocol/ledger.py. Sans I/O, without tensors: their owner acts on the answers.
"""

import collections
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from farflock.swarm.links import PeerId

GradientKey = tuple[PeerId, int]  # (trainer, microbatch)
MAX_KEYS = 16_384  # microbatches named by one contribution to a stage's round
OWN = 0  # attempt of this peer's own microbatches; those of requests begin at 1
REMEMBERED = 4096  # committed keys, and as many refused ones, kept for late requests

Begin = Literal["run", "again", "busy", "nothing"]
Confirmed = Literal["merge", "merged", "unknown"]


@dataclass(slots=True)
class _Slot:
    attempt: int
    phase: Literal["running", "staged", "merged", "offered"] = "running"
    until_s: float = 0.0  # end of a staged gradient's lease
    round: int = -1


@dataclass(slots=True)
class GradientLeases:
    """The gradients of one stage at one server.

    `places` bounds those running or staged; `lease_s` is the time to confirm a staged one."""

    places: int
    lease_s: float
    _slots: dict[GradientKey, _Slot] = field(default_factory=dict)
    _committed: collections.OrderedDict[GradientKey, None] = field(
        default_factory=collections.OrderedDict
    )
    # By key, the last refused attempt.
    _refused: collections.OrderedDict[GradientKey, int] = field(
        default_factory=collections.OrderedDict
    )

    def begin(self, key: GradientKey, attempt: int) -> Begin:
        """Handle a backward request: `run` it, answer `again` as before, or say `busy`.

        Do `nothing` while it is running, or if it is late and already counts or was refused."""
        slot = self._slots.get(key)
        if attempt <= self._refused.get(key, -1):
            return "nothing"
        if slot is None and key not in self._committed:
            # A gradient is as large as its stage. The trainer asks again, or asks another server.
            if not self.free:
                return "busy"
            self._slots[key] = _Slot(attempt)
            return "run"
        if slot is None or slot.phase not in ("running", "staged"):
            return "nothing"
        slot.attempt = max(slot.attempt, attempt)
        return "again" if slot.phase == "staged" else "nothing"

    def staged(self, key: GradientKey, now_s: float) -> int | None:
        """Stage a computed gradient and return the attempt to answer; None if it is unwanted."""
        slot = self._slots.get(key)
        if slot is None or slot.phase != "running":
            return None
        slot.phase, slot.until_s = "staged", now_s + self.lease_s
        return slot.attempt

    def confirm(self, key: GradientKey, attempt: int) -> Confirmed:
        """Answer a trainer's confirmation: `merge` it now, it is `merged`, or it is `unknown`."""
        slot = self._slots.get(key)
        if self.is_merged(key):
            return "merged"
        if slot is not None and slot.phase == "staged" and slot.attempt == attempt:
            slot.phase = "merged"
            return "merge"
        # The trainer may now ask another server, so this attempt must never be merged here.
        self._refuse(key, attempt)
        return "unknown"

    def own(self, key: GradientKey) -> None:
        """Add a microbatch of this peer's own, already in its sum; it takes no place."""
        assert key not in self._slots, f"{key} is here already"
        self._slots[key] = _Slot(OWN, "merged")

    def revoke(self, key: GradientKey, attempt: int) -> None:
        """Drop an unmerged gradient up to this attempt: its trainer uses another server's."""
        slot = self._slots.get(key)
        if slot is not None and slot.phase in ("running", "staged") and slot.attempt <= attempt:
            del self._slots[key]

    def expire(self, now_s: float) -> None:
        """Drop gradients that were not confirmed in time."""
        staged = [(key, slot) for key, slot in self._slots.items() if slot.phase == "staged"]
        for key, slot in staged:
            if slot.until_s <= now_s:
                del self._slots[key]

    def offer(
        self, number: int, made_of: Collection[GradientKey] | None = None
    ) -> list[GradientKey]:
        """Offer a round the merged gradients of `made_of` (None: all); return their keys."""
        merged = {key for key, slot in self._slots.items() if slot.phase == "merged"}
        keys = sorted(merged if made_of is None else merged.intersection(made_of))
        for key in keys:
            slot = self._slots[key]
            slot.phase, slot.round = "offered", number
        return keys

    def close(self, number: int, committed: Collection[GradientKey]) -> list[GradientKey]:
        """Commit the keys in a round's close list; return those offered to it but not named.

        Those become `merged` again, and their gradients must wait for the next round with them."""
        offered = [
            key
            for key, slot in self._slots.items()
            if slot.phase == "offered" and slot.round == number
        ]
        for key in committed:
            if self._slots.pop(key, None) is not None:
                self._remember(key)
        back = [key for key in offered if key in self._slots]
        for key in back:
            self._slots[key].phase = "merged"
        return back

    def reset(self) -> list[GradientKey]:
        """Drop everything: after leaving the group, nothing will count. Return the keys of this
        peer's own, which nobody else is asked for."""
        own = [key for key, slot in self._slots.items() if slot.attempt == OWN]
        self._slots.clear()
        return own

    def is_merged(self, key: GradientKey) -> bool:
        """True if a gradient is in this server's sum or in a contribution, or counts already."""
        slot = self._slots.get(key)
        return key in self._committed or (slot is not None and slot.phase in ("merged", "offered"))

    def is_offered(self, key: GradientKey) -> bool:
        """True if a contribution with this key is on its way into a round."""
        slot = self._slots.get(key)
        return slot is not None and slot.phase == "offered"

    @property
    def kept(self) -> set[GradientKey]:
        """Keys of the staged gradients; all others may be dropped."""
        return {key for key, slot in self._slots.items() if slot.phase == "staged"}

    @property
    def remembered(self) -> int:
        """The number of committed keys that are known, for late requests."""
        return len(self._committed)

    @property
    def taken(self) -> int:
        """The number of places taken."""
        return sum(slot.phase in ("running", "staged") for slot in self._slots.values())

    @property
    def free(self) -> int:
        """The number of free places."""
        return max(self.places - self.taken, 0)

    def __len__(self) -> int:
        """Return the number of gradients that are not yet committed or dropped."""
        return len(self._slots)

    def _refuse(self, key: GradientKey, attempt: int) -> None:
        """Never merge anything requested up to this attempt."""
        self.revoke(key, attempt)
        self._refused[key] = max(attempt, self._refused.pop(key, -1))
        if len(self._refused) > REMEMBERED:
            self._refused.popitem(last=False)

    def _remember(self, key: GradientKey) -> None:
        self._committed[key] = None
        if len(self._committed) > REMEMBERED:
            self._committed.popitem(last=False)
