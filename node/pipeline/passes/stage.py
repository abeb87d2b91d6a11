"""A stage: consecutive layers of a model on one peer, for microbatches in any order.

A backward pass needs only the stage's input and the gradient of its output: it can compute the
forward pass again. So any peer of the stage may compute it, and the result depends only on weights
and input. Where memory allows, a server keeps the forward pass's graph instead (graphs.py).

A stage's gradient of the weights is a sum over tokens, with their number. Sums of different peers
are added and divided once, by all tokens that count at this stage (other designs divide by the
world size, which is wrong as soon as a microbatch is lost or skips a stage).

Shapes: B sequences, L positions, D model width, V vocabulary."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from farflock.node.model.llama import Llama

Gradients = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class MicrobatchGradient:
    """The gradient of a microbatch's summed loss with respect to a stage's weights, and its number
    of tokens."""

    gradients: Gradients
    tokens: int


@dataclass(frozen=True, slots=True)
class BackwardOutput:
    """A backward pass's results: the gradient of the stage's input (B, L, D), None at the first
    stage; the gradient of its weights; and at the last stage the loss, in nats summed over
    tokens."""

    input_gradient: Tensor | None
    staged: MicrobatchGradient
    loss_sum: float | None = None


@dataclass(frozen=True, slots=True)
class Graph:
    """A forward pass that can be differentiated: the stage's input and its output."""

    input: Tensor
    output: Tensor


class Stage:
    """The passes of one stage, which keeps nothing but its weights between calls. Only one thread
    at a time may call it."""

    def __init__(self, model: Llama) -> None:
        self.model = model
        self._names = tuple(name for name, _ in model.named_parameters())
        self._weights = tuple(model.parameters())

    @property
    def is_first(self) -> bool:
        """True if this stage takes tokens."""
        return self.model.span.start == 0

    @property
    def is_last(self) -> bool:
        """True if this stage computes the loss."""
        return self.model.span.stop == self.model.config.layers

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Return activations (B, L, D), or the last stage's logits (B, L, V), from tokens (B, L) or
        activations."""
        y: Tensor = self.model(x)
        return y

    @torch.no_grad()
    def loss_sum(self, x: Tensor, targets_BL: Tensor) -> float:
        """Compute the last stage's loss without a backward pass, in nats summed over tokens."""
        return float(_summed_loss(self.model(x), targets_BL))

    @torch.enable_grad()
    def graph(self, x: Tensor) -> Graph:
        """Compute as `forward` does, and keep what `gradients` needs."""
        if not self.is_first:
            x = x.detach().requires_grad_()
        return Graph(x, self.model(x))

    def backward(self, x: Tensor, outside: Tensor) -> BackwardOutput:
        """Compute the forward pass again, then the gradients."""
        return self.gradients(self.graph(x), outside)

    @torch.enable_grad()
    def gradients(self, graph: Graph, outside: Tensor) -> BackwardOutput:
        """Compute the gradients of a forward pass, once. `outside` is the gradient of the summed
        loss with respect to this stage's output (B, L, D), or at the last stage the targets
        (B, L)."""
        x, y = graph.input, graph.output
        wanted = self._weights if self.is_first else (x, *self._weights)
        result = _summed_loss(y, outside) if self.is_last else y
        found = torch.autograd.grad(result, wanted, None if self.is_last else outside)
        gradients = self.of_weights(found[-len(self._names) :])
        return BackwardOutput(
            input_gradient=None if self.is_first else found[0],
            staged=MicrobatchGradient(gradients, x.shape[0] * x.shape[1]),
            loss_sum=float(result.detach()) if self.is_last else None,
        )

    def of_weights(self, gradients: Iterable[Tensor]) -> Gradients:
        """Return the gradients by name, given the raw ones in the order of the weights. A
        subclass may change them."""
        return dict(zip(self._names, gradients, strict=True))


@torch.enable_grad()
def backward_through(
    stages: Sequence[Stage], tokens_BL: Tensor, targets_BL: Tensor
) -> tuple[tuple[MicrobatchGradient, ...], float]:
    """Compute one forward and backward pass through a path's `stages`, all local, in order.

    Return each stage's gradient and the loss, in nats summed over tokens. Nothing is computed
    twice."""
    y = tokens_BL
    for stage in stages:
        y = stage.model(y)
    loss = _summed_loss(y, targets_BL)
    weights = [weight for stage in stages for weight in stage._weights]
    found = iter(torch.autograd.grad(loss, weights))
    staged = [
        MicrobatchGradient(
            stage.of_weights(itertools.islice(found, len(stage._weights))), tokens_BL.numel()
        )
        for stage in stages
    ]
    return tuple(staged), float(loss.detach())


@dataclass(slots=True)
class GradientAccumulator:
    """The sum of gradients at one peer since it was last taken, and its token count."""

    sums: Gradients = field(default_factory=dict)
    tokens: int = 0
    _is_own: bool = False  # the sums' memory; a single gradient is not copied

    def add(self, staged: MicrobatchGradient) -> None:
        """Add one more gradient or sum, which does not change."""
        is_same_stage = not self.sums or self.sums.keys() == staged.gradients.keys()
        assert is_same_stage, "these gradients belong to another stage"
        if self._is_own:
            for name, x in staged.gradients.items():
                self.sums[name].add_(x)
        else:
            self._is_own = bool(self.sums)
            self.sums = {
                name: self.sums[name] + x if self._is_own else x
                for name, x in staged.gradients.items()
            }
        self.tokens += staged.tokens

    def take(self) -> MicrobatchGradient:
        """Take the whole sum and start from zero."""
        taken = MicrobatchGradient(self.sums, self.tokens)
        self.sums, self.tokens, self._is_own = {}, 0, False
        return taken


def _summed_loss(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
    logits = logits_BLV if logits_BLV.dtype == torch.float64 else logits_BLV.float()
    return F.cross_entropy(logits.flatten(0, 1), targets_BL.flatten(), reduction="sum")
