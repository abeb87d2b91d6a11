"""Count first, merge after: a method at a stage whose own exchanges cannot name the microbatches
that count (docs/decisions/038).

A method that merges in pairs, in fragments or late has no round that takes in the whole of a
server's work, or none of it. `Counting` wraps it. Its first stream, `microbatches`, is a round of
the stage's whole group without tensors, whose only content is the list of microbatches. It is due
after each local step, or after every so many. What the method asks for at that step is held back
until the list is known:

    due:    method.due -> held;  the count is requested
    apply:  the count names this server     -> the held exchanges go out
            the count does not name it      -> empty ones of no weight go out in their place

So tensors that leave a server, to a partner, a group or a joiner, hold counted microbatches only.
Otherwise A merges with B and dies uncounted, its trainer asks C for the same gradient, and half of
it is in B's weights as well. A server that is not named keeps its work and brings the same
microbatches to the next count; nobody waits for it.

A merge has the number of the count that it waits for, on the axis of the stage's rounds: one view
decides both. The method itself counts its rounds as ever, and `Counting` translates.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from farflock.node.run.counts import is_counted_apart, placeholder_streams
from farflock.node.run.terms import RunPlan
from farflock.optimizers.catalog import method
from farflock.optimizers.method import (
    All,
    Exchange,
    ExchangeKey,
    Method,
    Progress,
    RandomGroups,
    Replica,
    Result,
    State,
    Tensors,
)
from farflock.optimizers.parts.blocks import shapes_of
from farflock.optimizers.parts.state import counter, zeros
from farflock.optimizers.parts.stateful import (
    LiveState,
    ReplicaMethod,
    StepSchedule,
    evaluated_weights,
    live_state,
)

STREAM = "microbatches"
COUNTS = "counts"  # in a snapshot: the number of counts in it
SINCE = "uncounted_steps"  # in a checkpoint: of the count that is not asked for yet
HELD = "held."  # prefix in a checkpoint: the number of a merge that waits for its count
DEADLINE_S = 30.0
# Of a server that sits out. If all do, the mean is still one: zeros.
NO_WEIGHT = 2.0**-100


@dataclass(frozen=True, slots=True)
class AxisNumbers:
    """The numbers of one stream's rounds: the method's own begin at `own` and are `own_stride`
    apart; on the stage's axis they begin at `first` and are `stride` apart."""

    own: int
    own_stride: int
    first: int
    stride: int

    def to_axis(self, number: int) -> int:
        """Return the number on the axis of one of the method's own."""
        return self.first + (number - self.own) // self.own_stride * self.stride

    def to_own(self, number: int) -> int:
        """Return the method's number of the first round at or after a number on the axis."""
        return self.own - (self.first - number) // self.stride * self.own_stride


@dataclass(slots=True)
class UnmergedTokens:
    """The tokens of one life of a server: in a step, counted, and in a merge with others."""

    counted: int = 0
    _trained: int = 0  # and not counted yet
    _offered: int = 0  # of them, in the open count
    # those counted, by open merge; and by stream, those in its last merge with others
    _in_merge: dict[ExchangeKey, int] = field(default_factory=dict)
    _merged: dict[str, int] = field(default_factory=dict)

    def begin(self, stream: str) -> None:
        """Note a stream whose merges take in work."""
        self._merged.setdefault(stream, 0)

    @property
    def unmerged(self) -> int:
        """Tokens that count, and whose work is only here: they are lost if this server dies."""
        return self.counted - min(self._merged.values(), default=0)

    @property
    def will_merge(self) -> bool:
        """True if a merge will take in work that counts and is only here."""
        return bool(self._merged) and self.unmerged > 0

    def train(self, tokens: int) -> None:
        """Note the tokens of a step."""
        self._trained += tokens

    def offer(self) -> float:
        """Offer all that is not counted to a count; return what would be lost with this server if
        it died after that, as the weight of its contribution."""
        self._offered = self._trained
        return max(float(self.unmerged + self._offered), NO_WEIGHT)

    def count(self) -> None:
        """Note that the open count names this server's microbatches."""
        self.counted, self._trained = self.counted + self._offered, self._trained - self._offered

    def send(self, merge: ExchangeKey) -> None:
        """Note that a merge has gone out, with all that counts."""
        self._in_merge[merge] = self.counted

    def merge(self, merge: ExchangeKey, result: Result) -> None:
        """Note how it ended."""
        told, others = self._in_merge.pop(merge, 0), len(result.participants) > 1
        if result.taken and others:
            self._merged[merge.stream] = max(self._merged[merge.stream], told)

    def forget(self) -> None:
        """Forget the open merges, and what is not counted."""
        self._in_merge.clear()
        self._trained = self._offered = 0


@dataclass(slots=True)
class Counting:
    """`method` at a stage, with a count after `every` local steps; all its merges are due after
    such steps."""

    method: Method
    schedule: StepSchedule
    deadline_s: float = DEADLINE_S
    every: int = 1
    counts: int = field(default=0, init=False)  # that are over
    open: int | None = field(default=None, init=False)  # the count whose outcome is not known
    # whether a count has named all work that is in the replica
    is_counted: bool = field(default=True, init=False)
    held: list[Exchange] = field(default_factory=list, init=False)
    _since: int = field(default=0, init=False)  # local steps since the last count was asked for
    tokens: UnmergedTokens = field(default_factory=UnmergedTokens, init=False)
    # relative distance of the weights in the last merge of a pair from the pair's mean
    spread: float | None = field(default=None, init=False)
    _numbers: dict[str, AxisNumbers] = field(default_factory=dict, init=False)
    # merges that were sent empty, in place of work not counted
    _empty: set[ExchangeKey] = field(default_factory=set, init=False)
    # by merge, the local steps from its message to the count's outcome
    _late: dict[ExchangeKey, int] = field(default_factory=dict, init=False)

    @property
    def equality(self) -> Literal["exact", "close", "per-peer"]:
        """The method's."""
        return self.method.equality

    @property
    def keeps_gradients(self) -> bool:
        """As the method."""
        return self.method.keeps_gradients

    @property
    def shares_replica(self) -> bool:
        """True if joiners get the replica's parameters, in which work may not be counted yet."""
        return isinstance(self.method, ReplicaMethod)

    # exchanges

    def streams(self, replica: Replica) -> list[Exchange]:
        """Return the template of the counts, and the method's."""
        merges = self.method.streams(replica)
        for merge in merges:
            first, between = self.schedule.due_steps[merge.key.stream]
            axis = first // self.every - 1, between // self.every
            numbers = AxisNumbers(merge.key.round, merge.stride, *axis)
            self._numbers[merge.key.stream] = numbers
            self.tokens.begin(merge.key.stream)
        return [self._count(0), *map(self._outward, merges)]

    def local_step(self, replica: Replica, progress: Progress) -> None:
        """Make the method's; what it changes is not counted yet."""
        self.is_counted = False
        self.method.local_step(replica, progress)

    def due(self, replica: Replica, progress: Progress) -> list[Exchange]:
        """Request a count if it is due and none is open, and hold back what the method asks for.
        The weight of a count says what would be lost with this server if it died after it."""
        self.tokens.train(progress.step_tokens)
        self._since += 1
        if self.open is not None or self._since < self.every:
            return []
        self.open, self._since = self.counts, 0
        if self._is_merge_due((self.counts + 1) * self.every):
            self.held = self.method.due(replica, progress)
        return [replace(self._count(self.counts), weight=self.tokens.offer())]

    def apply(self, replica: Replica, exchange: Exchange, result: Result) -> list[Exchange]:
        """Apply a count, and return what it held back; or apply the method's own result."""
        key = exchange.key
        if key.stream == STREAM:
            return self._close(replica, key.round, result)
        numbers, late = self._numbers[key.stream], self._late.pop(key, 0)
        result = replace(
            result,
            next_round=numbers.to_own(result.next_round),
            steps_since=result.steps_since + late,
        )
        if key in self._empty:
            self._empty.discard(key)
            result = replace(result, taken={}, sent=None)
        self.tokens.merge(key, result)
        if isinstance(exchange.group, RandomGroups) and len(result.participants) > 1:
            self.spread = _distance(result)
        more = self.method.apply(replica, self._inward(exchange), result)
        return [self._outward(each) for each in more]

    def _close(self, replica: Replica, number: int, result: Result) -> list[Exchange]:
        self.counts = max(self.counts, result.next_round)
        if number != self.open:  # decided without this server; the others have made its steps
            self._take_up_schedule(replica)
            return []
        held, self.held, self.open = self.held, [], None
        is_named, late = bool(result.taken), result.steps_since
        self.is_counted = is_named and not late
        if is_named:
            self.tokens.count()
        return [self._released(self._at(each, number), late, is_named) for each in held]

    def _released(self, merge: Exchange, late: int, is_named: bool) -> Exchange:
        if late:
            self._late[merge.key] = late
        merge = replace(merge, apply_after=max(merge.apply_after - late, 0))
        if is_named:
            self.tokens.send(merge.key)
            return merge
        self._empty.add(merge.key)
        return replace(merge, tensors=zeros(shapes_of(merge.tensors)), weight=NO_WEIGHT)

    def _take_up_schedule(self, replica: Replica) -> None:
        self._since = 0
        self.schedule.at_step(replica, self.counts * self.every)

    def _is_merge_due(self, step: int) -> bool:
        return any(
            step >= first and (step - first) % between == 0
            for first, between in self.schedule.due_steps.values()
        )

    # numbers

    def _count(self, number: int) -> Exchange:
        key, wait = ExchangeKey(STREAM, number), self.deadline_s
        return Exchange(key, "mean", All(), {}, codec="fp32", uniform=True, deadline_s=wait)

    def _at(self, merge: Exchange, number: int) -> Exchange:
        """Return a merge with its number on the axis. Pairs keep no log in which one could be
        behind, so theirs is that of the count."""
        outward = self._outward(merge)
        if not isinstance(merge.group, RandomGroups):
            return outward
        return replace(outward, key=replace(outward.key, round=number))

    def _outward(self, merge: Exchange) -> Exchange:
        numbers = self._numbers[merge.key.stream]
        key = replace(merge.key, round=numbers.to_axis(merge.key.round))
        return replace(merge, key=key, stride=numbers.stride)

    def _inward(self, merge: Exchange) -> Exchange:
        numbers = self._numbers[merge.key.stream]
        key = replace(merge.key, round=numbers.to_own(merge.key.round))
        return replace(merge, key=key, stride=numbers.own_stride)

    # state

    def snapshot(self, replica: Replica) -> State:
        """Return the method's, and the number of counts."""
        return self.method.snapshot(replica) | {COUNTS: torch.tensor(self.counts)}

    def live(self, replica: Replica) -> LiveState:
        """Return the state without copies of large tensors."""
        shared, own, model = live_state(self.method, replica)
        shared = shared | {COUNTS: torch.tensor(self.counts)}
        return LiveState(shared, own | self._own(), model)

    def evaluated(self, replica: Replica) -> Tensors:
        """Return the method's parameters to evaluate, as they are stored."""
        return evaluated_weights(self.method, replica)

    def restore(self, replica: Replica, state: State, mode: Literal["adopt", "carry"]) -> None:
        """Take over a snapshot, and the schedule of the peer that it is from."""
        self.method.restore(replica, state, mode)
        self._begin(state)
        self.is_counted = self.is_counted or mode == "adopt"
        self._take_up_schedule(replica)

    def personal(self, replica: Replica) -> State:
        """Return the method's, and what waits for a count."""
        return self.method.personal(replica) | self._own()

    def resume(self, replica: Replica, state: State) -> None:
        """Continue where this peer stopped. The outcome of an open count can no longer be learned,
        so what waits for it will go out empty."""
        self.method.resume(replica, state)
        self._begin(state)
        self.is_counted = False
        if "count" in state:
            self.open = counter("count", state)
        self._since = counter(SINCE, state) if SINCE in state else 0
        for merge in self.method.streams(replica):
            if (name := HELD + merge.key.stream) in state:
                self.held.append(replace(merge, key=replace(merge.key, round=counter(name, state))))

    def agreed(self, replica: Replica, stream: str) -> State:
        """Return nothing for a count, which begins from no state."""
        return {} if stream == STREAM else self.method.agreed(replica, stream)

    def eval_params(self, replica: Replica) -> Tensors:
        """Return the method's parameters to evaluate."""
        return self.method.eval_params(replica)

    def _begin(self, state: State) -> None:
        self.counts, self.open = counter(COUNTS, state), None
        self.held, self._empty, self._late = [], set(), {}
        self.tokens.forget()

    def _own(self) -> State:
        own = {HELD + merge.key.stream: torch.tensor(merge.key.round) for merge in self.held}
        own |= {SINCE: torch.tensor(self._since)} if self._since else {}
        return own if self.open is None else own | {"count": torch.tensor(self.open)}


def _distance(result: Result) -> float | None:
    """Return the Euclidean distance of the weights that were sent from the mean of all, divided by
    their norm; None if none were."""
    mean, sent = result.mean, result.sent
    if mean is None or sent is None:
        return None
    names = [name for name in sent if not name.startswith("delta.")]  # changes, beside weights
    apart = sum(float((mean[name] - sent[name]).double().square().sum()) for name in names)
    whole = sum(float(sent[name].double().square().sum()) for name in names)
    return math.sqrt(apart / whole) if whole else None


def stage_method(plan: RunPlan, count_every: int) -> Method:
    """Return the run's method as stages run it: with counts of their own after so many steps, if it
    needs them."""
    made = method(plan.method, **plan.options)
    templates = placeholder_streams(made, plan.model.layers)
    if not is_counted_apart(made, templates):
        return made
    assert isinstance(made, StepSchedule)
    wait_s = min((each.deadline_s for each in templates), default=DEADLINE_S)
    return Counting(made, made, deadline_s=wait_s, every=count_every)
