"""The losses of a loop's steps."""

from dataclasses import dataclass

from farflock.node.reporting import Report
from farflock.node.train.task import Loss


@dataclass(slots=True)
class Losses:
    """Each step's loss is reported once, in order. One that a device still computes is read after
    the next step was asked for, and reported when that ends: if it were read at once, the device
    would have nothing to do meanwhile."""

    last: float | None = None  # the newest that was read
    _waiting: tuple[int, Loss] | None = None  # the newest step, unless it was reported

    def read(self) -> None:
        """Wait for the newest step's loss. Only the thread that trains may: a step can be long."""
        if self._waiting is not None:
            step, loss = self._waiting
            self.last = float(loss)
            self._waiting = step, self.last

    def step_ended(self, step: int, loss: Loss, report: Report) -> None:
        """Note a step's loss, and report those that were read."""
        self.tell(report)
        self._waiting = step, loss
        if isinstance(loss, float):
            self.read()
            self.tell(report)

    def tell(self, report: Report) -> None:
        """Report the newest loss, if that was not done and it was read."""
        if self._waiting is not None and isinstance(self._waiting[1], float):
            step, loss = self._waiting
            self._waiting = None
            report("step", {"step": step, "loss": loss})
