"""A chain begins with a view 0 that the founder signed; links prove the views that nobody keeps."""

import random

import msgspec
import pytest
from adversaries import long_chain
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.swarm.identity import Identity
from farflock.swarm.messages import MAX_PROOF_BYTES, MAX_PROOFS_SENT, MAX_VALUE_BYTES
from farflock.swarm.protocol import backbone, views
from farflock.swarm.protocol.agreement.certificates import signed_text
from farflock.swarm.protocol.agreement.justified import vote_domain
from farflock.swarm.protocol.arrival import FirstViews
from farflock.swarm.protocol.backbone import begun, farthest, link_between, pack, proof, unpack
from farflock.swarm.protocol.branches import branch_of
from farflock.swarm.protocol.views import BadView, Certified, Forgery, Member, encode

RUN = "run"
IDENTITIES = [Identity.from_seed(bytes([number + 1]) * 32) for number in range(8)]
MEMBERS = tuple(Member(each.peer, 10 + number) for number, each in enumerate(IDENTITIES))
FOUNDER = IDENTITIES[0].peer
IDENTITY = {each.peer: each for each in IDENTITIES}


def first():
    return views.founded(RUN, IDENTITIES[0], MEMBERS[0])


def start():
    return begun(RUN, FOUNDER, first())


def signed(parent, view, signers, run=RUN):
    """The view, signed by these members (indices) of its parent."""
    text = signed_text(views.view_key(view.number), view.previous, (0, 0), encode(view))
    proofs = [
        (index, IDENTITY[parent.peers[index]].sign(vote_domain(run), text)) for index in signers
    ]
    return Certified(view, (0, 0), tuple(proofs))


def extended(chain, members, signers=None):
    """The chain with one more view of these members, signed by all of the last one or by some."""
    parent = chain.newest
    signers = range(len(parent.members)) if signers is None else signers
    assert chain.extend(signed(parent, views.successor(parent, tuple(members)), signers))
    return chain


def five():
    """View 0, then one of five members, then ones in which two of these are replaced."""
    chain = extended(start(), MEMBERS[:5])
    extended(chain, MEMBERS[:5])
    extended(chain, (*MEMBERS[:4], MEMBERS[5]))
    extended(chain, (*MEMBERS[:3], MEMBERS[5], MEMBERS[6]))
    return extended(chain, (*MEMBERS[:3], MEMBERS[5], MEMBERS[6]))


# View 0.


def test_a_chain_begins_with_a_view_0_that_its_founder_signed():
    assert start().newest == views.genesis(RUN, MEMBERS[0])


FALSE_STARTS = {
    "another founder": views.founded(RUN, IDENTITIES[1], MEMBERS[1]),
    "another signer": views.founded(RUN, IDENTITIES[1], MEMBERS[0]),
    "another run": views.founded("other", IDENTITIES[0], MEMBERS[0]),
    "signed for another run": msgspec.structs.replace(
        first(), proofs=views.founded("other", IDENTITIES[0], MEMBERS[0]).proofs
    ),
    "unsigned": Certified(views.genesis(RUN, MEMBERS[0])),
    "signed twice": msgspec.structs.replace(first(), proofs=first().proofs * 2),
    "a ballot": msgspec.structs.replace(first(), ballot=(1, 0)),
    "another life": msgspec.structs.replace(first(), view=views.genesis(RUN, Member(FOUNDER, 77))),
    "two members": msgspec.structs.replace(
        first(), view=msgspec.structs.replace(first().view, members=MEMBERS[:2])
    ),
    "a later round": msgspec.structs.replace(
        first(), view=msgspec.structs.replace(first().view, first_round=5)
    ),
    "a branch": msgspec.structs.replace(
        first(), view=msgspec.structs.replace(first().view, branches=1)
    ),
    "signed as a view": msgspec.structs.replace(
        first(),
        proofs=((0, IDENTITIES[0].sign(vote_domain(RUN), encode(first().view))),),
    ),
}


@pytest.mark.parametrize("false", FALSE_STARTS.values(), ids=FALSE_STARTS)
def test_no_chain_begins_with_anything_else(false):
    with pytest.raises(Forgery):
        begun(RUN, FOUNDER, false)


# Links.


def leap(chain, link, checked):
    """Follow a link, as it is sent."""
    known = [chain.past.first.view, *(each.view for each in chain.past.links)]
    base = next((view for view in known if view.hash == link.base), known[0])
    backbone.leap(chain, pack(link, base), checked)


def link_of(chain, base, to):
    """The link between two kept views, by number."""
    entries = {entry.view.number: entry for entry in chain.views}
    return link_between(entries[base].view, entries[to - 1].view, entries[to])


def at(chain, number):
    """A chain that consists of the way to one kept view of another, by links from each parent."""
    way = start()
    for to in range(1, number + 1):
        leap(way, link_of(chain, to - 1, to), set())
    return way


def test_a_link_leads_over_views_whose_voters_a_quorum_of_the_first_outlasts():
    chain, way = five(), at(five(), 1)
    link = link_of(chain, 1, 5)
    assert [index for index, _ in link.proofs] == [0, 1, 2], "a quorum of five, and no more"
    leap(way, link, set())
    assert way.newest == chain.newest
    assert extended(way, MEMBERS[:3]).newest.number == 6, "the chain goes on from there"


def test_there_is_no_link_once_too_many_of_the_first_voters_are_gone():
    chain = extended(five(), (*MEMBERS[:2], *MEMBERS[5:7]))
    assert link_of(chain, 1, 6) is None, "two of five are left"
    assert link_of(chain, 2, 6) is None
    assert link_of(chain, 3, 6) is not None


def test_a_voter_that_came_back_in_another_life_does_not_count_for_its_first_one():
    chain = extended(start(), MEMBERS[:3])
    again = Member(MEMBERS[1].peer, 99)
    extended(chain, (MEMBERS[0], MEMBERS[2], again))
    extended(chain, (MEMBERS[0], MEMBERS[2], again), signers=(0, 2))
    assert link_of(chain, 1, 3) is None


def test_the_farthest_view_is_linked():
    chain = five()
    base, entries = chain.views[1].view, chain.views[2:]
    assert farthest(base, base, entries).view == chain.newest


def forged(link, chain, **changes):
    return msgspec.structs.replace(link, **changes)


def signers_of(link, chain, places):
    """The link with signatures of the base's members at these places."""
    base = next(entry.view for entry in chain.views if entry.view.hash == link.base)
    text = signed_text(
        views.view_key(link.view.number), link.view.previous, (0, 0), encode(link.view)
    )
    proofs = tuple((at, IDENTITY[base.peers[at]].sign(vote_domain(RUN), text)) for at in places)
    return msgspec.structs.replace(link, proofs=proofs)


FORGERIES = {
    "one signer twice": lambda link, chain: signers_of(link, chain, (0, 0, 1)),
    "one signature for three": lambda link, chain: forged(
        link, chain, proofs=tuple((index, link.proofs[0][1]) for index in range(3))
    ),
    "too few": lambda link, chain: forged(link, chain, proofs=link.proofs[:2]),
    "none": lambda link, chain: forged(link, chain, proofs=()),
    "a signer that is gone": lambda link, chain: signers_of(link, chain, (0, 1, 4)),
    "no such member": lambda link, chain: forged(
        link, chain, proofs=(*link.proofs[:2], (60, bytes(64)))
    ),
    "not in order": lambda link, chain: signers_of(link, chain, (1, 0, 2)),
    "another ballot": lambda link, chain: forged(link, chain, ballot=(3, 0)),
    "another view": lambda link, chain: forged(
        link, chain, view=msgspec.structs.replace(link.view, first_round=9)
    ),
    "another parent": lambda link, chain: forged(
        link, chain, view=msgspec.structs.replace(link.view, previous=bytes(32))
    ),
    "a view that a branch led to": lambda link, chain: forged(
        link, chain, view=msgspec.structs.replace(link.view, branches=1)
    ),
    "a view of the past": lambda link, chain: forged(
        link, chain, view=msgspec.structs.replace(link.view, number=1)
    ),
    "signed for another run": lambda link, chain: forged(
        link,
        chain,
        proofs=signed(chain.views[1].view, link.view, (0, 1, 2), run="other").proofs,
    ),
}


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
def test_a_forged_link_is_refused(forge):
    chain, way = five(), at(five(), 1)
    with pytest.raises(BadView):
        leap(way, forge(link_of(chain, 1, 5), chain), set())
    assert way.newest.number == 1


def test_a_link_from_a_view_that_was_never_verified_is_refused():
    """Strangers can make an electorate of their own, and let it sign whatever they like."""
    chain = start()
    own = views.successor(chain.newest, MEMBERS[5:8])
    after = views.successor(own, MEMBERS[5:8])
    link = backbone.Link(own.hash, after, (0, 0), signed(own, after, (0, 1, 2)).proofs)
    with pytest.raises(BadView, match="unknown view"):
        leap(chain, link, set())
    mislabelled = msgspec.structs.replace(link, base=chain.newest.hash)
    with pytest.raises(Forgery):
        leap(chain, mislabelled, set())


def test_a_branch_is_linked_from_its_parent_alone_and_no_link_leads_over_it():
    chain = extended(start(), MEMBERS[:5])
    extended(chain, MEMBERS[:5])
    branch = branch_of(chain.newest, (0, 1, 2), 5)
    domain = views.branch_domain(RUN)
    proofs = tuple((at, IDENTITIES[at].sign(domain, encode(branch))) for at in range(3))
    assert chain.extend(Certified(branch, proofs=proofs))
    extended(chain, MEMBERS[:3])
    way = at(chain, 2)
    assert link_of(chain, 1, 3) is None
    assert link_of(chain, 1, 4) is None, "the branch's members are a quorum of view 1"
    over = signers_of(backbone.Link(chain.views[1].view.hash, chain.newest), chain, (0, 1, 2))
    with pytest.raises(BadView, match="there is a branch"):
        leap(at(chain, 1), over, set())
    to = backbone.Link(chain.views[1].view.hash, branch, (0, 0), proofs)
    with pytest.raises(BadView):
        leap(at(chain, 1), to, set())
    leap(way, link_of(chain, 2, 3), set())
    leap(way, link_of(chain, 3, 4), set())
    assert way.newest == chain.newest


def test_a_re_founding_is_linked_from_its_parent_alone_and_no_link_leads_over_it():
    chain = extended(start(), MEMBERS[:5])
    extended(chain, MEMBERS[:5])
    view = views.refounded(chain.newest, MEMBERS[:5], 0)
    assert chain.extend(signed(chain.newest, view, (0, 1, 2)))
    extended(chain, MEMBERS[:5])
    assert link_of(chain, 1, 3) is None
    assert link_of(chain, 1, 4) is None
    over = signers_of(backbone.Link(chain.views[1].view.hash, chain.newest), chain, (0, 1, 2))
    with pytest.raises(BadView, match="there is a re-founding"):
        leap(at(chain, 1), over, set())
    way = at(chain, 2)
    leap(way, link_of(chain, 2, 3), set())
    leap(way, link_of(chain, 3, 4), set())
    assert way.newest == chain.newest


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_a_link_or_are_refused(raw):
    with pytest.raises(Forgery):
        unpack(raw, [first().view])
        raise Forgery


GOOD = link_of(five(), 1, 5)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 255))
def test_an_altered_link_is_refused_or_the_same(place, value):
    raw = bytearray(pack(GOOD, five().views[1].view))
    raw[place % len(raw)] = value
    way = at(five(), 1)
    try:
        backbone.leap(way, bytes(raw), set())
    except BadView:
        assert way.newest.number == 1
    else:
        assert way.past.links[-1] == GOOD


def packed(**changes):
    """A link from view 0 to a view 5 of its member and another one, with fields changed."""
    zero = first().view
    fields = {"number": 5, "previous": zero.hash, "first_round": 0}
    members = changes.pop("members", [0, [MEMBERS[1].peer, 1, -1]])
    view = changes.pop("view", {})
    if isinstance(view, dict):
        none = [bytes(32), 0, [], [0, bytes(32)]]
        view = [*{**fields, **view}.values(), members, [], 0, 0, *none, [], 0]
    certificate = {"ballot": [0, 0], "proofs": [[0, bytes(64)]], "convictions": []}
    whole = {"base": zero.hash, "view": view, **certificate}
    return msgspec.msgpack.encode([*{**whole, **changes}.values()])


def test_a_link_names_the_members_of_the_view_before_it_by_index():
    at, link = unpack(packed(), [first().view])
    assert (at, link.view.members) == (0, (MEMBERS[0], Member(MEMBERS[1].peer, 1)))
    assert pack(link, first().view) == packed()


HOSTILE = {
    "long": bytes(MAX_VALUE_BYTES + 1),
    "a short base": packed(base=bytes(31)),
    "a long signature": packed(proofs=[[0, bytes(65)]]),
    "a signer beyond all": packed(proofs=[[64, b""]]),
    "too many signers": packed(proofs=[[0, b""]] * 65),
    "no such member": packed(members=[0, 1]),
    "a member below zero": packed(members=[0, -1]),
    "a member twice": packed(members=[0, 0]),
    "a member by index and by name": packed(members=[0, [MEMBERS[0].peer, 10, -1]]),
    "a member that is none": packed(members=[0, ["x"]]),
    "too many members": packed(members=[[f"p{number}", 1, -1] for number in range(65)]),
    "a long conviction": packed(convictions=[bytes(MAX_PROOF_BYTES + 1)]),
    "too many convictions": packed(convictions=[b""] * (MAX_PROOFS_SENT + 1)),
    "nobody": packed(members=[]),
    "no view": packed(view=7),
    "a short view": packed(view=[1, bytes(32)]),
    "deep": packed(view=[[[[[]] * 9] * 9] * 9] * 9),
    "deeper": packed(members=[msgspec.Raw(b"\x91" * 100_000 + b"\x00")]),
    "a negative number": packed(view={"number": -1, "previous": bytes(32), "first_round": 0}),
}


@pytest.mark.parametrize("raw", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_encoding_is_refused(raw):
    with pytest.raises(Forgery):
        unpack(raw, [first().view])


# Long chains.


@pytest.mark.parametrize("seed", range(3))
def test_what_leaves_a_chain_is_replaced_by_links_that_lead_a_newcomer_to_its_end(
    seed, monkeypatch
):
    """In a chain that keeps few views, of which many come and go, and some branch off."""
    monkeypatch.setattr(views, "KEPT_VIEWS", 20)
    monkeypatch.setattr(backbone, "MAX_TAIL", 20)
    monkeypatch.setattr(backbone, "RECENT_BYTES", 4000)
    chance, chain, branches = random.Random(seed), extended(start(), MEMBERS[:4]), 0
    for _ in range(300):
        parent = chain.newest
        if chance.random() < 0.02 and len(parent.members) > 1:
            branches += 1
            some = range(chance.randint(1, len(parent.members)))
            branch = branch_of(parent, some, parent.first_round)
            domain = views.branch_domain(RUN)
            proofs = ((i, IDENTITY[parent.peers[i]].sign(domain, encode(branch))) for i in some)
            assert chain.extend(Certified(branch, proofs=tuple(proofs)))
            continue
        here = [each for each in parent.members if chance.random() < 0.9] or [parent.members[0]]
        others = [each for each in MEMBERS if each not in here]
        here += chance.sample(others, chance.randint(0, min(2, len(others))))
        order = list(range(len(parent.members)))
        chance.shuffle(order)
        signers = next(
            sorted(order[:many])
            for many in range(1, len(order) + 1)
            if parent.electorate.is_quorum(order[:many])
        )
        extended(chain, here, signers)
    assert len(chain.views) == 20
    assert len(chain.past.tail) <= 20
    assert len(chain.past.links) < 250
    arrival = FirstViews(RUN, FOUNDER)
    links = proof(chain)
    for message in long_chain.messages(chain, long_chain.packed(chain, links), after(chain, links)):
        arrival.take(chain.newest.peers[0], message, 0.0)
    assert arrival.choice(99.0).line.newest == chain.newest
    assert chain.newest.branches == branches > 0
    # A newcomer goes on, and proves the chain to the next one.
    heir = arrival.choice(99.0).line.chain
    for _ in range(60):
        extended(heir, heir.newest.members)
    last, links = FirstViews(RUN, FOUNDER), proof(heir)
    for message in long_chain.messages(heir, long_chain.packed(heir, links), after(heir, links)):
        last.take(heir.newest.peers[0], message, 0.0)
    assert last.choice(99.0).line.newest == heir.newest


def after(chain, links):
    return [entry for entry in chain.views if entry.view.number > links[-1].view.number]


def test_a_fork_within_the_kept_views_has_the_same_way_from_view_0(monkeypatch):
    monkeypatch.setattr(views, "KEPT_VIEWS", 10)
    monkeypatch.setattr(backbone, "MAX_TAIL", 10)
    monkeypatch.setattr(backbone, "RECENT_BYTES", 1000)
    chain = extended(start(), MEMBERS[:3])
    for _ in range(50):
        extended(chain, MEMBERS[:3])
    other = backbone.cut(chain, chain.newest.number - 5)
    extended(other, MEMBERS[:2])
    assert other.past.links == chain.past.links
    assert other.past.links is not chain.past.links
    arrival, links = FirstViews(RUN, FOUNDER), proof(other)
    for message in long_chain.messages(other, long_chain.packed(other, links), after(other, links)):
        arrival.take(FOUNDER, message, 0.0)
    assert arrival.choice(0.0).line.newest == other.newest


# The founder's anchor.


def aged(anchor=None, length=9, tail=0, monkeypatch=None):
    """A chain of which few views are kept, and the rest is links."""
    monkeypatch.setattr(views, "KEPT_VIEWS", 3)
    monkeypatch.setattr(backbone, "MAX_TAIL", tail)
    chain = extended(start(), MEMBERS[:5])
    for _ in range(length):
        backbone.pin(chain, anchor and anchor(chain))
        extended(chain, MEMBERS[:5])
    return chain


def state_of(chain, anchor):
    return backbone.holds(chain, anchor), backbone.lacks(chain, anchor)


def test_a_chain_holds_the_anchor_or_has_another_view_or_ends_before():
    chain = five()
    for number, entry in enumerate(chain.views):
        assert state_of(chain, (number, entry.view.hash)) == (True, False)
        assert state_of(chain, (number, bytes(32))) == (False, True)
    assert state_of(chain, (6, bytes(32))) == (False, True)


@pytest.mark.parametrize("number", range(10))
@pytest.mark.parametrize("tail", [0, 1, 3])
def test_no_link_leads_over_the_anchor_so_that_everybody_sees_that_a_chain_has_it(
    monkeypatch, number, tail
):
    seen = {}

    def anchor(chain):
        seen[chain.newest.number] = chain.newest.hash
        return (number, seen.get(number, bytes(32)))

    chain = aged(anchor, tail=tail, monkeypatch=monkeypatch)
    wanted = number, chain.past.first.view.hash if number == 0 else seen[number]
    assert backbone.holds(chain, wanted) is True
    monkeypatch.setattr(backbone, "RECENT_BYTES", 0)
    way = start()
    for _, raw in backbone.packed_proof(chain):
        backbone.leap(way, raw, set())
    for entry in chain.views:
        way.extend(entry)
    assert way.newest == chain.newest
    assert backbone.holds(way, wanted) is True


def test_a_chain_whose_links_lead_over_a_view_shows_neither_that_it_has_it_nor_that_it_lacks_it(
    monkeypatch,
):
    seen = {}

    def note(chain):
        seen[chain.newest.number] = chain.newest.hash
        return None

    chain = aged(note, monkeypatch=monkeypatch)
    assert state_of(chain, (3, seen[3])) == (False, False)
    assert state_of(chain, (3, bytes(32))) == (False, False)
    assert state_of(chain, (9, seen[9])) == (True, False)
