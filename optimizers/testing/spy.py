"""A method under watch, for the laws on exchanges and failed results."""

from dataclasses import dataclass, field
from typing import Any

from farflock.optimizers.method import (
    Exchange,
    ExchangeKey,
    Method,
    Progress,
    Replica,
    Result,
    State,
)
from farflock.optimizers.parts.blocks import LazyTensors
from farflock.optimizers.testing.loopback import same


@dataclass
class Spy:
    """A method under watch: what it requested, and what each failed result did."""

    inner: Method
    # (exchange, copy of its tensors)
    copies: list[tuple[Exchange, State]] = field(default_factory=list)
    # floating state and parameters, (before, after)
    failures: list[tuple[State, State]] = field(default_factory=list)
    open: dict[ExchangeKey, tuple[Exchange, State]] = field(default_factory=dict)  # no result yet
    changed: list[ExchangeKey] = field(default_factory=list)  # exchanges whose tensors changed

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the method has
        return getattr(self.inner, name)

    def local_step(self, replica: Replica, progress: Progress) -> None:
        """Let the method make its step, and note exchanges whose tensors it changed."""
        self.inner.local_step(replica, progress)
        for one, then in self.open.values():
            spent = isinstance(one.tensors, LazyTensors) and one.tensors.dropped
            if not spent and not same(dict(one.tensors), then):
                self.changed.append(one.key)

    def due(self, replica: Replica, progress: Progress) -> list[Exchange]:
        """Return the method's exchanges, recorded."""
        return self._noted(self.inner.due(replica, progress))

    def apply(self, replica: Replica, exchange: Exchange, result: Result) -> list[Exchange]:
        """Return the method's second phase, recorded."""
        self.open.pop(exchange.key, None)
        before = self._floating(replica) if result.status == "failed" else {}
        second = self.inner.apply(replica, exchange, result)
        if result.status == "failed":
            self.failures.append((before, self._floating(replica)))
        return self._noted(second)

    def _noted(self, exchanges: list[Exchange]) -> list[Exchange]:
        for one in exchanges:
            self.copies.append((one, {name: x.clone() for name, x in one.tensors.items()}))
            self.open[one.key] = self.copies[-1]
        return exchanges

    def _floating(self, replica: Replica) -> State:
        state = self.inner.snapshot(replica)
        theta = {f"theta.{name}": x for name, x in replica.read(replica.names, "param").items()}
        return {name: x.clone() for name, x in state.items() if x.is_floating_point()} | theta
