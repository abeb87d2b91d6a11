"""The cost of a codec over one copy of the same buffer, and its bits per value.

The buffer holds normal values with a deviation of 1e-3, like pseudo-gradients, in shards as cut by
`node/train/shards.py`; one thread works. The value is the path of an exchange: encode tensors to
payloads in fresh buffers, with the cut into shards, and decode these into tensors that are kept,
with a receiver's checks. A fresh buffer may lie in memory that the allocator kept from the run
before; where it does not, its page faults count. The note has the codec alone, shard after shard,
and the same path into fresh tensors. For real pseudo-gradients, and their size under zstandard, see
compression/zstd.py.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from farflock.compression import catalog, native
from farflock.compression.codec import Codec, Context
from farflock.experiments.measure.metric import Metric, Options, load, medians, turns
from farflock.experiments.measure.threads import one_thread
from farflock.node.errors import Usage
from farflock.node.train.shards import SEGMENT_VALUES, ShardLayout, decode_all

VALUES = 16 * SEGMENT_VALUES  # 16 MiB
QUICK_VALUES = SEGMENT_VALUES
WIDTH = 1e-3
SEED = 20_261_121
TURNS = 5  # rounds per repeat: each takes milliseconds
SPARSE, K, CHUNK, SPARSE_BITS = "topk2:64/4096", 64, 4096, 2


def run(options: Options) -> Iterator[Metric]:
    """Yield `codec.NAME` for each codec of the catalogue, and `codec.sparse_bits`."""
    chance = torch.Generator().manual_seed(SEED)
    values = WIDTH * torch.randn(QUICK_VALUES if options.quick else VALUES, generator=chance)
    with one_thread():
        for name in _names(options.only):
            yield _speed(name, _codec(name), values, options.repeats)
    if options.wants("codec.sparse_bits"):
        yield _sparse_bits(values)


def _names(only: str | None) -> tuple[str, ...]:
    if only is None:
        return tuple(catalog.CODECS)
    name = only.removeprefix("codec.")
    return () if name == "sparse_bits" else (name,)


def _codec(name: str) -> Codec:
    """Return any codec that the catalogue accepts, including unusual parameters."""
    try:
        return catalog.codec(name)
    except ValueError as error:
        raise Usage(f"codec.{name}", str(error), "or name codec.sparse_bits") from None


@dataclass(frozen=True, slots=True)
class Shards:
    """The paths through a codec: in an exchange, and alone."""

    codec: Codec
    cut: ShardLayout
    values: Tensor
    out: Tensor  # the decoded values

    @classmethod
    def of(cls, codec: Codec, values: Tensor) -> "Shards":
        """Cut flat values into shards, with memory for the decoded ones."""
        cut = ShardLayout.of({"x": tuple(values.shape)}, codec)
        return cls(codec, cut, values, torch.empty_like(values))

    def exchange(self) -> None:
        """Encode all payloads of an exchange, then decode them into tensors that are there."""
        for index, payload in enumerate(self._payloads()):
            places = [self.out[segment.start : segment.stop] for segment in self.cut.shards[index]]
            self.cut.decode_into(index, 0, payload, places)

    def fresh(self) -> None:
        """Do the same, but decode into fresh tensors."""
        decode_all(self.cut, 0, self._payloads(), {"x": tuple(self.values.shape)})

    def alone(self) -> int:
        """Encode and decode each shard; return the payloads' bytes."""
        written = 0
        for x, out in zip(
            self.values.view(-1, SEGMENT_VALUES), self.out.view(-1, SEGMENT_VALUES), strict=True
        ):
            payload = bytearray()
            written += self.codec.encode(x, Context(), payload)
            self.codec.decode(payload, Context(), out)
        return written

    def _payloads(self) -> list[bytes]:
        tensors = {"x": self.values}
        return [self.cut.encode(index, 0, tensors) for index in range(len(self.cut.shards))]


def _speed(name: str, codec: Codec, values: Tensor, repeats: int) -> Metric:
    shards, target = Shards.of(codec, values), torch.empty_like(values)
    works: tuple[Callable[[], object], ...] = (
        shards.exchange,
        lambda: target.copy_(values),
        shards.alone,
        shards.fresh,
    )
    rounds = turns(repeats * TURNS, *works, clock=time.process_time)
    value, yardstick, ratio = medians([(exchange, copy) for exchange, copy, _, _ in rounds])
    _, _, alone = medians([(alone, copy) for _, copy, alone, _ in rounds])
    _, _, fresh = medians([(fresh, copy) for _, copy, _, fresh in rounds])
    bits = 8 * shards.alone() / values.numel()
    error = float((shards.out - values).norm() / values.norm())
    note = (
        f"{bits:.4g} bits per value; the codec alone {alone:.3g}x, into fresh tensors "
        f"{fresh:.3g}x; relative error {error:.2g} on normal values"
    )
    if native.active() is None:
        note += "; without the compiled kernel: `pip install -e .` builds it with a C compiler"
    return Metric(f"codec.{name}", value, yardstick, ratio, len(rounds), load(), note=note)


def _sparse_bits(values: Tensor) -> Metric:
    """Measure the sparse codec's bits per parameter over the minimum for positions and values."""
    payload = bytearray()
    bits = 8 * catalog.codec(SPARSE).encode(values, Context(), payload) / values.numel()
    positions = math.log2(math.comb(CHUNK, K))
    limit = (positions + K * SPARSE_BITS) / CHUNK
    note = (
        f"{SPARSE}: Rice-coded positions, two bits per kept value, and two bf16 levels per chunk; "
        "the limit does not count the levels"
    )
    return Metric(
        "codec.sparse_bits",
        bits,
        limit,
        round(bits / limit, 4),
        1,
        load(),
        "bits a parameter",
        note,
    )
