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

import torch
from torch import Tensor

from farflock.compression.catalog import codec
from farflock.optimizers.feedback import choose, message, settle
from farflock.optimizers.method import All, Exchange, Key, Progress, Replica, Result, State, Tensors
from farflock.optimizers.options import require_deadline, require_period
from farflock.optimizers.outer import OuterSGD
from farflock.optimizers.senders import mean_of_senders
from farflock.optimizers.state import counter, kept, named, unnamed

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
    _phi: dict[str, Tensor] = field(default_factory=dict)
    _residual: dict[str, Tensor] = field(default_factory=dict)
    _message: dict[str, Tensor] = field(default_factory=dict)  # what the pending exchange was encoded from
    _start: dict[str, Tensor] = field(default_factory=dict)  # and where the replica stood then
    _round: int = 0
    _since: int = 0
    _pending: bool = False

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
        return [self._exchange({name: torch.zeros(shape) for name, shape in replica.shapes.items()})]

    def local_step(self, replica: Replica, progress: Progress) -> None:
        """The inner update; the first one remembers where the round began."""
        self._begin(replica)
        replica.inner_step()
        self._since += 1

    def due(self, replica: Replica, progress: Progress) -> list[Exchange]:
        """Pseudo-gradient and decayed residual, after `period` local steps since the last message."""
        if self._since < self.period or self._pending:
            return []
        self._start = dict(replica.read(replica.names, "param"))
        self._message = {
            name: message(self._phi[name] - theta, self._residual.get(name), self.feedback)
            for name, theta in self._start.items()
        }
        self._pending, self._since = True, 0
        return [self._exchange(self._message)]

    def apply(self, replica: Replica, exchange: Exchange, result: Result) -> list[Exchange]:
        """The outer step. The replica moves to the new phi with the work on top that was not taken or was done since."""
        self._begin(replica)
        if result.status != "failed":
            mean = self._mean(result)
            theta = replica.read(replica.names, "param")
            replica.write({name: self._follow(name, theta[name], mean[name], result) for name in theta}, "param")
        if exchange.tensors:
            self._pending, self._message, self._start = False, {}, {}
        self._round = result.next_round
        return []

    def _mean(self, result: Result) -> Tensors:
        if self.denominator == "selectors":
            assert result.gathered is not None, f"{result.status} without what was gathered"
            return mean_of_senders(result.gathered)
        assert result.mean is not None, f"{result.status} without a mean"
        return result.mean

    def _follow(self, name: str, theta: Tensor, mean: Tensor, result: Result) -> Tensor:
        """One tensor's outer step, its residual, and where the replica's goes."""
        before = self._phi[name]
        after, _ = OuterSGD(self.outer_lr).step(before, mean, before)
        self._phi[name] = after
        taken = result.taken.get(name, ())
        left = after + (theta - before)
        if not taken:
            return left
        assert result.sent is not None
        self._residual[name] = settle(self._message[name], result.sent[name], taken, self._residual.get(name))
        done = after if result.steps_since == 0 else after + (theta - self._start[name])
        return choose(taken, done, left)

    def snapshot(self, replica: Replica) -> State:
        """phi and the round."""
        self._begin(replica)
        return {**named("phi", self._phi), "round": torch.tensor(self._round)}

    def restore(self, replica: Replica, state: State, mode: Literal["adopt", "carry"]) -> None:
        """Take over phi; `carry` puts this replica's unsent work on top of it and keeps the residual."""
        new, self._round = unnamed("phi", state, replica.shapes), counter("round", state)
        if mode == "carry" and self._phi:
            theta = replica.read(replica.names, "param")
            replica.write({name: new[name] + (theta[name] - self._phi[name]) for name in new}, "param")
        else:
            replica.write(new, "param")
            self._residual = {}
        self._phi, self._message, self._start = new, {}, {}
        self._since, self._pending = 0, False

    def personal(self, replica: Replica) -> State:
        """Where in the round this peer is, its residual, and what its pending message was made from."""
        counters = {"since": torch.tensor(self._since), "pending": torch.tensor(int(self._pending))}
        lists = {"residual": self._residual, "message": self._message, "start": self._start}
        return counters | {key: value for what, held in lists.items() for key, value in named(what, held).items()}

    def resume(self, replica: Replica, state: State) -> None:
        """Go on where this peer stopped."""
        self._phi, self._round = unnamed("phi", state, replica.shapes), counter("round", state)
        self._since, self._pending = counter("since", state), bool(counter("pending", state))
        self._residual, self._message, self._start = (
            kept(what, state, replica.shapes) for what in ("residual", "message", "start")
        )

    def agreed(self, replica: Replica, stream: str) -> State:
        """phi and the round."""
        return self.snapshot(replica)

    def eval_params(self, replica: Replica) -> Tensors:
        """phi."""
        self._begin(replica)
        return {name: tensor.clone() for name, tensor in self._phi.items()}

    def _begin(self, replica: Replica) -> None:
        if not self._phi:
            self._phi = dict(replica.read(replica.names, "param"))

    def _exchange(self, tensors: dict[str, Tensor]) -> Exchange:
        return Exchange(
            Key(STREAM, self._round), "gather", All(), tensors, codec=self.codec, deadline_s=self.deadline_s
        )
