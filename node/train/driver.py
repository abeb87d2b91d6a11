"""The driver: a method, the table of its pending exchanges, and its position in the run.

It does no I/O: the loop asks it which exchanges to start, what to apply, and whether to wait. A
result is wanted at a step (`apply_after`), and applied then or as soon as it is known. Training
waits for it only between a later step (`slack`) and the exchange's deadline. Results of one stream
are applied in the order of their rounds.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from farflock.node.state.cut import OpenCuts
from farflock.optimizers.method import (
    All,
    Exchange,
    ExchangeKey,
    Method,
    Progress,
    RandomGroups,
    Replica,
    Result,
)
from farflock.optimizers.parts.blocks import LazyTensors
from farflock.optimizers.parts.state import state_hash


@dataclass(frozen=True, slots=True)
class Apply:
    """A result that is due now."""

    exchange: Exchange
    result: Result

    @property
    def summary(self) -> dict[str, object]:
        """The fields of a node's `round` event."""
        key, result = self.exchange.key, self.result
        return {
            "stream": key.stream,
            "round": key.round,
            "status": result.status,
            "peers": len(result.participants),
            "participants": list(result.participants),
            "tokens": result.tokens,
        }


@dataclass(frozen=True, slots=True)
class Wait:
    """A pause in training until the exchange has its result, for at most `timeout_s`."""

    key: ExchangeKey
    timeout_s: float


@dataclass(slots=True)
class Pending:
    """An exchange, the step and run time at which it was requested, its result once known, and the
    node's own tokens that it brings."""

    exchange: Exchange
    since_step: int
    since_s: float
    result: Result | None = None
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class RunPosition:
    """A node's position in its run: the last applied round of each stream, the agreed tokens after
    these rounds, the node's own tokens since, and the last known number of members."""

    rounds: dict[str, int] = field(default_factory=dict)
    agreed_tokens: int = 0
    own_tokens: int = 0
    members: int = 1

    def after(self, stream: str, stride: int, result: Result) -> "RunPosition":
        """Return the position once a result of a stream is applied."""
        last = max(self.rounds[stream], result.next_round - stride)
        tokens = max(self.agreed_tokens, result.tokens)
        return replace(self, rounds={**self.rounds, stream: last}, agreed_tokens=tokens)


@dataclass(frozen=True, slots=True)
class Claim:
    """The data sent along with an exchange's tensors: the tokens trained; for an exact method,
    the hash of the state from which it starts the round (otherwise empty); and a stage's notes."""

    tokens: int
    state: bytes = b""
    notes: bytes = b""


@dataclass(frozen=True, slots=True)
class EncodedExchange:
    """An exchange that is encoded for the swarm; `withheld` says why its own values are not in it
    (withheld.py)."""

    exchange: Exchange
    payloads: tuple[bytes, ...]
    claim: Claim
    withheld: str = ""


class ContributionLog(Protocol):
    """The notes on a stage's contributions, sent with the stage's first stream
    (microbatch_ids.py)."""

    def brought(self, number: int) -> bytes:
        """Return the notes for this peer's contribution to a round, which is being prepared."""
        ...

    def closing(self, number: int, noted: bytes) -> None:
        """Note, in the worker, that a round with these notes is about to be applied."""
        ...

    def closed(self, number: int, noted: bytes) -> None:
        """Note, in the worker, that a round with these notes has been applied."""
        ...


class Driver:
    """The link between a method and the loop: it carries exchanges out and results back."""

    def __init__(self, method: Method, replica: Replica) -> None:
        self.method, self.replica = method, replica
        self.cuts = OpenCuts()  # of the state; whoever changes it asks them first
        self.streams = method.streams(replica)  # one template exchange per stream
        self.contributions: ContributionLog | None = None  # stage servers only
        self._pending: dict[ExchangeKey, Pending] = {}
        self._own_tokens = self._agreed_tokens = 0
        self._step_tokens = 1  # of the last local step
        self.members = 1
        self.ahead = False  # a local step has changed the state, and is not counted yet
        self.applied: Callable[[], None] = lambda: None  # told in the worker after each result
        # so many members are gone that no round of a whole group can be expected
        self.hopeless: Callable[[], bool] = lambda: False
        # the others are past a round
        self.has_passed: Callable[[ExchangeKey], bool] = lambda key: False
        self.begin({}, 0)

    # the run

    def begin(self, rounds: Mapping[str, int], tokens: int) -> None:
        """Set the agreed tokens and each stream's last applied round (missing: none yet)."""
        before = {entry.key.stream: entry.key.round - entry.stride for entry in self.streams}
        self._rounds, self._agreed_tokens, self._own_tokens = {**before, **rounds}, tokens, 0

    @property
    def position(self) -> RunPosition:
        """This node's position in the run, as a checkpoint stores it."""
        return RunPosition(dict(self._rounds), self._agreed_tokens, self._own_tokens, self.members)

    def local_step(self, progress: Progress) -> None:
        """Let the method make its local step; in the worker that trains."""
        with self.cuts.stepping():
            self.ahead = True
            self.method.local_step(self.replica, progress)

    def trained(self, tokens: int, members: int) -> None:
        """Count the tokens of a local step; `members` is the number of peers that train at the
        same pace."""
        self._own_tokens, self._step_tokens = self._own_tokens + tokens, tokens
        self.members, self.ahead = members, False

    @property
    def tokens(self) -> int:
        """The agreed tokens plus an estimate of what all members have trained since."""
        return self._agreed_tokens + self._own_tokens * self.members

    def progress(self, step: int, run_s: float) -> Progress:
        """Return the run's progress for the method."""
        return Progress(step, self.tokens, run_s, step_tokens=self._step_tokens)

    # exchanges

    @property
    def pending(self) -> tuple[ExchangeKey, ...]:
        """Keys of the exchanges whose results are not applied yet, oldest first."""
        return tuple(self._pending)

    @property
    def table(self) -> tuple[Pending, ...]:
        """All pending exchanges, oldest first, as a checkpoint stores them."""
        return tuple(self._pending.values())

    def load_state(self, table: Iterable[Pending]) -> None:
        """Restore the exchanges that were pending when a checkpoint was written."""
        self._pending = {pending.exchange.key: pending for pending in table}

    def load_position(self, position: RunPosition) -> None:
        """Restore the position at which a checkpoint was written."""
        self.begin(position.rounds, position.agreed_tokens)
        self._own_tokens, self.members = position.own_tokens, position.members

    def after_step(self, progress: Progress) -> list[Exchange]:
        """Return the exchanges to start after a local step."""
        return self._note(self.method.due(self.replica, progress), progress)

    def encoded(
        self, exchange: Exchange, claim: Claim, encode: Callable[[Exchange, Claim], EncodedExchange]
    ) -> EncodedExchange:
        """Hash, encode, and forget the tensors if they were only computed for that; in a worker."""
        offer = encode(exchange, self.hashed(exchange, claim))
        if isinstance(exchange.tensors, LazyTensors):
            exchange.tensors.drop()
        return offer

    def claim(self, exchange: Exchange) -> Claim:
        """Return an exchange's claim, without the hash, which `hashed` adds. Only the first
        stream's claim has notes.

        In a collective, the first stream claims the tokens trained since the last round that
        took this peer's contribution. In a pair, a peer claims its estimate of the whole run's
        tokens, unless this is a stage, where rounds of the whole group count them."""
        key, is_first, notes = exchange.key, self._is_first(exchange.key), b""
        if self.contributions is not None and is_first:
            notes = self.contributions.brought(key.round)
        # only one stream counts tokens, or each step would count once per stream
        own = self._own_tokens if is_first else 0
        if (pending := self._pending.get(key)) is not None:
            pending.tokens = own
        estimates = isinstance(exchange.group, RandomGroups) and self.contributions is None
        tokens = self.tokens if estimates else own
        return Claim(tokens, notes=notes)

    def hashed(self, exchange: Exchange, claim: Claim) -> Claim:
        """Return the claim, with the state hash added if the method is exact.

        This runs in a worker, because hashing reads the whole state."""
        if self.method.equality != "exact":
            return claim
        agreed = self.method.agreed(self.replica, exchange.key.stream)
        return replace(claim, state=state_hash(agreed))

    def resolve(self, key: ExchangeKey, result: Result) -> None:
        """Store the result of an exchange, which must be pending and have no result yet."""
        pending = self._pending.get(key)
        assert pending is not None, f"a result for {key}, which is not pending"
        assert pending.result is None, f"a second result for {key}"
        pending.result = result

    def next(self, progress: Progress, *, last: bool = False) -> Apply | Wait | None:
        """Return the next thing to do before a local step: apply a result, wait for one, or None.

        After the `last` step, any available result is due at once. While it is `hopeless` that one
        of a whole group is decided, training does not wait for it."""
        hopeless = self.hopeless()
        held: set[str] = set()  # streams with an older exchange that is still open
        for pending in self._pending.values():
            key, steps = pending.exchange.key, progress.step - pending.since_step
            wanted = pending.exchange.apply_after
            due = last or steps >= wanted
            if pending.result is not None and due and key.stream not in held:
                return Apply(pending.exchange, replace(pending.result, steps_since=steps))
            # past its deadline a result no longer blocks training: it is applied when it arrives
            timeout_s = pending.since_s + pending.exchange.deadline_s - progress.run_time_s
            needed = last or steps >= wanted + pending.exchange.slack
            in_pairs = isinstance(
                pending.exchange.group, RandomGroups
            )  # which decide by themselves
            if pending.result is None and needed and timeout_s > 0 and (in_pairs or not hopeless):
                return Wait(key, timeout_s)
            held.add(key.stream)
        return None

    def apply(
        self,
        action: Apply,
        progress: Progress,
        set_rate: Callable[[int], None] = lambda tokens: None,
    ) -> list[Exchange]:
        """Apply a result, count its tokens, and return the exchanges of a second phase. If other
        peers contributed tokens, `set_rate` first sets the inner rate of that round. After a round
        that was decided without this peer, only those follow that the others have not passed.

        This runs in a worker, so that no snapshot has the new state with the old count."""
        if action.result.tokens:
            set_rate(action.result.tokens)
        exchange, result = action.exchange, action.result
        notes = self.contributions if self._is_first(exchange.key) else None
        with self.cuts.changing():
            if notes is not None:
                notes.closing(exchange.key.round, result.notes)
            pending = self._pending.pop(exchange.key, None)
            follow = self.method.apply(self.replica, exchange, result)
            if pending is None:
                follow = [each for each in follow if not self.has_passed(each.key)]
            second_phase = self._note(follow, progress)
            self._count(exchange.key, result, 0 if pending is None else pending.tokens)
            if notes is not None:
                notes.closed(exchange.key.round, result.notes)
            self.applied()
        return second_phase

    def replay(self, key: ExchangeKey, result: Result, progress: Progress) -> list[Exchange]:
        """Apply a round that was decided without this peer: the outer state follows, and local
        work stays."""
        return self.apply(self.missed(key, result), progress)

    def missed(self, key: ExchangeKey, result: Result) -> Apply:
        """Return the `Apply` for a round that was decided without this peer."""
        assert key not in self._pending, f"{key} is pending and cannot be replayed"
        return Apply(Exchange(key, "mean", All(), tensors={}), result)

    def skip(self, key: ExchangeKey, result: Result) -> None:
        """Tell the method, before its streams open, that rounds up to this one failed for it."""
        self.method.apply(self.replica, self.missed(key, result).exchange, result)

    def forget(self) -> None:
        """Drop every pending exchange: a snapshot has replaced the state that they belong to."""
        self._pending.clear()

    def _is_first(self, key: ExchangeKey) -> bool:
        return key.stream == self.streams[0].key.stream

    def _count(self, key: ExchangeKey, result: Result, offered: int) -> None:
        (template,) = [entry for entry in self.streams if entry.key.stream == key.stream]
        after = self.position.after(key.stream, template.stride, result)
        self._rounds, self._agreed_tokens = after.rounds, after.agreed_tokens
        if result.status == "failed" and not result.tokens:
            return
        if result.taken or isinstance(template.group, RandomGroups):
            self._own_tokens -= offered

    def _note(self, exchanges: list[Exchange], progress: Progress) -> list[Exchange]:
        for exchange in exchanges:
            assert exchange.key not in self._pending, f"{exchange.key} is requested twice"
            self._pending[exchange.key] = Pending(exchange, progress.step, progress.run_time_s)
        return exchanges
