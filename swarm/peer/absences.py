"""Members that contribute nothing for some rounds, and said so: nobody waits for their offers.

A member that evaluates the model, or whose save takes long, goes on voting and applying rounds.
Others heed its word as they heed a suspicion, up to the round from which on it contributes again.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from farflock.swarm.links import PeerId
from farflock.swarm.messages import Away, Key
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.peer.round_log import StreamState

REPEAT_S = 1.0  # a message may be lost
REPEATS = 10  # of the word that a member is back
LAG_ROUNDS = 2  # decided, of which the content is not here
AHEAD = 32  # rounds: a member that dies meanwhile becomes suspect long before

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Word:
    """A word about a stream: this peer contributes to it from a round on."""

    from_round: int
    repeats: int | None  # that are left; None: as long as it is away


class Absences:
    """This peer's own absence, as it said it, and those of others, as it heard of them
    (`context.away`). `is_open` tells whether this peer takes part in a stream."""

    def __init__(self, context: PeerContext, is_open: Callable[[str], bool]) -> None:
        self._context, self._is_open = context, is_open
        self._words: dict[str, _Word] = {}  # by stream
        self._said_s = 0.0
        self._lag: Lag | None = None

    def watch(self, streams: Mapping[str, StreamState]) -> None:
        """Be absent, too, while this peer is behind in these."""
        self._lag = Lag(self._context, self, streams)

    def is_behind(self, stream: str) -> bool:
        """Return whether this peer catches up with rounds of a stream whose content is late."""
        return self._lag is not None and stream in self._lag.behind

    def leave(self, nexts: Iterable[tuple[str, int]]) -> None:
        """Contribute nothing to these streams, whose next rounds these are; call it again as rounds
        pass."""
        for stream, number in nexts:
            word = self._words.get(stream)
            if word is None or word.from_round < number + AHEAD // 2:
                self._begin(stream, _Word(number + AHEAD, None))

    def come_back(self, nexts: Iterable[tuple[str, int]]) -> None:
        """Contribute to these streams again, from these rounds on."""
        for stream, number in nexts:
            self._begin(stream, _Word(number, REPEATS))

    def receive(self, sender: PeerId, incarnation: int, message: Away) -> None:
        """Handle a member's word."""
        view, key = self._context.views.newest, message.key
        if view.index(sender, incarnation) is None or not self._is_open(key.stream):
            self._context.drop("absence of a stranger")
            return
        away = self._context.away
        for peer, stream in [each for each in away if not view.lists(each[0])]:
            del away[peer, stream]
        away[sender, key.stream] = key.round

    def tick(self) -> None:
        """Repeat what was said, and look whether this peer has fallen behind."""
        if self._lag is not None:
            self._lag.tick()
        if self._context.now() - self._said_s >= REPEAT_S:
            self._repeat()

    def _begin(self, stream: str, word: _Word) -> None:
        """Say something new about a stream; it is repeated with what is said about others."""
        self._words[stream] = word
        self._say(stream, word)

    def _repeat(self) -> None:
        self._said_s = self._context.now()
        for stream, word in self._words.items():
            if word.repeats == 0:
                continue
            if word.repeats is not None:
                word.repeats -= 1
            self._say(stream, word)

    def _say(self, stream: str, word: _Word) -> None:
        for peer in self._context.views.newest.peers:
            if peer != self._context.me:
                self._context.send(peer, Away(Key(stream, word.from_round)))


class Lag:
    """Takes this peer out of what others wait for as soon as it falls behind, as on a line that is
    slower than the rounds, until it has all of them again."""

    def __init__(
        self, context: PeerContext, absences: Absences, streams: Mapping[str, StreamState]
    ) -> None:
        self._context, self._absences, self._streams = context, absences, streams
        self.behind: set[str] = set()  # streams

    def tick(self) -> None:
        """Look how far this peer is in each stream whose members wait for each other."""
        for name, state in self._streams.items():
            terms, stride = state.stream.terms, state.stream.cadence.stride
            if state.stream.wants != "all" or terms.enough or not self._context.is_member:
                continue
            rounds = (state.newest - state.whole) // stride
            if rounds >= LAG_ROUNDS:
                if name not in self.behind:
                    self._say(name, rounds)
                self.behind.add(name)
                self._absences.leave([(name, state.next)])
            elif not rounds and state.seen <= state.next and name in self.behind:
                self.behind.remove(name)
                self._absences.come_back([(name, state.next)])

    def _say(self, name: str, rounds: int) -> None:
        log.warning(
            "this peer is %d rounds of %s behind, whose content has not come yet: its line is"
            " slower than the rounds, or was for a while; the others do not wait for it until it"
            " has caught up",
            rounds,
            name,
        )
