"""A stage: consecutive layers of a model on one peer, for microbatches in any order.

A backward pass needs only the stage's input and the gradient of its output: it can compute the
forward pass again. So any peer of the stage may compute it, and the result depends only on weights
and input. Where memory allows, a server keeps the forward pass's graph instead (graphs.py).

A stage's gradient of the weights is a sum over tokens, with their number. Sums of different peers
are added and divided once, by all tokens that count at this stage (other designs divide by the
world size, which is wrong as soon as a microbatch is lost or skips a stage).

A stage's weights lie on the machine's device. Inputs come from the CPU and go there once; graphs,
outputs and gradients are on the device. Another device rounds otherwise: where two servers of a
stage compute the two passes of a microbatch, its gradient is that of an output that differs by
rounding from the one that was sent, as it does by the error of most codecs.

Shapes: B sequences, L positions, D model width, V vocabulary."""

import contextlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from farflock.node.model.device import Device
from farflock.node.model.llama import Llama

Gradients = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class MicrobatchGradient:
    """The gradient of a microbatch's summed loss with respect to a stage's weights, and its number
    of tokens. It has the weights' type and device."""

    gradients: Gradients
    tokens: int


@dataclass(frozen=True, slots=True)
class BackwardOutput:
    """A backward pass's results, on the device: the gradient of the stage's input (B, L, D), None
    at the first stage; the gradient of its weights; and at the last stage the loss, in nats summed
    over tokens."""

    input_gradient: Tensor | None
    staged: MicrobatchGradient
    loss_sum: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Graph:
    """A forward pass that can be differentiated: the input as it came, the same on the device, and
    the output there."""

    given: Tensor
    input: Tensor
    output: Tensor


class Stage:
    """The passes of one stage, which keeps nothing but its weights between calls. Only one thread
    at a time may call it.

    `device` is where the model is. Matrix products run in bf16 if it does that natively, except
    those of float64 weights. Inputs may be on the CPU; results are on the device."""

    def __init__(self, model: Llama, device: Device | None = None) -> None:
        self.model, self._device = model, used_by_stages(device or Device())
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

    @property
    def free_bytes(self) -> int | None:
        """The free bytes of the device's own memory; None on a CPU."""
        return None if self._device.place.type == "cpu" else self._device.memory()[0]

    @property
    def runs_ahead(self) -> bool:
        """True if the device computes on after it was asked, so that this machine can do something
        else before it reads the results."""
        return self._device.runs_ahead

    def release(self) -> None:
        """Give back the memory of the device that torch keeps for later tensors."""
        self._device.release()

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Return activations (B, L, D), or the last stage's logits (B, L, V), from tokens (B, L) or
        activations."""
        with self._precision():
            y: Tensor = self.model(self.there(x))
        return y

    @torch.no_grad()
    def loss_sum(self, x: Tensor, targets_BL: Tensor) -> float:
        """Compute the last stage's loss without a backward pass, in nats summed over tokens."""
        return float(_summed_loss(self.forward(x), self.there(targets_BL)))

    @torch.no_grad()
    def measured(
        self, x: Tensor, targets_BL: Tensor | None, weights: Mapping[str, Tensor] | None
    ) -> Tensor:
        """Return what `forward` does but, at the last stage, the mean loss of each sequence (B,) in
        nats a token; `weights` are used instead of the stage's own."""
        outside = () if targets_BL is None else (self.there(targets_BL), "none")
        own = dict(self.model.named_parameters())
        used = {name: weight.to(own[name]) for name, weight in (weights or {}).items()}
        with self._precision():
            y: Tensor = functional_call(self.model, used, (self.there(x), *outside))
        return y if targets_BL is None else y.double().mean(dim=1)

    @torch.enable_grad()
    def graph(self, x: Tensor) -> Graph:
        """Compute as `forward` does, and keep what `gradients` needs."""
        there = self.there(x)
        if not self.is_first:
            there = there.detach().requires_grad_()
        with self._precision():
            return Graph(x, there, self.model(there))

    def backward(self, x: Tensor, outside: Tensor) -> BackwardOutput:
        """Compute the forward pass again, then the gradients."""
        return self.gradients(self.graph(x), outside)

    @torch.enable_grad()
    def gradients(self, graph: Graph, outside: Tensor) -> BackwardOutput:
        """Compute the gradients of a forward pass, once. `outside` is the gradient of the summed
        loss with respect to this stage's output (B, L, D), or at the last stage the targets
        (B, L)."""
        x, y, outside = graph.input, graph.output, self.there(outside)
        wanted = self._weights if self.is_first else (x, *self._weights)
        result = _summed_loss(y, outside) if self.is_last else y
        found = torch.autograd.grad(result, wanted, None if self.is_last else outside)
        gradients = self.of_weights(found[-len(self._names) :])
        return BackwardOutput(
            input_gradient=None if self.is_first else found[0],
            staged=MicrobatchGradient(gradients, x.shape[0] * x.shape[1]),
            loss_sum=result.detach() if self.is_last else None,
        )

    def there(self, x: Tensor) -> Tensor:
        """Return a tensor on the device (see `Device.bring`)."""
        return self._device.bring(x)

    def _precision(self) -> contextlib.AbstractContextManager[object]:
        if self._weights[0].dtype == torch.float64:
            return contextlib.nullcontext()
        return self._device.autocast()

    def of_weights(self, gradients: Iterable[Tensor]) -> Gradients:
        """Return the gradients by name, given the raw ones in the order of the weights. A
        subclass may change them."""
        return dict(zip(self._names, gradients, strict=True))


def used_by_stages(device: Device) -> Device:
    """Return a device as stages use it: not in fp16, whose gradients need a scale of the loss,
    while those of a stage come from peers that compute otherwise, and go to such."""
    return device if device.precision == "bf16" else replace(device, precision="fp32")


@torch.enable_grad()
def backward_through(
    stages: Sequence[Stage], tokens_BL: Tensor, targets_BL: Tensor
) -> tuple[tuple[MicrobatchGradient, ...], float]:
    """Compute one forward and backward pass through a path's `stages`, all on one device, in order.

    Return each stage's gradient and the loss, in nats summed over tokens. Nothing is computed
    twice."""
    first = stages[0]
    y = first.there(tokens_BL)
    with first._precision():
        for stage in stages:
            y = stage.model(y)
    loss = _summed_loss(y, first.there(targets_BL))
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
