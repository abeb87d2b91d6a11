"""Answers to members that do not know yet that an exchange is decided.

The decision is announced to all members, it is long, and a member that misses it asks all others:
if each of them answered, every late announcement would cost a list from everybody.
"""

import collections
import math
from dataclasses import dataclass, field

from farflock.swarm.messages import Holds, Message, Offer, Reduced
from farflock.swarm.protocol.exchange.holdings import RESEND_S

ANSWERS = 2  # to a member that asks for the first time
MAX_DOUBLINGS = 6  # of them; then all answer


@dataclass(slots=True)
class Reminders:
    """The questions about one decision, known here since `decided_s`, by the member that asks."""

    decided_s: float = -math.inf
    asked: collections.Counter[int] = field(default_factory=collections.Counter)

    def is_due(self, now_s: float, sender: int, me: int, members: int) -> bool:
        """Note a question; return whether this member answers it.

        What crossed the announcement asks for nothing. After that the members next to the asker
        answer, and twice as many each time that it asks again."""
        if now_s < self.decided_s + RESEND_S:
            return False
        answers = ANSWERS << min(self.asked[sender], MAX_DOUBLINGS)
        self.asked[sender] += 1
        return (me - sender) % members <= answers


def calls_for_decision(message: Message) -> bool:
    """Return whether the sender of a message about content must be told that the round is decided.

    A report that only answers was sent before its sender could hear of the decision."""
    return isinstance(message, Offer | Reduced) or (isinstance(message, Holds) and message.asks)
