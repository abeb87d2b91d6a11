"""Checks, before anything starts, that a method fits the inner optimizer, the model and the
members.

The method, the optimizer and the model cannot check this on their own.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from farflock.node.errors import Usage
from farflock.node.run.split import nearest_divisor
from farflock.optimizers.ddp import DDP
from farflock.optimizers.decoupled import Decoupled
from farflock.optimizers.lean import Lean
from farflock.optimizers.method import Method
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.muon import Muon
from farflock.optimizers.parts.small_adamw import MomentType
from farflock.optimizers.streaming import Streaming

InnerOptimizer = torch.optim.Optimizer | InnerConfig


@runtime_checkable
class AveragesMoments(Protocol):
    """A method that averages inner moments."""

    def averaged_moments(self) -> Mapping[str, str]:
        """Return the moments, each with the option that turns its averaging off when set to 0."""
        ...


@runtime_checkable
class ClosesOnArrivals(Protocol):
    """A method whose rounds close once they have `enough` contributions; 0 waits for all."""

    enough: int


NONE: frozenset[str] = frozenset()
SECOND_MOMENT = "exp_avg_sq"
ADAM, MOMENTUM = frozenset(("step", "exp_avg", "exp_avg_sq")), frozenset(("momentum_buffer",))
NADAM = ADAM | {"mu_product"}
# methods whose replicas all take the same inner steps: the moments that they send to joiners
SHARED_MOMENTS = {
    "ddp": frozenset((*DDP.moments, *DDP.rare_moments)),
    "demo": frozenset(Decoupled.rare_moments),
    "flexdemo": frozenset(Decoupled.rare_moments),
}


def require_inner(
    name: str, made: Method, inner: InnerOptimizer, clip_norm: float | None = None
) -> None:
    """Raise `Usage` unless the method can work with the inner optimizer and with gradient clipping.

    A method whose replicas share the moments must send all of them; a method that averages moments
    must find them; a step that is a sign must be taken unchanged."""
    kept, called = (
        moments_of(inner),
        inner.name if isinstance(inner, InnerConfig) else type(inner).__name__,
    )
    if isinstance(made, Decoupled) and made.sign:
        if list(kept) != [NONE]:
            why = f"its step is rate · sign(q), and {called} with these settings would change that"
            raise Usage(f"method {name}", why, "use sgd without momentum, or set sign to false")
        if clip_norm is not None:
            why = (
                f"{clip_norm:g} would shorten {name}'s sign(q), whose norm is the square root of"
                " the number of parameters"
            )
            raise Usage("train.clip", why, "set it to 0")
    sent = SHARED_MOMENTS.get(name)
    # Muon's matrix products have other bits on other machines
    mixed = name == "ddp" and len(kept) > 1
    if sent is not None and (mixed or any(moments is None or moments - sent for moments in kept)):
        why, remedy = (
            f"it cannot send the moments of {called} with these settings",
            "or sgd without momentum",
        )
        remedy = remedy if name == "ddp" else "sgd or muon"
        raise Usage(f"method {name}", why, f"use adamw or adam without amsgrad, {remedy}")
    if isinstance(made, AveragesMoments):
        missing = {
            what: off
            for what, off in made.averaged_moments().items()
            if any(what not in (m or ()) for m in kept)
        }
        if missing:
            these = "these" if len(missing) > 1 else "it"
            why = f"it averages {' and '.join(missing)}, and {called} does not keep {these}"
            raise Usage(
                f"method {name}", why, f"use adamw, or set {' and '.join(missing.values())} to 0"
            )
    if (
        isinstance(made, Lean)
        and made.correction
        and all(m is not None and SECOND_MOMENT not in m for m in kept)
    ):
        why = f"it corrects exp_avg with exp_avg_sq, and {called} keeps neither"
        raise Usage(f"method {name}", why, "use adamw, or set correction to 0")


def require_moments(
    name: str, made: Method, inner: InnerConfig, moments: MomentType, in_stages: bool
) -> None:
    """Raise `Usage` unless a machine may keep the inner moments in this type: nobody else's may
    depend on them."""
    if moments == "fp32":
        return
    shares = name in SHARED_MOMENTS or (
        isinstance(made, AveragesMoments) and bool(made.averaged_moments())
    )
    if in_stages:
        why, remedy = "this run is a pipeline, whose stages keep their moments in float32", ""
    elif inner.name != "adamw":
        why, remedy = f"the run's optimizer is {inner.name}, and only adamw has such moments", ""
    elif shares:
        why = f"with method {name}, all replicas have the same moments, in float32"
        remedy = ", or train in a run of a method that leaves them alone, such as diloco"
    else:
        return
    raise Usage(f"--moments {moments}", why, f"leave it out{remedy}")


def require_layers(made: Method, layers: int) -> None:
    """Raise `Usage` unless `layers` divides into the method's fragments, with the same number in
    each."""
    if isinstance(made, Streaming) and layers % made.fragments:
        why = f"the model's {layers} layers cannot be divided into {made.fragments} equal fragments"
        raise Usage(
            "method.options.fragments", why, f"choose {nearest_divisor(layers, made.fragments)}"
        )


def require_members(made: Method, members: int, place: str) -> None:
    """Raise `Usage` if a round needs more contributions than `members`, which `place` sets."""
    if isinstance(made, ClosesOnArrivals) and made.enough > members:
        why = f"a round would wait for {made.enough} contributions, and {place} is {members}"
        raise Usage(
            "method.options.enough", why, f"choose {members} or fewer, or 0 for all members"
        )


def moments_of(inner: InnerOptimizer) -> Sequence[frozenset[str] | None]:
    """Return the moments kept per parameter, one set for each optimizer in `inner`; None for an
    optimizer unknown here.

    An `InnerConfig` is looked up, because constructing its optimizer would take torch seconds
    and write files."""
    if isinstance(inner, InnerConfig):
        momentum = MOMENTUM if inner.momentum else NONE
        return {"adamw": [ADAM], "nadam": [NADAM], "sgd": [momentum], "muon": [MOMENTUM, ADAM]}[
            inner.name
        ]
    if isinstance(inner, Muon):
        return [_kept(inner.optimizer_of(group["params"][0])) for group in inner.param_groups]
    return [_kept(inner)]


def _kept(inner: torch.optim.Optimizer) -> frozenset[str] | None:
    groups = inner.param_groups
    if isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
        return ADAM | ({"max_exp_avg_sq"} if any(group["amsgrad"] for group in groups) else NONE)
    if isinstance(inner, torch.optim.NAdam):
        return NADAM
    if isinstance(inner, torch.optim.SGD):
        return MOMENTUM if any(group["momentum"] for group in groups) else NONE
    # torch before 2.9 has no Muon
    return MOMENTUM if isinstance(inner, getattr(torch.optim, "Muon", Muon)) else None
