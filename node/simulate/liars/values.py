"""Views and close lists that no honest member proposes."""

import hashlib
from collections.abc import Collection

import msgspec

from farflock.node.simulate.liars.liar import Liar
from farflock.swarm.messages import Key
from farflock.swarm.protocol import views
from farflock.swarm.protocol.exchange.availability import RoundItem, mask_of
from farflock.swarm.protocol.exchange.close_list import CloseList
from farflock.swarm.protocol.views import Member

FAR = 2**62 - 5  # a round, or a ballot, that never comes
SOON = 2  # rounds after the open one: a view may begin there
NOBODY_TRAINED = 10  # tokens
ENDLESS_TOKENS = 2**60


def itself_alone(liar: Liar, key: Key) -> bytes:
    """Return a view of which the liar is the only member."""
    return _view_of(liar, (liar.view.members[liar.me],), liar.next_round + SOON)


def far_ahead(liar: Liar, key: Key) -> bytes:
    """Return a view that begins at a round that never comes."""
    return _view_of(liar, liar.view.members, FAR)


def the_same_again(liar: Liar, key: Key) -> bytes:
    """Return a view without a change."""
    return _view_of(liar, liar.view.members, liar.next_round + SOON)


def _view_of(liar: Liar, members: tuple[Member, ...], first_round: int) -> bytes:
    view = views.successor(liar.view, members)
    return views.encode(msgspec.structs.replace(view, first_round=first_round, ballot=1))


def void(liar: Liar, key: Key) -> bytes:
    """Return a list of content that nobody has, with contributions of all members."""
    stream = liar.peer.rounds.streams[key.stream].stream
    everybody, terms = liar.view_of(key).serving(stream.stage), stream.terms
    gathers = terms.kind == "gather"
    items = tuple(
        _void_item(owner * terms.bundles + bundle, (owner,) if gathers else everybody)
        for owner in (everybody if gathers else (0,))
        for bundle in range(terms.bundles)
    )
    return _list_of(liar, key, items, everybody, NOBODY_TRAINED)


def _void_item(place: int, members: Collection[int]) -> RoundItem:
    digest = hashlib.sha256(f"nothing {place}".encode()).digest()
    return RoundItem(place, digest, 5, mask_of(members))


def empty(liar: Liar, key: Key) -> bytes:
    """Return a list without content: the round failed, although it need not have."""
    return _list_of(liar, key, (), (), 0)


def endless_tokens(liar: Liar, key: Key) -> bytes:
    """Return a list without content after which the run has ended."""
    return _list_of(liar, key, (), (), ENDLESS_TOKENS)


def _list_of(
    liar: Liar, key: Key, items: tuple[RoundItem, ...], counted: tuple[int, ...], tokens: int
) -> bytes:
    prior, peers = liar.peer.rounds.streams[key.stream].precedent, liar.view_of(key).peers
    close = CloseList(
        items,
        tuple((member, 1.0) for member in counted),
        prior.tokens + tokens,
        _state(liar, key),
        prior.hash or b"",
        prior.idle_after(peers, counted),
        prior.counted_after(peers, counted),
    )
    return msgspec.msgpack.encode(close)


def _state(liar: Liar, key: Key) -> bytes:
    """Return the hash of the peer's state before a round, as its own offer says it."""
    machine = liar.peer.rounds.machines.get(key)
    offer = None if machine is None else machine.content.offers.get(machine.roster.me)
    return b"" if offer is None else offer.state
