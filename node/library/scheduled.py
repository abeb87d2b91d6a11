"""A learning-rate scheduler that follows a run, whenever this program has joined it."""

import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from farflock.node.library.presence import OptimizerNode
from farflock.node.library.telling import tell

if TYPE_CHECKING:
    from farflock.node.library.swarm_optimizer import SwarmOptimizer

LATE = 100  # steps of a run after which a warm-up is out of place


class Scheduled:
    """A torch scheduler over a `SwarmOptimizer`: each `step` brings it to where the run is.

    For a peer that was there from the beginning, and takes part in each round, these are the steps
    of the scheduler alone. Other attributes and methods are the scheduler's own."""

    def __init__(self, optimizer: "SwarmOptimizer", scheduler: Any) -> None:  # noqa: ANN401 - torch's have no common type
        self.scheduler, self._optimizer = scheduler, optimizer
        optimizer.follows_run = True
        self._made = max(scheduler.last_epoch, optimizer.run_steps())
        self._advance(self._made - scheduler.last_epoch)

    def step(self) -> None:
        """Set the rate of the next step."""
        now = max(self._made, self._optimizer.run_steps())
        self._advance(now - self._made)
        self._made = now

    def _advance(self, steps: int) -> None:
        with warnings.catch_warnings():  # that no step of the optimizer came before
            warnings.simplefilter("ignore", UserWarning)
            for _ in range(steps):
                try:
                    self.scheduler.step()
                except ValueError:  # OneCycleLR, past its end
                    return

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the scheduler's
        return getattr(self.scheduler, name)


def scheduled(optimizer: "SwarmOptimizer", scheduler: Any) -> Scheduled:  # noqa: ANN401 - see above
    """Return a scheduler that begins at the run's progress and follows it: a late joiner does not
    warm up while the others' rate is already low. Call its `step` after each step::

        scheduler = farflock.scheduled(optimizer, OneCycleLR(optimizer, 3e-3, total_steps=1000))

    Progress is counted in steps of a peer: whole rounds times their period, plus the steps since.
    """
    return Scheduled(optimizer, scheduler)


def tell_of_late_start(
    here: OptimizerNode, groups: Iterable[Mapping[str, Any]], run_steps: int
) -> None:
    """Warn of a scheduler (which leaves `initial_lr` in the groups) that begins at its start,
    though this peer joins a run that does not."""
    if not here.founder and run_steps >= LATE and any("initial_lr" in group for group in groups):
        tell(
            f"the run has made about {run_steps} steps, and the learning-rate scheduler of this"
            " program begins at step 0; use farflock.scheduled(optimizer, scheduler) to begin where"
            " the run is"
        )
