"""The microbatches of a contribution to a stage's round, sent as one more shard of the exchange, so
that the content and the list are decided together (docs/decisions/014). Such lists reduce to their
union.

Bytes: msgpack of {trainer: [numbers]}, trainers and numbers in order, each number after the first
as its distance from the one before. If some microbatches are late, the bytes are [that map,
[ages]], with an age for each number in the same order: the number of rounds by which the weights of
its gradient are older than those that the round changes, or `LATE` for a microbatch that is listed
but left out as too old.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated

import msgspec

from farflock.compression.codec import CorruptPayload
from farflock.swarm.links import PeerId
from farflock.swarm.protocol.exchange.streams import Reduction
from farflock.swarm.protocol.gradient_leases import MAX_KEYS, GradientKey

MAX_BYTES = 64 * 1024
LATE = -1
# What a round without tensors has taken of a peer, if the agreed list has this peer's microbatches.
TAKEN = {"microbatches": ((0, 1),)}

_Text = Annotated[str, msgspec.Meta(max_length=128)]
_Steps = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0, le=2**62)]], msgspec.Meta(max_length=MAX_KEYS)
]
_Listed = dict[_Text, _Steps]
_Ages = Annotated[
    list[Annotated[int, msgspec.Meta(ge=-1, le=2**31)]], msgspec.Meta(max_length=MAX_KEYS)
]


class _Aged(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    listed: _Listed
    ages: _Ages


_decoder: msgspec.msgpack.Decoder[_Listed | _Aged] = msgspec.msgpack.Decoder(_Listed | _Aged)


def written(keys: Collection[GradientKey] | Mapping[GradientKey, int]) -> bytes:
    """Encode these keys, with their ages unless all ages are 0. The order of the keys does not
    matter."""
    count = len(keys)
    assert count <= MAX_KEYS, f"{count} microbatches in one contribution, above {MAX_KEYS}"
    listed: dict[PeerId, list[int]] = {}
    last: dict[PeerId, int] = {}
    for trainer, number in sorted(keys):
        listed.setdefault(trainer, []).append(number - last.get(trainer, 0))
        last[trainer] = number
    if isinstance(keys, Mapping) and any(keys.values()):
        return msgspec.msgpack.encode(_Aged(listed, [keys[key] for key in sorted(keys)]))
    return msgspec.msgpack.encode(listed)


def read(payload: bytes) -> list[GradientKey]:
    """Decode a shard's keys, in order; raise `CorruptPayload` for bytes that `written` never
    makes."""
    return list(read_ages(payload))


def read_ages(payload: bytes) -> dict[GradientKey, int]:
    """Decode a shard as `read` does, and return the keys with their ages."""
    if len(payload) > MAX_BYTES:
        size_bytes = len(payload)
        raise CorruptPayload(f"a list of microbatches has {size_bytes} bytes, above {MAX_BYTES}")
    try:
        decoded = _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptPayload(f"not a list of microbatches: {error}") from None
    listed = decoded.listed if isinstance(decoded, _Aged) else decoded
    keys: list[GradientKey] = []
    for trainer, steps in listed.items():
        number = 0
        for step in steps:
            number += step
            keys.append((trainer, number))
    ages = decoded.ages if isinstance(decoded, _Aged) else [0] * len(keys)
    if len(keys) > MAX_KEYS or len(ages) != len(keys):
        raise CorruptPayload(f"a list of {len(keys)} microbatches has {len(ages)} ages")
    found = dict(zip(keys, ages, strict=True))
    if written(found) != payload:
        raise CorruptPayload(f"a list of {len(keys)} microbatches is not in order")
    return found


def union(inputs: Sequence[tuple[PeerId, float, bytes]]) -> Reduction:
    """Reduce several lists to their union; lists that cannot be read are left out and named."""
    keys: dict[GradientKey, int] = {}
    rejected = []
    for peer, _, payload in sorted(inputs):
        try:
            keys |= read_ages(payload)
        except CorruptPayload:
            rejected.append(peer)
    reduced = written(keys) if len(keys) <= MAX_KEYS else b""
    if len(rejected) == len(inputs) or not 0 < len(reduced) <= MAX_BYTES:
        return Reduction(None, tuple(peer for peer, _, _ in inputs))
    return Reduction(reduced, tuple(rejected))


def joined(payloads: Iterable[bytes]) -> list[GradientKey]:
    """Return the sorted keys of several agreed lists; an unreadable list counts as empty."""
    return sorted(joined_ages(payloads))


def joined_ages(payloads: Iterable[bytes]) -> dict[GradientKey, int]:
    """Return the keys of several agreed lists, as `joined` does, with their ages."""
    keys: dict[GradientKey, int] = {}
    for payload in payloads:
        try:
            keys |= read_ages(payload)
        except CorruptPayload:
            continue
    return keys
