"""Evaluations of the run's weights by drawn members, signed and known to all.

After certain rounds one member measures the weights on the held-out text. Which one follows from
the run's seed, the view in which the round was closed, and the round, so everybody knows whose
signature a value must have, and nobody can choose itself. A second member may repeat the
measurement. Values are sent to all members; who lacks one asks for it.

What a value says cannot be checked by those who receive it: only a second measurement can show that
it is wrong.
"""

import collections
import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

import msgspec

from farflock.swarm.context import PeerContext
from farflock.swarm.identity import SIGNATURE_BYTES, Identity, verify
from farflock.swarm.links import PeerId
from farflock.swarm.messages import (
    MAX_EVALUATION_BYTES,
    MAX_EVALUATIONS,
    Count,
    Digest,
    Evaluated,
    EvaluationMessage,
    EvaluationQuery,
    Name,
)
from farflock.swarm.protocol.views import Member, View
from farflock.swarm.roles import EVERY

KEPT = 64  # evaluated rounds: older ones are forgotten by all alike
AHEAD = 2  # evaluated rounds after the last applied one, of which values are taken in
ASK_S = 1.0  # before a missing value is asked for; each further wait is twice as long
ASKED = 2  # members at once: the answer, or the value there, may be missing too
MAX_ASKED_TIMES = 10  # then whoever should have measured is taken for gone
REPEATED = 10  # one in so many evaluations is repeated by a second member
MAX_LOSS = 1e6
MAX_NORM = 1e30  # stands for a gradient norm that is not finite, too
_DOMAIN = b"evaluation"
_STAGE = re.compile(r".*/(0|[1-9][0-9]{0,3})", re.DOTALL)

Outcome = Literal["ok", "not finite", "missed"]
EvaluationPlace = tuple[
    int, int
]  # a round, and whose measurement: 0 the first member's, 1 the second's


class Evaluation(msgspec.Struct, frozen=True, array_like=True):
    """A drawn member's measurement of the weights after a round.

    `place` is 0 for the first drawn member and 1 for the one that repeats. The loss and its
    standard error (0: unknown) are in nats per token, over `sequences` held-out sequences;
    `tokens` are the run's by then. The member adds what it knows of its own training: the gradient
    norm of its last step, its pace, and the share of time in which it computed. A member that could
    not measure says "missed"; if the loss is no number, it says "not finite"."""

    stream: Name
    round: Count
    view: Digest
    place: Annotated[int, msgspec.Meta(ge=0, le=1)]
    outcome: Outcome
    loss: float = 0.0
    standard_error: float = 0.0
    sequences: Annotated[int, msgspec.Meta(ge=0, le=2**20)] = 0
    tokens: Count = 0
    gradient_norm: float | None = None
    tokens_per_s: float | None = None
    busy: float | None = None

    def require_sane(self) -> None:
        """Raise `BadEvaluation` unless all numbers are finite and within their limits."""
        numbers = {
            "loss": (self.loss, MAX_LOSS),
            "standard error": (self.standard_error, MAX_LOSS),
            "gradient norm": (self.gradient_norm or 0.0, MAX_NORM),
            "pace": (self.tokens_per_s or 0.0, 1e15),
            "busy share": (self.busy or 0.0, 1.0),
        }
        for name, (value, most) in numbers.items():
            if not (math.isfinite(value) and 0.0 <= value <= most):
                raise BadEvaluation(f"its {name} is {value}, and must be 0 to {most:g}")


class BadEvaluation(ValueError):
    """Bytes that no correct member sends as an evaluation."""


@dataclass(frozen=True, slots=True)
class EvaluationSchedule:
    """The rounds of a stream that are evaluated: every `every`-th, beginning with its `first`.
    Rounds of the stream are `stride` apart. The stream may be that of a stage of a pipeline."""

    stream: str
    every: int
    stride: int = 1
    first: int = 0

    @property
    def period(self) -> int:
        """The distance of two evaluated rounds."""
        return self.every * self.stride

    def is_due(self, number: int) -> bool:
        """Return whether this round of the stream is evaluated."""
        return number >= self.first and (number - self.first) % self.period == 0

    def is_repeated(self, number: int) -> bool:
        """Return whether a second member evaluates this round too. In a pipeline none does: its
        weights change while they are measured."""
        if stage_of_stream(self.stream) is not None:
            return False
        return self.is_due(number) and (number - self.first) // self.period % REPEATED == 0

    def between(self, after: int, last: int) -> list[int]:
        """Return the evaluated rounds after one round up to another, at most the newest `KEPT`."""
        newest = last - (last - self.first) % self.period
        oldest = max(after + 1, newest - (KEPT - 1) * self.period, self.first)
        return list(range(newest, oldest - 1, -self.period))[::-1]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Evaluation)


def stage_of_stream(stream: str) -> int | None:
    """Return the stage whose stream has this name; None if it is a stream of whole models."""
    found = _STAGE.fullmatch(stream)
    return None if found is None else int(found[1])


def drawn(seed: int, view: View, number: int, stage: int | None = None) -> tuple[Member, ...]:
    """Return the members that evaluate a round, the second of which only repeats, drawn by SHA-256
    of the seed, the view and the round: members with the whole model or, if the round is one of a
    `stage`, any member, since all of them can ask the servers. Empty if no member can."""
    able = [member for member in view.members if stage is not None or member.stage == EVERY]
    text = b"farflock-evaluation-v1\x00%d\x00%s\x00%d" % (seed, view.hash.hex().encode(), number)
    draw = int.from_bytes(hashlib.sha256(text).digest())
    if not able:
        return ()
    draw, first = divmod(draw, len(able))
    others = able[:first] + able[first + 1 :]
    return (able[first], others[draw % len(others)]) if others else (able[first],)


def evaluation_domain(run: str) -> bytes:
    """Return the domain of signatures on evaluations, which is different for each run."""
    return _DOMAIN + hashlib.sha256(run.encode()).digest()[:16]


def decode_evaluation(blob: bytes) -> Evaluation:
    """Decode a signed evaluation without a look at its signature; raise `BadEvaluation`."""
    if not SIGNATURE_BYTES < len(blob) <= MAX_EVALUATION_BYTES:
        raise BadEvaluation(f"{len(blob)} bytes are no evaluation")
    try:
        evaluation = _decoder.decode(blob[SIGNATURE_BYTES:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadEvaluation(f"not an evaluation: {error}") from None
    evaluation.require_sane()
    return evaluation


@dataclass(frozen=True, slots=True)
class _Kept:
    """A value with its signed bytes, and who signed it."""

    blob: bytes
    evaluation: Evaluation
    peer: PeerId


@dataclass(slots=True)
class _Asking:
    """The number of times that a round's value was asked for, and the time of the next."""

    times: int = 0
    next_s: float = 0.0


class Evaluations:
    """One peer's knowledge of the run's evaluations.

    Two values of one member for one round are a lie; of these all keep the one whose bytes are
    lower, so that those who know both agree."""

    def __init__(self, context: PeerContext, identity: Identity) -> None:
        self._context, self._identity = context, identity
        self._schedule: EvaluationSchedule | None = None
        self._looks_on = False
        self._applied = -1
        self._kept: dict[EvaluationPlace, _Kept] = {}
        self._asking: dict[int, _Asking] = {}
        self._turn = 0
        self.fresh: collections.deque[EvaluationPlace] = collections.deque(maxlen=MAX_EVALUATIONS)

    def open(self, schedule: EvaluationSchedule, applied: int) -> None:
        """Take part from now on; `applied` is the last round that this peer has applied."""
        self._schedule = schedule
        self.reached(applied)

    def look_on(self, asked: PeerId) -> None:
        """Ask a member for all values, and take in whatever members have signed: for a visitor,
        which knows no schedule."""
        self._looks_on = True
        self._context.send(asked, EvaluationQuery(0))

    def reached(self, applied: int) -> None:
        """Note the last applied round, and forget values that are too old."""
        assert self._schedule is not None, "no stream is evaluated"
        self._applied = applied
        oldest = applied - KEPT * self._schedule.period
        self._kept = {place: kept for place, kept in self._kept.items() if place[0] > oldest}
        self._asking = {
            number: asking for number, asking in self._asking.items() if number > oldest
        }

    def mine(self, number: int) -> int | None:
        """Return the place at which this peer evaluates a round; None if it does not."""
        schedule = self._schedule
        view = None if schedule is None else self._view_at(schedule.stream, number)
        if schedule is None or view is None or not schedule.is_due(number):
            return None
        index = self._context.my_index(view)
        members = self._drawn(schedule.stream, view, number)
        me = None if index is None else view.members[index]
        if me not in members:
            return None
        place = members.index(me)
        return place if place == 0 or schedule.is_repeated(number) else None

    def say(self, number: int, place: int, measured: Evaluation) -> None:
        """Sign a measurement for a place of this peer, keep it and send it to all members; its
        round, view and place are filled in."""
        schedule = self._schedule
        assert schedule is not None, "no stream is evaluated"
        view = self._view_at(schedule.stream, number)
        assert view is not None, f"round {number} has no view"
        said = msgspec.structs.replace(
            measured, stream=schedule.stream, round=number, view=view.hash, place=place
        )
        said.require_sane()
        body = _encoder.encode(said)
        blob = self._identity.sign(evaluation_domain(self._context.run), body) + body
        self._keep(_Kept(blob, said, self._context.me))
        for peer in self._context.views.newest.peers:
            if peer != self._context.me:
                self._context.send(peer, Evaluated((blob,)))

    @property
    def known(self) -> Mapping[EvaluationPlace, Evaluation]:
        """The accepted values by round and place, in the order of rounds."""
        places = sorted(self._kept)
        return MappingProxyType({place: self._kept[place].evaluation for place in places})

    def signer(self, place: EvaluationPlace) -> PeerId:
        """Return the member that signed an accepted value."""
        return self._kept[place].peer

    def lacks(self, number: int) -> bool:
        """Return whether the value of an evaluated round is missing and can be expected of a
        member that is here."""
        schedule = self._schedule
        view = None if schedule is None else self._view_at(schedule.stream, number)
        if (number, 0) in self._kept or schedule is None or view is None:
            return False
        members = self._drawn(schedule.stream, view, number)[:1]
        return any(self._is_here(member) for member in members)

    def receive(self, sender: PeerId, incarnation: int, message: EvaluationMessage) -> None:
        """Handle a request or values, which anybody may pass on."""
        if isinstance(message, EvaluationQuery):
            wanted = sorted(place for place in self._kept if place[0] >= message.first)
            if wanted:
                blobs = tuple(self._kept[place].blob for place in wanted[-MAX_EVALUATIONS:])
                self._context.send(sender, Evaluated(blobs))
            return
        for blob in message.values:
            try:
                self._take_in(blob)
            except BadEvaluation:
                self._context.drop("evaluation that is wrong")

    def tick(self) -> None:
        """Ask a member for missing values, of rounds that this peer has applied."""
        now_s = self._context.now()
        due = [number for number in self._missing() if self._asking[number].next_s <= now_s]
        others = [
            peer
            for peer in self._context.views.newest.peers
            if peer != self._context.me and self._context.life(peer) == "alive"
        ]
        if not due or not others:
            return
        for number in due:
            asking = self._asking[number]
            asking.times, asking.next_s = asking.times + 1, now_s + ASK_S * 2**asking.times
        for _ in range(min(ASKED, len(others))):
            self._turn += 1
            self._context.send(others[self._turn % len(others)], EvaluationQuery(min(due)))

    def _missing(self) -> Iterator[int]:
        """Yield the evaluated rounds that still can be asked for; the first wait begins when a
        round is applied."""
        schedule = self._schedule
        if schedule is None:
            return
        for number in schedule.between(-1, self._applied):
            if (number, 0) in self._kept or self._view_at(schedule.stream, number) is None:
                continue
            asking = self._asking.setdefault(number, _Asking(next_s=self._context.now() + ASK_S))
            if asking.times < MAX_ASKED_TIMES and self.mine(number) != 0:
                yield number

    def _take_in(self, blob: bytes) -> None:
        """Keep a value if it is one that was due; raise `BadEvaluation` for a wrong one."""
        said = decode_evaluation(blob)
        known = self._kept.get((said.round, said.place))
        if known is not None and known.blob == blob:
            return
        view = self._view_at(said.stream, said.round)
        if not self._is_wanted(said) or view is None or view.hash != said.view:
            self._context.drop("evaluation that is not due")  # perhaps not yet: it is asked for
            return
        members = self._drawn(said.stream, view, said.round)
        if said.place >= len(members):
            raise BadEvaluation(f"round {said.round} has no place {said.place}")
        peer, body = members[said.place].peer, blob[SIGNATURE_BYTES:]
        domain = evaluation_domain(self._context.run)
        if not verify(peer, domain, body, blob[:SIGNATURE_BYTES]):
            raise BadEvaluation(f"not signed by {peer}, which was drawn for round {said.round}")
        if known is not None:
            self._context.drop("second evaluation of a round by one member")
            if known.blob <= blob:
                return
        self._keep(_Kept(blob, said, peer))

    def _view_at(self, stream: str, number: int) -> View | None:
        """Return the view of a round; those of a stage are counted on its own axis."""
        return self._context.views.at(number, stage_of_stream(stream))

    def _drawn(self, stream: str, view: View, number: int) -> tuple[Member, ...]:
        return drawn(self._context.seed, view, number, stage_of_stream(stream))

    def _is_wanted(self, said: Evaluation) -> bool:
        schedule = self._schedule
        if schedule is None:
            return self._looks_on
        oldest = self._applied - KEPT * schedule.period
        newest = self._applied + AHEAD * schedule.period
        is_due = schedule.is_repeated if said.place else schedule.is_due
        return (
            said.stream == schedule.stream and oldest < said.round <= newest and is_due(said.round)
        )

    def _keep(self, kept: _Kept) -> None:
        place = kept.evaluation.round, kept.evaluation.place
        self._kept[place] = kept
        self.fresh.append(place)
        if len(self._kept) > 2 * (KEPT + AHEAD):  # only for one that looks on
            del self._kept[min(self._kept)]

    def _is_here(self, member: Member) -> bool:
        context = self._context
        if member.peer == context.me or context.life(member.peer) in ("suspect", "dead"):
            return False
        return context.views.newest.index(member.peer, member.incarnation) is not None
