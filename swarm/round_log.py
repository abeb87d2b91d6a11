"""The log of a stream's last rounds: what was decided, whether its content is here, and who waits for that.

A member that was away learns from the logs of others what it missed, in order; a round that has left everybody's log is lost to
who still waits for it.
"""

from collections.abc import Callable

from farflock.swarm.collective import CloseList
from farflock.swarm.links import PeerId
from farflock.swarm.messages import Decided, Key
from farflock.swarm.port import Port
from farflock.swarm.streams import Logged, Outcome, StreamState, outcome, work_pin

LOG_ROUNDS = 8


class RoundLog:
    """Keeps the logs of one peer's streams. `drop` forgets the machine of a round that leaves its log."""

    def __init__(self, port: Port, drop: Callable[[Key], object]) -> None:
        self._port, self._drop = port, drop

    def enter(
        self,
        state: StreamState,
        key: Key,
        close: CloseList,
        group: tuple[PeerId, ...],
        contributors: int,
        decided: Decided,
        taken: tuple[bool, ...],
    ) -> None:
        """A round is decided: it is the stream's newest, and the oldest one leaves the log."""
        state.newest = key.round
        state.seen = max(state.seen, key.round)
        state.tokens, state.skipped = close.tokens, False
        state.log[key.round] = Logged(close, group, contributors, decided, taken)
        while len(state.log) > LOG_ROUNDS:
            self.evict(state, next(iter(state.log)))

    def evict(self, state: StreamState, number: int) -> None:
        """Take a round from the log, and whatever still waits for its content."""
        key = Key(state.stream.name, number)
        del state.log[number]
        self._drop(key)
        self._port.store.release(key)
        self._port.store.release(work_pin(key))
        future = state.waiting.get(number)
        if future is not None and not future.done():
            future.set_result(Outcome(key, "lost", state.next))

    def completed(self, state: StreamState, number: int) -> None:
        """What this peer wants of a round is here: whoever waits for it has its outcome."""
        entry = state.log.get(number)
        if entry is None:
            return
        key = Key(state.stream.name, number)
        for item in entry.close.items:
            self._port.store.pin(item.digest, key)  # of what is here; who only votes may have none of it
        self._port.store.release(work_pin(key))
        entry.complete = True
        future = state.waiting.get(number)
        if future is not None and not future.done():
            future.set_result(outcome(state.stream, number, entry, self._port.store))

    def give_up(self, state: StreamState, next_round: int) -> None:
        """Nobody can say any more what came of the exchanges that wait: they are lost."""
        for number, future in state.waiting.items():
            if not future.done():
                future.set_result(Outcome(Key(state.stream.name, number), "lost", next_round))
