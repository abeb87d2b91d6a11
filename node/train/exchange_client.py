"""The exchange client: a method's exchanges become shards on their way out, the swarm's outcomes become results on
their way in.

Encoding and decoding run through the injected `compute`, so that a process does them off its network thread and a
simulation inline.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from farflock.compression.catalog import codec
from farflock.compression.codec import CorruptPayload
from farflock.node.run.terms import MAX_KEYS
from farflock.node.train import microbatch_ids as notes
from farflock.node.train.reducer import Inputs, Reducer
from farflock.node.train.shards import ShardLayout, checker, decode_all, weighted_mean
from farflock.optimizers.method import All, Exchange, MemberId, RandomGroups, Ranges, Result, Tensors
from farflock.optimizers.parts.state import Shapes
from farflock.swarm.compute import Compute
from farflock.swarm.peer.peer import Peer
from farflock.swarm.protocol.exchange.close_list import RoundTerms
from farflock.swarm.protocol.exchange.streams import Cadence, Reduction, RoundOutcome, Stream


class OutOfStep(Exception):
    """This peer's state is not the group's any more (too far behind, or different bits): it must adopt a snapshot."""


class Decoded(Mapping[str, Tensor]):
    """Tensors that are worked out when somebody first looks at them: most results' `sent` is never needed, nor is the mean of
    what was gathered."""

    def __init__(self, names: Sequence[str], decode: Callable[[], Tensors]) -> None:
        self._names, self._decode = tuple(names), decode
        self._tensors: Tensors | None = None

    def __getitem__(self, name: str) -> Tensor:
        if self._tensors is None:
            self._tensors = self._decode()
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True, slots=True)
class _Line:
    """One stream: its name in the swarm, shapes, the cut on the way out, the cut on the way back, what this peer does for the
    others, and whether a further shard of notes (node/train/microbatch_ids.py) goes with it."""

    name: str
    shapes: Shapes
    out: ShardLayout
    back: ShardLayout
    reducer: Reducer
    noted: bool

    def reduce(self, round_number: int, index: int, inputs: Inputs) -> Reduction:
        """Of the tensors' shards and of the notes."""
        return (
            notes.union(inputs) if index == len(self.out.shards) else self.reducer.reduce(round_number, index, inputs)
        )

    def check(self, round_number: int, index: int, payload: bytes) -> bool:
        """Whether a correct peer can have sent this shard."""
        if index == len(self.out.shards):
            return notes.union([("", 1.0, payload)]).data is not None
        return checker(self.out)(round_number, index, payload)


class ExchangeClient:
    """Carries exchanges of one node's method over its peer; of one stage of the model, or (None) of all of it."""

    def __init__(self, peer: Peer, run_seed: int, compute: Compute, stage: int | None = None) -> None:
        self._peer, self._run_seed, self._compute, self._stage = peer, run_seed, compute, stage
        self._lines: dict[str, _Line] = {}

    def open(self, template: Exchange, after_round: int = -1, tokens: int = 0, *, noted: bool = False) -> None:
        """Begin a stream of exchanges like this one; its rounds up to `after_round` are in the method's state."""
        self._peer.open(self._stream(template, noted), after_round, tokens)

    def look_on(self, template: Exchange, *, noted: bool = False) -> str:
        """Vote in a stream of a stage that this node does not serve, and hear what its notes say. Returns its name."""
        stream = self._stream(template, noted)
        self._peer.open(replace(stream, wants="last" if noted else "none"))
        return stream.name

    def _stream(self, template: Exchange, noted: bool) -> Stream:
        shapes = {name: tuple(tensor.shape) for name, tensor in template.tensors.items()}
        out = ShardLayout.of(shapes, codec(template.codec), self._run_seed)
        back = ShardLayout(out.shards, codec(template.return_codec), self._run_seed)
        reducer = Reducer(out, back.codec, compensate=template.compensate)
        name = template.key.stream if self._stage is None else f"{template.key.stream}/{self._stage}"
        line = self._lines[template.key.stream] = _Line(name, shapes, out, back, reducer, noted)
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
            max_shard_bytes=max(out.max_shard_bytes, back.max_shard_bytes, notes.MAX_BYTES if noted else 0),
            reduce=line.reduce,
            check=line.check,
            cadence=Cadence(template.key.round, template.stride),
            stage=self._stage,
        )

    async def run_exchange(self, exchange: Exchange, tokens: int, state: bytes, noted: bytes = b"") -> Result:
        """Encode, exchange, decode; `OutOfStep` if the group has left this peer behind or holds another state.

        `tokens` are those trained since the last counted exchange; `state` is the hash of the state that an exact
        method starts the round from, empty for others.
        """
        line, key = self._lines[exchange.key.stream], exchange.key

        def encode() -> list[bytes]:
            return [line.out.encode(index, key.round, exchange.tensors) for index in range(len(line.out.shards))]

        payloads = await self._compute(encode)
        sent = [*payloads, noted] if line.noted else payloads
        outcome = await self._peer.exchange(
            line.name, key.round, sent, weight=exchange.weight, tokens=tokens, state=state
        )
        if outcome.status == "lost" or (outcome.state and outcome.state != state):
            raise OutOfStep(f"round {key.round} of {key.stream}: {outcome.status}, state {outcome.state.hex()[:12]}")
        result: Result = await self._compute(lambda: self._result(line, outcome, payloads))
        return result

    def replay(self, stream: str, round_number: int) -> Result | None:
        """The result of a round that was decided without this peer, if its content is here."""
        line = self._lines[stream]
        outcome = self._peer.decided(line.name, round_number)
        return None if outcome is None else self._result(line, outcome, None)

    def name(self, stream: str) -> str:
        """What the swarm calls a stream of the method."""
        return self._lines[stream].name

    def newest(self, stream: str) -> int:
        """The last round of a group's stream that is known to be decided; below 0 for pairs, whose rounds are their own."""
        name, rounds = self._lines[stream].name, self._peer.rounds
        return rounds.newest(name) if name in rounds.names else -1

    def memory(self) -> dict[str, Tensor]:
        """What this peer owes as a reducer, for a checkpoint."""
        lines = self._lines.items()
        return {f"{stream}.{name}": x for stream, line in lines for name, x in line.reducer.memory().items()}

    def load_state(self, memory: Mapping[str, Tensor]) -> None:
        """Owe what a checkpoint says, in streams that are open; `WrongState` if it does not fit them."""
        for stream, line in self._lines.items():
            mine = {name.removeprefix(f"{stream}."): x for name, x in memory.items() if name.startswith(f"{stream}.")}
            line.reducer.load_state(mine)

    def _result(self, line: _Line, outcome: RoundOutcome, payloads: list[bytes] | None) -> Result:
        noted = b""
        if line.noted:
            outcome, noted = _without_notes(outcome)
        assert outcome.status != "lost", f"{outcome.key} is lost, which is no result"
        line.reducer.settle(outcome.key.round, outcome.reduced)
        failed = Result("failed", outcome.next_round, tokens=outcome.tokens)
        if outcome.status == "failed":
            return failed
        try:
            mean, gathered = self._decoded(line, outcome)
        except CorruptPayload:
            return failed  # agreed upon and malformed: the same bytes for everybody, so it fails for everybody
        number, shapes = outcome.key.round, line.shapes
        sent: Tensors | None = None
        if payloads:
            own = gathered.get(self._peer.me) if gathered is not None else None
            sent = own or Decoded(tuple(shapes), lambda: decode_all(line.out, number, payloads, shapes))
        return Result(
            outcome.status,
            outcome.next_round,
            outcome.participants,
            outcome.weights,
            mean=mean,
            gathered=gathered,
            sent=sent,
            taken=_taken_ranges(line.out, outcome.taken) if payloads else {},
            tokens=outcome.tokens,
            notes=noted,
        )

    def _decoded(self, line: _Line, outcome: RoundOutcome) -> tuple[Tensors | None, dict[MemberId, Tensors] | None]:
        """The mean that the group agreed on, or everybody's tensors and their mean."""
        number, shapes = outcome.key.round, line.shapes
        if outcome.reduced is not None:
            return decode_all(line.back, number, outcome.reduced, shapes), None
        if outcome.gathered is None:
            return None, None
        gathered: dict[MemberId, Tensors] = {
            peer: decode_all(line.out, number, shards, shapes) for peer, shards in outcome.gathered.items()
        }
        return Decoded(tuple(shapes), lambda: _mean_of(gathered, outcome.weights)), gathered


def _without_notes(outcome: RoundOutcome) -> tuple[RoundOutcome, bytes]:
    """The outcome of the tensors' shards, and what the last one says."""
    if outcome.reduced is not None:
        return replace(outcome, reduced=outcome.reduced[:-1], taken=outcome.taken[:-1]), outcome.reduced[-1]
    if outcome.gathered is None:
        return outcome, b""
    ages = notes.joined_ages(shards[-1] for shards in outcome.gathered.values())
    keys = {key: ages[key] for key in sorted(ages)[:MAX_KEYS]}  # the same for all
    bare = {peer: shards[:-1] for peer, shards in outcome.gathered.items()}
    return replace(outcome, gathered=bare, taken=outcome.taken[:-1]), notes.written(keys)


def _group_size(exchange: Exchange) -> int:
    match exchange.group:
        case All():
            return 0
        case RandomGroups(size=2):
            return 2
    raise ValueError(f"{exchange.group} is not carried yet; use All() or RandomGroups(2)")


def _mean_of(gathered: Mapping[str, Tensors], weights: Sequence[float]) -> dict[str, Tensor]:
    """The weighted mean in sorted order of peers, the same bits on each side of a pair."""
    names = list(next(iter(gathered.values())))
    inputs = [
        (weight, [tensors[name] for name in names]) for weight, tensors in zip(weights, gathered.values(), strict=True)
    ]
    return dict(zip(names, weighted_mean(inputs), strict=True))


def _taken_ranges(cut: ShardLayout, taken: Sequence[bool]) -> dict[str, Ranges]:
    """Which flat ranges of each tensor were taken, neighbours merged."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    for shard, was_taken in zip(cut.shards, taken, strict=True):
        for part in shard if was_taken else ():
            mine = ranges.setdefault(part.tensor, [])
            if mine and mine[-1][1] == part.start:
                mine[-1] = (mine[-1][0], part.stop)
            else:
                mine.append((part.start, part.stop))
    return dict(ranges)
