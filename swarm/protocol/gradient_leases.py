"""Gradients that a stage server has put aside for trainers: they are computed and do not count until confirmed.

    running -> staged -> merged -> offered(round) -> committed
                  |         ^----------'  the round closed without my contribution
                  '-> dropped: revoked, or its lease ran out

A key is (trainer, microbatch). What is staged takes memory of a stage's size, so there are few places and each has a lease;
what is merged is in the stage's sum and costs nothing more. Only a confirmation of the attempt that was staged merges it: an
older one may have been given up by the trainer, who then asked somebody else. And an attempt whose confirmation was refused is
never merged, although its request may come once more, late: its trainer may ask somebody else from the refusal on. The other
side is swarm/protocol/ledger.py. Sans I/O: no tensor is here; who owns them does what the answers say.
"""

import collections
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from farflock.swarm.links import PeerId

GradientKey = tuple[PeerId, int]  # trainer, microbatch
MAX_KEYS = 16_384  # microbatches that one contribution to a stage's round names
REMEMBERED = 4096  # committed keys, and refused ones, for who asks again

Begin = Literal["run", "again", "busy", "nothing"]
Confirmed = Literal["merge", "merged", "unknown"]


@dataclass(slots=True)
class _Slot:
    attempt: int
    phase: Literal["running", "staged", "merged", "offered"] = "running"
    until_s: float = 0.0  # the lease of what is staged
    round: int = -1


@dataclass(slots=True)
class GradientLeases:
    """The gradients of one stage at one server. `places` bounds those that are running or staged, `lease_s` how long one waits
    for its confirmation."""

    places: int
    lease_s: float
    _slots: dict[GradientKey, _Slot] = field(default_factory=dict)
    _committed: collections.OrderedDict[GradientKey, None] = field(default_factory=collections.OrderedDict)
    _refused: collections.OrderedDict[GradientKey, int] = field(
        default_factory=collections.OrderedDict
    )  # the last attempt

    def begin(self, key: GradientKey, attempt: int) -> Begin:
        """A backward pass is asked for: `run` it, answer `again` what was answered, or say `busy`; `nothing` is to be done
        while it is running, and for a late request that counts already or was refused."""
        slot = self._slots.get(key)
        if attempt <= self._refused.get(key, -1):
            return "nothing"
        if slot is None and key not in self._committed:
            if self.taken >= self.places:
                return "busy"
            self._slots[key] = _Slot(attempt)
            return "run"
        if slot is None or slot.phase not in ("running", "staged"):
            return "nothing"
        slot.attempt = max(slot.attempt, attempt)
        return "again" if slot.phase == "staged" else "nothing"

    def staged(self, key: GradientKey, now_s: float) -> int | None:
        """It is computed: the attempt to answer. None if nobody wants it any more, and it is to be dropped."""
        slot = self._slots.get(key)
        if slot is None or slot.phase != "running":
            return None
        slot.phase, slot.until_s = "staged", now_s + self.lease_s
        return slot.attempt

    def confirm(self, key: GradientKey, attempt: int) -> Confirmed:
        """Its trainer has the answer and wants it to count: `merge` it into the sum now; it is `merged`; or it is `unknown`."""
        slot = self._slots.get(key)
        if key in self._committed or (slot is not None and slot.phase in ("merged", "offered")):
            return "merged"
        if slot is not None and slot.phase == "staged" and slot.attempt == attempt:
            slot.phase = "merged"
            return "merge"
        self._refuse(key, attempt)
        return "unknown"

    def own(self, key: GradientKey) -> None:
        """A microbatch of this peer's own, which it has in its sum without being asked: it takes no place."""
        assert key not in self._slots, f"{key} is here already"
        self._slots[key] = _Slot(0, "merged")

    def revoke(self, key: GradientKey, attempt: int) -> None:
        """Its trainer has gone on with another server's: nobody wants what was asked for up to this attempt."""
        slot = self._slots.get(key)
        if slot is not None and slot.phase in ("running", "staged") and slot.attempt <= attempt:
            del self._slots[key]

    def expire(self, now_s: float) -> None:
        """Drop what was not confirmed in time: nobody wants it any more."""
        for key in [key for key, slot in self._slots.items() if slot.phase == "staged" and slot.until_s <= now_s]:
            del self._slots[key]

    def offer(self, number: int, made_of: Collection[GradientKey] | None = None) -> list[GradientKey]:
        """A contribution goes into this round, made of these keys (None: of all that are merged); returns them in order."""
        merged = {key for key, slot in self._slots.items() if slot.phase == "merged"}
        keys = sorted(merged if made_of is None else merged.intersection(made_of))
        for key in keys:
            slot = self._slots[key]
            slot.phase, slot.round = "offered", number
        return keys

    def close(self, number: int, committed: Collection[GradientKey]) -> list[GradientKey]:
        """A round is over, and its close list names these keys. Returns what I had offered and it does not name: that waits
        for the next round again, and so must its gradient."""
        offered = [key for key, slot in self._slots.items() if slot.phase == "offered" and slot.round == number]
        for key in committed:
            if self._slots.pop(key, None) is not None:
                self._remember(key)
        back = [key for key in offered if key in self._slots]
        for key in back:
            self._slots[key].phase = "merged"
        return back

    def reset(self) -> None:
        """This server left its group or adopted another state: nothing that it has put aside will ever count."""
        self._slots.clear()

    def is_offered(self, key: GradientKey) -> bool:
        """True if a contribution with it is on its way into a round."""
        slot = self._slots.get(key)
        return slot is not None and slot.phase == "offered"

    @property
    def kept(self) -> set[GradientKey]:
        """Whose gradients are put aside: all others may be dropped."""
        return {key for key, slot in self._slots.items() if slot.phase == "staged"}

    @property
    def taken(self) -> int:
        """Places that are taken."""
        return sum(slot.phase in ("running", "staged") for slot in self._slots.values())

    def _refuse(self, key: GradientKey, attempt: int) -> None:
        """Never merge anything that was asked for up to this attempt."""
        self.revoke(key, attempt)
        self._refused[key] = max(attempt, self._refused.pop(key, -1))
        if len(self._refused) > REMEMBERED:
            self._refused.popitem(last=False)

    def _remember(self, key: GradientKey) -> None:
        self._committed[key] = None
        if len(self._committed) > REMEMBERED:
            self._committed.popitem(last=False)
