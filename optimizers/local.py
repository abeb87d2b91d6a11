"""No communication at all: the baseline for every claim of saved bytes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from farflock.optimizers.method import Exchange, Progress, Replica, Result
from farflock.optimizers.parts.stateful import ReplicaMethod
from farflock.optimizers.trial_options import Disaster, TrialOptions


@dataclass(slots=True)
class Local(ReplicaMethod):
    """Each replica trains on its own."""

    equality: ClassVar[Literal["per-peer"]] = "per-peer"
    trial: ClassVar[TrialOptions] = TrialOptions(rest=6, disasters=(Disaster({}, 16),))

    def streams(self, replica: Replica) -> list[Exchange]:
        """Return no templates: nothing is exchanged."""
        return []

    @property
    def due_steps(self) -> Mapping[str, tuple[int, int]]:
        """As `StepSchedule.due_steps`: nothing is ever due."""
        return {}

    def at_step(self, replica: Replica, step: int) -> None:
        """As `StepSchedule.at_step`."""

    def local_step(self, replica: Replica, progress: Progress) -> None:
        """Make the inner update."""
        replica.inner_step()

    def due(self, replica: Replica, progress: Progress) -> list[Exchange]:
        """Return no exchanges."""
        return []

    def apply(self, replica: Replica, exchange: Exchange, result: Result) -> list[Exchange]:
        """Raise `AssertionError`: a method without exchanges has no results."""
        raise AssertionError("Local asked for no exchange")
