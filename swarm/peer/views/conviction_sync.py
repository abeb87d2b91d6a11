"""Convictions (swarm/protocol/agreement/convictions.py) as a peer keeps them and tells others.

A member that finds two statements which contradict each other shows them to all members, and again
while the newest view lists their signer. Members take nothing on anybody's word: each checks both
signatures. The next view goes without a convicted peer, and it comes back in none; newcomers are
told of it when they are let in. Proofs are in stable storage, for all members may restart.
"""

import logging
from collections.abc import Callable, Collection, Iterable

import msgspec

from farflock.swarm.context import PeerContext
from farflock.swarm.links import PeerId
from farflock.swarm.messages import MAX_PROOF_BYTES, MAX_PROOFS_SENT, Proven
from farflock.swarm.protocol.agreement.convictions import (
    BadProof,
    Contradiction,
    decode_proof,
    is_proven,
)
from farflock.swarm.stable.storage import StableStorage

TELL_EVERY_S = 2.0  # while the view lists a convicted peer: messages may be lost
CONTRADICTS = "two signed statements that contradict each other"
FALSE_PROOF = "a proof that proves nothing"
PROOFS = "proofs"

_NOTHING = msgspec.msgpack.encode([])
_kept_decoder = msgspec.msgpack.Decoder(list[bytes])

log = logging.getLogger(__name__)


class ConvictionSync:
    """The convicted peers; calls `changed` after each new one. `is_known` tells whether a key was
    ever admitted: of others, which are free, no proof is kept."""

    def __init__(
        self,
        context: PeerContext,
        is_known: Callable[[PeerId], bool],
        changed: Callable[[], None],
    ) -> None:
        self._context, self._is_known, self._changed = context, is_known, changed
        self.proofs: dict[PeerId, bytes] = {}
        self._told_s = -1e9
        self._storage: StableStorage | None = None
        context.entrance.convicted = self.proofs.keys()
        context.entrance.convict = self._find

    def remember(self, storage: StableStorage) -> None:
        """Keep proofs there, and take up those of earlier lives."""
        self._storage = storage
        try:
            for raw in _kept_decoder.decode(storage.read(PROOFS) or _NOTHING):
                said = decode_proof(raw)
                if is_proven(self._context.run, said):
                    self.proofs[said.peer] = raw
        except (msgspec.MsgspecError, BadProof) as error:
            log.warning("the proofs on disk are not used: %s", error)

    def _find(self, said: Contradiction) -> None:
        """Take in what this peer found itself, and tell all members."""
        self._take(msgspec.msgpack.encode(said), None)

    def receive(self, sender: PeerId, message: Proven) -> None:
        """Take in another's proofs."""
        for raw in message.values:
            if not self._take(raw, sender):
                return

    def _take(self, raw: bytes, sender: PeerId | None) -> bool:
        """Convict a peer; return False for what nobody would send that checks its own words."""
        context = self._context
        try:
            said = decode_proof(raw)
        except BadProof:
            context.drop("bad proof")
            return False
        if said.peer in self.proofs:
            return True
        if not self._is_known(said.peer) or len(raw) > MAX_PROOF_BYTES:
            context.drop("proof about a stranger")
            return True
        if not is_proven(context.run, said):
            if sender is not None:
                context.accuse(sender, FALSE_PROOF)
            return False
        self.proofs[said.peer] = raw
        self._keep()
        context.accuse(said.peer, CONTRADICTS)
        self._told_s = -1e9  # tell it at once
        self._changed()
        return True

    def _keep(self) -> None:
        try:
            if self._storage is not None:
                self._storage.write(PROOFS, msgspec.msgpack.encode(list(self.proofs.values())))
        except OSError as error:
            log.warning("this peer's proofs cannot be kept: %s", error)

    def tick(self, now_s: float) -> None:
        """Tell the newest view's members of those among them that are convicted."""
        view, peers = self._context.views.newest, self.proofs
        listed = [peer for peer in peers if view.lists(peer)] if peers else []
        if listed and now_s - self._told_s >= TELL_EVERY_S:
            self._told_s = now_s
            self.tell(view.peers, listed)

    def tell(self, to: Collection[PeerId], convicted: Iterable[PeerId] | None = None) -> None:
        """Show peers the proofs against some peers, or against all that are convicted."""
        values = [self.proofs[peer] for peer in (self.proofs if convicted is None else convicted)]
        for first in range(0, len(values), MAX_PROOFS_SENT):
            self._context.tell(to, Proven(tuple(values[first : first + MAX_PROOFS_SENT])))
