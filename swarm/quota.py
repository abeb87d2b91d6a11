"""A token bucket per remote peer: how much of this machine's time and memory a stranger may use.

Identities are free, so a quota only slows a flood down; `swarm/dht/item_store.py` bounds the memory
that a flood can occupy.
"""

from dataclasses import dataclass, field

UNITS_PER_S = 50.0
BURST_UNITS = 400.0
BYTES_PER_UNIT = 4096
MAX_TRACKED_PEERS = 4096


def units(calls: int, size_bytes: int) -> float:
    """Return the cost of a request: one unit per item it names and one per 4 kB it moves."""
    return calls + size_bytes / BYTES_PER_UNIT


@dataclass(slots=True)
class Quota:
    """A token bucket per peer, filled at `units_per_s` up to `burst_units`.

    Beyond `max_peers` the peer heard from least recently is forgotten, and starts again with a full
    bucket."""

    units_per_s: float = UNITS_PER_S
    burst_units: float = BURST_UNITS
    max_peers: int = MAX_TRACKED_PEERS
    _buckets: dict[bytes, tuple[float, float]] = field(default_factory=dict)  # (units, time)

    def take(self, peer: bytes, cost_units: float, now_s: float) -> bool:
        """Pay `cost_units` from the peer's bucket, or return False if it has too little."""
        left, then_s = self._buckets.pop(peer, (self.burst_units, now_s))
        left = min(self.burst_units, left + max(0.0, now_s - then_s) * self.units_per_s)
        paid = cost_units <= left
        self._buckets[peer] = (left - cost_units if paid else left, now_s)
        if len(self._buckets) > self.max_peers:
            del self._buckets[next(iter(self._buckets))]
        return paid

    def __len__(self) -> int:
        return len(self._buckets)
