"""A peer's work as a reducer: the weighted mean of shards, and what its return codec leaves out."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farflock.compression.codec import Codec, CorruptPayload
from farflock.node.train.shards import MAX_ABS, ShardLayout, Values, add_share, shares
from farflock.optimizers.parts.state import WrongState
from farflock.swarm.protocol.exchange.streams import Reduction

MAX_MEAN = MAX_ABS / 2  # leaves room for the return codec to round up
MIN_WEIGHT = 2.0**-100  # a smaller total may be 0 in float32

Inputs = Sequence[tuple[str, float, bytes]]  # peer, weight, payload
RunInputs = Sequence[tuple[str, float, Sequence[bytes]]]  # the same, payloads of several shards


class _CorruptInput(Exception):
    """The payload of `peer` cannot be decoded."""

    def __init__(self, peer: str) -> None:
        self.peer = peer


@dataclass(frozen=True, slots=True)
class _Undecided:
    """An undecided reduction: its inputs, its payload, and the payload's error, in which the
    earlier residual is contained if there was one."""

    inputs: Inputs
    payload: bytes
    left_out: Values
    compensated: bool


class Reducer:
    """A peer's work as a reducer: the weighted mean of a shard, encoded with the return codec.

    Reductions run in a worker, while the event loop may settle an earlier round.

    Without compensation, the error of a coarse return codec is lost to every peer. Where the
    exchange says `compensate`, the reducer keeps it as the shard's residual and adds it to that
    shard's next mean (DoubleSqueeze, Tang et al., arXiv:1905.05957, algorithm 1, the server's
    error; deviations: the reducer of a shard may change, and a round may fail).

    Only the reduction that the group agreed on counts. If that is this peer's, its error is the new
    residual. If the round fails, the earlier residual is computed back from the error, up to its
    rounding, so that no second copy waits for the decision. If the group takes another peer's
    reduction, the residual is dropped: other peers reduce this shard now, and the error of their
    mean is unknown here.
    """

    def __init__(self, layout: ShardLayout, back: Codec, *, compensate: bool) -> None:
        self._layout, self._back = layout, ShardLayout(layout.shards, back, layout.run_seed)
        self._compensate = compensate
        self._lock = threading.Lock()  # held while tensors are coded only after a failed round
        self._residuals: dict[int, Values] = {}  # by shard
        self._undecided: dict[tuple[int, int], _Undecided] = {}  # by round and shard

    def reduce(self, round_number: int, index: int, inputs: Inputs) -> Reduction:
        """Decode the inputs in peer order and encode their weighted mean.

        Corrupt payloads are left out and named."""
        usable, rejected = sorted(inputs), set()
        while sum(weight for _, weight, _ in usable) >= MIN_WEIGHT:
            try:
                mean = self._mean(round_number, index, usable)
            except _CorruptInput as error:
                rejected.add(error.peer)
                usable = [entry for entry in usable if entry[0] != error.peer]
            else:
                if self._compensate:
                    payload = self._encode_compensated(round_number, index, mean, usable)
                else:
                    payload = self._encode(round_number, index, mean)
                return Reduction(payload, tuple(sorted(rejected)))
        return Reduction(None, tuple(peer for peer, _, _ in inputs))

    def reduce_run(self, round_number: int, run: range, inputs: RunInputs) -> list[Reduction]:
        """Reduce neighbouring shards, of which each input has the payloads, as `reduce` does
        each."""
        layout, back = self._layout, self._back
        usable = sum(weight for _, weight, _ in inputs) >= MIN_WEIGHT
        if usable and not self._compensate and layout.joins(run) and back.joins(run):
            mean = self._joined_mean(round_number, run, sorted(inputs))
            if mean is not None:
                mean.clamp_(-MAX_MEAN, MAX_MEAN)
                return [Reduction(data) for data in back.pack_run(run, round_number, mean)]
        return [
            self.reduce(
                round_number,
                index,
                [(peer, weight, payloads[n]) for peer, weight, payloads in inputs],
            )
            for n, index in enumerate(run)
        ]

    def _joined_mean(self, round_number: int, run: range, inputs: RunInputs) -> Tensor | None:
        """Return the weighted mean of a run that joins; None if a payload is corrupt."""
        layout = self._layout
        values = torch.empty(layout.count(run), dtype=torch.float32)
        mean = torch.empty_like(values)
        by_share = shares(tuple(weight for _, weight, _ in inputs))
        for number, (share, (_, _, payloads)) in enumerate(zip(by_share, inputs, strict=True)):
            if not layout.decode_run(run, round_number, payloads, values):
                return None
            add_share(mean, values, share, first=number == 0)
        return mean

    def _mean(self, round_number: int, index: int, inputs: Inputs) -> Values:
        """Return the weighted mean, segment by segment: of the inputs, only one segment each is
        decoded at a time. Raise `_CorruptInput` for the first input that cannot be decoded."""
        peer, raws, mean = "", {}, []
        by_share = shares(tuple(weight for _, weight, _ in inputs))
        try:
            for peer, _, payload in inputs:
                raws[peer] = self._layout.split(index, payload)
            for number, segment in enumerate(self._layout.shards[index]):
                values = torch.empty(segment.count, dtype=torch.float32)
                total = torch.empty_like(values)
                for share, (peer, _, _) in zip(by_share, inputs, strict=True):
                    self._layout.decode_segment(segment, round_number, raws[peer][number], values)
                    add_share(total, values, share, first=peer == inputs[0][0])
                mean.append(total)
        except CorruptPayload as error:
            raise _CorruptInput(peer) from error
        return mean

    def settle(self, round_number: int, decided: Sequence[bytes] | None) -> None:
        """Note that a round is over: `decided` are its shards' payloads, None if it failed."""
        with self._lock:
            compensated = self._residuals or self._undecided
            for index, payload in enumerate(decided or ()) if compensated else ():
                mine = self._undecided.get((round_number, index))
                if mine is None or mine.payload != payload:
                    self._residuals.pop(index, None)
            for number, index in [key for key in self._undecided if key[0] <= round_number]:
                mine = self._undecided.pop((number, index))
                if decided is None or number < round_number:
                    self._keep(index, self._added(number, index, mine))
                elif decided[index] == mine.payload:
                    self._keep(index, mine.left_out)

    def feedback(self) -> dict[str, Tensor]:
        """Return the residuals for a checkpoint, as if every undecided round had failed."""
        with self._lock:
            residuals = {index: list(values) for index, values in self._residuals.items()}
            for (number, index), mine in self._undecided.items():
                added = self._added(number, index, mine)
                residuals[index] = _sum(residuals.get(index), added) or []
        return {
            f"{index}.{part}": x.clone()
            for index, values in residuals.items()
            for part, x in enumerate(values)
        }

    def load_state(self, feedback: Mapping[str, Tensor]) -> None:
        """Restore a checkpoint's residuals; raise `WrongState` if they do not fit the layout."""
        places = {
            f"{i}.{p}": part
            for i, shard in enumerate(self._layout.shards)
            for p, part in enumerate(shard)
        }
        fits = (name in places and x.shape == (places[name].count,) for name, x in feedback.items())
        if not all(fits):
            raise WrongState("a reducer's residuals belong to another layout of shards")
        self._residuals = {}
        for index, shard in enumerate(self._layout.shards):
            values = [
                feedback[name]
                for part in range(len(shard))
                if (name := f"{index}.{part}") in feedback
            ]
            if values and len(values) != len(shard):
                missing = len(shard) - len(values)
                raise WrongState(f"a reducer's residual of shard {index} lacks {missing} segments")
            self._keep(index, values)

    def _encode_compensated(
        self, round_number: int, index: int, mean: Values, inputs: Inputs
    ) -> bytes:
        """Encode the sum of a mean and the residual, and store the error, all in the residual's
        memory."""
        with self._lock:
            if (earlier := self._undecided.pop((round_number, index), None)) is not None:
                # this reduction replaces it
                self._keep(index, self._added(round_number, index, earlier))
            added = self._residuals.pop(index, None)
        total = mean if added is None else added
        for x, y in zip(total, mean, strict=True) if added is not None else ():
            x.add_(y)
        payload = self._encode(round_number, index, total)
        for x, decoded in zip(total, self._decoded(round_number, index, payload), strict=True):
            x.sub_(decoded)
        with self._lock:
            self._undecided[round_number, index] = _Undecided(
                inputs, payload, total, added is not None
            )
        return payload

    def _added(self, round_number: int, index: int, mine: _Undecided) -> Values | None:
        """Return the residual that an undecided reduction contains."""
        if not mine.compensated:
            return None
        added = self._mean(round_number, index, mine.inputs)
        decoded = self._decoded(round_number, index, mine.payload)
        for x, left_out, taken in zip(added, mine.left_out, decoded, strict=True):
            torch.sub(left_out + taken, x, out=x)
        return added

    def _decoded(self, round_number: int, index: int, payload: bytes) -> Iterator[Tensor]:
        """Yield this payload's values, each segment in the same memory."""
        segments = self._layout.shards[index]
        scratch = torch.empty(max(segment.count for segment in segments), dtype=torch.float32)
        for segment, raw in zip(segments, self._back.split(index, payload), strict=True):
            self._back.decode_segment(segment, round_number, raw, scratch[: segment.count])
            yield scratch[: segment.count]

    def _encode(self, round_number: int, index: int, mean: Values) -> bytes:
        return self._back.pack(index, round_number, [x.clamp_(-MAX_MEAN, MAX_MEAN) for x in mean])

    def _keep(self, index: int, values: Values | None) -> None:
        """Add to a residual. Zeros are not kept: adding them could change a mean's sign of zero."""
        if values and any(bool(x.any()) for x in values):
            self._residuals[index] = _sum(values, self._residuals.get(index)) or values


def _sum(one: Values | None, other: Values | None) -> Values | None:
    """Return the sum of two lists of values, either of which may be None."""
    if one is None or other is None:
        return one if other is None else other
    return [x + y for x, y in zip(one, other, strict=True)]
