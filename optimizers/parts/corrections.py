"""Corrections for late gradients: they adapt an inner optimizer to the measured age of its
gradients.

In a pipeline that does not wait, a stage moves on by D epochs between a microbatch's forward pass
and the step that takes its gradient. D differs from microbatch to microbatch (random paths), so
nothing here knows a stage's index: each step is told how old its gradients are. Where D is 0, the
inner optimizer's result is unchanged, bit for bit.

Corrections hook into the optimizer and do not replace it, so that replicas and checkpoints find its
groups and moments. In formulas w are weights, v the velocity (the momentum buffer), g a gradient, m
the momentum, eta the rate.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

TREND = "trend"  # name of the moment that `Trend` adds to the optimizer's state

Groups = list[dict[str, Any]]


@dataclass(slots=True)
class Age:
    """Age of the next step's gradients in epochs; the collector of gradients sets it before each
    step. For a sum of gradients it is their mean age, weighted by tokens, and need not be whole."""

    epochs: float = 0.0


def spike_factors(momentum: float, delay: float) -> tuple[float, float]:
    """Return (a, b) = (m^D, (1 - m^D) / (1 - m)) of SC_D, the spike compensation of Kosson et al.,
    arXiv:2003.11666.

    `a` is the share of a gradient that goes into the velocity, b what bypasses it and is applied at
    once: what the velocity would have done with it in the D steps that it is late. In total b +
    a/(1-m) = 1/(1-m).
    """
    share = momentum**delay
    return share, (1 - share) / (1 - momentum)


class SpikeCompensation:
    """v <- m·v + a·g;  w <- w - eta·(v + b·g), on torch's SGD with momentum.

    Deviation: the paper keeps v <- m·v + g and steps by a·v + b·g. For a constant delay both are
    the same; here `a` stays with its own gradient, so that each gradient's contributions add up to
    1/(1-m) when delays differ.
    """

    def __init__(self, inner: torch.optim.SGD, age: Age) -> None:
        for group in inner.param_groups:
            if group["nesterov"] or group["dampening"]:
                raise ValueError(
                    "spike compensation is for SGD with plain momentum; "
                    "build it without nesterov, dampening"
                )
        self._age = age
        inner.register_step_post_hook(self._after)

    @torch.no_grad()
    def _after(
        self, inner: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Correct a step that put the whole gradient into v: move the part that bypasses v."""
        if not self._age.epochs:
            return
        for group in inner.param_groups:
            into, past = spike_factors(group["momentum"], self._age.epochs)
            for parameter in group["params"]:
                velocity = inner.state.get(parameter, {}).get("momentum_buffer")
                if parameter.grad is not None and velocity is not None:
                    velocity.add_(parameter.grad, alpha=into - 1)
                    parameter.add_(parameter.grad, alpha=-group["lr"] * (into + past - 1))


def brake(gradient: Tensor, velocity: Tensor, rho: float) -> Tensor:
    """Return g · (1 - rho·cos(g, v)): longer against the velocity, shorter along it (Venigalla et
    al., arXiv:2007.01397). One angle per tensor; a zero vector has none and brakes nothing."""
    g, v = gradient.double().flatten(), velocity.double().flatten()
    norms = float(g.norm() * v.norm())
    cosine = float(g @ v) / norms if norms > 0 else 0.0
    return gradient * (1 - rho * cosine)


class AdaptiveBraking:
    """Calls `brake` before each step with late gradients.

    It brakes against SGD's velocity or Adam's first moment. Deviation: the paper brakes at any
    delay; here a gradient of the newest weights stays as it is."""

    def __init__(self, inner: torch.optim.Optimizer, age: Age, rho: float = 2.0) -> None:
        if not 0 <= rho < math.inf:
            raise ValueError(f"braking by rho={rho} is out of range; choose 0 or more, usually 2")
        self._age, self._rho = age, rho
        inner.register_step_pre_hook(self._before)

    @torch.no_grad()
    def _before(
        self, inner: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not self._age.epochs:
            return
        for parameter in _trained(inner):
            moments = inner.state.get(parameter, {})
            velocity = moments.get("momentum_buffer", moments.get("exp_avg"))
            if parameter.grad is not None and velocity is not None:
                parameter.grad.copy_(brake(parameter.grad, velocity, self._rho))


class Trend:
    """A running mean of the weights' moves, in the optimizer's state as `trend`.

    delta <- decay·delta + (1 - decay)·(w_new - w_old) after each step. With decay 0 it is the last
    move."""

    def __init__(self, inner: torch.optim.Optimizer, decay: float = 0.0) -> None:
        if not 0 <= decay < 1:
            raise ValueError(
                f"a trend with decay {decay} is out of range; "
                "choose one in [0, 1), e.g. trend_decay's"
            )
        self._decay = decay
        self._before: list[Tensor] = []
        inner.register_step_pre_hook(self._remember)
        inner.register_step_post_hook(self._follow)

    def _remember(
        self, inner: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._before = [parameter.detach().clone() for parameter in _trained(inner)]

    @torch.no_grad()
    def _follow(
        self, inner: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        for parameter, before in zip(_trained(inner), self._before, strict=True):
            # Without a gradient the optimizer has no moments; ours would keep it from making any.
            if parameter.grad is not None:
                move = parameter - before
                old = inner.state[parameter].get(TREND, torch.zeros_like(move))
                inner.state[parameter][TREND] = self._decay * old + (1 - self._decay) * move
        self._before = []


@torch.no_grad()
def along_trend(
    module: nn.Module, inner: torch.optim.Optimizer, epochs: float
) -> dict[str, Tensor]:
    """Return w + epochs·delta by name, as new tensors, on an optimizer with a `Trend`; before the
    first step, the weights.

    Ahead by the delay that a forward pass expects, with the last move, it is linear weight
    prediction in weight form (arXiv:2003.11666; it also works with spike compensation). Back by the
    epochs between a forward pass and its backward pass, with `trend_decay`, it is PipeMare's
    discrepancy correction (Yang et al., arXiv:1910.05124), for peers without room for a stash.
    """
    moved = {}
    for name, parameter in module.named_parameters():
        trend = inner.state.get(parameter, {}).get(TREND)
        moved[name] = parameter.clone() if trend is None else parameter + epochs * trend
    return moved


@torch.no_grad()
def along_velocity(module: nn.Module, inner: torch.optim.SGD, epochs: float) -> dict[str, Tensor]:
    """Return w - eta·epochs·v by name, as new tensors, with the last step's eta, on SGD with plain
    momentum. This is linear weight prediction in velocity form (arXiv:2003.11666). It equals the
    weight form there, but not with spike compensation, where a part bypasses the velocity."""
    rates = {
        parameter: group["lr"] for group in inner.param_groups for parameter in group["params"]
    }
    moved = {}
    for name, parameter in module.named_parameters():
        velocity = inner.state.get(parameter, {}).get("momentum_buffer")
        moved[name] = (
            parameter.clone()
            if velocity is None
            else parameter - rates[parameter] * epochs * velocity
        )
    return moved


def trend_decay(epochs: float, left: float = math.exp(-2)) -> float:
    """Return left^(1/epochs), the decay with which a trend keeps `left` after `epochs`; 0 for no
    epochs (arXiv:1910.05124, T2, whose `left` is 0.135, close to this)."""
    return left ** (1 / epochs) if epochs > 0 else 0.0


def rescheduled(rate: float, delay: float, step: int, anneal_steps: int) -> float:
    """Return eta / D^p with p = 1 - min(step / anneal_steps, 1): lower for late gradients, early in
    the run (arXiv:1910.05124, T1). Deviation: delays below 1 leave the rate as it is; the paper's
    formula would raise it."""
    if anneal_steps < 1:
        raise ValueError(
            f"annealing over {anneal_steps} steps is out of range; "
            "choose 1 or more, usually a quarter of the run"
        )
    power = 1 - min(step / anneal_steps, 1.0)
    return float(rate / max(delay, 1.0) ** power)


def nesterov(groups: Groups, rate: float, gamma: float = 0.99) -> torch.optim.SGD:
    """d = gamma·(w - w_before);  w <- w + d - eta·(1-gamma)·g, with g from w + d as it was D steps
    ago: Nesterov's gradient as a correction of delays (AsyncPP, ICML 2025). The look-ahead damps
    what the delay excites; gamma is near 1.

    The parameters that are trained, served and stashed are the points w + d; on these the recursion
    is torch's SGD with nesterov=True at rate eta·(1-gamma), whatever the delay. With delay 0 it is
    therefore Nesterov's method.
    """
    return torch.optim.SGD(groups, lr=rate * (1 - gamma), momentum=gamma, nesterov=True)


def nadam(
    groups: Groups, rate: float, betas: tuple[float, float] = (0.99, 0.95), eps: float = 1e-8
) -> torch.optim.NAdam:
    """Return the correction of `nesterov` in Adam's metric, as in AsyncPP's code.

    It is NAdam with decoupled decay, momentum decay 0.004 and a first beta of 0.99. Its look-ahead
    is in the step, and a new gradient counts (1-mu) as above. Deviation: the second beta is 0.95,
    where that code has 0.999. A manifest's `nadam` has the betas of its `train.betas`."""
    return torch.optim.NAdam(
        groups, lr=rate, betas=betas, eps=eps, momentum_decay=4e-3, decoupled_weight_decay=True
    )


@dataclass(frozen=True, slots=True)
class Momentum:
    """Rate and momentum of SGD for batches of `samples`."""

    rate: float
    momentum: float
    samples: float

    def at(self, samples: float) -> "Momentum":
        """Return the values for another batch size, m = m_r^(N/N_r) and eta/(1-m)/N unchanged: a
        gradient decays over the same number of samples and moves the weights equally far
        (arXiv:2003.11666; Chiley et al. 2019)."""
        momentum = self.momentum ** (samples / self.samples)
        rate = (1 - momentum) * samples / ((1 - self.momentum) * self.samples) * self.rate
        return Momentum(rate, momentum, samples)


def stability_limit(delay: int) -> float:
    """Return the bound on eta·lambda below which plain SGD with gradients `delay` steps old settles
    on a quadratic of curvature lambda: 2·sin(pi / (2·(2·D + 1))). That is 2 without a delay, 1 with
    a delay of 1, about pi/(2·D) from there on."""
    return 2 * math.sin(math.pi / (2 * (2 * delay + 1)))


def _trained(inner: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in inner.param_groups for parameter in group["params"]]
