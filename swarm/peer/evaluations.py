"""The run's evaluations, as one peer knows them.

A drawn member puts what it measured into its next offer, and the close list of that round repeats
it to all. A member that makes no offers sends it to the others instead. Values of members that were
not drawn do not count. Among pairs each member knows only its own.

A member that comes later asks several members for the values from before it came, and believes what
most of those that answer say. A member keeps no proof of what the others measured, so that one
alone could say anything.
"""

import collections
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeVar

from farflock.swarm.links import PeerId
from farflock.swarm.messages import (
    MAX_EVALUATIONS,
    MAX_SAMPLE_CHARS,
    Evaluated,
    Evaluation,
    EvaluationMessage,
    EvaluationQuery,
    Measuring,
)
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.protocol.evaluation_lot import EvaluationSchedule
from farflock.swarm.protocol.evaluation_progress import EvaluationProgress

AHEAD = 4  # rounds that a member that measured may be ahead of this one
ASKED = 5  # members at once, the most senior ones: they have been here for most of the values
ANSWERS_WITHIN_S = 10.0  # for the answers; if there is none by then, others are asked

T = TypeVar("T")
EvaluationPlace = tuple[int, PeerId]  # the round, and who measured


class Evaluations:
    """One peer's part in the evaluations of its run. `newest` returns the last round of a stream
    that is known here to be decided."""

    def __init__(self, context: PeerContext, newest: Callable[[str], int]) -> None:
        self._context, self._newest = context, newest
        self._schedule: EvaluationSchedule | None = None
        self._asked: PeerId | None = None
        self.answered = False  # by the member that a visitor asked
        self._past: PastEvaluations | None = None
        self._progress = EvaluationProgress()
        self._known: dict[EvaluationPlace, Evaluation] = {}  # of more, the newest rounds
        self._sample = (-1, "")  # a text, and the round before whose weights it was written
        # the places of values that are new here
        self.fresh: collections.deque[EvaluationPlace] = collections.deque(maxlen=MAX_EVALUATIONS)
        context.evaluated = self._decided

    def open(self, schedule: EvaluationSchedule, *, shared: bool = True) -> None:
        """Take part from now on; unless values are `shared`, each member has its own alone."""
        self._schedule = schedule
        self._past = PastEvaluations(self._context) if shared else None

    def look_on(self, member: PeerId) -> None:
        """Ask a member, and believe it: for a visitor, which knows no schedule."""
        self._asked = member
        self._context.send(member, EvaluationQuery())

    def is_mine(self, number: int) -> bool:
        """Return whether this peer is to evaluate the weights before a round."""
        return self._context.me in self.drawn(number)

    def drawn(self, number: int) -> tuple[PeerId, ...]:
        """Return the members that are to evaluate the weights before a round."""
        schedule = self._schedule
        return () if schedule is None else schedule.drawn(self._context.views, number)

    @property
    def known(self) -> Mapping[EvaluationPlace, Evaluation]:
        """The values that count, in the order of rounds."""
        return MappingProxyType(dict(sorted(self._known.items())))

    @property
    def sample(self) -> str:
        """A text written by the weights of one of the last evaluations; perhaps empty."""
        return self._sample[1]

    def keep(self, value: Evaluation, sample: str = "") -> None:
        """Keep a measurement as this peer's own, and tell nobody."""
        self._take(self._context.me, value)
        self._take_sample(value, sample)

    def offer(self, value: Evaluation, sample: str = "") -> None:
        """Put a measurement into the next offer, and send the sample to all members."""
        assert self._schedule is not None, "no stream is evaluated"
        self._context.measured[self._schedule.stream] = value
        self._take_sample(value, sample)
        if sample:
            self._tell(value, sample)

    def tell(self, value: Evaluation, sample: str = "") -> None:
        """Keep a measurement, and send it to all members."""
        self.keep(value, sample)
        self._tell(value, sample)

    def say_progress(self, number: int, percent: int) -> None:
        """Tell all members, from time to time, how much of an evaluation through others' servers is
        done; 100 at its end."""
        if self._progress.is_said(percent, self._context.now()):
            self._send(Measuring(number, percent))

    def is_another_under_way(self, number: int) -> bool:
        """Return whether another member's evaluation of an earlier round makes progress."""
        view, context = self._context.views.newest, self._context
        self._progress.forget(lambda peer: not (context.gone(view, peer) or context.left(peer)))
        return self._progress.is_before(number, context.now())

    def receive(self, sender: PeerId, incarnation: int, message: EvaluationMessage) -> None:
        """Answer a query, or take in a member's word."""
        if isinstance(message, EvaluationQuery):
            known = tuple((peer, value) for (_, peer), value in self.known.items())
            self._context.send(sender, Evaluated(known, self.sample, answers=True))
        elif isinstance(message, Measuring):
            self._take_progress(sender, incarnation, message)
        elif self._asked is not None:
            self._take_answer(sender, message)
        elif message.answers:
            if self._past is not None:
                self._past.receive(sender, message)
        elif self._context.views.newest.index(sender, incarnation) is not None:
            self._take_word(sender, message)
        else:
            self._context.drop("evaluation of a stranger")

    @property
    def is_learning(self) -> bool:
        """True until the values from before this peer came are known."""
        return self._past is not None and not self._past.is_over

    def tick(self) -> None:
        """Ask for the values from before this peer came, once it knows how far the run is, and take
        in those of members that were drawn."""
        schedule = self._schedule
        if schedule is None or self._past is None:
            return
        past = self._past.tick(may_ask=self._newest(schedule.stream) >= schedule.first)
        if past is not None:
            for peer, value in past.evaluations:
                self._learn(peer, value, past.sample)

    def _learn(self, peer: PeerId, value: Evaluation, sample: str) -> None:
        """Keep a value that most members say, if its member was drawn."""
        if self._may_measure(peer, value.round):
            self._take(peer, value)
            self._take_sample(value, sample)
        else:
            self._context.drop("evaluation by somebody else")

    def _take_answer(self, sender: PeerId, message: Evaluated) -> None:
        if sender == self._asked:
            self.answered = True
            for peer, value in message.evaluations:
                self._take(peer, value)
                self._take_sample(value, message.sample)

    def _take_word(self, sender: PeerId, message: Evaluated) -> None:
        for peer, value in message.evaluations[:1]:
            if peer != sender or not self._may_measure(sender, value.round):
                self._context.drop("evaluation by somebody else")
                return
            self._take_sample(value, message.sample)
            if self._schedule is not None and self._schedule.stage is not None:
                self._take(sender, value)

    def _take_progress(self, sender: PeerId, incarnation: int, word: Measuring) -> None:
        member = self._context.views.newest.index(sender, incarnation) is not None
        if member and self._may_measure(sender, word.round):
            self._progress.hear(sender, word, self._context.now())
        else:
            self._context.drop("evaluation by somebody else")

    def _decided(self, stream: str, member: PeerId, value: Evaluation) -> None:
        """Take in a value of a close list."""
        if member == self._context.me and value == self._context.measured.get(stream):
            del self._context.measured[stream]
        schedule = self._schedule
        if schedule is None or schedule.stream != stream:
            return
        if self._may_measure(member, value.round):
            self._take(member, value)
        else:
            self._context.drop("evaluation by somebody else")

    def _may_measure(self, member: PeerId, number: int) -> bool:
        """Return whether a member is drawn for a round, and that has begun."""
        schedule = self._schedule
        if schedule is None:
            return False
        last = self._newest(schedule.stream) + AHEAD * schedule.stride
        return number <= last and member in self.drawn(number)

    def _take(self, member: PeerId, value: Evaluation) -> None:
        """Keep a value; of two of one member for one round, the first."""
        place = value.round, member
        if place in self._known or (
            len(self._known) == MAX_EVALUATIONS and place < min(self._known)
        ):
            return
        self._known[place] = value
        self.fresh.append(place)
        while len(self._known) > MAX_EVALUATIONS:
            del self._known[min(self._known)]

    def _take_sample(self, value: Evaluation, sample: str) -> None:
        """Keep the text of the newest weights, without what a terminal would obey."""
        if sample and value.round >= self._sample[0]:
            shown = (char if char.isprintable() else " " for char in sample[:MAX_SAMPLE_CHARS])
            self._sample = value.round, "".join(shown)

    def _tell(self, value: Evaluation, sample: str) -> None:
        self._send(Evaluated(((self._context.me, value),), sample))

    def _send(self, word: EvaluationMessage) -> None:
        for peer in self._context.views.newest.peers:
            if peer != self._context.me:
                self._context.send(peer, word)


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
