"""No communication at all: the line that every claim of saved bytes must be held against."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from farflock.optimizers.method import Exchange, Progress, Replica, Result, State, Tensors
from farflock.optimizers.parts.state import named, unnamed
from farflock.optimizers.trial_options import Disaster, TrialOptions


@dataclass(slots=True)
class Local:
    """Each replica trains on its own."""

    equality: ClassVar[Literal["per-peer"]] = "per-peer"
    trial: ClassVar[TrialOptions] = TrialOptions(rest=6, disasters=(Disaster({}, 16),))

    def streams(self, replica: Replica) -> list[Exchange]:
        """None."""
        return []

    def local_step(self, replica: Replica, progress: Progress) -> None:
        """The inner update."""
        replica.inner_step()

    def due(self, replica: Replica, progress: Progress) -> list[Exchange]:
        """Never anything."""
        return []

    def apply(self, replica: Replica, exchange: Exchange, result: Result) -> list[Exchange]:
        """There is nothing to apply."""
        raise AssertionError("Local asked for no exchange")

    def snapshot(self, replica: Replica) -> State:
        """The parameters."""
        return named("param", replica.read(replica.names, "param"))

    def restore(self, replica: Replica, state: State, mode: Literal["adopt", "carry"]) -> None:
        """Take over the parameters; there is no outer state that local work could be carried on."""
        replica.write(unnamed("param", state, replica.shapes), "param")

    def personal(self, replica: Replica) -> State:
        """Nothing."""
        return {}

    def resume(self, replica: Replica, state: State) -> None:
        """The replica is all there is."""

    def agreed(self, replica: Replica, stream: str) -> State:
        """Nothing: each peer has its own."""
        return {}

    def eval_params(self, replica: Replica) -> Tensors:
        """The replica's parameters."""
        return replica.read(replica.names, "param")
