"""When a round is over: after so many local steps, or whenever the run's time crosses a multiple of some seconds.

Where machines are unequal, rounds of steps wait for the slowest; in rounds of seconds everybody does what it can
(A-EDiT, Cheng et al., arXiv:2412.07210).
"""

from dataclasses import dataclass

from farflock.optimizers.method import Progress


@dataclass(frozen=True, slots=True)
class SyncSchedule:
    """Rounds of `period` steps, or with `round_s` of so many seconds and at least `min_steps` of this peer's steps.

    A slot is an interval of `round_s`, counted from 1; 0 is not known yet, and always where steps are counted.
    """

    period: int
    round_s: float | None = None
    min_steps: int = 1

    def slot(self, progress: Progress) -> int:
        """In which interval the run is."""
        return 0 if self.round_s is None else int(progress.run_time_s // self.round_s) + 1

    def over(self, since: int, slot: int, progress: Progress) -> bool:
        """Whether a round is over that has had `since` steps and began in `slot`."""
        if self.round_s is None:
            return since >= self.period
        return self.slot(progress) > slot and since >= self.min_steps
