"""The memory of a voter over its lives: the views, and its votes on the one after the newest.

Both are in stable storage before they are told. So a voter that restarts may still vote on the next
view, whichever life the newest view lists: it repeats nothing, and forgets no promise. Its votes
on rounds are not kept, so it cannot go on with the rounds of that view. If no quorum of the
lives that a view lists is there any more, its keys therefore *re-found* it: by the same agreement
as any next view, so that there is one at most, they decide a view that takes over all rounds that
are not in their state. A peer that has later ones gives them up.

A voter that has lost its storage, or never had any, waits until the others list its new life.
"""

import logging

import msgspec

from farflock.swarm.links import PeerId
from farflock.swarm.messages import Ballot, Digest, Value
from farflock.swarm.protocol import backbone
from farflock.swarm.protocol.agreement.decide import Decision
from farflock.swarm.protocol.roll import BadRoll, Roll, decode_roll
from farflock.swarm.protocol.views import BadView, Chain, decode_certified, encode
from farflock.swarm.stable.storage import StableStorage

VIEWS = "views"
VOTES = "votes"
# Views of which the votes on the next one are kept: a peer that changes lines may come back to one.
KEPT_VOTES = 4

log = logging.getLogger(__name__)


class _KeptViews(msgspec.Struct, frozen=True, array_like=True):
    """A chain from view 0 on: links as they are sent, and the views after the last one; and the
    newest roll that was known, or nothing."""

    run: str
    newest: Digest
    first: bytes
    links: tuple[bytes, ...]
    views: tuple[bytes, ...]
    roll: bytes


class _KeptVotes(msgspec.Struct, frozen=True, array_like=True):
    """A voter's promise, and its vote, if it has cast one, on the view after the one named."""

    view: Digest
    promised: Ballot
    accepted: Ballot | None
    value: Value


_views_decoder = msgspec.msgpack.Decoder(_KeptViews)
_votes_decoder = msgspec.msgpack.Decoder(list[_KeptVotes])


class Recollection:
    """One voter's memory over its lives; without a `storage` it has none.

    The memory begins with the first life of a storage that a view lists: of what the key did
    before, nothing is known."""

    def __init__(self, run: str, founder: PeerId, storage: StableStorage | None = None) -> None:
        self._run, self._founder, self._storage = run, founder, storage
        self._views = self._read_views()
        self._votes = self._read_votes()

    def chain(self) -> Chain | None:
        """Return the chain of views that was kept, verified; None if there is none."""
        kept = self._views
        if kept is None:
            return None
        try:
            chain = backbone.begun(self._run, self._founder, decode_certified(kept.first))
            for raw in kept.links:
                backbone.leap(chain, raw, set())
            for raw in kept.views:
                chain.extend(decode_certified(raw))
        except BadView as error:
            log.warning("the views on disk are not used: %s", error)
            return None
        return chain

    def roll(self) -> Roll | None:
        """Return the roll that was kept, of whichever view; None if there is none."""
        if self._views is None or not self._views.roll:
            return None
        try:
            return decode_roll(self._views.roll)
        except BadRoll as error:
            log.warning("the roll on disk is not used: %s", error)
            return None

    def covers(self, chain: Chain) -> bool:
        """True if all votes are known here that this key may have cast on the view after a chain's
        newest one."""
        # A voter keeps a view before it votes on the next. So if it kept an earlier one of this
        # chain last, it has cast no vote on those after.
        return self._views is not None and chain.by_hash(self._views.newest) is not None

    def keep_views(self, chain: Chain, roll: Roll | None, *, is_member: bool) -> None:
        """Keep a peer's views, which have changed."""
        past = chain.past
        if self._storage is None or past is None or (self._views is None and not is_member):
            return
        links = backbone.packed_proof(chain)
        after = max((number for number, _ in links), default=0)
        rest = (entry for entry in chain.views if entry.view.number > after)
        kept = _KeptViews(
            self._run,
            chain.newest.hash,
            encode(past.first),
            tuple(raw for _, raw in links),
            tuple(encode(entry) for entry in rest),
            self._roll_of(roll),
        )
        if self._write(VIEWS, kept):
            self._views = kept

    def _roll_of(self, roll: Roll | None) -> bytes:
        """Return what to keep of a roll; until one is known here, what was kept before."""
        if roll is not None:
            return roll.encoded
        return b"" if self._views is None else self._views.roll

    def restore(self, decision: Decision) -> None:
        """Give a decision on the next view the votes that this key has cast before."""
        votes = next((each for each in self._votes if each.view == decision.view), None)
        if votes is None:
            return
        decision.promised = votes.promised
        if votes.accepted is not None:
            decision.accepted = votes.accepted, votes.value

    def keep_votes(self, decision: Decision) -> bool:
        """Keep this voter's promise and vote; return False if that failed: nobody may be told."""
        ballot, value = decision.accepted or (None, b"")
        votes = _KeptVotes(decision.view, decision.promised, ballot, value)
        if self._storage is None or votes in self._votes:
            return True
        others = [each for each in self._votes if each.view != decision.view]
        kept = [votes, *others[: KEPT_VOTES - 1]]
        if not self._write(VOTES, kept):
            return False
        self._votes = kept
        return True

    def _write(self, name: str, kept: _KeptViews | list[_KeptVotes]) -> bool:
        assert self._storage is not None
        try:
            self._storage.write(name, msgspec.msgpack.encode(kept))
        except OSError as error:
            log.warning("this peer's %s cannot be kept, so it does not vote: %s", name, error)
            return False
        return True

    def _read_views(self) -> _KeptViews | None:
        raw = self._storage.read(VIEWS) if self._storage is not None else b""
        try:
            kept = _views_decoder.decode(raw) if raw else None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            log.warning("the views on disk are not used: %s", error)
            return None
        return kept if kept is not None and kept.run == self._run else None

    def _read_votes(self) -> list[_KeptVotes]:
        raw = self._storage.read(VOTES) if self._storage is not None else b""
        try:
            return _votes_decoder.decode(raw) if raw else []
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            # Without its votes this key must not vote again where it may have voted.
            log.warning("the votes on disk are not used: %s", error)
            self._views = None
            return []
