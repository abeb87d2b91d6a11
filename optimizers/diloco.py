"""DiLoCo: H local steps, then one outer step on the mean pseudo-gradient (Douillard et al.,
arXiv:2311.08105, algorithm 1).

Deviations: the mean is over the peers that took part, never over those that were expected; a
replica whose work was not taken keeps it and sends it next time (the paper's behaviour under
drops); optional error feedback for biased codecs; optional rounds of seconds instead of steps, and
weights by steps, for unequal machines.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from farflock.optimizers.method import Exchange, Progress, Replica, Result
from farflock.optimizers.parts.blocks import LazyTensors
from farflock.optimizers.parts.feedback import SenderFeedback
from farflock.optimizers.parts.options import require_feedback, require_options
from farflock.optimizers.parts.outer import Outer, OuterNesterov
from farflock.optimizers.parts.outer_state import Feedback, Merge, OuterState
from farflock.optimizers.parts.state_fields import nested, own
from farflock.optimizers.parts.stateful import PeriodicMethod, mean_of
from farflock.optimizers.parts.sync_schedule import SyncSchedule
from farflock.optimizers.trial_options import Disaster, TrialOptions

STREAM = "delta"


@dataclass(slots=True)
class DiLoCo(PeriodicMethod):
    """Rounds of `period` local steps; with `round_s` a round ends when run time crosses a multiple
    of it.

    `weights` is what a contribution weighs in the mean: 1, its number of local steps, or these
    times the tokens of a step; with equal data the first two could not be told apart
    (docs/reproductions.md, unequal). `feedback` is the decay
    of the error feedback, None for none.
    """

    period: int = 50
    outer: Outer = field(default_factory=OuterNesterov)
    codec: str = "fp16"
    return_codec: str = "bf16"
    deadline_s: float = 30.0
    feedback: float | None = None
    round_s: float | None = None
    weights: Literal["uniform", "steps", "tokens"] = "uniform"

    equality: ClassVar[Literal["exact"]] = "exact"
    trial: ClassVar[TrialOptions] = TrialOptions(
        rest=6,
        disasters=(
            Disaster({"period": 3, "codec": "fp32", "return_codec": "fp32"}, 0),
            Disaster({"period": 3, "codec": "topk:2/8", "feedback": 0.9}, 7),
            Disaster({"period": 3, "codec": "int8"}, 15),
        ),
    )
    stream: ClassVar[str] = STREAM
    _state: OuterState = nested(OuterState)
    _steps: int = own(0, "untaken", stays=True)  # local steps in work that was not taken yet
    _slot: int = own(0)  # of the last message (see `SyncSchedule`)
    _memory: SenderFeedback = nested(SenderFeedback)  # empty without `feedback`

    def __post_init__(self) -> None:
        require_options(self)
        require_feedback(self.codec, self.feedback, "fp16, bf16 or int8")
        if self.weights not in (known := ("uniform", "steps", "tokens")):
            raise ValueError(
                f"weights={self.weights!r} is not known; choose from {', '.join(known)}"
            )

    @property
    def pending(self) -> bool:
        """True while a message's result is not known."""
        return self._book.pending

    def local_step(self, replica: Replica, progress: Progress) -> None:
        """Make the inner update; the first one records where the round began."""
        PeriodicMethod.local_step(self, replica, progress)
        self._slot = self._slot or self._sync_schedule.slot(progress)
        self._steps += 1

    def due(self, replica: Replica, progress: Progress) -> list[Exchange]:
        """Request the mean pseudo-gradient when a round is over."""
        if self.pending or not self._sync_schedule.over(self._book.since, self._slot, progress):
            return []
        self._slot = self._sync_schedule.slot(progress)
        message = self._message(replica)
        self._book.leave(message)
        a_step = {"uniform": 0, "steps": 1, "tokens": progress.step_tokens}[self.weights]
        return [self._exchange(message, float(a_step * self._steps) if a_step else 1.0)]

    def _message(self, replica: Replica) -> LazyTensors:
        return self._state.pseudo_gradient(replica, replica.names, self._feedback)

    @property
    def _feedback(self) -> Feedback | None:
        return None if self.feedback is None else Feedback(self._memory, self.feedback)

    @property
    def _recalls(self) -> bool:
        return self.feedback is not None

    def _take(self, replica: Replica, exchange: Exchange, result: Result) -> None:
        """Make the outer step. Where this peer's work was taken, restart from phi plus the steps
        made since; elsewhere keep theta."""
        mean, merge = mean_of(exchange, result), Merge(self._feedback)
        names, book = replica.names, self._book
        if self._state.advance(replica, names, self.outer, mean, result, book, merge):
            self._steps = result.steps_since

    @property
    def _sync_schedule(self) -> SyncSchedule:
        return SyncSchedule(self.period, self.round_s)
