"""The driver: a method and the table of its pending exchanges. Sans I/O: whoever owns a loop asks it what to start, what
to apply, and whether to wait.

An exchange blocks training only between the step at which its result is wanted (`apply_after`) and its deadline;
after that the peer trains on, and the result is applied whenever it is known. Results of one stream come in round order.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from farflock.optimizers.method import All, Exchange, ExchangeKey, Method, Progress, Replica, Result


@dataclass(frozen=True, slots=True)
class Apply:
    """This result is due now."""

    exchange: Exchange
    result: Result


@dataclass(frozen=True, slots=True)
class Wait:
    """Training must not go on before this exchange has its result or the run's time is `until_s`."""

    key: ExchangeKey
    until_s: float


@dataclass(slots=True)
class Pending:
    """An exchange that was asked for at a step and a run time, and its result once that is known."""

    exchange: Exchange
    since_step: int
    since_s: float
    result: Result | None = None


class Driver:
    """Carries exchanges from a method to the loop around it and results back."""

    def __init__(self, method: Method, replica: Replica) -> None:
        self.method, self.replica = method, replica
        self._pending: dict[ExchangeKey, Pending] = {}

    @property
    def pending(self) -> tuple[ExchangeKey, ...]:
        """The exchanges without an applied result, oldest first."""
        return tuple(self._pending)

    @property
    def table(self) -> tuple[Pending, ...]:
        """All that is pending, oldest first: what a checkpoint holds."""
        return tuple(self._pending.values())

    def load_state(self, table: Iterable[Pending]) -> None:
        """Go on with what was pending when a checkpoint was written."""
        self._pending = {pending.exchange.key: pending for pending in table}

    def after_step(self, progress: Progress) -> list[Exchange]:
        """The exchanges to start after a local step."""
        return self._begin(self.method.due(self.replica, progress), progress)

    def resolve(self, key: ExchangeKey, result: Result) -> None:
        """The swarm's answer to an exchange; answered keys and unknown ones are refused."""
        pending = self._pending.get(key)
        assert pending is not None, f"a result for {key}, which is not pending"
        assert pending.result is None, f"a second result for {key}"
        pending.result = result

    def next(self, progress: Progress, *, last: bool = False) -> Apply | Wait | None:
        """What to do before the next local step: apply a result, wait for one, or nothing. After the `last` one a result that
        is there is due at once."""
        held: set[str] = set()  # streams with an older exchange that is still open
        for pending in self._pending.values():
            key, steps = pending.exchange.key, progress.step - pending.since_step
            due = last or steps >= pending.exchange.apply_after
            if pending.result is not None and due and key.stream not in held:
                return Apply(pending.exchange, replace(pending.result, steps_since=steps))
            until_s = pending.since_s + pending.exchange.deadline_s
            if pending.result is None and due and progress.run_time_s < until_s:
                return Wait(key, until_s)
            held.add(key.stream)
        return None

    def apply(self, action: Apply, progress: Progress) -> list[Exchange]:
        """Hand a result to the method; returns the exchanges of a second phase, if it wants one."""
        del self._pending[action.exchange.key]
        return self._begin(self.method.apply(self.replica, action.exchange, action.result), progress)

    def replay(self, key: ExchangeKey, result: Result, progress: Progress) -> list[Exchange]:
        """Hand the method a round that was decided without this peer: its outer state follows, local work stays."""
        assert key not in self._pending, f"{key} is pending and cannot be replayed"
        template = Exchange(key, "mean", All(), tensors={})
        return self._begin(self.method.apply(self.replica, template, result), progress)

    def forget(self) -> None:
        """Drop every pending exchange: a snapshot has replaced the state that they belong to."""
        self._pending.clear()

    def _begin(self, exchanges: list[Exchange], progress: Progress) -> list[Exchange]:
        for exchange in exchanges:
            assert exchange.key not in self._pending, f"{exchange.key} is asked for twice"
            self._pending[exchange.key] = Pending(exchange, progress.step, progress.run_time_s)
        return exchanges
