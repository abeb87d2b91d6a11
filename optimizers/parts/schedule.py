"""The learning rate as a pure function of the run's progress, so that joiners and veterans use the
same one."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """Linear warm-up over `warmup_tokens`, then a cosine down to `floor`·`peak` at `total_tokens`.
    With `floor` 1 the rate is constant after the warm-up. A peer with empty moments also warms up
    on its own: its rate grows over its first `joiner_steps` steps."""

    peak: float
    total_tokens: int
    warmup_tokens: int = 0
    floor: float = 0.1
    joiner_steps: int = 0

    def __post_init__(self) -> None:
        if not (self.peak > 0 and math.isfinite(self.peak)):
            raise ValueError(
                f"a peak learning rate of {self.peak} is out of range; choose one above 0"
            )
        if not 0 <= self.warmup_tokens <= self.total_tokens or self.total_tokens < 1:
            raise ValueError(
                f"warm-up of {self.warmup_tokens} tokens does not fit a run of {self.total_tokens}"
            )
        if self.joiner_steps < 0:
            raise ValueError(
                f"{self.joiner_steps} warm-up steps for joiners is out of range; "
                "choose 0 or more, usually 100"
            )
        if not 0 <= self.floor <= 1:
            raise ValueError(f"a floor of {self.floor} is out of range; choose one in [0, 1]")

    def rate(self, tokens: int, own_steps: int) -> float:
        """Return the rate at the run's `tokens` for a peer `own_steps` steps after it joined."""
        local = min((own_steps + 1) / self.joiner_steps, 1.0) if self.joiner_steps else 1.0
        if tokens < self.warmup_tokens:
            return self.peak * local * (tokens + 1) / self.warmup_tokens
        span = max(self.total_tokens - self.warmup_tokens, 1)
        done = min((tokens - self.warmup_tokens) / span, 1.0)
        return (
            self.peak * local * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done)) / 2)
        )
