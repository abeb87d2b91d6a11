"""A trainer's choice of codecs between stages, based on what the servers announced (spec 4.9).

A run names one activation codec, or several in order of preference, and peers of different
releases may know different ones or different versions. Both ends of an edge must know the codec
of a payload, and so must a server that takes over from one of them. So the trainer picks, among
the codecs that it knows, one that all servers of both stages read: all servers then get work,
even if it costs more bytes. If there is none, it picks one that some servers of both stages read
and does not ask the others. Where the sender's weights determine the codec
(compression/subspace.py), the trainer chooses nothing, and does not ask servers that lack a
payload's version."""

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
    """One trainer's choices. `told` returns the codecs that a server reads, None if unknown."""

    def __init__(self, edges: Edges, told: Callable[[PeerId, int], ReadableCodecs | None]) -> None:
        self.edges, self._told = edges, told
        self._reasons = set[str]()  # why no codec suited all servers; each reason is logged once

    def choose(self, senders: Servers, receivers: Servers, came: CodecId | None) -> CodecId | None:
        """Choose the codec for the output of a stage whose input came in codec `came` (None:
        tokens). Return None where the weights determine the codec."""
        if self.edges.follows_weights:
            return None
        mine = self.edges.reads
        able = [told for told in self._heard(senders) if came is None or came in told]
        both = able, self._heard(receivers)
        try:
            common = read_by_all(mine, [told for side in both for told in side])
            chosen = agree(_offers(mine), _offers(common))
            return CodecId(chosen.name, chosen.version, chosen.digest)
        except Incompatible as reason:
            if str(reason) not in self._reasons:
                self._reasons.add(str(reason))
                log.warning(
                    "no codec is read by all servers of two stages, so some get no work: %s", reason
                )
        for one in mine:
            if all(not side or any(one in told for told in side) for side in both):
                return one
        return mine[0]

    def unfit(self, servers: Servers, needs: Collection[CodecId | None]) -> set[PeerId]:
        """Return the servers known not to read all of `needs`.

        If that is every server, return an empty set, so that one is asked and its refusal gives
        the reason."""
        needed = {need for need in needs if need is not None}
        told = {server.peer: self._told(server.peer, server.sequence) for server in servers}
        unfit = {
            peer for peer, reads in told.items() if reads is not None and not needed.issubset(reads)
        }
        return unfit if unfit != told.keys() else set()

    def _heard(self, servers: Servers) -> list[ReadableCodecs]:
        """Return the codecs of each server that announced any."""
        heard = (self._told(server.peer, server.sequence) for server in servers)
        return [told for told in heard if told is not None]


def read_by_all(mine: ReadableCodecs, told: Sequence[ReadableCodecs]) -> list[CodecId]:
    """Return the codecs of `mine` that every entry of `told` contains."""
    return [one for one in mine if all(one in each for each in told)]


def _offers(codecs: Collection[CodecId]) -> list[CodecOffer]:
    return [CodecOffer(codec.name, codec.version, codec.digest) for codec in codecs]
