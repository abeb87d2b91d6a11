"""What a peer does for the others of a collective: the weighted mean of a shard, coded for its way back.

What a coarse return codec leaves out of a mean would be lost for all. Where the exchange says `compensate`, the reducer keeps
it and adds it to the next mean of that shard (DoubleSqueeze, Tang et al., arXiv:1905.05957, algorithm 1, the server's error;
deviations: who reduces a shard may change, and a round may fail).

Only what was agreed upon counts. Until a round is decided, what was added to its mean is on loan: if the group takes my
reduction, what that left out is owed from then on; if the round fails, the loan is owed again; if it takes somebody else's,
nothing is, for then others reduce this shard, and I no longer know what it lacks.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from farflock.compression.codec import Codec, CorruptPayload
from farflock.node.train.shards import MAX_MEAN, MIN_WEIGHT, ShardLayout, weighted_mean
from farflock.optimizers.parts.state import WrongState
from farflock.swarm.protocol.exchange.streams import Reduction

Inputs = Sequence[tuple[str, float, bytes]]  # peer, weight, payload
Values = list[Tensor]  # one flat tensor a segment


@dataclass(frozen=True, slots=True)
class _Loan:
    """One reduction that is not decided yet: what was added to its mean, its payload, and what that leaves out."""

    added: Values | None
    payload: bytes
    left_out: Values


class Reducer:
    """Reduces shards of one stream. Reductions run in a worker, while the loop's own thread may settle an earlier round."""

    def __init__(self, cut: ShardLayout, back: Codec, *, compensate: bool) -> None:
        self._cut, self._back = cut, ShardLayout(cut.shards, back, cut.run_seed)
        self._compensate = compensate
        self._contributions = threading.Lock()  # never held while tensors are coded
        self._feedback: dict[int, Values] = {}  # by shard
        self._loans: dict[tuple[int, int], _Loan] = {}  # by round and shard

    def reduce(self, round_number: int, index: int, inputs: Inputs) -> Reduction:
        """Decode in peer order, weighted mean, encode with the return codec. Corrupt payloads are left out and named."""
        usable, rejected = [], []
        for peer, weight, payload in sorted(inputs):
            try:
                usable.append((weight, self._cut.decode(index, round_number, payload)))
            except CorruptPayload:
                rejected.append(peer)
        if sum(weight for weight, _ in usable) < MIN_WEIGHT:
            return Reduction(None, tuple(peer for peer, _, _ in inputs))
        mean = weighted_mean(usable)
        payload = self._lend(round_number, index, mean) if self._compensate else self._coded(round_number, index, mean)
        return Reduction(payload, tuple(rejected))

    def settle(self, round_number: int, decided: Sequence[bytes] | None) -> None:
        """A round is over: `decided` are its shards' payloads, None if it failed."""
        with self._contributions:
            if decided is not None:
                self._forget_strangers(round_number, decided)
            for number, index in [key for key in self._loans if key[0] <= round_number]:
                loan = self._loans.pop((number, index))
                if decided is None or number < round_number:
                    self._owe(index, loan.added)
                elif decided[index] == loan.payload:
                    self._owe(index, loan.left_out)

    def memory(self) -> dict[str, Tensor]:
        """What is owed, for a checkpoint, as if all that is undecided failed."""
        with self._contributions:
            feedback = {index: list(values) for index, values in self._feedback.items()}
            for (_, index), loan in self._loans.items():
                feedback[index] = _sum(feedback.get(index), loan.added) or []
        return {f"{index}.{part}": x.clone() for index, values in feedback.items() for part, x in enumerate(values)}

    def load_state(self, memory: Mapping[str, Tensor]) -> None:
        """Owe what a checkpoint's `memory` says; `WrongState` if it does not fit the cut."""
        places = {f"{i}.{p}": part for i, shard in enumerate(self._cut.shards) for p, part in enumerate(shard)}
        if any(name not in places or x.shape != (places[name].count,) for name, x in memory.items()):
            raise WrongState("what a reducer owes is of another cut")
        self._feedback = {}
        for index, shard in enumerate(self._cut.shards):
            values = [memory[name] for part in range(len(shard)) if (name := f"{index}.{part}") in memory]
            if values and len(values) != len(shard):
                raise WrongState(f"of what a reducer owes for shard {index}, parts are missing")
            self._owe(index, values)

    def _lend(self, round_number: int, index: int, mean: Values) -> bytes:
        """Code a mean together with what is owed, and note what that leaves out."""
        with self._contributions:
            if (earlier := self._loans.pop((round_number, index), None)) is not None:
                self._owe(index, earlier.added)  # that reduction was of no use: here is another one
            added = self._feedback.pop(index, None)
        total = _sum(mean, added) or mean
        payload = self._coded(round_number, index, total)
        left_out = [x - y for x, y in zip(total, self._back.decode(index, round_number, payload), strict=True)]
        with self._contributions:
            self._loans[round_number, index] = _Loan(added, payload, left_out)
        return payload

    def _coded(self, round_number: int, index: int, mean: Values) -> bytes:
        return self._back.pack(index, round_number, [x.clamp_(-MAX_MEAN, MAX_MEAN) for x in mean])

    def _forget_strangers(self, round_number: int, decided: Sequence[bytes]) -> None:
        """Who does not reduce a shard any more owes nothing there."""
        for index, payload in enumerate(decided):
            loan = self._loans.get((round_number, index))
            if loan is None or loan.payload != payload:
                self._feedback.pop(index, None)

    def _owe(self, index: int, values: Values | None) -> None:
        """Owe these, too. Zeros are not kept: adding them could change a mean's sign of zero."""
        if values and any(bool(x.any()) for x in values):
            self._feedback[index] = _sum(values, self._feedback.get(index)) or values


def _sum(one: Values | None, other: Values | None) -> Values | None:
    """Of two lists of values either of which may not be there."""
    if one is None or other is None:
        return one if other is None else other
    return [x + y for x, y in zip(one, other, strict=True)]
