"""The losses of a loop's steps."""

from dataclasses import dataclass

from farflock.node.reporting import Report
from farflock.node.train.task import Loss


@dataclass(slots=True)
class Losses:
    """Each step's loss is reported once, in order. One that a device still computes is reported
    when the next step ends: if it were read at once, the device would have nothing to do until it
    is asked for the next step."""

    _newest: Loss | None = None
    _unreported: int | None = None  # the step whose loss the newest one is

    @property
    def last(self) -> float | None:
        """The newest step's loss; reading it waits for the device."""
        return None if self._newest is None else float(self._newest)

    def step_ended(self, step: int, loss: Loss, report: Report) -> None:
        """Note a step's loss, and report what can be read without a wait."""
        self.tell(report)
        self._newest, self._unreported = loss, step
        if isinstance(loss, float):
            self.tell(report)

    def tell(self, report: Report) -> None:
        """Report the newest loss, if that was not done."""
        if self._unreported is not None:
            step, self._unreported = self._unreported, None
            report("step", {"step": step, "loss": self.last})
