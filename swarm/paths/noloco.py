"""NoLoCo's random routing: a seeded permutation per microbatch and stage that needs no messages.

Replicas whose microbatches cross each other's stages mix through the data, so that they need to
average their weights less often (NoLoCo, arXiv:2506.10911; DiPaCo's pipeline). SHA-256 gives the
order, as in `groups.py`: the same on every machine.

A *lane* is the number of the replica where a microbatch starts; each (step, index) has one
microbatch per lane.

Deviations from the released code: the holder of a lane is drawn for each stage, and the map at a
boundary follows from its two stages, not the other way round. With equal stages the maps have the
same distribution (uniform, independent of each other), but a hop needs no knowledge of earlier
ones, and stages may differ in size: the numbers of lanes held by a stage's servers differ by one at
most. The membership number is in the seed, so that the permutation of the survivors does not depend
on the dead.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from farflock.swarm.links import PeerId


@dataclass(frozen=True, slots=True)
class Draw:
    """Inputs of a permutation, which all peers agree on; `membership` numbers the view."""

    seed: int
    membership: int
    step: int
    index: int


def line(draw: Draw, peers: Sequence[PeerId], stage: int, lane: int) -> tuple[PeerId, ...]:
    """Return a stage's servers in the order in which they are asked to hold this lane.

    The first holds it; the others take over if it cannot be reached. Stage 0 holds its own lanes,
    in the order of ids. Each block of as many lanes as there are servers meets each server once.
    """
    if not peers:
        return ()
    block, place = divmod(lane, len(peers))
    ordered = sorted(peers) if stage == 0 else _shuffled(draw, peers, stage, block)
    return tuple(ordered[place:] + ordered[:place])


def _shuffled(draw: Draw, peers: Sequence[PeerId], stage: int, block: int) -> list[PeerId]:
    numbers = (draw.seed, draw.membership, draw.step, draw.index, stage, block)
    salt = b"\x00".join((b"mixing", *(str(number).encode() for number in numbers)))
    return sorted(peers, key=lambda peer: hashlib.sha256(salt + b"\x00" + peer.encode()).digest())
