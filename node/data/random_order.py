"""Random numbers and orders as pure functions of a purpose and a place, alike on all machines.

A counter-based generator (Philox4x64-10: Salmon et al., "Parallel random numbers: as easy as 1, 2,
3", SC 2011) need not be run forward: each key has a stream at each value of its counter's upper
half. Only raw integers are used, since NumPy may change how it makes others of them.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray


def philox_key(purpose: str) -> NDArray[np.uint64]:
    """Return the key of a purpose, which names its domain and version: half of its SHA-256."""
    return np.frombuffer(hashlib.sha256(purpose.encode()).digest()[:16], dtype="<u8")


def raw_outputs(key: NDArray[np.uint64], place: tuple[int, int], count: int) -> NDArray[np.uint64]:
    """Return the first 64-bit outputs of a key at a place, each part of which is below 2^64."""
    philox = np.random.Philox(key=key, counter=np.array((0, 0, *place), dtype=np.uint64))
    return np.asarray(philox.random_raw(count), dtype=np.uint64)


def random_order(key: NDArray[np.uint64], place: tuple[int, int], count: int) -> NDArray[np.int64]:
    """Return a permutation of 0 to `count` - 1, that of as many outputs; equal ones (very rare)
    keep their order."""
    drawn = raw_outputs(key, place, count)
    order = np.argsort(drawn)  # with vector instructions, four times as fast as a stable sort
    ordered = drawn[order]
    if (ordered[1:] == ordered[:-1]).any():
        return np.argsort(drawn, kind="stable")
    return order
