"""Rebuilding of a lost stage from its neighbours: CheckFree's weighted mean and CheckFree+'s copies
(Blagoev et al., "All is Not Lost: LLM Recovery without Checkpoints", arXiv:2506.15461).

When all servers of a stage are lost and there is no fresh snapshot, its neighbours' weights are a
far better start than random weights, and the other stages continue without a rollback. Only
parameters are rebuilt: the peer that takes over the stage builds a new replica and a new method
from them, with moments and step counts of zero, and trains at a bumped rate (`bumped_rate`).
node/pipeline/recovery/policy.py chooses the source.

Tensors have their names in the unsplit model; layers correspond by position in their stage."""

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from farflock.node.model.device import widened
from farflock.node.model.llama import Llama, ModelConfig
from farflock.optimizers.method import Tensors
from farflock.optimizers.parts.state import state_hash

EMA_BETA = 0.9
LR_BUMP = 1.1  # the paper's
UNEQUAL = "neighbour mean of unequal stages"
END = "neighbour mean of an end stage"
DOUBLE = "neighbour mean next to a lost stage"

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)", re.S)
_ELSE = "restore a snapshot, or roll back all stages to their last common checkpoint"


class Unrecoverable(ValueError):
    """A stage that cannot be made from these tensors; the message names the rule and the remedy."""


@dataclass(frozen=True, slots=True)
class GradientScale:
    """The size of a stage's gradients: the moving average of the squared norm of its mean gradient,
    before clipping, over its layers only (an embedding or a head has no counterpart in the rebuilt
    stage). 0 means never trained; the first gradient starts the average."""

    squared: float = 0.0

    def after(self, gradients: Tensors) -> "GradientScale":
        """Return the scale after one more step; a gradient that is not finite changes nothing."""
        layers = [x for name, x in gradients.items() if _LAYER.fullmatch(name)]
        squares = [widened(x.detach()).square().sum() for x in layers]
        # read at once, as a device is waited for each time
        found = math.fsum(torch.stack(squares).tolist()) if squares else 0.0
        if not math.isfinite(found):
            return self
        return GradientScale(
            EMA_BETA * self.squared + (1 - EMA_BETA) * found if self.squared else found
        )

    def omega(self, norm_power: Literal[1, 2] = 2) -> float:
        """Return the stage's weight ω in the mean: its gradient's norm to this power. The paper
        uses the square; its code uses the norm of one gradient, after clipping it to 1."""
        return self.squared if norm_power == 2 else math.sqrt(self.squared)


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A stage next to the lost one: its layers, its ω, and its parameters, which are checked."""

    span: range
    tensors: Tensors
    omega: float = 0.0


def neighbour_mean(
    config: ModelConfig, lost: range, before: Neighbour | None, after: Neighbour | None
) -> dict[str, Tensor]:
    """Return CheckFree's mean (3.1): W = (ω₋W₋ + ω₊W₊) / (ω₋ + ω₊), layer by layer in order. Pass
    None for a neighbour that is lost too.

    It is exact: equal ω give the arithmetic mean, an ω of 0 gives a copy of the other neighbour,
    and no value leaves the interval between its two; computed in float64, rounded once. Deviations:
    if both ω are 0 it is the arithmetic mean, and no epsilon is added to the norms (1e-4 in the
    released code), so that ω may be scaled by any common factor. Raise `Unrecoverable` for end
    stages, a lost neighbour, and stages or tensors of unequal shape."""
    if lost.start == 0 or lost.stop == config.layers:
        raise Unrecoverable(
            f"{END}: layers {_told(lost)} have only one neighbour; copy its layers if there is an "
            f"exact copy of the embedding or the head, else {_ELSE}"
        )
    if before is None or after is None:
        raise Unrecoverable(f"{DOUBLE}: layers {_told(lost)} need both their neighbours; {_ELSE}")
    assert before.span.stop == lost.start, f"{before.span} does not end where {lost} starts"
    assert after.span.start == lost.stop, f"{after.span} does not start where {lost} ends"
    pieces = [moved(config, beside.span, lost, beside.tensors) for beside in (before, after)]
    share = _share(before.omega, after.omega)
    return {name: _between(name, x, pieces[1][name], share) for name, x in pieces[0].items()}


def partner_copy(
    config: ModelConfig, lost: range, partner: Neighbour, ends: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return CheckFree+'s copy (3.2): the partner's layers (S1 <- S2, Sn <- Sn-1) and, at an end
    of the model, the exact copies in `ends` of its embedding, or norm and head. All tensors are
    new. Raise `Unrecoverable` if they do not make up the stage, as when the stages are unequal."""
    made = moved(config, partner.span, lost, partner.tensors)
    for name, shape in _shapes(config, lost).items():
        if name not in made:
            made[name] = _fitting(name, ends or {}, shape)
    return made


def end_tensors(tensors: Tensors) -> dict[str, Tensor]:
    """Return copies of an end stage's tensors outside its layers: the embedding, or the norm and
    the head. Empty for the stages between."""
    return {name: x.detach().clone() for name, x in tensors.items() if not _LAYER.fullmatch(name)}


def end_shapes(config: ModelConfig, span: range) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a stage's `end_tensors`."""
    return {
        name: shape for name, shape in _shapes(config, span).items() if not _LAYER.fullmatch(name)
    }


@dataclass(frozen=True, slots=True, eq=False)
class EndCopy:
    """An end stage's own tensors after a round, as a neighbour keeps them, and their hash."""

    round: int
    digest: bytes
    tensors: Tensors

    @staticmethod
    def of(round: int, tensors: Tensors) -> "EndCopy":
        """Copy an end stage's own tensors after a round."""
        ends = end_tensors(tensors)
        return EndCopy(round, state_hash(ends), ends)

    def restored(self) -> dict[str, Tensor]:
        """Return the tensors, bit for bit; raise `Unrecoverable` if they do not match the hash."""
        if state_hash(dict(self.tensors)) != self.digest:
            raise Unrecoverable(
                f"exact copy of an end: the copy of round {self.round} does not match its hash; "
                "ask another neighbour"
            )
        return {name: x.clone() for name, x in self.tensors.items()}


def moved(config: ModelConfig, source: range, target: range, tensors: Tensors) -> dict[str, Tensor]:
    """Return copies of one stage's layers under another one's names, position by position.

    Raise `Unrecoverable` unless there are equally many layers, all finite and in the model's
    shapes. A stage's embedding or head is ignored."""
    if len(source) != len(target):
        raise Unrecoverable(
            f"{UNEQUAL}: {len(source)} layers ({_told(source)}) for {len(target)} "
            f"({_told(target)}); cut the model into equal stages, or {_ELSE}"
        )
    made = {}
    for name, shape in _shapes(config, target).items():
        if matched := _LAYER.fullmatch(name):
            theirs = f"model.layers.{int(matched[1]) - target.start + source.start}.{matched[2]}"
            made[name] = _fitting(theirs, tensors, shape)
    return made


def bumped_rate(
    rate: float, steps_since: int, bump: float = LR_BUMP, decay_steps: float = math.inf
) -> float:
    """Return the learning rate of a rebuilt stage after `steps_since` of its own steps: at first
    `bump` times the schedule's.

    By default the bump stays, as in the paper; with `decay_steps` the excess falls by a factor
    of e in that many steps. A stage that is lost again starts over: bumps do not multiply."""
    if not (bump > 0 and decay_steps > 0 and steps_since >= 0):
        raise ValueError(
            f"a bump of {bump} that decays in {decay_steps} steps is out of range; "
            "both must be above 0, usually 1.1 and infinity"
        )
    decay = 1.0 if math.isinf(decay_steps) else math.exp(-steps_since / decay_steps)
    return rate * (1 + (bump - 1) * decay)


def _share(before: float, after: float) -> float:
    """Return the weight of the earlier neighbour in the mean, from 0 to 1."""
    for omega in (before, after):
        if not 0 <= omega < math.inf:
            raise Unrecoverable(
                f"neighbour mean: an ω of {omega} is not a squared norm; ask another neighbour"
            )
    largest = max(before, after)
    if largest == 0:
        return 0.5
    # scaled first: subnormal ω keep their ratio, and huge ones do not overflow
    earlier, later = before / largest, after / largest
    return earlier / (earlier + later)


def _between(name: str, before: Tensor, after: Tensor, share: float) -> Tensor:
    if before.dtype != after.dtype:
        raise Unrecoverable(
            f"{UNEQUAL}: {name} is {before.dtype} at one and {after.dtype} at the other; "
            "give both in float32"
        )
    if share in (0.0, 1.0):
        return before if share else after
    low, high = torch.minimum(before, after), torch.maximum(before, after)
    mean = before.double() * share + after.double() * (1 - share)
    return mean.to(before.dtype).clamp(low, high)


def _fitting(name: str, tensors: Tensors, shape: tuple[int, ...]) -> Tensor:
    """Return a copy of one of a peer's tensors, after checking it."""
    x = tensors.get(name)
    if x is None:
        raise Unrecoverable(
            f"{name} is missing in the neighbour's tensors; ask another neighbour, or {_ELSE}"
        )
    if tuple(x.shape) != shape:
        raise Unrecoverable(
            f"{UNEQUAL}: {name} has shape {tuple(x.shape)}, the lost one {shape}; {_ELSE}"
        )
    if not x.is_floating_point() or not bool(torch.isfinite(x).all()):
        raise Unrecoverable(
            f"{name} holds values that are not finite numbers; ask another neighbour, or {_ELSE}"
        )
    return x.detach().clone()


@functools.cache
def _shapes(config: ModelConfig, span: range) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(x.shape) for name, x in Llama(config, span).named_parameters()}


def _told(span: range) -> str:
    return f"{span.start} to {span.stop - 1}"
