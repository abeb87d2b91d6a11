"""What payloads between stages are written in: a trainer's choice, by what the servers say that they read (spec 4.9).

A run names one activation codec, or several in order of preference, and peers of different releases may know different ones, or
different versions. Both ends of an edge must know what passes it, and whoever takes over from one of them too. So of the codecs
that the trainer knows that one is taken which all servers of both stages read: work goes to all of them, in more bytes if need
be. If there is none, one that some of both stages read, and the others are not asked. Where the sender's weights decide
(compression/subspace.py), nothing is chosen, and who has not got the version of a payload is not asked for it.
"""

import logging
from collections.abc import Callable, Collection, Sequence

from farflock.compression.activation import CodecOffer, Incompatible, agree
from farflock.node.pipeline.passes.edges import Edges
from farflock.swarm.links import PeerId
from farflock.swarm.messages import CodecId
from farflock.swarm.paths.round_robin import Announced
from farflock.swarm.peer.codec_offers import ReadableCodecs

Servers = Sequence[Announced]

log = logging.getLogger(__name__)


class EdgeCodecs:
    """As one trainer sees them. `told` is what a life of a server reads, None if it has not said."""

    def __init__(self, edges: Edges, told: Callable[[PeerId, int], ReadableCodecs | None]) -> None:
        self.edges, self._told = edges, told
        self._reasons = set[str]()  # why choices were not what all read: each is said once

    def choose(self, senders: Servers, receivers: Servers, came: CodecId | None) -> CodecId | None:
        """What the output of a stage is to be written in that gets its input in `came` (None: tokens); None if that follows
        from the weights."""
        if self.edges.follows_weights:
            return None
        mine = self.edges.reads
        able = [told for told in self._heard(senders) if came is None or came in told]
        both = able, self._heard(receivers)
        try:
            chosen = agree(_offers(mine), _offers(read_by_all(mine, [told for side in both for told in side])))
            return CodecId(chosen.name, chosen.version, chosen.digest)
        except Incompatible as reason:
            if str(reason) not in self._reasons:
                self._reasons.add(str(reason))
                log.warning("not all servers of two stages read the same, and some get no work: %s", reason)
        shared = (one for one in mine if all(not side or any(one in told for told in side) for side in both))
        return next(shared, mine[0])

    def unfit(self, servers: Servers, needs: Collection[CodecId | None]) -> set[PeerId]:
        """Who is known not to read these codecs, and so not asked for a pass whose payloads are in them. If that were all,
        anybody is asked: its refusal says why."""
        needed = {need for need in needs if need is not None}
        told = {server.peer: self._told(server.peer, server.sequence) for server in servers}
        unfit = {peer for peer, reads in told.items() if reads is not None and not needed.issubset(reads)}
        return unfit if unfit != told.keys() else set()

    def _heard(self, servers: Servers) -> list[ReadableCodecs]:
        """What those read who have said it."""
        heard = (self._told(server.peer, server.sequence) for server in servers)
        return [told for told in heard if told is not None]


def read_by_all(mine: ReadableCodecs, told: Sequence[ReadableCodecs]) -> list[CodecId]:
    """Those of mine that everybody reads."""
    return [one for one in mine if all(one in each for each in told)]


def _offers(codecs: Collection[CodecId]) -> list[CodecOffer]:
    return [CodecOffer(codec.name, codec.version, codec.digest) for codec in codecs]
