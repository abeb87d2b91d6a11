"""Run time: the local monotonic clock plus the median offset to partners. It alone places rounds in
time; wall clocks are never compared (they are wrong more often than crystals are)."""

import collections
import statistics
from dataclasses import dataclass, field

from farflock.swarm.links import PeerId

KEPT_SAMPLES = 8
MAX_PARTNERS = 64


@dataclass(slots=True)
class RunClock:
    """Estimates the run time from ping answers; the founder's clock is the origin (`is_origin`)."""

    is_origin: bool = False
    _samples: dict[PeerId, collections.deque[tuple[float, float]]] = field(default_factory=dict)

    def run_s(self, local_s: float) -> float:
        """Return the run time at a local time."""
        return local_s + self.offset_s

    @property
    def partners(self) -> tuple[PeerId, ...]:
        """The peers whose answers count, oldest first."""
        return tuple(self._samples)

    @property
    def offset_s(self) -> float:
        """Run time minus local time: the median of the partners' best samples, 0 without any."""
        if self.is_origin or not self._samples:
            return 0.0
        best = [min(samples)[1] for samples in self._samples.values()]
        return statistics.median(best)

    def answered(
        self, partner: PeerId, sent_s: float, received_s: float, their_run_s: float
    ) -> None:
        """Record that a partner's run time was `their_run_s` between the two local times.

        The sample assumes the midpoint; the one with the shortest round trip is the best."""
        if not sent_s <= received_s:
            return
        if partner not in self._samples and len(self._samples) >= MAX_PARTNERS:
            del self._samples[next(iter(self._samples))]
        samples = self._samples.setdefault(partner, collections.deque(maxlen=KEPT_SAMPLES))
        samples.append((received_s - sent_s, their_run_s - (sent_s + received_s) / 2))
