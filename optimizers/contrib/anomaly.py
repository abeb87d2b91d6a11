"""Judgement of pseudo-gradients by their norms: which peers are anomalies, and how much each one
counts (EDiT, arXiv:2412.07210, section 3).

Scalars only, in Python's floats: sums are rounded once and exponentials correctly, so that all
peers get the same result on any machine and in any order of peers.
"""

import math
from dataclasses import dataclass
from decimal import Context, Decimal

HUGE = 2.0**60  # a norm of at least this, or NaN, is an anomaly whatever the others are
UNIT = 2**30  # a weight of 1
EXACT = Context(prec=20)  # decimal's exp is correctly rounded, on every machine


def average(values: list[float]) -> float:
    """Return the mean, independent of the order: `fsum` rounds once."""
    return math.fsum(values) / len(values)


@dataclass(frozen=True, slots=True)
class AnomalyFilter:
    """The arithmetic of one layer, whose state is (mu, sigma², and the same of recent z)."""

    temperature: float | None
    relative: bool
    threshold: float | None
    warmup: int
    alpha: float
    step_ratio: float

    def anomalies(
        self, norms: list[float], stats: list[float], seen: int
    ) -> tuple[list[bool], list[float]]:
        """Return which peers are rejected after `seen` rounds, and the layer's new state."""
        mean, variance, z_mean, z_variance = stats
        sigma, warm = math.sqrt(variance), seen >= self.warmup
        limit = (
            self.threshold * max(1.0, math.sqrt(z_variance))
            if warm and self.threshold is not None
            else math.inf
        )
        z = [(norm - mean) / sigma if warm and sigma > 0 else 0.0 for norm in norms]
        rejected = [norm >= HUGE or score > limit for norm, score in zip(norms, z, strict=True)]
        usable = [(norm, score) for norm, score in zip(norms, z, strict=True) if norm < HUGE]
        if not usable:
            return rejected, stats
        entering = [min(norm, mean + limit * sigma) if sigma > 0 else norm for norm, _ in usable]
        if not seen:
            mean = average(entering)
            return rejected, [
                mean,
                average([(norm - mean) * (norm - mean) for norm in entering]),
                0.0,
                0.0,
            ]
        scores = [max(-UNIT, min(score, limit, UNIT)) for _, score in usable]
        return rejected, [
            *self._moved(entering, mean, variance),
            *self._moved(scores, z_mean, z_variance),
        ]

    def _moved(self, values: list[float], mean: float, variance: float) -> tuple[float, float]:
        before = [value - mean for value in values]
        mean = mean + self.alpha * average(before)
        product = average([d * (value - mean) for d, value in zip(before, values, strict=True)])
        return mean, max(0.0, (1 - self.alpha) * (variance + self.alpha * product))

    def weights(self, norms: list[float], steps: list[float], rejected: list[bool]) -> list[int]:
        """Return each peer's weight in units of 2**-30; 0 for rejected peers."""
        left = [norm for norm, bad in zip(norms, rejected, strict=True) if not bad]
        if not left:
            return [0] * len(norms)
        unit = (average(left) if self.relative else 1.0) or 1.0
        raw = [
            0.0 if bad else self._softened((norm - min(left)) / unit)
            for norm, bad in zip(norms, rejected, strict=True)
        ]
        made = [0.0 if bad else count for count, bad in zip(steps, rejected, strict=True)]
        total, all_steps = math.fsum(raw), math.fsum(made)
        ratio = self.step_ratio if all_steps > 0 else 0.0
        return [
            round(
                UNIT
                * ((1 - ratio) * weight / total + (ratio * count / all_steps if ratio else 0.0))
            )
            for weight, count in zip(raw, made, strict=True)
        ]

    def _softened(self, excess: float) -> float:
        if self.temperature is None:
            return 1.0
        exponent = excess / self.temperature
        return float(EXACT.exp(Decimal(-exponent))) if exponent < 1000 else 0.0
