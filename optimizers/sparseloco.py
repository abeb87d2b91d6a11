"""SparseLoCo: H local steps, then everybody's few largest values of pseudo-gradient plus residual (arXiv:2508.15706,
algorithm 1; Covenant-72B, arXiv:2603.08163): the residual of what was not sent stands in for outer momentum.

    a = beta·e + (phi - theta);   sent = what others decode of a;   e = a - sent;   phi <- phi - lr·mean(sent)

Deviations: `e` is settled when the result is known, against `sent` with the quantiser's error in it. A peer whose work was
not taken keeps it in its replica, which moves along with phi: theta <- phi_new + (theta - phi), e as it was. The paper's
authors put it into the residual (e <- a, theta <- phi). Either counts it once; in the replica it does not decay with beta,
training goes on from it instead of making the same descent again, and a round that failed moves nothing at all. Whoever
misses more rounds than the log holds (8) adopts a snapshot and loses both, earlier than the residual would have faded.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor

from farflock.compression.catalog import codec
from farflock.optimizers.method import All, Exchange, ExchangeKey, Progress, Replica, Result, State, Tensors
from farflock.optimizers.parts.feedback import SenderFeedback, choose
from farflock.optimizers.parts.options import require_deadline, require_period
from farflock.optimizers.parts.outer import OuterSGD
from farflock.optimizers.parts.outer_state import OuterState
from farflock.optimizers.parts.round_book import RoundBook
from farflock.optimizers.parts.sparse_mean import mean_of_senders
from farflock.optimizers.parts.state import zeros
from farflock.optimizers.trial_options import Disaster, TrialOptions

STREAM = "sparse"
DENOMINATORS = ("participants", "selectors")


@dataclass(slots=True)
class SparseLoCo:
    """`period` local steps a round; `feedback` is the residual's decay beta, `outer_lr` the outer step's length.

    `denominator`: the mean over all `participants` (the paper's equation), or at each coordinate over its `selectors`,
    those who sent it (all released code), which is up to M times longer where few agree.
    """

    period: int = 30
    outer_lr: float = 1.0
    feedback: float = 0.95
    denominator: Literal["participants", "selectors"] = "participants"
    codec: str = "topk:64/4096"
    deadline_s: float = 30.0

    equality: ClassVar[Literal["exact"]] = "exact"
    trial: ClassVar[TrialOptions] = TrialOptions(
        law={"codec": "topk:2/8"}, disasters=(Disaster({"period": 3, "codec": "topk:2/8"}, 1),)
    )
    _state: OuterState = field(default_factory=lambda: OuterState(None))
    _book: RoundBook = field(default_factory=RoundBook)
    _memory: SenderFeedback = field(default_factory=SenderFeedback)

    def __post_init__(self) -> None:
        require_period(self.period)
        require_deadline(self.deadline_s)
        OuterSGD(self.outer_lr), codec(self.codec)  # each refuses what it cannot be
        if not 0 <= self.feedback <= 1:
            raise ValueError(f"feedback of {self.feedback} is no decay; choose one in [0, 1], usually 0.95")
        if self.denominator not in DENOMINATORS:
            raise ValueError(f"denominator {self.denominator!r} is not known; choose participants or selectors")

    def streams(self, replica: Replica) -> list[Exchange]:
        """One: the messages."""
        return [self._exchange(zeros(replica.shapes))]

    def local_step(self, replica: Replica, progress: Progress) -> None:
        """The inner update; the first one remembers where the round began."""
        self._state.begin(replica)
        replica.inner_step()
        self._book.since += 1

    def due(self, replica: Replica, progress: Progress) -> list[Exchange]:
        """Pseudo-gradient and decayed residual, after `period` local steps since the last message."""
        if not self._book.is_due(self.period):
            return []
        self._book.leave()
        theta = replica.read(replica.names, "param")
        return [self._exchange(self._memory.compose(self._state.pseudo_gradient(theta), theta, self.feedback))]

    def apply(self, replica: Replica, exchange: Exchange, result: Result) -> list[Exchange]:
        """The outer step. The replica moves to the new phi with the work on top that was not taken or was done since."""
        self._state.begin(replica)
        if result.status != "failed":
            mean = self._mean(result)
            theta = replica.read(replica.names, "param")
            replica.write({name: self._follow(name, theta[name], mean[name], result) for name in theta}, "param")
        if exchange.tensors:
            self._memory.forget_message()
        self._book.close(exchange, result)
        return []

    def _mean(self, result: Result) -> Tensors:
        if self.denominator == "selectors":
            assert result.gathered is not None, f"{result.status} without what was gathered"
            return mean_of_senders(result.gathered)
        assert result.mean is not None, f"{result.status} without a mean"
        return result.mean

    def _follow(self, name: str, theta: Tensor, mean: Tensor, result: Result) -> Tensor:
        """One tensor's outer step, its residual, and where the replica's goes."""
        before = self._state.phi[name]
        after, _ = OuterSGD(self.outer_lr).step(before, mean, before)
        self._state.phi[name] = after
        taken = result.taken.get(name, ())
        left = after + (theta - before)
        if not taken:
            return left
        assert result.sent is not None
        self._memory.settle(name, result.sent[name], taken)
        done = after if result.steps_since == 0 else after + (theta - self._memory.start[name])
        return choose(taken, done, left)

    def snapshot(self, replica: Replica) -> State:
        """phi and the round."""
        return self._state.snapshot(replica) | self._book.snapshot()

    def restore(self, replica: Replica, state: State, mode: Literal["adopt", "carry"]) -> None:
        """Take over phi; `carry` puts this replica's unsent work on top of it and keeps the residual."""
        new, number = self._state.read(state, replica.shapes), self._book.read(state)
        if not self._state.restore(replica, new, mode):
            self._memory.residual = {}
        self._memory.forget_message()
        self._book.restart(number)

    def personal(self, replica: Replica) -> State:
        """Where in the round this peer is, its residual, and what its pending message was made from."""
        return self._book.personal() | self._memory.personal()

    def resume(self, replica: Replica, state: State) -> None:
        """Go on where this peer stopped."""
        self._state.adopt(self._state.read(state, replica.shapes))
        self._book.resume(state)
        self._memory.resume(state, replica.shapes)

    def agreed(self, replica: Replica, stream: str) -> State:
        """phi and the round."""
        return self.snapshot(replica)

    def eval_params(self, replica: Replica) -> Tensors:
        """phi."""
        return self._state.parameters(replica)

    def _exchange(self, tensors: Tensors) -> Exchange:
        key = ExchangeKey(STREAM, self._book.number)
        return Exchange(key, "gather", All(), tensors, codec=self.codec, deadline_s=self.deadline_s)
