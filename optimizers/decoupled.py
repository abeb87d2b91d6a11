"""What DeMo and FlexDeMo share: a momentum that each peer keeps to itself, of which only a part is exchanged, and removed.

    delta <- decay·delta + gradient;   delta <- delta - sent;   q = mean of what was sent;   theta <- theta - lr·sign(q)

(DeMo, arXiv:2411.19870; DeToNATION, arXiv:2502.06728.) A method says which part, in what form; the rest is here.

Who takes the step: sign(q) is handed to the replica as a gradient and the inner optimizer takes it, so that the rate is the
schedule's, for everybody that of the round, and weight decay is where all methods have it. The inner optimizer to choose is
sgd without clipping (`optimizer = "sgd"`, `clip = 0`): then theta <- (1 - lr·wd)·theta - lr·sign(q), the papers' equation.
The norm of a sign is the root of the number of parameters, so a clip at 1 makes the rate that many times smaller. Another
inner optimizer takes sign(q), or q without `sign` (DeToNATION's AdamW form), as its gradient; joiners get its moments.

Deviations: lr does not multiply the gradient inside delta (the papers' double lr): a constant one cancels in the sign, and a
schedule would only make old gradients weigh more or less than new ones. The gradient of a step without an exchange is added
to delta and changes no parameter (DeToNATION's code applies it, and replicas part). What nobody took stays in delta.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from farflock.optimizers.method import All, Drifted, Exchange, ExchangeKey, Progress, Replica, Result, Tensors
from farflock.optimizers.parts.drift import SUMS, parted, sketch
from farflock.optimizers.parts.feedback import choose
from farflock.optimizers.parts.options import require_options
from farflock.optimizers.parts.outer import scaled
from farflock.optimizers.parts.round_book import RoundBook
from farflock.optimizers.parts.sparse_mean import mean_of_senders
from farflock.optimizers.parts.state import Shapes, zeros
from farflock.optimizers.parts.state_fields import own, part, shared
from farflock.optimizers.parts.stateful import ReplicaMethod, mean_of

CHECK = "check"


@dataclass(slots=True)
class Decoupled(ReplicaMethod):
    """An exchange every `period` local steps; `decay` is the momentum's, each step. Without `sign` the step is q itself.

    Parameters change in `apply` alone, alike for everybody who applies a round, also for who was not in it. The inner
    optimizer's arithmetic is not portable, nor is DeMo's transform: replicas are equal on equal machines, close on others.
    So every `check_rounds` rounds their sketches are compared, and who is farther than `tolerance` from the others, as a
    share of the parameters' size, adopts their state. The own momentum is lost with it.
    """

    period: int = 1
    decay: float = 0.999
    sign: bool = True
    check_rounds: int = 50
    tolerance: float = 0.01
    deadline_s: float = 30.0

    equality: ClassVar[Literal["close"]] = "close"
    rare_moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "step", "momentum_buffer")
    _delta: dict[str, Tensor] = own(dict, stays=True)
    _book: RoundBook = part(RoundBook)
    _checking: bool = own(False)
    _unchecked: int = shared(0)  # sketches of earlier rounds were compared, with or without this replica's

    def __post_init__(self) -> None:
        require_options(self)
        if self.check_rounds < 1:
            raise ValueError(f"a check every {self.check_rounds} rounds is not possible; choose 1 or more, usually 50")
        if not 0 < self.tolerance < math.inf:
            raise ValueError(f"a tolerance of {self.tolerance} is none; choose a share above 0, usually 0.01")
        if not 0 <= self.decay < 1:
            raise ValueError(f"a decay of {self.decay} is none; choose one in [0, 1), usually 0.999")

    @abstractmethod
    def _part(self, delta: Tensors) -> dict[str, Tensor]:
        """What of delta this round's exchange carries, in a form whose shapes never change."""

    @abstractmethod
    def _whole(self, part: Tensors, shapes: Shapes, round_number: int) -> dict[str, Tensor]:
        """The tensors of `shapes` that have this part, and zero elsewhere: the transpose of `_part`."""

    @abstractmethod
    def _exchange(self, tensors: dict[str, Tensor]) -> Exchange:
        """This round's exchange of these tensors."""

    def streams(self, replica: Replica) -> list[Exchange]:
        """The parts, and the sketches, in the last of every `check_rounds` rounds."""
        parts = self._part(zeros(replica.shapes))
        return [self._exchange(parts), self._check(self.check_rounds - 1, torch.zeros(SUMS))]

    def local_step(self, replica: Replica, progress: Progress) -> None:
        """The gradient goes from the replica into the momentum; no parameter changes."""
        gradients = replica.read(replica.names, "grad")
        for name, gradient in gradients.items():
            old = self._delta.get(name)
            self._delta[name] = gradient if old is None else scaled(old, self.decay) + gradient
        replica.write({name: torch.zeros_like(gradient) for name, gradient in gradients.items()}, "grad")
        self._book.since += 1

    def due(self, replica: Replica, progress: Progress) -> list[Exchange]:
        """A part of the momentum, after `period` local steps since the last one; with it the sketch, when that is due."""
        if not self._book.is_due(self.period):
            return []
        self._book.leave()
        asked, number = [self._exchange(self._part(self._delta))], self._book.number
        if (number + 1) % self.check_rounds == 0 and number >= self._unchecked and not self._checking:
            self._checking = True
            asked.append(self._check(number, sketch(replica.read(replica.names, "param"), number)))
        return asked

    def apply(self, replica: Replica, exchange: Exchange, result: Result) -> list[Exchange]:
        """What was taken of mine leaves the momentum; then everybody's step. `Drifted` if sketches say so."""
        if exchange.key.stream == CHECK:
            self._compare(exchange, result)
            return []
        self._book.close(exchange, result)
        if result.status == "failed":
            return []
        if result.taken:
            self._remove(replica.shapes, exchange.key.round, result)
        mean = mean_of(exchange, result) if result.gathered is None else mean_of_senders(result.gathered)
        q = self._whole(mean, replica.shapes, exchange.key.round)
        waiting = replica.read(replica.names, "grad")
        replica.write({name: torch.sign(x) for name, x in q.items()} if self.sign else q, "grad")
        replica.inner_step()
        replica.write(waiting, "grad")
        return []

    def _compare(self, exchange: Exchange, result: Result) -> None:
        self._unchecked = max(self._unchecked, exchange.key.round + 1)
        if not exchange.tensors:
            return
        self._checking = False
        if result.gathered is None or not result.taken:
            return
        sketches = [result.gathered[peer]["sums"] for peer in result.participants]
        apart = parted(exchange.tensors["sums"], sketches)
        if apart > self.tolerance:
            raise Drifted(f"parameters are {apart:.2%} from the others', more than {self.tolerance:.2%}")

    def _remove(self, shapes: Shapes, round_number: int, result: Result) -> None:
        """delta <- delta - what others decoded, decayed as often as delta was since it was sent."""
        assert result.sent is not None
        delivered = {
            name: choose(result.taken.get(name, ()), x, torch.zeros_like(x)) for name, x in result.sent.items()
        }
        for name, x in self._whole(delivered, shapes, round_number).items():
            self._delta[name] = self._delta[name] - scaled(x, self.decay**result.steps_since)

    def _check(self, number: int, sums: Tensor) -> Exchange:
        key, stride = ExchangeKey(CHECK, number), self.check_rounds
        return Exchange(key, "gather", All(), {"sums": sums}, codec="fp32", stride=stride, deadline_s=self.deadline_s)
