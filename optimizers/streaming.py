"""Streaming DiLoCo: fragments of the model take turns, and training continues while one is in
flight (Douillard et al., arXiv:2501.18512, algorithm 2).

    t_p + k·H:        D_p = phi_p - theta_p  is sent
    t_p + k·H + tau:  phi_p, u_p <- Outer(phi_p, u_p, mean D_p);  theta_p <- a·theta_p + (1-a)·phi_p

Deviations: t_p = floor((p+1)·H/F), the paper's phases with the fragments numbered from the first
that is sent, so that rounds follow each other in time (the next round numbers alone tell a joiner
whose turn it is). What was not taken stays in theta_p and goes with the next D_p, as in DiLoCo. A
result that comes after tau steps keeps all steps since its snapshot: theta_p <- theta_p +
(1-a)·(phi_p - snapshot). Parameters outside of numbered layers (embedding, norm, head) go to the
fragment that is smallest so far. Optional error feedback.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Self

import torch

from farflock.optimizers.method import (
    All,
    Exchange,
    ExchangeKey,
    Progress,
    Replica,
    Result,
    State,
    Tensors,
)
from farflock.optimizers.parts.feedback import SenderFeedback
from farflock.optimizers.parts.layers import is_numbered, layers_of
from farflock.optimizers.parts.options import require_feedback, require_options
from farflock.optimizers.parts.outer import Outer, OuterNesterov
from farflock.optimizers.parts.outer_state import Feedback, Merge, OuterState
from farflock.optimizers.parts.round_book import RoundBook
from farflock.optimizers.parts.state import Shapes, WrongState, tables, zeros
from farflock.optimizers.parts.state_fields import Whose, nested, own
from farflock.optimizers.parts.stateful import OuterMethod, mean_of
from farflock.optimizers.trial_options import Disaster, TrialOptions

STREAM = "fragment."

Pattern = Literal["strided", "sequential"]
Fragments = tuple[tuple[str, ...], ...]


def split(
    shapes: Mapping[str, tuple[int, ...]], fragments: int, pattern: Pattern = "strided"
) -> Fragments:
    """Return the parameters' names by fragment, whole layers together, in the model's order. Layer
    l of L goes to fragment l mod F (strided) or l·F // L (sequential). Raise `ValueError` for
    too few layers."""
    groups = layers_of(shapes)
    if fragments > len(groups):
        raise ValueError(
            f"{fragments} fragments need as many layers, and this model has {len(groups)}; "
            f"choose {len(groups)} or fewer"
        )
    layers = [group for group in groups if is_numbered(group)]
    place = {group: number * fragments // len(layers) for number, group in enumerate(layers)}
    if pattern == "strided":
        place = {group: number % fragments for number, group in enumerate(layers)}
    for group in groups:
        if group not in place:
            place[group] = _smallest(groups, place, shapes, fragments)
    where = {name: place[group] for group, names in groups.items() for name in names}
    return tuple(tuple(name for name in shapes if where[name] == p) for p in range(fragments))


def _smallest(
    groups: Mapping[str, list[str]], place: Mapping[str, int], shapes: Shapes, fragments: int
) -> int:
    values, members = [0] * fragments, [0] * fragments
    for group, p in place.items():
        values[p] += sum(torch.Size(shapes[name]).numel() for name in groups[group])
        members[p] += 1
    return min(range(fragments), key=lambda p: (values[p], members[p], p))


@dataclass(slots=True)
class Fragment:
    """Some of the parameters, with rounds and an error feedback of their own."""

    names: tuple[str, ...]
    book: RoundBook = nested(RoundBook)
    memory: SenderFeedback = nested(SenderFeedback)  # empty without `feedback`


@dataclass(slots=True)
class Streaming(OuterMethod):
    """Each of `fragments` is sent every `period` local steps and merged `overlap` steps later,
    keeping `mix` of the local values; `feedback` is the decay of the error feedback, None for none.
    Training waits for a late mean after `slack` more steps; None: when the next fragment is sent,
    or with an `overlap` of 0 at once.
    """

    period: int = 100
    fragments: int = 4
    pattern: Pattern = "strided"
    overlap: int = 1
    mix: float = 0.5
    outer: Outer = field(default_factory=lambda: OuterNesterov(lr=0.4))
    codec: str = "fp4"
    return_codec: str = "bf16"
    deadline_s: float = 30.0
    feedback: float | None = None
    slack: int | None = None

    equality: ClassVar[Literal["exact"]] = "exact"
    trial: ClassVar[TrialOptions] = TrialOptions(
        law={"fragments": 2, "overlap": 1},
        quick={"fragments": 2, "overlap": 1},
        disasters=(
            Disaster({"period": 4, "fragments": 2, "overlap": 1}, 2),
            Disaster(
                {"period": 4, "fragments": 2, "overlap": 0, "feedback": 0.5, "codec": "int4"}, 18
            ),
        ),
    )
    _state: OuterState = nested(OuterState)
    _fragments: list[Fragment] = nested(list)
    _quiet: int = own(0)  # local steps since any fragment was sent

    def __post_init__(self) -> None:
        require_options(self)
        require_feedback(self.codec, self.feedback, "fp4, int8 or fp16")
        if self.pattern not in ("strided", "sequential"):
            raise ValueError(f"pattern {self.pattern!r} is not known; choose strided or sequential")
        if not 1 <= self.fragments <= self.period:
            raise ValueError(
                f"{self.fragments} fragments do not fit into a period of {self.period} steps, "
                f"one step each at least; choose 1 to {self.period}"
            )
        most = self._gap
        if not 0 <= self.overlap <= most:
            raise ValueError(
                f"an overlap of {self.overlap} steps: with {self.fragments} fragments in "
                f"{self.period} steps the next one would be sent before; "
                f"choose 0 to {most}, or fewer fragments"
            )
        if self.slack is not None and not 0 <= self.slack <= most - self.overlap:
            raise ValueError(
                f"a slack of {self.slack} steps after an overlap of {self.overlap}: the next "
                f"fragment would be sent before; choose 0 to {most - self.overlap}, or none"
            )
        if not 0 <= self.mix <= 1:
            raise ValueError(
                f"a mix of {self.mix} is out of range; choose one in [0, 1], usually 0.5"
            )

    @property
    def _gap(self) -> int:
        """Local steps from one fragment's message to the next one's, at least."""
        return min(self.period // self.fragments, self.period - 1)

    def streams(self, replica: Replica) -> list[Exchange]:
        """Return one template for each fragment, of its pseudo-gradients."""
        groups = split(replica.shapes, self.fragments, self.pattern)
        return [
            self._exchange(p, p, zeros({x: replica.shapes[x] for x in names}))
            for p, names in enumerate(groups)
        ]

    @property
    def due_steps(self) -> Mapping[str, tuple[int, int]]:
        """As `StepSchedule.due_steps`."""
        return {f"{STREAM}{p}": (self._slot(p), self.period) for p in range(self.fragments)}

    def at_step(self, replica: Replica, step: int) -> None:
        """As `StepSchedule.at_step`: each fragment is sent where its next round is due."""
        self.begin(replica)
        books = [fragment.book for fragment in self._fragments]
        for book in books:
            book.since = max(self.period - (self._slot(book.number) - step), 0)
        self._quiet = max(step - self._slot(min(book.number for book in books) - 1), 0)

    def local_step(self, replica: Replica, progress: Progress) -> None:
        """Make the inner update; the first one records where the run began."""
        self.begin(replica)
        for fragment in self._fragments:
            fragment.book.hold(replica, fragment.names if self.feedback is not None else ())
            fragment.book.since += 1
        replica.inner_step()
        self._quiet += 1

    def due(self, replica: Replica, progress: Progress) -> list[Exchange]:
        """Request the mean of the fragment whose turn it is.

        That is the fragment with the lowest round of those not in flight, once its gap to the one
        before is over and `period` steps have passed since it was last sent. All peers send in this
        order, so none waits for a fragment that another peer sends only after a later one.
        """
        idle = [fragment for fragment in self._fragments if not fragment.book.pending]
        if not idle:
            return []
        fragment = min(idle, key=lambda one: one.book.number)
        number = fragment.book.number
        if fragment.book.since < self.period or self._quiet < self._slot(number) - self._slot(
            number - 1
        ):
            return []
        feedback = self._feedback(fragment)
        message = self._state.pseudo_gradient(replica, fragment.names, feedback)
        fragment.book.leave(message)
        self._quiet = 0
        return [self._exchange(self._fragments.index(fragment), number, message)]

    def _slot(self, number: int) -> int:
        """Return the local step of the run at which a round's fragment is sent if all goes well."""
        return (number + 1) * self.period // self.fragments

    def apply(self, replica: Replica, exchange: Exchange, result: Result) -> list[Exchange]:
        """Make the fragment's outer step; merge the replica where its work was taken."""
        self.begin(replica)
        fragment = self._fragments[int(exchange.key.stream.removeprefix(STREAM))]
        fragment.book.close(exchange, result)
        if result.status != "failed":
            mean = mean_of(exchange, result)
            merge = Merge(self._feedback(fragment), self.overlap, self.mix)
            terms = (fragment.names, self.outer, mean, result, fragment.book, merge)
            self._state.advance(replica, *terms)
        fragment.book.settled()
        return []

    def _feedback(self, fragment: Fragment) -> Feedback | None:
        return None if self.feedback is None else Feedback(fragment.memory, self.feedback)

    def load(self, replica: Replica, state: State, *whose: Whose) -> Self:
        """Load phi, momentum and each fragment's round; a joiner replays rounds in flight."""
        self._cut(replica)
        new = OuterMethod.load(self, replica, state, *whose)
        for p, fragment in enumerate(new._fragments):
            if (number := fragment.book.number) % self.fragments != p:
                raise WrongState(
                    f"round.{p} must be one of every {self.fragments} rounds from {p} on, "
                    f"got {number}"
                )
        return new

    def _cut(self, replica: Replica) -> None:
        if not self._fragments:
            groups = split(replica.shapes, self.fragments, self.pattern)
            self._fragments = [
                Fragment(names, RoundBook(p, suffix=f".{p}")) for p, names in enumerate(groups)
            ]

    def begun(self, replica: Replica) -> None:
        """Start as if the round before the lowest one had just been sent; later rounds keep their
        distances from it."""
        self._cut(replica)
        books = [fragment.book for fragment in self._fragments]
        first = self._slot(min(book.number for book in books) - 1)
        for book in books:
            book.since = max(self.period - (self._slot(book.number) - first), 0)
        self._quiet = 0

    def agreed(self, replica: Replica, stream: str) -> State:
        """Return the fragment's phi and momentum; peers may be a round apart in the others."""
        self.begin(replica)
        names = [
            name
            for p, one in enumerate(self._fragments)
            if stream == f"{STREAM}{p}"
            for name in one.names
        ]
        both = {"phi": self._state.phi, "momentum": self._state.momentum}
        return tables({what: {name: x[name] for name in names} for what, x in both.items()})

    def _exchange(self, p: int, number: int, tensors: Tensors) -> Exchange:
        key, back, wait = ExchangeKey(f"{STREAM}{p}", number), self.return_codec, self.deadline_s
        stride, after = self.fragments, self.overlap
        slack = self.slack
        if slack is None:
            slack = self._gap - after if after else 0
        return Exchange(
            key,
            "mean",
            All(),
            tensors,
            1.0,
            self.codec,
            back,
            stride=stride,
            apply_after=after,
            slack=slack,
            deadline_s=wait,
        )
