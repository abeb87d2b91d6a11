"""Which microbatches a contribution to a stage's round is made of: a further shard of the exchange, so that what counts and
what is said to count are decided together (docs/decisions/014). Its reduction is the union.

Bytes: msgpack of {trainer: [numbers]}, trainers and numbers in order, each number after the first as its distance from the one
before.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Annotated

import msgspec

from farflock.compression.codec import CorruptPayload
from farflock.swarm.links import PeerId
from farflock.swarm.staging import Key
from farflock.swarm.streams import Reduction

MAX_BYTES = 64 * 1024
MAX_KEYS = 16_384

_Text = Annotated[str, msgspec.Meta(max_length=128)]
_Steps = Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=2**62)]], msgspec.Meta(max_length=MAX_KEYS)]
_decoder = msgspec.msgpack.Decoder(dict[_Text, _Steps])


def written(keys: Collection[Key]) -> bytes:
    """The shard of these keys, the same for the same keys in any order."""
    assert len(keys) <= MAX_KEYS, f"{len(keys)} microbatches in one contribution; at most {MAX_KEYS} fit"
    listed: dict[PeerId, list[int]] = {}
    last: dict[PeerId, int] = {}
    for trainer, number in sorted(keys):
        listed.setdefault(trainer, []).append(number - last.get(trainer, 0))
        last[trainer] = number
    return msgspec.msgpack.encode(listed)


def read(payload: bytes) -> list[Key]:
    """The keys of a shard, in order; `CorruptPayload` for anything that `written` does not write."""
    if len(payload) > MAX_BYTES:
        raise CorruptPayload(f"a list of microbatches of {len(payload)} bytes; at most {MAX_BYTES}")
    try:
        listed = _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptPayload(f"not a list of microbatches: {error}") from None
    keys = []
    for trainer, steps in listed.items():
        number = 0
        for step in steps:
            number += step
            keys.append((trainer, number))
    if len(keys) > MAX_KEYS or written(set(keys)) != payload:
        raise CorruptPayload(f"a list of {len(keys)} microbatches that is not in order")
    return keys


def union(inputs: Sequence[tuple[PeerId, float, bytes]]) -> Reduction:
    """What several contributions are made of together; those whose list cannot be read are left out and named."""
    keys: set[Key] = set()
    rejected = []
    for peer, _, payload in sorted(inputs):
        try:
            keys |= set(read(payload))
        except CorruptPayload:
            rejected.append(peer)
    reduced = written(keys) if len(keys) <= MAX_KEYS else b""
    if len(rejected) == len(inputs) or not 0 < len(reduced) <= MAX_BYTES:
        return Reduction(None, tuple(peer for peer, _, _ in inputs))
    return Reduction(reduced, tuple(rejected))


def joined(payloads: Iterable[bytes]) -> list[Key]:
    """The keys of several lists that the group has agreed upon; what cannot be read has none."""
    keys: set[Key] = set()
    for payload in payloads:
        try:
            keys |= set(read(payload))
        except CorruptPayload:
            continue
    return sorted(keys)
