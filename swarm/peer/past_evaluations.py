"""The evaluations from before a peer came: it asks several members, and believes what most of those
that answer say.

A member keeps no proof of what the others measured, so that one alone could say anything.
"""

import collections
from typing import TypeVar

from farflock.swarm.links import PeerId
from farflock.swarm.messages import Evaluated, EvaluationQuery
from farflock.swarm.peer.context import PeerContext

ASKED = 5  # members at once, the most senior ones: they have been here for most of the values
ANSWERS_WITHIN_S = 10.0  # for the answers; if there is none by then, others are asked

T = TypeVar("T")


class PastEvaluations:
    """One peer's question for past evaluations, once it is a member."""

    def __init__(self, context: PeerContext) -> None:
        self._context = context
        self._answers: dict[PeerId, Evaluated | None] = {}  # of those asked
        self._ends_s = 0.0
        self.is_over = False

    def tick(self, *, may_ask: bool) -> Evaluated | None:
        """Ask, once that makes sense; when there are answers enough, return what they agree on."""
        if self.is_over or not self._context.is_member:
            return None
        if self._context.views.newest.peers == (self._context.me,):
            self.is_over = True  # nobody knows more
        elif not self._answers:
            if may_ask:
                self._ask()
        elif None not in self._answers.values() or self._context.now() >= self._ends_s:
            found = [answer for answer in self._answers.values() if answer is not None]
            self._answers, self.is_over = {}, bool(found)
            return agreed(found) if found else None
        return None

    def receive(self, sender: PeerId, message: Evaluated) -> None:
        """Note the first answer of a member that was asked."""
        if sender in self._answers and self._answers[sender] is None:
            self._answers[sender] = message
        else:
            self._context.drop("evaluations that were not asked for")

    def _ask(self) -> None:
        others = (peer for peer in self._context.views.newest.peers if peer != self._context.me)
        asked = [peer for peer in others if self._context.life(peer) == "alive"][:ASKED]
        for peer in asked:
            self._context.send(peer, EvaluationQuery())
        self._answers = dict.fromkeys(asked)
        self._ends_s = self._context.now() + ANSWERS_WITHIN_S


def agreed(answers: list[Evaluated]) -> Evaluated:
    """Return the values in the order of rounds, and the sample, that more than half of these
    answers have."""
    values = _majority([set(answer.evaluations) for answer in answers])
    samples = _majority([{answer.sample} for answer in answers])
    ordered = sorted(values, key=lambda said: (said[1].round, said[0]))
    return Evaluated(tuple(ordered), "".join(samples), answers=True)


def _majority(answers: list[set[T]]) -> list[T]:
    counts = collections.Counter(item for answer in answers for item in answer)
    return [item for item, count in counts.items() if 2 * count > len(answers)]
