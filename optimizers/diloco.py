"""DiLoCo: H local steps, then one outer step on the mean pseudo-gradient (Douillard et al., arXiv:2311.08105, algorithm 1).

Deviations: the mean is over whoever took part, never over whom we expected; a replica whose work was not taken keeps it
and sends it next time (their paper's behaviour under drops); optional error feedback for biased codecs; optional rounds of
seconds instead of steps, and weights by steps, for unequal machines.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from farflock.optimizers.feedback import choose, message, settle
from farflock.optimizers.method import All, Exchange, Key, Progress, Ranges, Replica, Result, State, Tensors
from farflock.optimizers.options import require_deadline, require_period, require_unbiased
from farflock.optimizers.outer import Outer, OuterNesterov
from farflock.optimizers.rhythm import Rhythm, require_round
from farflock.optimizers.state import counter, kept, named, unnamed

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
    _phi: dict[str, Tensor] = field(default_factory=dict)
    _momentum: dict[str, Tensor] = field(default_factory=dict)
    _residual: dict[str, Tensor] = field(default_factory=dict)
    _message: dict[str, Tensor] = field(default_factory=dict)  # what the pending exchange was encoded from (feedback)
    _snapshot: dict[str, Tensor] = field(default_factory=dict)  # and where the replica stood then (feedback)
    _round: int = 0
    _since: int = 0
    _steps: int = 0  # local steps in the work that nobody took yet
    _slot: int = 0  # of the last message (optimizers/rhythm.py)
    _pending: bool = False

    def __post_init__(self) -> None:
        require_period(self.period)
        require_deadline(self.deadline_s)
        require_round(self.round_s)
        if self.weights not in (known := ("uniform", "steps")):
            raise ValueError(f"weights={self.weights!r} is not known; choose from {', '.join(known)}")
        require_unbiased("return codec", self.return_codec, "choose bf16 or fp32")
        if self.feedback is None:
            require_unbiased("codec", self.codec, "give it feedback, e.g. feedback=0.9, or choose fp16, bf16 or int8")
        elif not 0 <= self.feedback <= 1:
            raise ValueError(f"feedback of {self.feedback} is no decay; choose one in [0, 1], usually 0.9, or None")

    def streams(self, replica: Replica) -> list[Exchange]:
        """One: the pseudo-gradients."""
        return [self._exchange({name: torch.zeros(shape) for name, shape in replica.shapes.items()})]

    def local_step(self, replica: Replica, progress: Progress) -> None:
        """The inner update; the first one remembers where the round began."""
        self._begin(replica)
        self._slot = self._slot or self._rhythm.slot(progress)
        replica.inner_step()
        self._since += 1
        self._steps += 1

    def due(self, replica: Replica, progress: Progress) -> list[Exchange]:
        """The pseudo-gradient, when a round is over."""
        if self._pending or not self._rhythm.over(self._since, self._slot, progress):
            return []
        theta = replica.read(replica.names, "param")
        tensors = {name: self._phi[name] - theta[name] for name in replica.names}
        if self.feedback is not None:
            beta = self.feedback
            tensors = {name: message(x, self._residual.get(name), beta) for name, x in tensors.items()}
            self._message, self._snapshot = tensors, theta
        self._pending, self._since, self._slot = True, 0, self._rhythm.slot(progress)
        return [self._exchange(tensors, float(self._steps) if self.weights == "steps" else 1.0)]

    def apply(self, replica: Replica, exchange: Exchange, result: Result) -> list[Exchange]:
        """The outer step. Where my work was taken it starts anew from phi, with the steps made since; elsewhere it stays."""
        if result.sent is not None or exchange.tensors:
            self._pending = False
        self._round = result.next_round
        if result.status == "failed":
            return []
        self._begin(replica)
        assert result.mean is not None, f"{exchange.key}: {result.status} without a mean"
        theta = replica.read(replica.names, "param") if result.taken else {}
        moved = {}
        for name in replica.names:
            before = self._phi[name]
            after, self._momentum[name] = self.outer.step(before, result.mean[name], self._momentum[name])
            self._phi[name] = after
            taken = result.taken.get(name, ())
            if taken:
                moved[name] = self._follow(name, theta[name], before, after, taken, result)
        if moved:
            self._steps = result.steps_since
            replica.write(moved, "param")
        return []

    def _follow(self, name: str, theta: Tensor, before: Tensor, after: Tensor, taken: Ranges, result: Result) -> Tensor:
        """theta <- phi_new + what has been done since the snapshot, where the snapshot's work was taken."""
        assert result.sent is not None
        if self.feedback is not None:
            self._residual[name] = settle(self._message[name], result.sent[name], taken, self._residual.get(name))
        if result.steps_since == 0:
            return choose(taken, after, theta)
        snapshot = before - result.sent[name] if self.feedback is None else self._snapshot[name]
        return choose(taken, after + (theta - snapshot), theta)

    def snapshot(self, replica: Replica) -> State:
        """phi, the outer momentum, and the round."""
        self._begin(replica)
        counters = {"round": torch.tensor(self._round)}
        return {**named("phi", self._phi), **named("momentum", self._momentum), **counters}

    def restore(self, replica: Replica, state: State, mode: Literal["adopt", "carry"]) -> None:
        """Take over phi and momentum; `carry` puts this replica's unsent work on top of the new phi, and keeps its residual."""
        new, momentum = unnamed("phi", state, replica.shapes), unnamed("momentum", state, replica.shapes)
        self._round = counter("round", state)
        if mode == "carry" and self._phi:
            theta = replica.read(replica.names, "param")
            replica.write({name: new[name] + (theta[name] - self._phi[name]) for name in new}, "param")
        else:
            replica.write(new, "param")
            self._residual = {}
            self._steps = 0
        self._phi, self._momentum = new, momentum
        self._since, self._slot, self._pending = 0, 0, False
        self._message, self._snapshot = {}, {}

    def personal(self, replica: Replica) -> State:
        """Where in the round this peer is, its residual, and what its pending message was made from."""
        numbers = {"since": self._since, "untaken": self._steps, "slot": self._slot, "pending": int(self._pending)}
        counters = {key: torch.tensor(number) for key, number in numbers.items()}
        lists = {"residual": self._residual, "message": self._message, "start": self._snapshot}
        return counters | {key: value for what, held in lists.items() for key, value in named(what, held).items()}

    def resume(self, replica: Replica, state: State) -> None:
        """Go on where this peer stopped."""
        self._phi, self._momentum = (unnamed(what, state, replica.shapes) for what in ("phi", "momentum"))
        self._round = counter("round", state)
        self._since, self._steps, self._slot = (counter(what, state) for what in ("since", "untaken", "slot"))
        self._pending = bool(counter("pending", state))
        self._residual, self._message, self._snapshot = (
            kept(what, state, replica.shapes) for what in ("residual", "message", "start")
        )

    def agreed(self, replica: Replica, stream: str) -> State:
        """The whole state."""
        return self.snapshot(replica)

    def eval_params(self, replica: Replica) -> Tensors:
        """phi."""
        self._begin(replica)
        return {name: tensor.clone() for name, tensor in self._phi.items()}

    def _begin(self, replica: Replica) -> None:
        if not self._phi:
            self._phi = dict(replica.read(replica.names, "param"))
            self._momentum = {name: torch.zeros_like(tensor) for name, tensor in self._phi.items()}

    @property
    def _rhythm(self) -> Rhythm:
        return Rhythm(self.period, self.round_s)

    def _exchange(self, tensors: dict[str, Tensor], weight: float = 1.0) -> Exchange:
        return Exchange(
            Key(STREAM, self._round),
            "mean",
            All(),
            tensors,
            weight,
            codec=self.codec,
            return_codec=self.return_codec,
            deadline_s=self.deadline_s,
        )
