"""Branches as records: what a branch is, when it may be founded, and which of two lines stays."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.swarm.identity import Identity
from farflock.swarm.protocol import branches, views
from farflock.swarm.protocol.branches import (
    Fork,
    Petition,
    Solitude,
    branch_of,
    fork_of,
    is_stronger,
    other_chain,
    trail,
)
from farflock.swarm.protocol.decide import signed_text
from farflock.swarm.protocol.views import (
    BadView,
    Certified,
    Chain,
    Member,
    View,
    encode,
    genesis,
    view_key,
)

RUN = "run"
IDENTITIES = [Identity.from_seed(bytes([number]) * 32) for number in range(5)]
MEMBERS = tuple(Member(identity.peer, 10 + number) for number, identity in enumerate(IDENTITIES))


# What a branch is.


def chain_of(members=MEMBERS, first_round=5):
    """A chain of genesis and one view of these members."""
    chain = Chain(RUN, [Certified(genesis(RUN, MEMBERS[0]))])
    assert chain.extend(decided(chain, members, first_round, [0]))
    return chain


def decided(chain, members, first_round, signers):
    newest = chain.newest
    view = View(newest.number + 1, newest.hash, first_round, tuple(members))
    text, domain = (
        signed_text(view_key(view.number), (0, 0), encode(view)),
        views.signature_domain(RUN),
    )
    sign = {member.peer: identity for member, identity in zip(MEMBERS, IDENTITIES, strict=True)}
    return Certified(
        view, (0, 0), tuple((i, sign[newest.peers[i]].sign(domain, text)) for i in signers)
    )


def signed(view, signers, domain=None):
    domain = domain or views.branch_domain(RUN)
    return Certified(
        view,
        proofs=tuple((index, IDENTITIES[index].sign(domain, encode(view))) for index in signers),
    )


def branched(chain, founders, first_round=7):
    """The same chain with a branch that these members of its newest view founded."""
    other = Chain(RUN, list(chain.views))
    assert other.extend(signed(branch_of(chain.newest, founders, first_round), founders))
    return other


def test_a_branch_that_all_its_members_have_signed_follows_and_is_known_for_one():
    chain = chain_of()
    assert chain.branch is None
    line = branched(chain, (1, 3))
    assert line.newest.members == (MEMBERS[1], MEMBERS[3])
    assert line.branch is line.newest
    assert line.extend(decided(line, [MEMBERS[3]], 9, [0]))
    assert line.branch is line.views[-2].view, "also later on"


@pytest.mark.parametrize("first_round", [0, 4, 5, 100])
def test_a_branch_begins_where_its_signers_say_also_before_a_view_whose_rounds_never_came(
    first_round,
):
    line = branched(chain_of(first_round=5), (4,), first_round)
    assert line.at(first_round) is line.newest
    assert first_round == 0 or line.at(first_round - 1) is not line.newest


FORGERIES = {
    "one signature missing": lambda parent, view: signed(view, (1,)),
    "none": lambda parent, view: Certified(view),
    "one signs twice": lambda parent, view: signed(view, (1, 1)),
    "somebody else signs": lambda parent, view: signed(view, (1, 2)),
    "one more signs": lambda parent, view: signed(view, (1, 2, 3)),
    "a false signature": lambda parent, view: msgspec.structs.replace(
        signed(view, (1, 3)), proofs=((1, bytes(64)), (3, bytes(64)))
    ),
    "signed as a view": lambda parent, view: signed(view, (1, 3), views.signature_domain(RUN)),
    "signed in another run": lambda parent, view: signed(
        view, (1, 3), views.branch_domain("other")
    ),
    "a ballot": lambda parent, view: msgspec.structs.replace(signed(view, (1, 3)), ballot=(1, 0)),
    "altered": lambda parent, view: msgspec.structs.replace(
        signed(view, (1, 3)), view=msgspec.structs.replace(view, first_round=99)
    ),
    "no member": lambda parent, view: signed(with_members(view, Member("stranger", 1)), (1,)),
    "another life": lambda parent, view: signed(
        with_members(view, Member(MEMBERS[1].peer, 99)), (1,)
    ),
    "another order": lambda parent, view: signed(
        with_members(view, MEMBERS[3], MEMBERS[1]), (1, 3)
    ),
    "a later number": lambda parent, view: signed(
        msgspec.structs.replace(view, number=view.number + 1), (1, 3)
    ),
    "of another view": lambda parent, view: signed(
        msgspec.structs.replace(view, previous=bytes(32)), (1, 3)
    ),
    "as a successor": lambda parent, view: signed(
        msgspec.structs.replace(view, previous=parent.hash), (1, 3)
    ),
}


def with_members(view, *members):
    return msgspec.structs.replace(view, members=members)


@pytest.mark.parametrize("forgery", FORGERIES.values(), ids=FORGERIES)
def test_a_forged_branch_is_refused(forgery):
    chain = chain_of()
    forged = forgery(chain.newest, branch_of(chain.newest, (1, 3), 7))
    with pytest.raises(BadView):
        chain.extend(forged)
    assert chain.newest.number == 1


def test_a_quorum_may_branch_to_take_over_rounds_of_older_views():
    chain = chain_of(first_round=9)
    assert branched(chain, (0, 1, 2), first_round=8).at(8).members == MEMBERS[:3]


def test_time_without_a_quorum_counts_from_the_last_one_and_only_while_awake():
    solitude = Solitude()
    for tick in range(100):
        solitude.look(tick * 0.1, can_decide=False)
    assert solitude.lasted_s == pytest.approx(9.9)
    solitude.look(3600.0, can_decide=False)
    assert solitude.lasted_s == pytest.approx(9.9 + branches.AWAKE_S), (
        "an hour asleep is no hour of looking"
    )
    solitude.look(3600.1, can_decide=True)
    assert solitude.lasted_s == 0.0
    solitude.look(3600.2, can_decide=False)
    assert solitude.lasted_s == pytest.approx(0.1)


def test_a_petition_is_complete_once_everybody_listed_has_signed():
    parent = chain_of().newest
    petition = Petition(parent, branch_of(parent, (3, 1), 7), begun_s=0.0)
    assert petition.missing == (1, 3)
    whole = signed(petition.view, (1, 3))
    petition.proofs[3] = whole.proofs[1][1]
    assert petition.missing == (1,)
    with pytest.raises(AssertionError, match="lacks signatures"):
        petition.certified()
    petition.proofs[1] = whole.proofs[0][1]
    assert petition.certified() == whole


# Two lines.


def both(mine, theirs):
    """The fork as each side sees it."""
    return (
        fork_of(mine, theirs.newest.number, trail(theirs)),
        fork_of(theirs, mine.newest.number, trail(mine)),
    )


def prefix(view):
    return view.hash[:8]


def test_both_sides_find_the_same_fork():
    chain = chain_of()
    one, other = branched(chain, (1,)), branched(chain, (2, 3))
    assert other.extend(decided(other, [MEMBERS[3]], 9, [0]))
    mine, theirs = both(one, other)
    assert (mine.number, mine.mine, mine.theirs) == (
        1,
        prefix(one.newest),
        prefix(other.views[2].view),
    )
    assert theirs == Fork(1, mine.theirs, mine.mine)


def test_a_line_that_ends_where_the_other_branches_off_has_nothing_after_the_fork():
    chain = chain_of()
    mine, theirs = both(chain, branched(chain, (1,)))
    assert mine == Fork(1, b"", theirs.mine)
    assert both(chain, chain)[0] == Fork(1, b"", b"")


def test_lines_with_nothing_in_common_are_not_compared_unless_both_go_back_to_a_founding():
    chain = chain_of()
    again = Chain(RUN, [Certified(genesis(RUN, Member(MEMBERS[0].peer, 77)))])
    assert fork_of(chain, 0, trail(again)) == Fork(
        -1, prefix(chain.views[0].view), prefix(again.newest)
    )
    assert fork_of(chain, 9, trail(again)) is None, "theirs begins at view 9"
    chain.views.pop(0)
    assert fork_of(chain, 0, trail(again)) is None, "mine does not go back"


def test_the_other_line_is_verified_from_the_fork_on():
    chain = chain_of()
    one, other = branched(chain, (1,)), branched(chain, (2, 3))
    other.extend(decided(other, [MEMBERS[3]], 9, [0]))
    mine, theirs = both(one, other)
    line = other_chain(one, mine, branches.missing_views(other, theirs))
    assert [entry.view.hash for entry in line.views] == [entry.view.hash for entry in other.views]
    assert one.newest.members == (MEMBERS[1],), "mine is untouched"
    assert branches.first_parting(line, mine) == (7,)
    assert branches.first_parting(chain, mine) is None


def test_a_second_founding_by_the_same_founder_is_another_line_and_one_by_another_peer_is_none():
    chain = chain_of()
    for founder, good in ((MEMBERS[0].peer, True), (MEMBERS[1].peer, False)):
        again = Chain(RUN, [Certified(genesis(RUN, Member(founder, 77)))])
        fork, theirs = both(chain, again)
        raw = branches.missing_views(again, theirs)
        if good:
            assert other_chain(chain, fork, raw).newest == again.newest
        else:
            with pytest.raises(BadView, match="founder"):
                other_chain(chain, fork, raw)


@pytest.mark.parametrize(
    "spoil",
    [lambda raw: (), lambda raw: raw[1:], lambda raw: (raw[0], raw[0]), lambda raw: (b"x",)],
)
def test_another_line_with_views_missing_doubled_or_broken_is_refused(spoil):
    chain = chain_of()
    one, other = branched(chain, (1,)), branched(chain, (2, 3))
    other.extend(decided(other, [MEMBERS[3]], 9, [0]))
    mine, theirs = both(one, other)
    with pytest.raises(BadView):
        other_chain(one, mine, spoil(branches.missing_views(other, theirs)))


def test_a_line_that_is_not_the_one_that_was_announced_is_refused():
    chain = chain_of()
    one, other = branched(chain, (1,)), branched(chain, (2, 3))
    third = branched(chain, (4,))
    mine, _ = both(one, other)
    with pytest.raises(BadView, match="does not match its announced hashes"):
        other_chain(one, mine, branches.missing_views(third, both(third, one)[0]))


def test_what_a_message_holds_of_a_long_line_is_bounded_and_goes_on_from_the_fork(monkeypatch):
    chain = chain_of()
    line = branched(chain, (1,))
    for number in range(8, 40):
        assert line.extend(decided(line, [MEMBERS[1]], number, [0]))
    monkeypatch.setattr(branches, "MAX_MISSING_BYTES", 1500)
    fork = both(line, chain)[0]
    raw = branches.missing_views(line, fork)
    assert 0 < sum(map(len, raw)) <= 1500
    assert other_chain(chain, both(chain, line)[0], raw).newest.number == 1 + len(raw)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.binary(max_size=8), st.binary(max_size=8))
def test_of_two_lines_exactly_one_stays(mine, theirs, my_prefix, their_prefix):
    here = is_stronger(theirs, mine, Fork(1, my_prefix, their_prefix))
    there = is_stronger(mine, theirs, Fork(1, their_prefix, my_prefix))
    assert here != there or (mine == theirs and my_prefix == their_prefix)
    assert theirs <= mine or here


@settings(deadline=None)
@given(st.integers(0, 600), st.binary(min_size=1, max_size=200))
def test_any_trail_is_compared_or_refused(number, raw):
    fork = fork_of(chain_of(), number, raw)
    assert fork is None or fork.number >= -1


def test_any_peer_ever_heard_of_that_is_not_with_me_may_be_elsewhere():
    line, me = branched(chain_of(), (1, 3)), MEMBERS[1].peer
    ever = {member.peer for member in MEMBERS}
    assert set(branches.elsewhere(line, ["new"], me, member=True)) == ever - {
        me,
        MEMBERS[3].peer,
    } | {"new"}
    assert set(branches.elsewhere(line, ["new"], me, member=False)) == ever - {me} | {"new"}
