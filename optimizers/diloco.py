"""DiLoCo: H local steps, then one outer step on the mean pseudo-gradient (Douillard et al., arXiv:2311.08105, algorithm 1).

Deviations: the mean is over the peers that took part, never over those that were expected; a replica whose work was not
taken keeps it and sends it next time (the paper's behaviour under drops); optional error feedback for biased codecs;
optional rounds of seconds instead of steps, and weights by steps, for unequal machines.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor

from farflock.optimizers.method import All, Exchange, ExchangeKey, Progress, Replica, Result, State, Tensors
from farflock.optimizers.parts.feedback import SenderFeedback, choose
from farflock.optimizers.parts.options import require_deadline, require_feedback, require_period, require_unbiased
from farflock.optimizers.parts.outer import Outer, OuterNesterov
from farflock.optimizers.parts.outer_state import OuterState
from farflock.optimizers.parts.round_book import RoundBook
from farflock.optimizers.parts.state import counters, numbers, zeros
from farflock.optimizers.parts.sync_schedule import SyncSchedule, require_round
from farflock.optimizers.trial_options import Disaster, TrialOptions

STREAM = "delta"


@dataclass(slots=True)
class DiLoCo:
    """`period` local steps a round, or with `round_s` whenever the run's time crosses a multiple of it.

    `weights`: what a contribution weighs in the mean, 1 or the local steps in it; with equal data it makes no difference
    that could be seen (docs/reproductions.md, unequal). `feedback` is the decay of the error feedback, None for none.
    """

    period: int = 50
    outer: Outer = field(default_factory=OuterNesterov)
    codec: str = "fp16"
    return_codec: str = "bf16"
    deadline_s: float = 30.0
    feedback: float | None = None
    round_s: float | None = None
    weights: Literal["uniform", "steps"] = "uniform"

    equality: ClassVar[Literal["exact"]] = "exact"
    trial: ClassVar[TrialOptions] = TrialOptions(
        rest=6,
        disasters=(
            Disaster({"period": 3, "codec": "fp32", "return_codec": "fp32"}, 0),
            Disaster({"period": 3, "codec": "topk:2/8", "feedback": 0.9}, 7),
            Disaster({"period": 3, "codec": "int8"}, 15),
        ),
    )
    _state: OuterState = field(default_factory=OuterState)
    _book: RoundBook = field(default_factory=RoundBook)
    _memory: SenderFeedback = field(default_factory=SenderFeedback)  # empty without `feedback`
    _steps: int = 0  # local steps in the work that nobody took yet
    _slot: int = 0  # of the last message (optimizers/parts/sync_schedule.py)

    def __post_init__(self) -> None:
        require_period(self.period)
        require_deadline(self.deadline_s)
        require_round(self.round_s)
        if self.weights not in (known := ("uniform", "steps")):
            raise ValueError(f"weights={self.weights!r} is not known; choose from {', '.join(known)}")
        require_unbiased("return codec", self.return_codec, "choose bf16 or fp32")
        require_feedback(self.codec, self.feedback, "fp16, bf16 or int8")

    def streams(self, replica: Replica) -> list[Exchange]:
        """One: the pseudo-gradients."""
        return [self._exchange(zeros(replica.shapes))]

    def local_step(self, replica: Replica, progress: Progress) -> None:
        """The inner update; the first one remembers where the round began."""
        self._state.begin(replica)
        self._slot = self._slot or self._sync_schedule.slot(progress)
        replica.inner_step()
        self._book.since += 1
        self._steps += 1

    def due(self, replica: Replica, progress: Progress) -> list[Exchange]:
        """The pseudo-gradient, when a round is over."""
        if self._book.pending or not self._sync_schedule.over(self._book.since, self._slot, progress):
            return []
        self._book.leave()
        self._slot = self._sync_schedule.slot(progress)
        theta = replica.read(replica.names, "param")
        work = self._state.pseudo_gradient(theta)
        if self.feedback is not None:
            work = self._memory.compose(work, theta, self.feedback)
        return [self._exchange(work, float(self._steps) if self.weights == "steps" else 1.0)]

    def apply(self, replica: Replica, exchange: Exchange, result: Result) -> list[Exchange]:
        """The outer step. Where my work was taken it starts anew from phi, with the steps made since; elsewhere it stays."""
        self._book.close(exchange, result)
        if result.status == "failed":
            return []
        self._state.begin(replica)
        assert result.mean is not None, f"{exchange.key}: {result.status} without a mean"
        theta, moved = replica.read(replica.names, "param") if result.taken else {}, {}
        for name in replica.names:
            before = self._state.phi[name]
            after = self._state.step(name, self.outer, result.mean[name])
            if result.taken.get(name):
                moved[name] = self._follow(name, theta[name], before, after, result)
        if moved:
            self._steps = result.steps_since
            replica.write(moved, "param")
        return []

    def _follow(self, name: str, theta: Tensor, before: Tensor, after: Tensor, result: Result) -> Tensor:
        """theta <- phi_new + what has been done since the snapshot, where the snapshot's work was taken."""
        if self.feedback is None:
            return follow(theta, before, after, name, result)
        assert result.sent is not None
        taken = result.taken[name]
        self._memory.settle(name, result.sent[name], taken)
        return choose(taken, after + (theta - self._memory.start[name]) if result.steps_since else after, theta)

    def snapshot(self, replica: Replica) -> State:
        """phi, the outer momentum, and the round."""
        return self._state.snapshot(replica) | self._book.snapshot()

    def restore(self, replica: Replica, state: State, mode: Literal["adopt", "carry"]) -> None:
        """Take over phi and momentum; `carry` puts this replica's unsent work on top of the new phi, and keeps its residual."""
        new, number = self._state.read(state, replica.shapes), self._book.read(state)
        if not self._state.restore(replica, new, mode):
            self._memory.residual, self._steps = {}, 0
        self._memory.forget_message()
        self._book.restart(number)
        self._slot = 0

    def personal(self, replica: Replica) -> State:
        """Where in the round this peer is, its residual, and what its pending message was made from."""
        return self._book.personal() | numbers({"untaken": self._steps, "slot": self._slot}) | self._memory.personal()

    def resume(self, replica: Replica, state: State) -> None:
        """Go on where this peer stopped."""
        self._state.adopt(self._state.read(state, replica.shapes))
        self._book.resume(state)
        self._steps, self._slot = counters(state, "untaken", "slot")
        self._memory.resume(state, replica.shapes)

    def agreed(self, replica: Replica, stream: str) -> State:
        """The whole state."""
        return self.snapshot(replica)

    def eval_params(self, replica: Replica) -> Tensors:
        """phi."""
        return self._state.parameters(replica)

    @property
    def _sync_schedule(self) -> SyncSchedule:
        return SyncSchedule(self.period, self.round_s)

    def _exchange(self, tensors: Tensors, weight: float = 1.0) -> Exchange:
        key, back = ExchangeKey(STREAM, self._book.number), self.return_codec
        return Exchange(key, "mean", All(), tensors, weight, self.codec, back, deadline_s=self.deadline_s)


def follow(theta: Tensor, before: Tensor, after: Tensor, name: str, result: Result) -> Tensor:
    """One tensor of a replica after the outer step from `before` to `after`: phi_new + what has been done since the message,
    where the message's work was taken; elsewhere theta stays."""
    taken = result.taken.get(name, ())
    if not taken:
        return theta
    assert result.sent is not None
    late = result.steps_since > 0
    return choose(taken, after + (theta - (before - result.sent[name])) if late else after, theta)
