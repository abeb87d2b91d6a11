"""The base of DeMo and FlexDeMo: each peer keeps a momentum to itself; only a part of it is
exchanged, and then removed.

    delta <- decay·delta + gradient;   delta <- delta - sent
    q = mean of what was sent;   theta <- theta - lr·sign(q)

(DeMo, arXiv:2411.19870; DeToNATION, arXiv:2502.06728.) A method chooses the part and its form; the
rest is here.

The inner optimizer takes the step: it gets sign(q) as a gradient, so that every peer uses the
schedule's rate of that round, and weight decay is where all methods have it. The inner optimizer to
choose is sgd without clipping (`optimizer = "sgd"`, `clip = 0`), which gives the papers' equation:
theta <- (1 - lr·wd)·theta - lr·sign(q). The norm of a sign is the square root of the number of
parameters, so a clip at 1 would divide the rate by it. Another inner optimizer takes sign(q), or q
without `sign` (DeToNATION's AdamW form), as its gradient; joiners get its moments.

Deviations: lr does not multiply the gradient inside delta (the papers' double lr): a constant one
cancels in the sign, and a schedule would only shift weight between old and new gradients. The
gradient of a step without an exchange is added to delta and changes no parameter (DeToNATION's code
applies it, so replicas diverge). What was not taken stays in delta.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from farflock.optimizers.method import (
    All,
    Drifted,
    Exchange,
    ExchangeKey,
    Progress,
    Replica,
    Result,
    Tensors,
)
from farflock.optimizers.parts.blocks import set_gradients
from farflock.optimizers.parts.drift import SUMS, parted, sketch
from farflock.optimizers.parts.feedback import choose
from farflock.optimizers.parts.options import require_options
from farflock.optimizers.parts.outer import scaled
from farflock.optimizers.parts.round_book import RoundBook
from farflock.optimizers.parts.sparse_mean import mean_of_senders
from farflock.optimizers.parts.state import Shapes, zeros
from farflock.optimizers.parts.state_fields import nested, own, shared
from farflock.optimizers.parts.stateful import ReplicaMethod, mean_of

CHECK = "check"


@dataclass(slots=True)
class Decoupled(ReplicaMethod):
    """An exchange every `period` local steps; `decay` is the momentum's, per step. Without `sign`
    the step is q itself.

    Parameters change only in `apply`, in the same way for every peer that applies a round, whether
    or not it contributed. DeMo's transform is not portable: replicas are identical on identical
    machines, and close on others. Therefore sketches of the replicas are compared every
    `check_rounds` rounds. A peer that is farther than `tolerance` from the others, as a share of
    the parameters' norm, adopts their state and loses
    its momentum.
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
    _book: RoundBook = nested(RoundBook)
    _checking: bool = own(False)
    # The first round whose sketches have not been compared yet, with or without this replica's.
    _unchecked: int = shared(0)

    def __post_init__(self) -> None:
        require_options(self)
        if self.check_rounds < 1:
            raise ValueError(
                f"a check every {self.check_rounds} rounds is not allowed; "
                "choose 1 or more, usually 50"
            )
        if not 0 < self.tolerance < math.inf:
            raise ValueError(
                f"a tolerance of {self.tolerance} is out of range; "
                "choose a share above 0, usually 0.01"
            )
        if not 0 <= self.decay < 1:
            raise ValueError(
                f"a decay of {self.decay} is out of range; choose one in [0, 1), usually 0.999"
            )

    @abstractmethod
    def _extract(self, delta: Tensors) -> dict[str, Tensor]:
        """Return the part of delta that this round's exchange carries, in constant shapes."""

    @abstractmethod
    def _whole(self, extract: Tensors, shapes: Shapes, round_number: int) -> dict[str, Tensor]:
        """Return tensors of `shapes` with this part, else zeros: the transpose of `_extract`."""

    @abstractmethod
    def _exchange(self, tensors: dict[str, Tensor]) -> Exchange:
        """Return this round's exchange of these tensors."""

    def streams(self, replica: Replica) -> list[Exchange]:
        """Return templates of the parts and of the sketches, sent every `check_rounds` rounds."""
        extract = self._extract(zeros(replica.shapes))
        return [
            self._exchange(extract),
            self._check(self.check_rounds - 1, torch.zeros(SUMS, dtype=torch.float32)),
        ]

    def local_step(self, replica: Replica, progress: Progress) -> None:
        """Move the gradient from the replica into the momentum; no parameter changes."""
        gradients = replica.read(replica.names, "grad")
        for name, gradient in gradients.items():
            old = self._delta.get(name)
            self._delta[name] = gradient if old is None else scaled(old, self.decay) + gradient
        set_gradients(replica, zeros(replica.shapes))
        self._book.since += 1

    def due(self, replica: Replica, progress: Progress) -> list[Exchange]:
        """Request a part's exchange `period` local steps after the last one, and any check due."""
        if not self._book.is_due(self.period):
            return []
        self._book.leave()
        asked, number = [self._exchange(self._extract(self._delta))], self._book.number
        if (
            (number + 1) % self.check_rounds == 0
            and number >= self._unchecked
            and not self._checking
        ):
            self._checking = True
            asked.append(self._check(number, sketch(replica.read(replica.names, "param"), number)))
        return asked

    def apply(self, replica: Replica, exchange: Exchange, result: Result) -> list[Exchange]:
        """Remove from the momentum what was taken, then make the common step. Raise `Drifted` if
        sketches show that this replica is too far from the others."""
        if exchange.key.stream == CHECK:
            self._compare(exchange, result)
            return []
        self._book.close(exchange, result)
        if result.status == "failed":
            return []
        if result.taken:
            self._remove(replica.shapes, exchange.key.round, result)
        mean = (
            mean_of(exchange, result)
            if result.gathered is None
            else mean_of_senders(result.gathered)
        )
        q = self._whole(mean, replica.shapes, exchange.key.round)
        waiting = replica.read(replica.names, "grad")
        set_gradients(replica, {name: torch.sign(x) for name, x in q.items()} if self.sign else q)
        replica.inner_step()
        set_gradients(replica, waiting)
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
            raise Drifted(
                f"parameters are {apart:.2%} from the others', more than {self.tolerance:.2%}"
            )

    def _remove(self, shapes: Shapes, round_number: int, result: Result) -> None:
        """delta <- delta - what others decoded, decayed as often as delta since it was sent."""
        assert result.sent is not None
        delivered = {
            name: choose(result.taken.get(name, ()), x, torch.zeros_like(x))
            for name, x in result.sent.items()
        }
        for name, x in self._whole(delivered, shapes, round_number).items():
            self._delta[name] = self._delta[name] - scaled(x, self.decay**result.steps_since)

    def _check(self, number: int, sums: Tensor) -> Exchange:
        key, stride = ExchangeKey(CHECK, number), self.check_rounds
        return Exchange(
            key,
            "gather",
            All(),
            {"sums": sums},
            codec="fp32",
            stride=stride,
            deadline_s=self.deadline_s,
        )
