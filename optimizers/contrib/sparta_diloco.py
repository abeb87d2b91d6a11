"""SPARTA inside DiLoCo: a sparse mean every few local steps keeps replicas together, so that outer
steps can be rare.

Two streams on one axis that counts sparse means: `mask` has each of its rounds, `delta` the last of
every outer period. If a sparse mean and an outer step overlap, the sparse mean is dropped and not
added: both move a replica towards the others, and the outer step does so for all values. The
combination is the SPARTA paper's (Beton et al., MCDC workshop at ICLR 2025); it does not mention
overlaps, for which the rule is ours.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Self

from farflock.optimizers.diloco import STREAM as DELTA
from farflock.optimizers.diloco import DiLoCo
from farflock.optimizers.method import (
    Exchange,
    ExchangeKey,
    Progress,
    Replica,
    Result,
    State,
    Tensors,
)
from farflock.optimizers.parts.outer import Outer, OuterNesterov
from farflock.optimizers.parts.state_fields import nested
from farflock.optimizers.parts.stateful import Mode, StatefulMethod
from farflock.optimizers.sparta import STREAM as MASK
from farflock.optimizers.sparta import Mixing, Selector
from farflock.optimizers.trial_options import Disaster, TrialOptions


@dataclass(slots=True)
class SpartaDiLoCo(StatefulMethod):
    """An outer step every `period` steps, a mean of one value in `one_in` every `mask_period`."""

    period: int = 500
    outer: Outer = field(default_factory=OuterNesterov)
    selector: Selector = "random"
    one_in: int = 200
    mask_period: int = 1
    delay: int = 0
    seed: int = 1337
    mask_codec: str = "fp16"  # both ways
    codec: str = "fp16"
    return_codec: str = "bf16"
    deadline_s: float = 30.0

    equality: ClassVar[Literal["exact"]] = "exact"
    trial: ClassVar[TrialOptions] = TrialOptions(
        law={"period": 4, "one_in": 3, "mask_codec": "fp32"},
        quick={"one_in": 2, "mask_codec": "fp32"},
        disasters=(
            Disaster(
                {
                    "period": 6,
                    "mask_period": 3,
                    "one_in": 3,
                    "codec": "fp32",
                    "return_codec": "fp32",
                },
                14,
            ),
        ),
    )
    _diloco: DiLoCo = nested()
    _mixing: Mixing = nested()

    def __post_init__(self) -> None:
        self._diloco = DiLoCo(
            self.period, self.outer, self.codec, self.return_codec, self.deadline_s
        )
        both, wait = (self.mask_codec, self.mask_codec), self.deadline_s
        terms = (self.selector, self.one_in, self.mask_period, self.delay, self.seed, *both, wait)
        self._mixing = Mixing(*terms, round_key=f"round.{MASK}")
        if self.period % self.mask_period:
            nearest = max(round(self.period / self.mask_period), 1) * self.mask_period
            raise ValueError(
                f"a period of {self.period} steps is not a multiple of "
                f"mask_period={self.mask_period}; choose {nearest}"
            )

    def streams(self, replica: Replica) -> list[Exchange]:
        """Return templates of the masked values and of the pseudo-gradients."""
        (outer,) = self._diloco.streams(replica)
        return [self._mixing.template(replica), self._on_axis(outer, 0)]

    def local_step(self, replica: Replica, progress: Progress) -> None:
        """Make the inner update."""
        self._diloco.local_step(replica, progress)
        self._mixing.since += 1

    def due(self, replica: Replica, progress: Progress) -> list[Exchange]:
        """Request masked values every `mask_period` steps, the pseudo-gradient every `period`."""
        outer = [self._on_axis(one, one.key.round) for one in self._diloco.due(replica, progress)]
        asked = self._mixing.due(replica) + outer
        if self._diloco.pending:
            self._mixing.disregard()
        return asked

    def apply(self, replica: Replica, exchange: Exchange, result: Result) -> list[Exchange]:
        """Apply a sparse mean or an outer step."""
        if exchange.key.stream == MASK:
            self._mixing.apply(replica, exchange, result)
            return []
        return self._diloco.apply(
            replica, exchange, replace(result, next_round=result.next_round // self._stride)
        )

    @property
    def _stride(self) -> int:
        return self.period // self.mask_period

    def _on_axis(self, exchange: Exchange, number: int) -> Exchange:
        """Move an exchange to the axis: round r is the last of rounds r·stride ... (r+1)·stride -
        1."""
        return replace(
            exchange, key=ExchangeKey(DELTA, (number + 1) * self._stride - 1), stride=self._stride
        )

    def begin(self, replica: Replica) -> None:
        """Begin as DiLoCo does."""
        self._diloco.begin(replica)

    def move(self, replica: Replica, state: State, new: Self, mode: Mode) -> bool:
        """Move as DiLoCo does: a joiner begins at phi, and sparse means draw it to the others."""
        return self._diloco.move(replica, state, new._diloco, mode)

    def agreed(self, replica: Replica, stream: str) -> State:
        """Return DiLoCo's state for its stream; what the mask moves belongs to each peer alone."""
        return self._diloco.agreed(replica, stream) if stream == DELTA else {}

    def evaluated(self, replica: Replica) -> Tensors:
        """Return phi, the outer parameters."""
        return self._diloco.evaluated(replica)
