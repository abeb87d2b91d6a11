"""The lot that draws a run's evaluators: a pure function of its seed, the view and the round.

So nobody can choose itself, and everybody knows whose measurement a value has to be. What it says
cannot be checked: only a second member's measurement can show that it is wrong.
"""

from dataclasses import dataclass

from farflock.swarm.links import PeerId
from farflock.swarm.messages import Key
from farflock.swarm.protocol.groups import order
from farflock.swarm.protocol.views import Chain, View
from farflock.swarm.roles import EVERY, NOTHING

REPEATED = 10  # one in so many evaluations is made by a second member too
_ATTEMPT = 255  # no exchange has it, so that this order is no other one


@dataclass(frozen=True, slots=True)
class EvaluationSchedule:
    """The rounds before which a stream's weights are evaluated: the `first`, and every `every`-th
    after it. Rounds of the stream are `stride` apart. The stream may be that of a stage."""

    stream: str
    seed: int
    every: int
    first: int = 0
    stride: int = 1
    stage: int | None = None

    def is_due(self, number: int) -> bool:
        """Return whether the weights before this round are evaluated."""
        return number >= self.first and (number - self.first) % (self.every * self.stride) == 0

    def is_repeated(self, number: int) -> bool:
        """Return whether a second member evaluates the same weights. Those of a pipeline change
        while they are measured."""
        place = (number - self.first) // (self.every * self.stride)
        return self.stage is None and place % REPEATED == 0

    def drawn(self, views: Chain, number: int) -> tuple[PeerId, ...]:
        """Return the members that evaluate the weights before a round: one, and in some rounds
        another; none if nothing is due.

        They are drawn from the view of the round before, which nothing can change any more, and
        for the first round from the oldest view."""
        if not self.is_due(number):
            return ()
        view = views.at(number - self.stride, self.stage) or views.views[0].view
        peers = self._able(view)
        drawn = order(peers, self.seed, view.hash, Key(self.stream, number, _ATTEMPT))
        return drawn[: 2 if self.is_repeated(number) else 1]

    def _able(self, view: View) -> list[PeerId]:
        """Return the members that can evaluate: those with the whole model and the room; in a
        pipeline those without a stage of their own or, if there are none, all."""
        roles = (EVERY,) if self.stage is None else (NOTHING, EVERY)
        able = [member.peer for member in view.members if member.stage in roles]
        return able if able or self.stage is None else list(view.peers)
