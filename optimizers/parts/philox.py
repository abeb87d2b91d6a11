"""Random numbers that are equal on all peers: Philox4x32-10, a counter-based generator in integer
arithmetic.

Masks and permutations from a shared seed cost no bytes only if every machine gets the same bits;
library generators do not promise that across versions and devices, and keep state. (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011, doi:10.1145/2063384.2063405; constants as in
their Random123.)
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[np.uint64]  # 32-bit words in 64-bit integers, so that products fit

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_ROUNDS = 10
_BATCH = 1 << 14  # counters per batch, so that their words stay in a core's cache


def philox(
    counter: tuple[Words, Words, Words, Words], key: tuple[int, int]
) -> tuple[Words, Words, Words, Words]:
    """Return four output words for each counter of four 32-bit words, under a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (second >> _HALF) ^ c1 ^ np.uint64(k0), second & _LOW
        c2, c3 = (first >> _HALF) ^ c3 ^ np.uint64(k1), first & _LOW
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def words(seed: int, stream: int, round_number: int, count: int) -> Tensor:
    """Return `count` uniform 32-bit words as int64: a pure function of seed (64 bits), stream (32)
    and round (64). A longer draw begins with the words of a shorter one. The counter is (place / 4,
    stream, round low, round high)."""
    _require_bits("seed", seed, 64)
    _require_bits("stream", stream, 32)
    _require_bits("round", round_number, 64)
    _require_bits("count", count, 34)
    blocks = -(-count // 4)
    drawn = np.empty((blocks, 4), np.int64)
    for start in range(0, blocks, _BATCH):
        place = np.arange(start, min(start + _BATCH, blocks), dtype=np.uint64)
        counter = (stream, round_number & 0xFFFFFFFF, round_number >> 32)
        fixed = [np.full_like(place, each) for each in counter]
        out = philox((place, fixed[0], fixed[1], fixed[2]), (seed & 0xFFFFFFFF, seed >> 32))
        for column, word in enumerate(out):
            drawn[start : start + len(place), column] = word.astype(np.int64)
    return torch.from_numpy(drawn.reshape(-1)[:count])


def below(bound: int, seed: int, stream: int, round_number: int, count: int) -> Tensor:
    """Return `count` int64 in [0, bound): floor(word · bound / 2^32), a bias under 2^-32."""
    if not 1 <= bound <= 1 << 31:
        raise ValueError(f"a bound of {bound} is outside [1, 2^31]; draw from fewer values")
    return (words(seed, stream, round_number, count) * bound) >> 32


def permutation(seed: int, stream: int, round_number: int, count: int) -> Tensor:
    """Return a permutation of 0..count-1 as int64: numbers sorted by random 64-bit keys, ties by
    number."""
    pairs = words(seed, stream, round_number, 2 * count).reshape(count, 2)
    keys = (pairs[:, 0] << 32) | pairs[:, 1]  # sorted as signed integers, which is as random
    return torch.sort(keys, stable=True).indices


def _require_bits(what: str, value: int, bits: int) -> None:
    if not 0 <= value < 1 << bits:
        raise ValueError(
            f"{what} {value} does not fit into {bits} bits; choose one in [0, 2^{bits})"
        )
