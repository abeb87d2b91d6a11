"""Returns as records: what a return is, who must sign it, and when all keys of a view are here."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.chains.return_records import (
    BACK,
    HELD,
    IDENTITIES,
    MEMBERS,
    RUN,
    STATE,
    chain_of,
    decided,
    returned,
    signed,
)

from farflock.swarm.messages import HeldState
from farflock.swarm.protocol import branches, views
from farflock.swarm.protocol.branches import Petition, branch_of, fork_of, is_stronger, trail
from farflock.swarm.protocol.returns import FRESH_S, TWO_LIVES_S, RollCall, fits, return_of
from farflock.swarm.protocol.views import BadView, Certified, Chain, Member, encode


def test_a_return_that_every_key_has_signed_follows_with_all_keys_in_their_order_and_new_lives():
    chain = chain_of()
    line = returned(chain, here=(*reversed(BACK[1:]), MEMBERS[0]))
    assert line.newest.members == (MEMBERS[0], *BACK[1:])
    assert (line.newest.first_round, line.newest.state()) == (7, STATE)
    assert line.branch is line.newest, "it is a chain of its own"
    assert line.newest.parts_from(chain.newest)
    assert line.at(7) is line.newest
    assert line.at(6) is chain.newest
    assert line.extend(decided(line, [MEMBERS[0]], 9, [0, 1, 2])), "ordinary views follow"


def test_a_return_of_a_return_follows_too():
    line = returned(chain_of())
    again = tuple(msgspec.structs.replace(member, incarnation=90) for member in MEMBERS)
    assert returned(line, here=again).newest.members == again


def test_a_goodbye_stands_in_place_of_the_signature_of_a_key_that_is_not_listed():
    line = returned(chain_of(), gone=[MEMBERS[2].peer])
    assert line.newest.members == (BACK[0], BACK[1], BACK[3])


def with_members(view, *members):
    return msgspec.structs.replace(view, members=members)


def without(certified, index):
    proofs = tuple(proof for proof in certified.proofs if proof[0] != index)
    return msgspec.structs.replace(certified, proofs=proofs)


FORGERIES = {
    "a signature missing": lambda parent, view: without(signed(parent, view), 2),
    "none": lambda parent, view: Certified(view),
    "a false signature": lambda parent, view: msgspec.structs.replace(
        signed(parent, view), proofs=(*signed(parent, view).proofs[:3], (3, bytes(64)))
    ),
    "signed as a view": lambda parent, view: signed(
        parent, view, domain=views.signature_domain(RUN)
    ),
    "signed as a branch": lambda parent, view: signed(
        parent, view, domain=views.branch_domain(RUN)
    ),
    "signed in another run": lambda parent, view: signed(
        parent, view, domain=views.return_domain("other")
    ),
    "a ballot": lambda parent, view: msgspec.structs.replace(signed(parent, view), ballot=(1, 0)),
    "altered": lambda parent, view: msgspec.structs.replace(
        signed(parent, view), view=msgspec.structs.replace(view, first_round=99)
    ),
    "another state": lambda parent, view: msgspec.structs.replace(
        signed(parent, view), view=msgspec.structs.replace(view, states=(bytes(32),))
    ),
    "a state of another size": lambda parent, view: signed(
        parent, msgspec.structs.replace(view, states=(b"short",))
    ),
    "a key left out without a goodbye": lambda parent, view: signed(
        parent, with_members(view, *BACK[:3])
    ),
    "a goodbye of a key that is listed": lambda parent, view: signed(parent, view, leavers=[3]),
    "another order": lambda parent, view: signed(parent, with_members(view, *reversed(BACK))),
    "a key twice": lambda parent, view: signed(parent, with_members(view, BACK[0], *BACK)),
    "a stranger": lambda parent, view: signed(
        parent, with_members(view, *BACK[:3], Member("stranger", 1))
    ),
    "a later number": lambda parent, view: signed(
        parent, msgspec.structs.replace(view, number=view.number + 1)
    ),
    "of another view": lambda parent, view: signed(
        parent, msgspec.structs.replace(view, previous=bytes(32))
    ),
    "a state of no axis": lambda parent, view: signed(
        parent, msgspec.structs.replace(view, states=(STATE, STATE))
    ),
    "as a successor": lambda parent, view: signed(
        parent, msgspec.structs.replace(view, previous=parent.hash)
    ),
    "as a branch": lambda parent, view: signed(
        parent, msgspec.structs.replace(view, previous=parent.branch_mark)
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES.values(), ids=FORGERIES)
def test_a_forged_return_is_refused(forgery):
    chain = chain_of()
    forged = forgery(chain.newest, return_of(chain.newest, BACK, (), {0: HELD}))
    with pytest.raises(BadView):
        chain.extend(forged)
    assert chain.newest.number == 1


def test_no_other_view_has_a_state():
    chain = chain_of()
    branch = msgspec.structs.replace(branch_of(chain.newest, (0,), 7), states=(STATE,))
    successor = msgspec.structs.replace(
        decided(chain, MEMBERS[:2], 9, [0, 1, 2]).view, states=(STATE,)
    )
    for view in (branch, successor):
        with pytest.raises(BadView):
            chain.extend(Certified(view))


@settings(deadline=None)
@given(st.data())
def test_a_return_with_any_byte_changed_is_refused_or_the_same(data):
    chain = chain_of()
    raw = bytearray(encode(signed(chain.newest, return_of(chain.newest, BACK, (), {0: HELD}))))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] = data.draw(st.integers(0, 255).filter(lambda byte: byte != raw[at]))
    with pytest.raises(BadView):
        chain.extend(views.decode_certified(bytes(raw)))


def test_a_goodbye_counts_for_one_key_one_life_one_view_and_one_run():
    chain = chain_of()
    view, other = chain.newest, decided(chain, MEMBERS[:3], 9, [0, 1, 2]).view
    me = IDENTITIES[2]
    proof = me.sign(views.goodbye_domain(RUN), views.goodbye_text(view, me.peer))
    assert views.is_goodbye(RUN, view, me.peer, proof)
    assert not views.is_goodbye(RUN, view, IDENTITIES[1].peer, proof)
    assert not views.is_goodbye("other", view, me.peer, proof)
    assert not views.is_goodbye(RUN, other, me.peer, proof)
    assert not views.is_goodbye(RUN, with_members(view, *BACK), me.peer, proof)
    assert not views.is_goodbye(RUN, view, "stranger", proof)
    assert not views.is_goodbye(RUN, view, me.peer, b"")


def test_of_a_return_and_a_later_view_that_somebody_else_knew_the_one_with_more_tokens_stays():
    chain = chain_of()
    line = returned(chain)
    later = Chain(RUN, list(chain.views))
    later.extend(decided(later, [*MEMBERS, Member("newcomer", 1)], 9, [0, 1, 2]))
    mine = fork_of(line, later.newest.number, trail(later))
    assert mine is not None
    theirs = fork_of(later, line.newest.number, trail(line))
    assert (mine.number, theirs.number) == (1, 1)
    assert is_stronger(100, 70, mine)
    assert not is_stronger(70, 100, theirs)
    assert branches.first_parting(line, theirs) == (7,)
    raw = branches.missing_views(line, mine)
    assert branches.other_chain(later, theirs, raw).newest == line.newest


def test_a_petition_for_a_return_waits_for_each_key_and_takes_goodbyes():
    parent = chain_of().newest
    view = return_of(parent, BACK, [MEMBERS[1].peer], {0: HELD})
    whole = signed(parent, view, leavers=[1])
    petition = Petition(parent, view, 0.0, proofs=dict(whole.proofs[:2]))
    assert petition.missing == (2, 3)
    petition.proofs.update(whole.proofs[2:])
    assert petition.certified() == whole


# Who is here.


def heard(*members, now_s=0.0, call=None, held=()):
    call = call or RollCall(chain_of().newest)
    for member in members:
        call.hear(member, held, now_s)
    return call


def test_a_key_is_here_for_a_while_after_each_answer():
    call = heard(*BACK[:3])
    assert call.silent(1.0) == (MEMBERS[3].peer,)
    assert call.silent(1.0, gone=[MEMBERS[3].peer]) == ()
    heard(BACK[3], now_s=FRESH_S - 1, call=call)
    assert call.silent(FRESH_S - 1) == ()
    assert call.silent(FRESH_S) == tuple(member.peer for member in MEMBERS[:3])


def test_keys_of_no_member_are_not_noted():
    call = heard(Member("stranger", 1))
    assert call.here(0.0) == {}


@pytest.mark.parametrize(
    ("here", "decides"),
    [
        (MEMBERS, True),
        ((*MEMBERS[:2], *BACK[2:]), True),  # half of them, and the senior one
        ((*BACK[:2], *MEMBERS[2:]), False),
        ((BACK[0], *MEMBERS[1:]), True),
        (BACK, False),
    ],
)
def test_a_view_decides_in_the_lives_that_it_lists_only(here, decides):
    assert heard(*here).has_quorum(0.0) is decides


def test_a_key_that_answers_in_two_lives_is_doubled_until_one_of_them_has_been_silent():
    call = heard(MEMBERS[0])
    heard(BACK[0], now_s=1.0, call=call)
    assert call.doubled(1.0) == (MEMBERS[0].peer,)
    assert call.doubled(TWO_LIVES_S) == (), "a restart: the older life has ended"
    heard(MEMBERS[0], now_s=6.5, call=call)
    heard(BACK[0], now_s=7.0, call=call)
    assert call.doubled(7.0) == (MEMBERS[0].peer,)
    for life in range(100):
        heard(Member(MEMBERS[0].peer, 1000 + life), now_s=8.0, call=call)
    assert call.doubled(8.0) == (MEMBERS[0].peer,)


def test_the_newest_state_of_the_chain_that_anyone_here_holds_is_where_a_return_begins():
    chain = chain_of()
    under = chain.newest.hash
    call = RollCall(chain.newest)
    assert call.newest(chain, 0.0) == {}
    states = [HeldState(6, b"a" * 32, 60, under), HeldState(9, b"b" * 32, 90, under), None, HELD]
    for member, held in zip(BACK, states, strict=True):
        call.hear(member, (held,) if held else (), 0.0)
    assert call.newest(chain, 0.0) == {0: states[1]}
    call.hear(BACK[1], (), 1.0)
    assert call.newest(chain, 1.0) == {0: states[0]}, "the last one is of no view of this chain"


def test_of_a_pipeline_each_stage_begins_with_the_newest_state_that_anyone_holds_of_it():
    chain = chain_of()
    under, call = chain.newest.hash, RollCall(chain.newest)
    first = HeldState(3, b"a" * 32, 30, chain.views[0].view.hash, axis=1)
    older, newer = (HeldState(n, bytes([n]) * 32, 10 * n, under, axis=2) for n in (8, 9))
    for member, held in zip(BACK, [(first, older), (), (newer,), ()], strict=True):
        call.hear(member, held, 0.0)
    begins = call.newest(chain, 0.0)
    assert begins == {2: newer}, "the second view begins at 0 at each stage: it has all rounds"
    stages = msgspec.structs.replace(chain.newest, stage_rounds=(4, 6))
    view = return_of(stages, BACK, (), {1: first, 2: newer})
    assert view.begins == (stages.first_round, 3, 9)
    assert (view.state(0), view.state(1), view.state(2)) == (b"", first.state, newer.state)
    assert view.state(3) == b""


def test_a_state_belongs_to_a_chain_by_the_view_of_its_last_round():
    chain = chain_of(first_round=5)
    old, new = (entry.view.hash for entry in chain.views)
    assert fits(chain, HeldState(0, STATE))
    assert fits(chain, HeldState(5, STATE, 0, old))
    assert not fits(chain, HeldState(5, STATE, 0, new))
    assert fits(chain, HeldState(9, STATE, 0, new))
    assert not fits(chain, HeldState(9, STATE, 0, old)), "another view took that round over"
    assert not fits(chain, HeldState(9, STATE, 0, bytes(32)))


def test_rounds_that_a_return_gave_up_fit_no_more_and_what_it_began_with_does():
    chain = chain_of(first_round=5)
    given_up = HeldState(9, b"b" * 32, 90, chain.newest.hash)
    line = returned(chain)
    assert fits(chain, given_up)
    assert not fits(line, given_up)
    assert fits(line, msgspec.structs.replace(HELD, under=bytes(32)))
