"""When things happen in an exchange, on the local clock: until when members wait for each other."""

from dataclasses import dataclass

RESEND_S = 0.5
TAKEOVER_S = 1.0  # each later member waits this much longer before it steps in for a silent one
SOFT = 0.5  # of the deadline: until then the live but slow are waited for
LATE_REDUCER = 0.7  # of the deadline: from then on a live but silent reducer is replaced


@dataclass(frozen=True, slots=True)
class Timing:
    """The hours of one exchange that began at `started_s`."""

    started_s: float
    deadline_s: float

    @property
    def soft_s(self) -> float:
        """From then on nobody waits for a member that lives and has brought nothing."""
        return self.started_s + SOFT * self.deadline_s

    def replaced_s(self, rank: int) -> float:
        """When the next in line number `rank` reduces what a live but silent reducer does not."""
        return self.started_s + self.deadline_s * LATE_REDUCER + TAKEOVER_S * rank

    @property
    def ends_s(self) -> float:
        """The deadline: from then on an empty list is put forward."""
        return self.started_s + self.deadline_s
