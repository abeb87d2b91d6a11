"""The standing invite of a node: the word with which its status lets others in."""

import math
import secrets
import time
from collections.abc import Sequence

import msgspec

from farflock.node.run.invite import MAX_ADDRESSES, Invite, grant_of
from farflock.swarm.capability import SECRET_BYTES
from farflock.swarm.identity import Identity
from farflock.swarm.messages import MAX_MEMBERS
from farflock.swarm.peer.peer import Peer

INVITE_LASTS_S = 7 * 24 * 3600
INVITE_ROUND_S = 3600  # an invite's end is rounded up, to say nothing of when it was made
# A word that leaks fills the places of one run once; a run that lives on gets a new word.
STANDING_USES = MAX_MEMBERS
RENEWED_S = INVITE_LASTS_S / 2  # before its end: a word that is passed on should last a while


class Inviter:
    """Issues a node's own capability, and a new one when that is used up or near its end."""

    def __init__(self, identity: Identity, peer: Peer, run: str, founder: str) -> None:
        self._identity, self._peer, self._run, self._founder = identity, peer, run, founder
        self._kept: Invite | None = None
        self._id = b""  # of its capability

    @property
    def may_invite(self) -> bool:
        """True if the run lets this node's key issue capabilities."""
        roll = self._peer.membership.admission.rolls.roll
        issuers = self._peer.context.entrance.issuers
        return issuers.allows(self._peer.me, lambda key: roll is not None and key in roll)

    def invite(self, addresses: Sequence[str]) -> Invite | None:
        """Return an invite with these addresses; None if this node may not invite."""
        if not self.may_invite:
            return None
        if self._kept is None or self._is_spent(self._kept):
            ends = math.ceil((time.time() + INVITE_LASTS_S) / INVITE_ROUND_S) * INVITE_ROUND_S
            bare = Invite(self._run, self._founder, (), ends)
            secret, uses = secrets.token_bytes(SECRET_BYTES), STANDING_USES
            issuers = self._peer.context.entrance.issuers
            # Who is trusted with this invite may come to vote, or the run would end with its
            # founder. A stranger gets one by `farflock invite --votes 0`.
            votes = uses if issuers.may_give_votes(self._peer.me) else 0
            self._kept = grant_of(self._identity, bare, uses, votes, secret)
            assert self._kept.capability is not None
            self._id = self._kept.capability.id
        distinct = tuple(dict.fromkeys(addresses))[:MAX_ADDRESSES]
        return msgspec.structs.replace(self._kept, addresses=distinct)

    def _is_spent(self, kept: Invite) -> bool:
        roll = self._peer.membership.admission.rolls.roll
        is_used = roll is not None and roll.used(self._id) >= STANDING_USES
        return is_used or kept.expires - time.time() < RENEWED_S
