"""The backbone of a chain: the proof that its views go back to the founder's view 0.

A peer keeps the last `KEPT_VIEWS` views, and a run may have 100,000. Of the others it keeps links.
A *link* leads from a verified view A to a later view N. It holds N whole, and signatures of N by a
quorum of A's voters, named by their index in A. The text that they signed contains the hash of N's
parent, so neither the parent nor any other view between is needed. A signature counts only if N
lists its signer in the same life as A, except in a link from N's own parent, whose voters are all
known. A link never leads over a branch or a re-founding, and to one of them only from its parent.

So only changes of voters cost bytes: a link holds as long as a quorum of A's voters sign on. No
link leads over the view that the founder anchored last, so that everybody sees that a chain has it.

Sans I/O, pure.
"""

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from farflock.swarm.links import PeerId
from farflock.swarm.messages import (
    MAX_MEMBERS,
    MAX_VALUE_BYTES,
    Ballot,
    Digest,
    Index,
    Proofs,
    Signature,
)
from farflock.swarm.protocol.agreement.certificates import checker, signed_text
from farflock.swarm.protocol.agreement.electorate import Electorate
from farflock.swarm.protocol.views import (
    KEPT_VIEWS,
    BadView,
    Certified,
    Chain,
    Forgery,
    View,
    decode_view,
    encode,
    require_branch,
    require_decided,
    require_genesis,
    require_later,
    view_key,
)
from farflock.swarm.statements import AnchoredView

MAX_TAIL = KEPT_VIEWS  # views that have left a chain and that no link has replaced yet
MAX_LINKS = 16_384  # of one chain; a link covers many views, unless each has other voters
RECENT_BYTES = 512 * 1024  # of consecutive views that end a proof, if a chain has as many


class Link(msgspec.Struct, frozen=True, array_like=True):
    """A view, signed by a quorum of the voters of an earlier one, whose hash is `base`; `proofs` by
    index in that one. The quorum may lack convicted voters, if no view is in between."""

    base: Digest
    view: View
    ballot: Ballot = (0, 0)
    proofs: Annotated[
        tuple[tuple[Index, Signature], ...], msgspec.Meta(max_length=MAX_MEMBERS)
    ] = ()
    convictions: Proofs = ()

    @property
    def certified(self) -> Certified:
        """The same as a record of a chain."""
        return Certified(self.view, self.ballot, self.proofs, self.convictions)


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    """A link as it is sent: instead of a member that `base` lists too, there is its index."""

    base: Digest
    view: msgspec.Raw
    ballot: Ballot
    proofs: Annotated[tuple[tuple[Index, Signature], ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    convictions: Proofs = ()


_decoder = msgspec.msgpack.Decoder(_Packed)
_fields_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])
_members_decoder = msgspec.msgpack.Decoder(
    Annotated[list[Index | list[Any]], msgspec.Meta(max_length=MAX_MEMBERS)]
)
_MEMBERS = View.__struct_fields__.index("members")


def pack(link: Link, base: View) -> bytes:
    """Return a link from view `base` in bytes."""
    fields = _fields_decoder.decode(encode(link.view))
    places = {member: index for index, member in enumerate(base.members)}
    members = [places.get(member, member) for member in link.view.members]
    fields[_MEMBERS] = msgspec.Raw(msgspec.msgpack.encode(members))
    raw = msgspec.Raw(msgspec.msgpack.encode(fields))
    return encode(_Packed(link.base, raw, link.ballot, link.proofs, link.convictions))


def unpack(raw: bytes, known: Sequence[View]) -> tuple[int, Link]:
    """Return the place in `known` of the view from which a link leads, and the link.

    Raise `Forgery` for what is no link, and `BadView` if it leads from none of these views."""
    if len(raw) > MAX_VALUE_BYTES:
        raise Forgery(f"a link of {len(raw)} bytes is over the limit of {MAX_VALUE_BYTES}")
    try:
        packed = _decoder.decode(raw)
        fields = _fields_decoder.decode(packed.view)
        members = _members_decoder.decode(fields[_MEMBERS])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, IndexError) as error:
        raise Forgery(f"not a link: {error}") from None
    at = next((at for at in range(len(known)) if known[at].hash == packed.base), None)
    if at is None:
        raise BadView("a link leads from an unknown view")
    listed = known[at].members
    if not all(isinstance(each, list) or each < len(listed) for each in members):
        raise Forgery("a link names a member that the view before it does not have")
    whole = [each if isinstance(each, list) else listed[each] for each in members]
    fields[_MEMBERS] = msgspec.Raw(msgspec.msgpack.encode(whole))
    view = decode_view(msgspec.msgpack.encode(fields))
    return at, Link(packed.base, view, packed.ballot, packed.proofs, packed.convictions)


def require_link(run: str, base: View, link: Link) -> None:
    """Raise `BadView` unless a quorum of the voters of view `base` signed the link's view."""
    view = link.view
    if link.base != base.hash:
        raise BadView(f"a link to view {view.number} leads from another view than {base.number}")
    if view.previous == base.branch_mark:
        require_branch(run, base, link.certified)
    elif view.previous == base.hash:
        require_decided(run, base, link.certified)
    else:
        _require_quorum(run, base, link)


def _require_quorum(run: str, base: View, link: Link) -> None:
    view, voters = link.view, base.electorate
    if view.number <= base.number + 1:
        raise BadView(f"view {view.number} does not come after view {base.number}")
    require_later(base, view)
    signers = [index for index, _ in link.proofs]
    if link.convictions:
        raise Forgery(f"a link to view {view.number} over others has convictions")
    if signers != sorted(set(signers)) or not set(signers) <= _staying(voters, view):
        raise Forgery(f"a link to view {view.number} names a signer twice, or one that left")
    if not voters.is_quorum(signers):
        raise Forgery(f"a link to view {view.number} lacks a quorum of view {base.number}")
    text = signed_text(view_key(view.number), view.previous, link.ballot, encode(view))
    checks = checker(run, voters)
    if not all(checks(index, text, proof) for index, proof in link.proofs):
        raise Forgery(f"a signature on a link to view {view.number} is invalid")


def _staying(voters: Electorate, view: View) -> set[int]:
    """Return the voters (indices) that a later view lists in the same life."""
    peers, lives = voters.peers, voters.lives
    return {at for at in voters.voters if view.index(peers[at], lives[at]) is not None}


# Making links.


def link_between(base: View, parent: View, certified: Certified) -> Link | None:
    """Return the link from a view to a later one, whose parent this is; None if there is none."""
    view, voters = certified.view, base.electorate
    if base.number == parent.number:
        return Link(base.hash, view, certified.ballot, certified.proofs, certified.convictions)
    if (view.branches, view.refoundings) != (base.branches, base.refoundings):
        return None
    signers = parent.electorate
    places = {
        each: index for index, each in enumerate(zip(voters.peers, voters.lives, strict=True))
    }
    signed = {
        places.get((signers.peers[index], signers.lives[index]), -1): proof
        for index, proof in certified.proofs
    }
    kept = sorted(signed.keys() & _staying(voters, view))
    if not voters.is_quorum(kept):
        return None
    while voters.is_quorum(kept[:-1]):  # a quorum is enough
        kept.pop()
    return Link(base.hash, view, certified.ballot, tuple((index, signed[index]) for index in kept))


def farthest(base: View, before: View, entries: Sequence[Certified]) -> Link | None:
    """Return the link from `base` to the farthest of some consecutive views, of which `before` is
    the parent of the first; None if no link leads to any."""
    parents = [before, *(entry.view for entry in entries)]
    for place in range(len(entries) - 1, -1, -1):
        link = link_between(base, parents[place], entries[place])
        if link is not None:
            return link
    return None


@dataclass(slots=True)
class Backbone:
    """The way from view 0 to the oldest view that a chain keeps.

    After view 0 come the links. The `tail` is the consecutive views from the last link's (or from
    view 0) to the oldest kept one, both excluded."""

    first: Certified
    links: list[Link] = field(default_factory=list)
    tail: list[Certified] = field(default_factory=list)
    pinned: int = -1  # the number of a view over which no new link leads

    @property
    def reached(self) -> View:
        """The last view to which a link leads."""
        return self.links[-1].view if self.links else self.first.view

    def copied(self) -> "Backbone":
        """Return the same for another chain."""
        return Backbone(self.first, list(self.links), list(self.tail), self.pinned)

    def take(self, left: Certified) -> None:
        """Take the view that leaves a chain, the next one after those taken before."""
        if len(self.links) >= MAX_LINKS:
            return  # newcomers cannot verify this chain any more
        if left.view.number > self.reached.number:
            self.tail.append(left)
        if len(self.tail) > MAX_TAIL:
            self._shorten()

    def _shorten(self) -> None:
        """Replace as much of the tail as possible by a link."""
        at, entries = self.reached, self.tail[: self.reach(self.tail)]
        base = self.links[-2].view if len(self.links) > 1 else self.first.view
        may_replace = self.links and at.number != self.pinned
        longer = farthest(base, at, entries) if may_replace else None
        # A longer link in place of the last one costs nothing.
        link = longer or farthest(at, at, entries)
        assert link is not None, "a view's certificate is a link from its parent"
        if longer is not None:
            self.links.pop()
        self.links.append(link)
        self.tail = [entry for entry in self.tail if entry.view.number > link.view.number]

    def reach(self, entries: Sequence[Certified]) -> int:
        """Return how many of some consecutive views a link may lead over, and to the last of."""
        numbers = (entry.view.number for entry in entries)
        pins = (place + 1 for place, number in enumerate(numbers) if number == self.pinned)
        return next(pins, len(entries))


def begun(run: str, founder: PeerId, first: Certified) -> Chain:
    """Return the chain that begins with this view 0; raise `Forgery` unless the founder signed
    it."""
    require_genesis(run, founder, first)
    return Chain(run, [first], past=Backbone(first))


def leap(chain: Chain, raw: bytes, checked: set[bytes]) -> None:
    """Follow a link, so that its view is the chain's only kept one; raise `BadView` if it leads
    from none of the chain's links or is false. `checked` holds the hashes of good links."""
    past = chain.past
    assert past is not None, "this chain does not begin with view 0"
    known = [past.first.view, *(each.view for each in past.links)]
    place, link = unpack(raw, known)
    digest = hashlib.sha256(raw).digest()
    if digest not in checked:
        require_link(chain.run, known[place], link)
        if len(checked) < MAX_LINKS:
            checked.add(digest)
    if place >= MAX_LINKS:
        raise BadView("there are more links than a chain may have")
    past.links[place:] = [link]
    chain.views = [link.certified]


def cut(chain: Chain, number: int) -> Chain:
    """Return a chain up to one of its kept views."""
    kept = [entry for entry in chain.views if entry.view.number <= number]
    return Chain(chain.run, kept, past=None if chain.past is None else chain.past.copied())


def proof(chain: Chain) -> tuple[Link, ...]:
    """Return the links from view 0 on to a kept view; those after it end the proof as they are.

    There are none if the chain keeps all its views, and they are few."""
    past = chain.past
    if past is None or len(past.links) >= MAX_LINKS:
        return ()
    links, at = list(past.links), past.reached
    entries = [entry for entry in (*past.tail, *chain.views) if entry.view.number > at.number]
    if not past.tail and at is past.first.view and len(entries) == _recent(entries):
        return ()
    recent = _recent(chain.views[1:])
    # Anywhere in the first half of the recent views will do, so that few steps lead there.
    ends, to = len(entries) - recent, len(entries) - recent // 2
    at_place = 0
    while at_place < ends:
        ahead = entries[at_place:to]
        link = farthest(at, at, ahead[: past.reach(ahead)])
        assert link is not None, "a view's certificate is a link from its parent"
        links.append(link)
        at_place += link.view.number - at.number
        at = link.view
    return tuple(links)


def packed_proof(chain: Chain) -> tuple[tuple[int, bytes], ...]:
    """Return the links of a chain's proof, each with the number of its view."""
    base, packed = chain.views[0].view if chain.past is None else chain.past.first.view, []
    for link in proof(chain):
        packed.append((link.view.number, pack(link, base)))
        base = link.view
    return tuple(packed)


def _recent(entries: Iterable[Certified]) -> int:
    """Return how many of the last of these views end a proof."""
    room, count = RECENT_BYTES, 0
    for entry in reversed(tuple(entries)):
        room -= len(encode(entry))
        if room < 0:
            break
        count += 1
    return count


def pin(chain: Chain, anchor: AnchoredView | None) -> None:
    """Keep the view that the founder anchored, if a chain has it, when its others are replaced by
    links."""
    if chain.past is not None and anchor is not None:
        chain.past.pinned = anchor[0]


def holds(chain: Chain, anchor: AnchoredView) -> bool:
    """True if a chain shows that it has the anchored view."""
    view = _at(chain, anchor[0])
    return view is not None and view.hash == anchor[1]


def lacks(chain: Chain, anchor: AnchoredView) -> bool:
    """True if a chain ends before the anchored view, or has another one of that number.

    It neither lacks nor holds the view if its links lead over that number."""
    view = _at(chain, anchor[0])
    return chain.newest.number < anchor[0] or (view is not None and view.hash != anchor[1])


def _at(chain: Chain, number: int) -> View | None:
    """Return a chain's view of this number; None if it ends before, or its links lead over it."""
    past = chain.past
    entries: Iterable[Certified | Link] = reversed(chain.views)
    if past is not None:
        entries = itertools.chain(entries, (past.first,), past.tail, past.links)
    return next((entry.view for entry in entries if entry.view.number == number), None)
