"""SparseLoCo: H local steps, then every peer's few largest values of pseudo-gradient plus residual
(arXiv:2508.15706, algorithm 1; Covenant-72B, arXiv:2603.08163). The residual of what was not sent
replaces outer momentum.

    a = beta·e + (phi - theta);   sent = what others decode of a
    e = a - sent;   phi <- phi - lr·mean(sent)

Deviations: `e` is settled when the result is known, against `sent` with its quantiser's error. A
peer whose work was not taken keeps it in its replica, which moves along with phi: theta <- phi_new
+ (theta - phi), e unchanged. The paper's authors put it into the residual (e <- a, theta <- phi).
Either counts it once; in the replica it does not decay with beta, training continues from it
instead of repeating the same descent, and a failed round moves nothing at all. A peer that misses
more rounds than the log holds (8) adopts a snapshot and loses both, earlier than the residual would
have faded.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from farflock.optimizers.method import Exchange, Replica, Result, TensorBlock, Tensors
from farflock.optimizers.parts.blocks import LazyTensors, read
from farflock.optimizers.parts.feedback import SenderFeedback, choose
from farflock.optimizers.parts.options import require_options
from farflock.optimizers.parts.outer import OuterSGD
from farflock.optimizers.parts.outer_state import Anchor, Feedback
from farflock.optimizers.parts.sparse_mean import mean_of_senders
from farflock.optimizers.parts.state_fields import nested
from farflock.optimizers.parts.stateful import PeriodicMethod, mean_of
from farflock.optimizers.trial_options import Disaster, TrialOptions

DENOMINATORS = ("participants", "selectors")


@dataclass(slots=True)
class SparseLoCo(PeriodicMethod):
    """Rounds of `period` local steps; `feedback` is the residual's decay beta, `outer_lr` the outer
    step's length.

    `denominator`: the mean is over all `participants` (the paper's equation), or at each coordinate
    over its `selectors`, the peers that sent it (all released code), which is up to M times longer
    where few agree.
    """

    period: int = 30
    outer_lr: float = 1.0
    feedback: float = 0.95
    denominator: Literal["participants", "selectors"] = "participants"
    codec: str = "topk:64/4096"
    deadline_s: float = 30.0

    equality: ClassVar[Literal["exact"]] = "exact"
    trial: ClassVar[TrialOptions] = TrialOptions(
        law={"codec": "topk:2/8"},
        biased=True,
        disasters=(Disaster({"period": 3, "codec": "topk:2/8"}, 1),),
    )
    stream: ClassVar[str] = "sparse"
    _state: Anchor = nested(Anchor)
    _memory: SenderFeedback = nested(SenderFeedback)

    def __post_init__(self) -> None:
        require_options(self)
        OuterSGD(self.outer_lr)  # raises for an impossible rate
        if not 0 <= self.feedback <= 1:
            raise ValueError(
                f"feedback of {self.feedback} is out of range; choose one in [0, 1], usually 0.95"
            )
        if self.denominator not in DENOMINATORS:
            raise ValueError(
                f"denominator {self.denominator!r} is not known; choose participants or selectors"
            )

    def _message(self, replica: Replica) -> LazyTensors:
        """Return pseudo-gradient plus decayed residual."""
        return self._state.pseudo_gradient(replica, replica.names, self._feedback)

    @property
    def _feedback(self) -> Feedback:
        return Feedback(self._memory, self.feedback)

    @property
    def _recalls(self) -> bool:
        return True

    def _take(self, replica: Replica, exchange: Exchange, result: Result) -> None:
        """Move the replica to the new phi, keeping work that was not taken or was done since."""
        self._memory.begin(replica, replica.names)
        mean = (
            mean_of(exchange, result)
            if self.denominator == "participants"
            else _mean_of_selectors(result)
        )
        outer = OuterSGD(self.outer_lr)

        def change(block: TensorBlock, theta: Tensor) -> tuple[Tensor]:
            phi, then = block.of(self._state.phi[block.name]), self._book.started(block, theta)
            if taken := block.within(result.taken.get(block.name, ())):
                assert result.sent is not None
                message = self._state.work(block, then, self._feedback)
                self._memory.settle(block, message, read(result.sent, block), taken)
            before = phi.clone()
            outer.step_(phi, read(mean, block), phi)
            done = phi if result.steps_since == 0 else phi + (theta - then)
            return (choose(taken, done, phi + (theta - before)),)

        replica.update(replica.names, ("param",), change)

    def _exchange(self, tensors: Tensors, weight: float = 1.0) -> Exchange:
        return replace(PeriodicMethod._exchange(self, tensors, weight), kind="gather")


def _mean_of_selectors(result: Result) -> Tensors:
    assert result.gathered is not None, f"{result.status} without what was gathered"
    return mean_of_senders(result.gathered)
