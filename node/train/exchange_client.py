"""The exchange client: encodes a method's exchanges into shards, and decodes outcomes into results.

Encoding and decoding take long, so the loop runs them through `compute` (node/loop.py). `exchange`
between them only waits.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from farflock.compression.catalog import codec
from farflock.compression.codec import CorruptPayload, UnencodableTensor
from farflock.compression.elementwise import weighted_mean
from farflock.node.model.device import CPU
from farflock.node.train import microbatch_ids, withheld
from farflock.node.train.driver import Claim, EncodedExchange
from farflock.node.train.shards import DecodedTensors, Inputs, Reducer, ShardLayout
from farflock.optimizers.method import (
    All,
    Exchange,
    ExchangeKey,
    MemberId,
    RandomGroups,
    Ranges,
    Result,
    TensorBlock,
    Tensors,
)
from farflock.optimizers.parts.blocks import LazyTensors, is_zero, read, shapes_of
from farflock.optimizers.parts.spread import Spread, in_turn
from farflock.optimizers.parts.state import Shapes
from farflock.swarm.links import PeerId
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.protocol.exchange.close_list import RoundTerms
from farflock.swarm.protocol.exchange.streams import Cadence, Reduction, RoundOutcome, Stream
from farflock.swarm.protocol.gradient_leases import MAX_KEYS

STOPPING_WAIT_S = 2.0  # for an answer under way: a lone peer's last state must not depend on timing
LOOK_EVERY_S = 1.0  # at whether an answer can still come
# Without a quorum. A silent member counts as present for some seconds before that; it may come back
# in minutes, or never.
HOPELESS_S = 1.0
MIN_WAIT_S = 0.001  # a wait below the clock's resolution would never end in virtual time

log = logging.getLogger(__name__)

UnderWay = dict[ExchangeKey, asyncio.Task[Result]]


class OutOfStep(Exception):
    """This peer's state differs from the group's or is too far behind it; the peer must adopt a
    snapshot."""


class ExchangePeer(Protocol):
    """A peer, as its node's exchanges see it (swarm/peer/peer.py)."""

    context: PeerContext

    def open(self, stream: Stream, after_round: int = -1, tokens: int = 0) -> None:
        """Begin a stream, or begin it again after adopting a snapshot of `after_round`."""
        ...

    async def exchange(
        self,
        name: str,
        number: int,
        shards: Sequence[bytes],
        *,
        weight: float,
        tokens: int,
        state: bytes,
    ) -> RoundOutcome:
        """Contribute encoded shards to a round of a stream, and return its outcome."""
        ...

    def decided(self, name: str, number: int) -> RoundOutcome | None:
        """Return a collective round that was decided without this peer, or that it is lost; None
        if it is not decided here."""
        ...

    def has_passed(self, name: str, number: int) -> bool:
        """Return whether a collective round is known to be decided, here or at others."""
        ...

    def run_s(self) -> float:
        """Return the run time in seconds."""
        ...


@dataclass(frozen=True, slots=True)
class _Coding:
    """The coding of one stream: its name in the swarm, shapes, layouts out and back, reducer,
    whether a further shard of notes goes with it (microbatch_ids.py), and the device on which
    results are decoded."""

    name: str
    shapes: Shapes
    out: ShardLayout
    back: ShardLayout
    reducer: Reducer
    noted: bool
    home: torch.device

    def decoded(
        self, layout: ShardLayout, round_number: int, payloads: Sequence[bytes], spread: Spread
    ) -> DecodedTensors:
        """Return the tensors in these payloads; raise `CorruptPayload` if one is malformed.

        They are checked on the CPU, in several threads, and decoded at home when they are read."""

        def check(run: range) -> None:
            layout.require_valid_run(run, round_number, payloads[run.start : run.stop])

        spread(check, layout.runs)
        return DecodedTensors(layout, round_number, payloads, self.shapes, self.home)

    def reduce(self, round_number: int, index: int, inputs: Inputs) -> Reduction:
        """Reduce a shard of the tensors, or the notes."""
        if index == len(self.out.shards):
            return microbatch_ids.union(inputs)
        return self.reducer.reduce(round_number, index, inputs)

    def check(self, round_number: int, index: int, payload: bytes) -> bool:
        """Return whether a correct peer could have sent this shard."""
        if index == len(self.out.shards):
            return microbatch_ids.union([("", 1.0, payload)]).data is not None
        return self.out.is_valid(index, round_number, payload)


class ExchangeClient:
    """The exchanges of one node's method over its peer, for one stage or (None) for the whole
    model. The method gets its results on the device `home`."""

    def __init__(
        self,
        peer: ExchangePeer,
        run_seed: int,
        stage: int | None = None,
        spread: Spread = in_turn,
        home: torch.device = CPU,
    ) -> None:
        self.peer, self._run_seed, self.stage, self.spread = peer, run_seed, stage, spread
        self.home = home
        self._codings: dict[str, _Coding] = {}
        self._withheld = withheld.Withheld()
        # asked last before an offer goes out: by then it may be made of what is given up
        self.is_left_out: Callable[[], bool] = lambda: False
        self.twin: PeerId = ""  # a peer that was seen to send the same updates as this one

    def open(
        self, template: Exchange, after_round: int = -1, tokens: int = 0, *, noted: bool = False
    ) -> None:
        """Open a stream of exchanges like the template; rounds up to `after_round` are already
        applied."""
        self.peer.open(self._stream(template, noted), after_round, tokens)

    def look_on(
        self, template: Exchange, after_round: int = -1, tokens: int = 0, *, noted: bool = False
    ) -> str:
        """Open a stream of a stage that other peers serve, to vote and to read notes after a round;
        return its name."""
        stream = self._stream(template, noted)
        self.peer.open(replace(stream, wants="last" if noted else "none"), after_round, tokens)
        return stream.name

    def run_s(self) -> float:
        """Return the run time in seconds."""
        return self.peer.run_s()

    def encode(self, exchange: Exchange, claim: Claim) -> EncodedExchange:
        """Encode an exchange's tensors, shard by shard."""
        layout, number = self._codings[exchange.key.stream].out, exchange.key.round

        def encoded(run: range) -> list[bytes]:
            return layout.encode_run(run, number, exchange.tensors)

        payloads = itertools.chain.from_iterable(self.spread(encoded, layout.runs))
        return EncodedExchange(exchange, tuple(payloads), claim)

    def offer(self, exchange: Exchange, claim: Claim) -> EncodedExchange:
        """Encode an exchange, or an empty one in place of tensors that are not finite.

        Raise `UnencodableTensor` for the latter if nobody else is there, or too often."""
        try:
            offer = self.encode(exchange, claim)
        except UnencodableTensor as error:
            if self.members() == 1:
                raise
            empty = self.encode(*self._withheld.instead(exchange, claim, error))
            return replace(empty, withheld=withheld.reason(exchange))
        self._withheld.in_a_row = 0
        return offer

    async def exchange(self, offer: EncodedExchange) -> RoundOutcome:
        """Run an encoded exchange over the swarm.

        Raise `OutOfStep` if the group has left this peer behind or holds another state, or if what
        this peer had to send was withheld."""
        key, claim = offer.exchange.key, offer.claim
        if self.is_left_out():
            raise OutOfStep("a change of members left this peer out")
        coding = self._codings[key.stream]
        shards = (*offer.payloads, claim.notes) if coding.noted else offer.payloads
        outcome = await self.peer.exchange(
            coding.name,
            key.round,
            shards,
            weight=offer.exchange.weight,
            tokens=claim.tokens,
            state=claim.state,
        )
        round_name = f"round {key.round} of {key.stream}"
        if outcome.status == "lost":
            raise _lost(key)
        if outcome.state and outcome.state != claim.state:
            theirs, mine = outcome.state.hex()[:12], claim.state.hex()[:12] or "none"
            raise OutOfStep(f"{round_name}: the group starts from state {theirs}, not {mine}")
        if offer.withheld:
            raise OutOfStep(offer.withheld)
        return outcome

    def decode(
        self, key: ExchangeKey, outcome: RoundOutcome, payloads: Sequence[bytes] = ()
    ) -> Result:
        """Return an outcome as the method's result; `payloads` are this peer's own shards."""
        coding, notes = self._codings[key.stream], b""
        listed: Mapping[str, Ranges] = {}
        if coding.noted:
            if not coding.shapes and any(outcome.taken):
                listed = microbatch_ids.TAKEN
            outcome, notes = _without_notes(outcome)
        assert outcome.status != "lost", f"{outcome.key} is lost and has no result"
        coding.reducer.settle(outcome.key.round, outcome.reduced)
        if payloads and not self.twin:
            self._look_for_twin(coding, outcome, payloads)
        failed = Result("failed", outcome.next_round, tokens=outcome.tokens)
        if outcome.status == "failed":
            return failed
        try:
            mean, gathered = _tensors_of(coding, outcome, self.spread)
        except CorruptPayload:
            return failed  # the agreed bytes are malformed, so the round fails for all
        return Result(
            outcome.status,
            outcome.next_round,
            outcome.participants,
            outcome.weights,
            mean=mean,
            gathered=gathered,
            sent=(
                DecodedTensors(coding.out, outcome.key.round, payloads, coding.shapes, coding.home)
                if payloads
                else None
            ),
            taken=_taken_ranges(coding.out, outcome.taken) if payloads else listed,
            tokens=outcome.tokens,
            notes=notes,
        )

    def _look_for_twin(
        self, coding: _Coding, outcome: RoundOutcome, payloads: Sequence[bytes]
    ) -> None:
        """Say once that another peer has sent the same update as this one, and not of zeros."""
        others = (outcome.gathered or {}).items()
        equal = (peer for peer, sent in others if peer != self.peer.context.me and sent == payloads)
        twin = next(iter((*outcome.twins, *equal)), None)
        if twin is None:
            return
        layout, number = coding.out, outcome.key.round
        mine = DecodedTensors(layout, number, payloads, coding.shapes, coding.home)
        if all(is_zero(mine[name]) for name in coding.shapes):
            return
        self.twin = twin
        log.warning(
            "peer %s has sent the same update as this peer in round %d of %s, bit for bit: both"
            " draw the same data in the same order, so one of them works for nothing; seed each"
            " program's data by its rank or its peer id",
            *(twin, number, outcome.key.stream),
        )

    def replay(self, stream: str, round_number: int) -> Result | None:
        """Return the result of a round decided without this peer, or None if its content is
        missing. Raise `OutOfStep` if that is gone from here."""
        key = ExchangeKey(stream, round_number)
        outcome = self.peer.decided(self.name(stream), round_number)
        if outcome is not None and outcome.status == "lost":
            raise _lost(key)
        return None if outcome is None else self.decode(key, outcome)

    def members(self) -> int:
        """Return the number of live peers that exchange with this one, itself included.

        Dead peers train nothing, although the view still lists them."""
        context = self.peer.context
        newest = context.chain.newest if context.chain is not None else None
        peers = [context.me]
        if newest is not None:
            peers = [newest.peers[index] for index in newest.serving(self.stage)]
        return sum(context.life(peer) != "dead" for peer in peers)

    def is_hopeless(self) -> bool:
        """Return whether so many members are gone that no round of a whole group can be decided."""
        return self.peer.context.undecided_s >= HOPELESS_S

    def name(self, stream: str) -> str:
        """Return the swarm's name for a stream of the method."""
        return self._codings[stream].name

    def has_passed(self, key: ExchangeKey) -> bool:
        """Return whether a round is known to be decided, here or at others."""
        return self.peer.has_passed(self.name(key.stream), key.round)

    @property
    def where(self) -> str:
        """Where exchanges are coded, for the status; nothing if that is the CPU. Codecs without a
        version for the device at home are named."""
        if self.home.type == "cpu":
            return ""
        used = [one.codec for coding in self._codings.values() for one in (coding.out, coding.back)]
        on_cpu = ", ".join(sorted({one.name for one in used if not one.on_device}))
        return f"{self.home}, {on_cpu} on the CPU" if on_cpu else f"{self.home}"

    def feedback(self) -> dict[str, Tensor]:
        """Return the reducers' residuals, for a checkpoint."""
        codings = self._codings.items()
        return {
            f"{stream}.{name}": x
            for stream, coding in codings
            for name, x in coding.reducer.feedback().items()
        }

    def load_state(self, feedback: Mapping[str, Tensor]) -> None:
        """Restore a checkpoint's residuals in the open streams; raise `WrongState` if they do
        not fit."""
        for stream, coding in self._codings.items():
            mine = {
                name.removeprefix(f"{stream}."): x
                for name, x in feedback.items()
                if name.startswith(f"{stream}.")
            }
            coding.reducer.load_state(mine)

    def _stream(self, template: Exchange, noted: bool) -> Stream:
        shapes = shapes_of(template.tensors)
        out = layout_of(template, self._run_seed)
        back = ShardLayout(out.shards, codec(template.return_codec), self._run_seed)
        reducer = Reducer(out, back.codec, compensate=template.compensate)
        name = template.key.stream if self.stage is None else f"{template.key.stream}/{self.stage}"
        coding = self._codings[template.key.stream] = _Coding(
            name, shapes, out, back, reducer, noted, self.home
        )
        terms = RoundTerms(
            template.kind,
            shards=len(out.shards) + noted,
            deadline_s=template.deadline_s,
            min_participants=template.min_participants,
            enough=template.enough,
            uniform=template.uniform or (noted and template.kind == "mean"),
            witnessed=noted,
            group=_group_size(template),
        )
        return Stream(
            name,
            terms,
            max_shard_bytes=max(
                out.max_shard_bytes, back.max_shard_bytes, microbatch_ids.MAX_BYTES if noted else 0
            ),
            reduce=coding.reduce,
            check=coding.check,
            reduce_run=reducer.reduce_run,
            cadence=Cadence(template.key.round, template.stride),
            stage=self.stage,
        )


@dataclass(slots=True)
class StopRequest:
    """A request to stop after the current step; call the object to make the request.

    `drain_s` is then the maximum wait for open exchanges."""

    requested: bool = False
    drain_s: float = 0.0
    _halt: asyncio.Future[None] | None = None  # done once the request is made

    def __call__(self, drain_s: float = 0.0) -> None:
        """Make the request."""
        self.requested, self.drain_s = True, max(self.drain_s, drain_s)
        if self._halt is not None and not self._halt.done():
            self._halt.set_result(None)

    async def ends(self, answer: asyncio.Task[Result], timeout_s: float) -> bool:
        """Wait up to `timeout_s` for an answer, and no longer than a second, so that the caller
        sees whether one can still come; return True if a stop request ended the wait.

        After a stop request the wait lasts at most `STOPPING_WAIT_S` more: enough for any answer
        that does not depend on a deadline."""
        if not self.requested:
            self._halt = self._halt or asyncio.get_running_loop().create_future()
            either = (answer, self._halt)
            wait_s = max(min(timeout_s, LOOK_EVERY_S), MIN_WAIT_S)
            await asyncio.wait(either, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        if self.requested:
            await asyncio.wait((answer,), timeout=STOPPING_WAIT_S)
        return self.requested and not answer.done()


def layout_of(template: Exchange, run_seed: int) -> ShardLayout:
    """Return the cut of a stream's tensors into shards.

    The codec back counts only where something comes back: the mean of a whole group."""
    shapes = shapes_of(template.tensors)
    if not shapes:
        return ShardLayout((), codec(template.codec), run_seed)
    comes_back = template.kind == "mean" and not _group_size(template)
    back = codec(template.return_codec) if comes_back else None
    return ShardLayout.of(shapes, codec(template.codec), run_seed, back)


def _lost(key: ExchangeKey) -> OutOfStep:
    return OutOfStep(f"round {key.round} of {key.stream} is over and its content is gone")


def _tensors_of(
    coding: _Coding, outcome: RoundOutcome, spread: Spread
) -> tuple[Tensors | None, dict[MemberId, Tensors] | None]:
    """Return the agreed mean, and all members' tensors if they were gathered.

    All payloads are decoded once here, for a method must not find half of a result malformed; their
    values are decoded again when it reads them, because no model's worth of them is kept."""
    if outcome.reduced is not None:
        return coding.decoded(coding.back, outcome.key.round, outcome.reduced, spread), None
    if outcome.gathered is None:
        return None, None
    gathered: dict[MemberId, Tensors] = {
        peer: coding.decoded(coding.out, outcome.key.round, shards, spread)
        for peer, shards in outcome.gathered.items()
    }
    return _mean_of(gathered, outcome.weights, coding.shapes), gathered


def _without_notes(outcome: RoundOutcome) -> tuple[RoundOutcome, bytes]:
    """Return the outcome of the tensors' shards, and the notes in the last shard."""
    if outcome.reduced is not None:
        *reduced, notes = outcome.reduced
        return replace(outcome, reduced=tuple(reduced), taken=outcome.taken[:-1]), notes
    if outcome.gathered is None:
        return outcome, b""
    ages = microbatch_ids.joined_ages(shards[-1] for shards in outcome.gathered.values())
    keys = {key: ages[key] for key in sorted(ages)[:MAX_KEYS]}  # the same cut on every peer
    bare = {peer: shards[:-1] for peer, shards in outcome.gathered.items()}
    return replace(outcome, gathered=bare, taken=outcome.taken[:-1]), microbatch_ids.written(keys)


def _group_size(exchange: Exchange) -> int:
    match exchange.group:
        case All():
            return 0
        case RandomGroups(size=2):
            return 2
    raise ValueError(f"{exchange.group} is not supported yet; use All() or RandomGroups(2)")


def _mean_of(
    gathered: Mapping[str, Tensors], weights: Sequence[float], shapes: Shapes
) -> LazyTensors:
    """Return the weighted mean in sorted order of peers: the same bits on both sides of a pair."""

    def compute(name: str, start: int, stop: int) -> Tensor:
        block = TensorBlock(name, start, stop)
        inputs = [
            (weight, (read(tensors, block),))
            for weight, tensors in zip(weights, gathered.values(), strict=True)
        ]
        return weighted_mean(inputs)[0]

    return LazyTensors(shapes, compute)


def _taken_ranges(layout: ShardLayout, taken: Sequence[bool]) -> dict[str, Ranges]:
    """Return the flat ranges of each tensor that were taken, with neighbours merged."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    for shard, was_taken in zip(layout.shards, taken, strict=True):
        for segment in shard if was_taken else ():
            mine = ranges.setdefault(segment.tensor, [])
            if mine and mine[-1][1] == segment.start:
                mine[-1] = (mine[-1][0], segment.stop)
            else:
                mine.append((segment.start, segment.stop))
    return dict(ranges)
