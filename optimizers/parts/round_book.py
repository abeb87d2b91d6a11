"""The bookkeeping of a method's rounds: which one is next, how far this peer is in it, and whether its message is on the
way."""

from dataclasses import dataclass

from farflock.optimizers.method import Exchange, Result, State
from farflock.optimizers.parts.state import counters, numbers


@dataclass(slots=True)
class RoundBook:
    """One stream's next round, which the members share, and this peer's own place in it.

    `since` counts the local steps since the last message was taken, `pending` says whether its result is still out.
    In a state these are `round`, `since` and `pending`, each followed by `suffix` where a method keeps several books.
    """

    number: int = 0
    since: int = 0
    pending: bool = False
    suffix: str = ""

    def is_due(self, period: int) -> bool:
        """True after `period` local steps, unless a message is still on its way."""
        return self.since >= period and not self.pending

    def leave(self) -> None:
        """Note that this round's message was taken just now."""
        self.since, self.pending = 0, True

    def close(self, exchange: Exchange, result: Result) -> None:
        """Go on to the next round. A replayed round has no tensors, and leaves a pending message of this peer's alone."""
        if exchange.tensors or result.sent is not None:
            self.pending = False
        self.number = result.next_round

    def restart(self, number: int) -> None:
        """Begin this round with nothing on its way."""
        self.number, self.since, self.pending = number, 0, False

    def snapshot(self) -> State:
        """The shared part: the next round."""
        return numbers({f"round{self.suffix}": self.number})

    def read(self, state: State) -> int:
        """The next round of a snapshot; `WrongState` if there is none."""
        return counters(state, f"round{self.suffix}")[0]

    def personal(self) -> State:
        """This peer's own part."""
        return numbers({f"since{self.suffix}": self.since, f"pending{self.suffix}": self.pending})

    def resume(self, state: State) -> None:
        """Go on from `snapshot` and `personal`; `WrongState` unless both are there."""
        self.number, self.since, pending = counters(state, *(f"{what}{self.suffix}" for what in _NAMES))
        self.pending = bool(pending)


_NAMES = ("round", "since", "pending")
