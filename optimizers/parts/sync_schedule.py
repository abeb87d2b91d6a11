"""The end of a round: after a number of local steps, or when run time crosses a multiple of some
seconds.

Where machines are unequal, rounds of steps wait for the slowest; in rounds of seconds every peer
does what it can (A-EDiT, Cheng et al., arXiv:2412.07210).
"""

from dataclasses import dataclass

from farflock.optimizers.method import Progress


@dataclass(frozen=True, slots=True)
class SyncSchedule:
    """Rounds of `period` steps, or of `round_s` seconds and at least `min_steps` steps of this
    peer. A slot is an interval of `round_s`, counted from 1; 0 means not known yet, or that steps
    are counted."""

    period: int
    round_s: float | None = None
    min_steps: int = 1

    def slot(self, progress: Progress) -> int:
        """Return the interval that the run is in."""
        return 0 if self.round_s is None else int(progress.run_time_s // self.round_s) + 1

    def over(self, since: int, slot: int, progress: Progress) -> bool:
        """Return whether a round of `since` steps that began in `slot` is over."""
        if self.round_s is None:
            return since >= self.period
        return self.slot(progress) > slot and since >= self.min_steps
