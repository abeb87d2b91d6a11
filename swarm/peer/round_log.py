"""The log of a stream's last rounds: what was decided, and whether its content is here.

A member that was away learns from the logs of others what it missed, in order; a round that has
left everybody's log is lost to who still waits for it. What a witnessed round was about stays in
the annals when its content goes: those who have no part in its state, a pipeline's trainers, follow
at their own pace, and must miss none.
"""

from collections.abc import Callable

from farflock.swarm.messages import Key
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.peer.streams import LoggedRound, RoundOutcome, StreamState, outcome, work_pin
from farflock.swarm.protocol.exchange.close_list import told

LOG_ROUNDS = 8
ANNALS_ROUNDS = 256
ANNALS_BYTES = 16 * 1024 * 1024  # of one stream's


class RoundLog:
    """Keeps the logs of one peer's streams.

    `drop` forgets the machine of a round that leaves its log.
    """

    def __init__(self, port: PeerContext, drop: Callable[[Key], object]) -> None:
        self._port, self._drop = port, drop

    def enter(self, state: StreamState, number: int, entry: LoggedRound) -> None:
        """A round is decided: it is the stream's newest, and the oldest one leaves the log."""
        state.newest = number
        state.seen = max(state.seen, number)
        state.tokens, state.skipped = entry.close.tokens, False
        state.log[number] = entry
        while len(state.log) > LOG_ROUNDS:
            self._retire(state, next(iter(state.log)))

    def _retire(self, state: StreamState, number: int) -> None:
        """Move a round from the log to the annals, if what it was about is noted and known here."""
        entry = state.log[number]
        if not (state.stream.terms.witnessed and (entry.complete or state.stream.wants == "last")):
            self._shorten(state, 0)
            self.evict(state, number)
            state.opened_tokens = entry.close.tokens
            return
        key = Key(state.stream.name, number)
        state.annals[number] = state.log.pop(number)
        state.annals_bytes += _size_bytes(state, entry)
        self._drop(key)
        self._port.store.keep_only([item.digest for item in told(entry.close, state.stream.terms.shards)], key)
        self._port.store.release(work_pin(key))
        self._shorten(state, ANNALS_ROUNDS)

    def _shorten(self, state: StreamState, most: int) -> None:
        """Drop the oldest annals until they are small enough; no round is missing between them."""
        while state.annals and (len(state.annals) > most or state.annals_bytes > ANNALS_BYTES):
            number, entry = state.annals.popitem(last=False)
            state.annals_bytes -= _size_bytes(state, entry)
            state.opened_tokens = entry.close.tokens
            self._port.store.release(Key(state.stream.name, number))

    def rewind(self, state: StreamState, first_round: int) -> None:
        """Forget the rounds from this one on."""
        for number in [number for number in state.annals if number >= first_round]:
            state.annals_bytes -= _size_bytes(state, state.annals.pop(number))
            self._port.store.release(Key(state.stream.name, number))
        for number in [number for number in state.log if number >= first_round]:
            del state.log[number]
            self._port.store.release(Key(state.stream.name, number))

    def clear(self, state: StreamState) -> None:
        """Forget all rounds, and what waits for their content."""
        for number in list(state.log):
            self.evict(state, number)
        self._shorten(state, 0)

    def evict(self, state: StreamState, number: int) -> None:
        """Take a round from the log, and whatever still waits for its content."""
        key = Key(state.stream.name, number)
        del state.log[number]
        self._drop(key)
        self._port.store.release(key)
        self._port.store.release(work_pin(key))
        future = state.waiting.get(number)
        if future is not None and not future.done():
            future.set_result(RoundOutcome(key, "lost", state.next))

    def completed(self, state: StreamState, number: int) -> None:
        """What this peer wants of a round is here: whoever waits for it has its outcome."""
        entry = state.entry(number)
        if entry is None:
            return
        key = Key(state.stream.name, number)
        for item in entry.close.items:
            # As far as it is here: a peer that only votes may have none of it.
            self._port.store.pin(item.digest, key)
        self._port.store.release(work_pin(key))
        entry.complete = True
        future = state.waiting.get(number)
        if future is not None and not future.done():
            future.set_result(outcome(state.stream, number, entry, self._port.store))

    def give_up(self, state: StreamState, next_round: int) -> None:
        """Nobody can say any more what came of the exchanges that wait: they are lost."""
        for number, future in state.waiting.items():
            if not future.done():
                future.set_result(RoundOutcome(Key(state.stream.name, number), "lost", next_round))


def _size_bytes(state: StreamState, entry: LoggedRound) -> int:
    """What a round in the annals takes, roughly."""
    return len(entry.decided.value) + sum(item.size for item in told(entry.close, state.stream.terms.shards))
