"""A method under watch, for the laws on exchanges and failed results."""

from dataclasses import dataclass, field
from typing import Any

from farflock.optimizers.method import Exchange, Method, Progress, Replica, Result, State


@dataclass
class Spy:
    """A method under watch: what it requested, and what each failed result did."""

    inner: Method
    # (exchange, copy of its tensors)
    copies: list[tuple[Exchange, State]] = field(default_factory=list)
    # floating state and parameters, (before, after)
    failures: list[tuple[State, State]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the method has
        return getattr(self.inner, name)

    def due(self, replica: Replica, progress: Progress) -> list[Exchange]:
        """Return the method's exchanges, recorded."""
        return self._noted(self.inner.due(replica, progress))

    def apply(self, replica: Replica, exchange: Exchange, result: Result) -> list[Exchange]:
        """Return the method's second phase, recorded."""
        before = self._floating(replica) if result.status == "failed" else {}
        second = self.inner.apply(replica, exchange, result)
        if result.status == "failed":
            self.failures.append((before, self._floating(replica)))
        return self._noted(second)

    def _noted(self, exchanges: list[Exchange]) -> list[Exchange]:
        self.copies += [
            (one, {name: x.clone() for name, x in one.tensors.items()}) for one in exchanges
        ]
        return exchanges

    def _floating(self, replica: Replica) -> State:
        state = self.inner.snapshot(replica)
        theta = {f"theta.{name}": x for name, x in replica.read(replica.names, "param").items()}
        return {name: x.clone() for name, x in state.items() if x.is_floating_point()} | theta
