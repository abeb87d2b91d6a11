"""Streaming DiLoCo: fragments of the model take turns, and training goes on while one is on its way (Douillard et al.,
arXiv:2501.18512, algorithm 2).

    t_p + k·H:         D_p = phi_p - theta_p  is sent
    t_p + k·H + tau:   phi_p, u_p <- Outer(phi_p, u_p, mean D_p);   theta_p <- a·theta_p + (1-a)·phi_p

Deviations: t_p = floor((p+1)·H/F), the paper's phases with the fragments numbered from the first that is sent, so that
rounds follow each other in time (a joiner knows from the next rounds alone whose turn it is). What was not taken stays in
theta_p and goes with the next D_p, as in DiLoCo. A result that comes after tau steps keeps all steps since its snapshot:
theta_p <- theta_p + (1-a)·(phi_p - snapshot). Parameters outside of numbered layers (embedding, norm, head) go to the
fragment that is smallest so far. Optional error feedback.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from farflock.optimizers.method import All, Exchange, ExchangeKey, Progress, Replica, Result, State, Tensors
from farflock.optimizers.parts.feedback import SenderFeedback, choose
from farflock.optimizers.parts.layers import is_numbered, layers_of
from farflock.optimizers.parts.options import require_deadline, require_feedback, require_period, require_unbiased
from farflock.optimizers.parts.outer import Outer, OuterNesterov, scaled
from farflock.optimizers.parts.outer_state import OuterState
from farflock.optimizers.parts.round_book import RoundBook
from farflock.optimizers.parts.state import Shapes, WrongState, counter, numbers, zeros
from farflock.optimizers.trial_options import Disaster, TrialOptions

STREAM = "fragment."

Pattern = Literal["strided", "sequential"]
Fragments = tuple[tuple[str, ...], ...]


def split(shapes: Mapping[str, tuple[int, ...]], fragments: int, pattern: Pattern = "strided") -> Fragments:
    """The parameters' names by fragment, whole layers together, in the model's order.

    Layer l of L goes to fragment l mod F (strided) or l·F // L (sequential). `ValueError` if there are too few layers.
    """
    groups = layers_of(shapes)
    if fragments > len(groups):
        raise ValueError(
            f"{fragments} fragments need as many layers, and this model has {len(groups)}; choose {len(groups)} or fewer"
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


def _smallest(groups: Mapping[str, list[str]], place: Mapping[str, int], shapes: Shapes, fragments: int) -> int:
    values, members = [0] * fragments, [0] * fragments
    for group, p in place.items():
        values[p] += sum(torch.Size(shapes[name]).numel() for name in groups[group])
        members[p] += 1
    return min(range(fragments), key=lambda p: (values[p], members[p], p))


@dataclass(slots=True)
class Streaming:
    """Each of `fragments` is sent every `period` local steps and merged `overlap` steps later, keeping `mix` of the local
    values; `feedback` is the decay of the error feedback, None for none."""

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

    equality: ClassVar[Literal["exact"]] = "exact"
    trial: ClassVar[TrialOptions] = TrialOptions(
        law={"fragments": 2, "overlap": 1},
        quick={"fragments": 2, "overlap": 1},
        disasters=(
            Disaster({"period": 4, "fragments": 2, "overlap": 1}, 2),
            Disaster({"period": 4, "fragments": 2, "overlap": 0, "feedback": 0.5, "codec": "int4"}, 18),
        ),
    )
    _state: OuterState = field(default_factory=OuterState)
    _memory: SenderFeedback = field(default_factory=SenderFeedback)  # empty without `feedback`
    _parts: Fragments = ()
    _books: list[RoundBook] = field(default_factory=list)  # by fragment
    _quiet: int = 0  # local steps since any was sent

    def __post_init__(self) -> None:
        require_period(self.period)
        require_deadline(self.deadline_s)
        if self.pattern not in ("strided", "sequential"):
            raise ValueError(f"pattern {self.pattern!r} is not known; choose strided or sequential")
        if not 1 <= self.fragments <= self.period:
            raise ValueError(
                f"{self.fragments} fragments do not fit into a period of {self.period} steps, one step each at least; "
                f"choose 1 to {self.period}"
            )
        most = min(self.period // self.fragments, self.period - 1)
        if not 0 <= self.overlap <= most:
            raise ValueError(
                f"an overlap of {self.overlap} steps: with {self.fragments} fragments in {self.period} steps the next "
                f"one would be sent before; choose 0 to {most}, or fewer fragments"
            )
        if not 0 <= self.mix <= 1:
            raise ValueError(f"a mix of {self.mix} is no share of the local values; choose one in [0, 1], usually 0.5")
        require_unbiased("return codec", self.return_codec, "choose bf16 or fp32")
        require_feedback(self.codec, self.feedback, "fp4, int8 or fp16")

    def streams(self, replica: Replica) -> list[Exchange]:
        """One a fragment: its pseudo-gradients."""
        parts = split(replica.shapes, self.fragments, self.pattern)
        return [self._exchange(p, p, zeros(_of(replica.shapes, names))) for p, names in enumerate(parts)]

    def local_step(self, replica: Replica, progress: Progress) -> None:
        """The inner update; the first one remembers where the run began."""
        self._begin(replica)
        replica.inner_step()
        for book in self._books:
            book.since += 1
        self._quiet += 1

    def due(self, replica: Replica, progress: Progress) -> list[Exchange]:
        """The fragment whose turn it is: of those that are not on their way the one with the first round, when its gap to
        the one before it is over and it was not sent for `period` steps. All peers send in this order, so that none waits
        for a fragment that the other sends only after another one."""
        idle = [p for p, book in enumerate(self._books) if not book.pending]
        if not idle:
            return []
        p = min(idle, key=lambda q: self._books[q].number)
        number = self._books[p].number
        if self._books[p].since < self.period or self._quiet < self._slot(number) - self._slot(number - 1):
            return []
        self._books[p].leave()
        self._quiet = 0
        theta = replica.read(self._parts[p], "param")
        work = self._state.pseudo_gradient(theta)
        if self.feedback is not None:
            work = self._memory.compose(work, theta, self.feedback)
        return [self._exchange(p, number, work)]

    def _slot(self, number: int) -> int:
        """The local step, counted from the run's begin, at which a round's fragment is sent if nothing goes wrong."""
        return (number + 1) * self.period // self.fragments

    def apply(self, replica: Replica, exchange: Exchange, result: Result) -> list[Exchange]:
        """The fragment's outer step. Where my work was taken the replica is merged with it; elsewhere it stays."""
        self._begin(replica)
        p = int(exchange.key.stream.removeprefix(STREAM))
        self._books[p].close(exchange, result)
        if result.status == "failed":
            return []
        assert result.mean is not None, f"{exchange.key}: {result.status} without a mean"
        theta, moved = replica.read(self._parts[p], "param") if result.taken else {}, {}
        for name in self._parts[p]:
            before = self._state.phi[name]
            after = self._state.step(name, self.outer, result.mean[name])
            if result.taken.get(name):
                moved[name] = self._merge(name, theta[name], before, after, result)
        if moved:
            replica.write(moved, "param")
        return []

    def _merge(self, name: str, theta: Tensor, before: Tensor, after: Tensor, result: Result) -> Tensor:
        """theta <- mix·theta + (1-mix)·phi_new, with the steps since the snapshot on top of phi if it comes late."""
        assert result.sent is not None
        taken = result.taken[name]
        if self.feedback is not None:
            self._memory.settle(name, result.sent[name], taken)
        if result.steps_since > self.overlap:
            start = before - result.sent[name] if self.feedback is None else self._memory.start[name]
            after = after + (theta - start)
        merged = scaled(theta, self.mix) + scaled(after, 1 - self.mix) if self.mix else after
        return choose(taken, merged, theta)

    def snapshot(self, replica: Replica) -> State:
        """phi, the outer momentum, and each fragment's round. A joiner replays those that are on their way."""
        self._begin(replica)
        rounds = numbers({f"round.{p}": book.number for p, book in enumerate(self._books)})
        return self._state.snapshot(replica) | rounds

    def restore(self, replica: Replica, state: State, mode: Literal["adopt", "carry"]) -> None:
        """Take over phi and momentum; `carry` puts this replica's unsent work on top of the new phi, and keeps its residual."""
        new, rounds = self._state.read(state, replica.shapes), self._rounds_of(state)
        if not self._state.restore(replica, new, mode):
            self._memory.residual = {}
        self._memory.forget_message()
        self._take_turns(replica, rounds)

    def _rounds_of(self, state: State) -> list[int]:
        rounds = [counter(f"round.{p}", state) for p in range(self.fragments)]
        for p, number in enumerate(rounds):
            if number % self.fragments != p:
                raise WrongState(f"round.{p} must be one of every {self.fragments} rounds from {p} on, got {number}")
        return rounds

    def _take_turns(self, replica: Replica, rounds: list[int]) -> None:
        """Begin as if the round before the first one were sent just now: the others follow at their distances."""
        first = self._slot(min(rounds) - 1)
        self._parts = split(replica.shapes, self.fragments, self.pattern)
        ages = [max(self.period - (self._slot(number) - first), 0) for number in rounds]
        self._books = [RoundBook(number, ages[p], suffix=f".{p}") for p, number in enumerate(rounds)]
        self._quiet = 0

    def personal(self, replica: Replica) -> State:
        """Where in their rounds this peer's fragments are, its residuals, and what pending messages were made from."""
        self._begin(replica)
        mine = self._memory.personal() | numbers({"quiet": self._quiet})
        return mine | {key: value for book in self._books for key, value in book.personal().items()}

    def resume(self, replica: Replica, state: State) -> None:
        """Go on where this peer stopped."""
        self._state.adopt(self._state.read(state, replica.shapes))
        self._take_turns(replica, self._rounds_of(state))
        self._quiet = counter("quiet", state)
        for book in self._books:
            book.resume(state)
        self._memory.resume(state, *(_of(replica.shapes, names) for names in self._parts))

    def agreed(self, replica: Replica, stream: str) -> State:
        """The fragment's phi and momentum: other fragments may be a round ahead or behind at other peers."""
        self._begin(replica)
        return self._state.part(
            [name for p, part in enumerate(self._parts) if stream == f"{STREAM}{p}" for name in part]
        )

    def eval_params(self, replica: Replica) -> Tensors:
        """phi."""
        self._begin(replica)
        return self._state.parameters(replica)

    def _begin(self, replica: Replica) -> None:
        if self._state.begin(replica):
            self._take_turns(replica, list(range(self.fragments)))

    def _exchange(self, p: int, number: int, tensors: Tensors) -> Exchange:
        key, back, wait = ExchangeKey(f"{STREAM}{p}", number), self.return_codec, self.deadline_s
        stride, after = self.fragments, self.overlap
        return Exchange(
            key, "mean", All(), tensors, 1.0, self.codec, back, stride=stride, apply_after=after, deadline_s=wait
        )


def _of(shapes: Shapes, names: tuple[str, ...]) -> Shapes:
    return {name: shapes[name] for name in names}
