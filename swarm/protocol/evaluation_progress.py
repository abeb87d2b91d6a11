"""Evaluations of a pipeline that are under way: one keeps others from beginning as long as it makes
progress, however many rounds it takes.

Two at once would share the servers with training and with each other, and both take longer. A
member that says nothing new for too long is waited for no more, so that one that hangs, or lies,
stops the others' for a few hours at most. Sans I/O.
"""

from collections.abc import Callable
from dataclasses import dataclass

from farflock.swarm.links import PeerId
from farflock.swarm.messages import Measuring

STALLED_S = 300.0  # for the next hundredth of an evaluation
WORD_EVERY_S = 5.0
ENDED = 100  # percent


@dataclass(slots=True)
class _Heard:
    """The last word of a member that said more than before, and when it came."""

    word: Measuring
    at_s: float


class EvaluationProgress:
    """Words of members on their evaluations, and the time of the last one of this member's own."""

    def __init__(self) -> None:
        self._heard: dict[PeerId, _Heard] = {}
        self._said_s = 0.0

    def is_said(self, percent: int, now_s: float) -> bool:
        """Return whether to tell others how much is done: the begin, the end, and from time to time
        what comes between."""
        if percent not in (0, ENDED) and now_s - self._said_s < WORD_EVERY_S:
            return False
        self._said_s = now_s
        return True

    def hear(self, member: PeerId, word: Measuring, now_s: float) -> None:
        """Take in a member's word, if it says more than its last one."""
        known = self._heard.get(member)
        if known is None or _place(word) > _place(known.word):
            self._heard[member] = _Heard(word, now_s)

    def forget(self, stays: Callable[[PeerId], bool]) -> None:
        """Forget the words of all members but those that stay."""
        self._heard = {peer: heard for peer, heard in self._heard.items() if stays(peer)}

    def is_before(self, number: int, now_s: float) -> bool:
        """Return whether an evaluation of an earlier round goes on."""
        return any(
            heard.word.round < number
            and heard.word.percent != ENDED
            and now_s - heard.at_s < STALLED_S
            for heard in self._heard.values()
        )


def _place(word: Measuring) -> tuple[int, int]:
    return word.round, word.percent
