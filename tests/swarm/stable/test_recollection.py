"""A voter that restarts knows its views and its votes, if its storage has kept them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.swarm.identity import Identity
from farflock.swarm.messages import Propose
from farflock.swarm.protocol import backbone
from farflock.swarm.protocol.agreement.certificates import signed_text
from farflock.swarm.protocol.agreement.decide import Decision
from farflock.swarm.protocol.agreement.justified import vote_domain
from farflock.swarm.protocol.agreement.rules import SignedRules
from farflock.swarm.protocol.branches import branch_of
from farflock.swarm.protocol.roll import first_roll
from farflock.swarm.protocol.views import (
    KEPT_VIEWS,
    Certified,
    Member,
    branch_domain,
    encode,
    founded,
    refounded,
    successor,
    view_key,
)
from farflock.swarm.stable.recollection import KEPT_VOTES, Recollection
from farflock.swarm.stable.storage import MemoryStorage

RUN = "run"
IDENTITIES = [Identity.from_seed(bytes([number]) * 32) for number in range(3)]
MEMBERS = tuple(Member(identity.peer, 10 + number) for number, identity in enumerate(IDENTITIES))
FOUNDER = MEMBERS[0].peer
ROLL = first_roll(FOUNDER)


def start():
    return backbone.begun(RUN, FOUNDER, founded(RUN, IDENTITIES[0], MEMBERS[0]))


def signed(parent, view):
    """A view with the signatures of all its parent's members."""
    text = signed_text(view_key(view.number), view.previous, (0, 0), encode(view))
    identities = {identity.peer: identity for identity in IDENTITIES}
    proofs = enumerate(identities[peer].sign(vote_domain(RUN), text) for peer in parent.peers)
    return Certified(view, (0, 0), tuple(proofs))


def grow(chain, count=1):
    for _ in range(count):
        newest = chain.newest
        assert chain.extend(signed(newest, successor(newest, MEMBERS)))
    return chain


def grown(count=1):
    return grow(start(), count)


def decision(chain, me=1):
    newest = chain.newest
    rules = SignedRules(RUN, IDENTITIES[me], newest.electorate)
    key, order = view_key(newest.number + 1), tuple(range(len(newest.members)))
    return Decision(key, newest.electorate, me, order, rules=rules)


def proposal(chain, value, ballot=(0, 0)):
    newest = chain.newest
    return Propose(view_key(newest.number + 1), newest.hash, ballot, value)


def kept(chain, storage=None, roll=ROLL):
    storage = storage or MemoryStorage()
    Recollection(RUN, FOUNDER, storage).keep_views(chain, roll, is_member=True)
    return storage


@pytest.mark.parametrize("count", [0, 1, 3, 40])
def test_views_and_roll_are_there_again(count, monkeypatch):
    monkeypatch.setattr(backbone, "RECENT_BYTES", 4000)  # so that links lead to the last ones
    chain = grown(count)
    memory = Recollection(RUN, FOUNDER, kept(chain))
    again = memory.chain()
    assert again.newest == chain.newest
    assert again.past.first == chain.past.first
    assert memory.roll().root == ROLL.root
    assert memory.covers(chain)
    assert memory.covers(again)


def test_a_chain_is_there_again_although_links_replace_what_left_it(monkeypatch):
    chain = grown(KEPT_VIEWS + 100)
    assert chain.views[0].view.number > 0
    again = Recollection(RUN, FOUNDER, kept(chain)).chain()
    assert again.newest == chain.newest


def test_a_re_founded_view_is_there_again():
    chain = grown(2)
    lives = tuple(Member(each.peer, each.incarnation + 10) for each in MEMBERS)
    assert chain.extend(signed(chain.newest, refounded(chain.newest, lives, 0)))
    grow_to = successor(chain.newest, lives)
    assert chain.extend(signed(chain.newest, grow_to))
    assert Recollection(RUN, FOUNDER, kept(chain)).chain().newest == chain.newest


@pytest.mark.parametrize("name", ["views", "votes"])
@pytest.mark.parametrize("spoil", [lambda raw: b"\x93", lambda raw: raw[:-3], lambda raw: b"\xc1"])
def test_from_a_spoilt_disk_nothing_is_believed(name, spoil):
    """A voter that does not know its votes must not vote again."""
    chain = grown()
    storage = kept(chain)
    Recollection(RUN, FOUNDER, storage).keep_votes(decision(chain))
    storage.write(name, spoil(storage.read(name)))
    memory = Recollection(RUN, FOUNDER, storage)
    assert not memory.covers(chain)
    assert memory.chain() is None
    assert memory.roll() is None


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["views", "votes"]), st.binary(max_size=200))
def test_any_bytes_are_read_or_are_not_believed(name, raw):
    chain = grown()
    storage = kept(chain)
    storage.write(name, raw)
    memory = Recollection(RUN, FOUNDER, storage)
    followed = memory.chain()
    assert followed is None or followed.newest == chain.newest
    memory.restore(decision(chain))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 255))
def test_an_altered_byte_is_found_or_changes_no_view(place, value):
    chain = grown(2)
    storage = kept(chain)
    raw = bytearray(storage.read("views"))
    raw[place % len(raw)] = value
    storage.write("views", bytes(raw))
    followed = Recollection(RUN, FOUNDER, storage).chain()
    assert followed is None or followed.newest in [each.view for each in chain.views]


def test_views_that_nobody_signed_are_not_followed():
    chain = grown()
    view = successor(chain.newest, MEMBERS)
    chain.views.append(Certified(view))
    assert Recollection(RUN, FOUNDER, kept(chain)).chain() is None


def test_another_run_in_the_same_folder_is_not_this_one():
    storage = kept(grown())
    memory = Recollection("other", FOUNDER, storage)
    assert memory.chain() is None
    assert not memory.covers(grown())


def test_without_storage_nothing_is_known_later():
    memory = Recollection(RUN, FOUNDER)
    memory.keep_views(grown(), ROLL, is_member=True)
    assert memory.keep_votes(decision(grown()))
    assert memory.chain() is None
    assert not memory.covers(grown())


def test_a_memory_begins_with_a_life_that_a_view_lists():
    """What the key did before is not known: it may have voted."""
    storage, chain = MemoryStorage(), grown()
    memory = Recollection(RUN, FOUNDER, storage)
    memory.keep_views(chain, ROLL, is_member=False)
    assert not memory.covers(chain)
    memory.keep_views(grow(chain), ROLL, is_member=True)
    memory.keep_views(grow(chain), ROLL, is_member=False)
    assert Recollection(RUN, FOUNDER, storage).covers(chain)


def test_a_memory_covers_what_follows_the_views_that_it_has_and_no_other_line():
    chain = grown()
    memory = Recollection(RUN, FOUNDER, kept(chain))
    lone = branch_of(chain.newest, {0}, 0)
    proof = IDENTITIES[0].sign(branch_domain(RUN), encode(lone))
    other = backbone.cut(chain, 0)
    assert not memory.covers(other)  # our newest view is later: we may have voted after this one
    assert memory.covers(grow(backbone.cut(chain, 1)))
    assert chain.extend(Certified(lone, proofs=((0, proof),)))
    assert memory.covers(chain)


def test_a_promise_and_a_vote_outlast_a_life():
    storage, chain = MemoryStorage(), grown()
    first = decision(chain)
    assert first.receive(0, proposal(chain, b"one"))
    assert Recollection(RUN, FOUNDER, storage).keep_votes(first)

    second = decision(chain)
    Recollection(RUN, FOUNDER, storage).restore(second)
    assert second.accepted == ((0, 0), b"one")
    assert not second.receive(0, proposal(chain, b"two")), "one value in a ballot, in any life"
    forgetful = decision(chain)
    assert forgetful.receive(0, proposal(chain, b"two"))


def test_votes_on_a_few_views_are_kept_so_that_a_line_can_be_left_and_taken_up_again():
    storage = MemoryStorage()
    chains = [grown(count) for count in range(1, KEPT_VOTES + 2)]
    memory = Recollection(RUN, FOUNDER, storage)
    for chain in chains:
        voted = decision(chain)
        voted.receive(0, proposal(chain, b"one"))
        assert memory.keep_votes(voted)
    again = [decision(chain) for chain in chains]
    for each in again:
        Recollection(RUN, FOUNDER, storage).restore(each)
    assert [each.accepted is not None for each in again] == [False, *[True] * KEPT_VOTES]


class Full(MemoryStorage):
    """A disk that may have no room."""

    is_full = True

    def write(self, name, content):
        if self.is_full:
            raise OSError(28, "No space left on device")
        super().write(name, content)


def test_what_a_full_disk_does_not_keep_is_said_and_kept_once_there_is_room(caplog):
    storage, chain = Full(), grown()
    memory = Recollection(RUN, FOUNDER, storage)
    memory.keep_views(chain, ROLL, is_member=True)
    voted = decision(chain)
    voted.receive(0, proposal(chain, b"one"))
    assert not memory.keep_votes(voted)
    assert "cannot be kept" in caplog.text
    storage.is_full = False
    assert memory.keep_votes(voted)
    memory.keep_views(chain, ROLL, is_member=True)
    assert Recollection(RUN, FOUNDER, storage).covers(chain)


def test_a_roll_is_kept_until_another_one_is_known():
    storage, chain = MemoryStorage(), grown()
    Recollection(RUN, FOUNDER, kept(chain, storage)).keep_views(grow(chain), None, is_member=True)
    assert Recollection(RUN, FOUNDER, storage).roll().root == ROLL.root
