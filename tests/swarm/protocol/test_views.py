"""Views follow each other without a gap, each signed by a quorum of the one before; which members
the next one has."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.swarm.identity import Identity
from farflock.swarm.messages import MAX_MEMBERS, MAX_STAGES
from farflock.swarm.protocol.decide import signed_text
from farflock.swarm.protocol.views import (
    KEPT_VIEWS,
    BadView,
    Candidates,
    Certified,
    Chain,
    Member,
    View,
    decode_certified,
    decode_view,
    encode,
    genesis,
    next_members,
    revised,
    signature_domain,
    view_key,
)
from farflock.swarm.roles import NOTHING, UNMEASURED

RUN = "run"
IDENTITIES = [Identity.from_seed(bytes([number]) * 32) for number in range(5)]
MEMBERS = tuple(Member(identity.peer, 10 + number) for number, identity in enumerate(IDENTITIES))


def certify(view, signers, *, ballot=(0, 0), run=RUN):
    text = signed_text(view_key(view.number), ballot, encode(view))
    domain = signature_domain(run)
    return Certified(
        view, ballot, tuple((index, identity.sign(domain, text)) for index, identity in signers)
    )


def founded():
    return Chain(RUN, [Certified(genesis(RUN, MEMBERS[0]))])


def successor(chain, members, first_round=None):
    newest = chain.newest
    first = newest.first_round + 2 if first_round is None else first_round
    return View(newest.number + 1, newest.hash, first, tuple(members))


def grown(members=MEMBERS, first_round=2):
    """A chain of genesis and one view of these members."""
    chain = founded()
    assert chain.extend(certify(successor(chain, members, first_round), [(0, IDENTITIES[0])]))
    return chain


def signers(count):
    return list(enumerate(IDENTITIES[:count]))


def test_a_view_with_the_signatures_of_a_quorum_follows():
    chain = grown()
    assert chain.newest.members == MEMBERS
    assert chain.extend(certify(successor(chain, MEMBERS[:4]), signers(3)))
    assert chain.newest.number == 2


def test_a_view_that_is_known_already_is_no_news():
    chain = grown()
    assert not chain.extend(chain.views[1])
    assert not chain.extend(chain.views[0])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda view: certify(view, signers(2)),
        lambda view: certify(view, [(0, IDENTITIES[0]), (1, IDENTITIES[0]), (2, IDENTITIES[0])]),
        lambda view: certify(view, [(0, IDENTITIES[0])] * 5),
        lambda view: certify(view, signers(3), run="another run"),
        lambda view: msgspec.structs.replace(certify(view, signers(3)), ballot=(1, 0)),
        lambda view: msgspec.structs.replace(
            certify(view, signers(3)), view=msgspec.structs.replace(view, members=view.members[:1])
        ),
        lambda view: Certified(view),
    ],
    ids=[
        "too few",
        "one signs for three",
        "one counted often",
        "of another run",
        "another ballot",
        "altered",
        "none",
    ],
)
def test_a_view_without_the_signatures_of_a_quorum_is_refused(spoil):
    chain = grown()
    with pytest.raises(BadView, match="lacks the signatures"):
        chain.extend(spoil(successor(chain, MEMBERS[:4])))
    assert chain.newest.number == 1


@pytest.mark.parametrize(
    "wrong",
    [{"number": 3}, {"previous": bytes(32)}, {"first_round": 1}, {"first_round": 0}],
    ids=str,
)
def test_a_view_that_does_not_follow_is_refused(wrong):
    chain = grown()
    view = msgspec.structs.replace(successor(chain, MEMBERS[:4]), **wrong)
    with pytest.raises(BadView):
        chain.extend(certify(view, signers(5)))


def test_a_round_belongs_to_the_last_view_that_begins_at_or_before_it():
    chain = grown(first_round=5)
    chain.extend(certify(successor(chain, MEMBERS[:3], 9), signers(5)))
    assert [chain.at(number).number for number in (0, 4, 5, 8, 9, 10**9)] == [0, 0, 1, 1, 2, 2]
    chain.views.pop(0)
    assert chain.at(4) is None


def test_a_view_that_begins_where_the_one_before_it_does_takes_its_place():
    """Otherwise views that change faster than rounds would run ahead of them, and leave rounds to
    members that are long gone."""
    chain = grown(first_round=5)
    assert chain.floor(encode(successor(chain, MEMBERS[:3], 5)), (5,)) == ()
    assert chain.extend(certify(successor(chain, MEMBERS[:3], 5), signers(5)))
    assert [chain.at(number).number for number in (4, 5, 6)] == [0, 2, 2]


def test_a_view_is_found_by_its_hash_and_only_by_it():
    chain = grown()
    assert chain.by_hash(chain.newest.hash) is chain.newest
    assert chain.by_hash(bytes(32)) is None
    twin = msgspec.structs.replace(chain.newest, first_round=3)
    assert twin.hash != chain.newest.hash


def test_the_hash_is_computed_once(monkeypatch):
    from farflock.swarm.protocol import views

    count = 0

    def counting(view):
        nonlocal count
        count += 1
        return encode(view)

    chain = grown()
    fresh = [decode_view(encode(entry.view)) for entry in chain.views]
    monkeypatch.setattr(views, "encode", counting)
    for _ in range(100):
        assert all(view.hash for view in fresh)
    assert count == len(fresh)


def test_the_barrier_blocks_rounds_from_there_on_until_the_view_is_decided():
    chain = grown()
    assert not chain.blocked(10**6)
    chain.barrier = View(2, bytes(32), 7, MEMBERS[:4], (3,))
    assert [chain.blocked(number) for number in (6, 7, 8)] == [False, True, True]
    assert [chain.blocked(number, 0) for number in (2, 3, 6)] == [False, True, True], (
        "stages count for themselves"
    )
    chain.extend(certify(successor(chain, MEMBERS[:4]), signers(3)))
    assert not chain.blocked(8)


def test_a_promise_for_a_view_holds_back_rounds_until_it_is_decided():
    chain = grown()
    chain.held = (5, 3)
    assert [chain.blocked(number, 0) for number in (2, 3, 6)] == [False, True, True]
    assert chain.blocked(0, 1), "a stage of which nothing was said"
    assert [chain.blocked(number) for number in (4, 5, 10**6)] == [False, True, True]
    chain.extend(certify(successor(chain, MEMBERS[:4]), signers(3)))
    assert not chain.blocked(3, 0)
    assert not chain.blocked(10**6)


def test_a_proposal_is_revised_by_axis_to_where_it_may_begin():
    view = View(2, bytes(32), 7, MEMBERS[:4], (3, 9))
    assert decode_view(revised(encode(view), view, (5, 4, 8, 2), ())).begins == (7, 4, 9, 2)
    assert decode_view(revised(encode(view), view, (), MEMBERS[:4])) == view


def test_a_proposal_keeps_the_members_that_are_present_in_their_places():
    before = View(2, bytes(32), 7, MEMBERS[:4])
    restarted = Member(MEMBERS[2].peer, 99)
    proposal = View(3, before.hash, 8, (MEMBERS[0], restarted, MEMBERS[4]))
    kept = decode_view(revised(encode(proposal), before, (), MEMBERS[1:3])).members
    assert kept == (MEMBERS[0], MEMBERS[1], restarted, MEMBERS[4])


def test_a_stage_is_served_by_the_peers_that_said_so_and_by_every_full_replica():
    view = View(
        2,
        bytes(32),
        7,
        (Member("a", 1, 0), Member("b", 1), Member("c", 1, 1), Member("d", 1, NOTHING)),
    )
    assert [view.serving(stage) for stage in (None, 0, 1, 2)] == [
        (0, 1, 2, 3),
        (0, 1),
        (1, 2),
        (1,),
    ]


@pytest.mark.parametrize("stage", [UNMEASURED - 1, MAX_STAGES])
def test_a_member_of_a_stage_that_cannot_be_is_refused(stage):
    with pytest.raises(BadView):
        decode_view(encode(View(2, bytes(32), 7, (Member("a", 1, stage),))))


def test_the_floor_accepts_only_a_successor_that_begins_after_every_round_touched():
    chain = grown()
    proposal = encode(successor(chain, MEMBERS[:4], first_round=9))
    assert chain.floor(proposal, (9,)) == ()
    assert chain.floor(proposal, (10,)) == (10,)
    assert chain.floor(proposal, (21,)) == (21,)
    assert chain.floor(b"nonsense", (5,)) == (5,)
    assert chain.floor(encode(chain.newest), (2,)) == (2,), "not a successor"


def test_the_chain_keeps_a_bounded_number_of_views_and_sends_them_in_portions():
    chain = Chain(RUN, [Certified(genesis(RUN, MEMBERS[0]))])
    for _ in range(KEPT_VIEWS + 5):
        chain.extend(certify(successor(chain, MEMBERS[:1]), signers(1)))
    assert len(chain.views) == KEPT_VIEWS
    oldest = chain.views[0].view.number
    assert oldest == 6
    portion = [decode_certified(raw).view.number for raw in chain.since(10)]
    assert portion == list(range(11, 27))
    assert [decode_certified(raw).view.number for raw in chain.since(chain.newest.number - 1)] == [
        chain.newest.number
    ]
    assert chain.since(chain.newest.number) == ()
    assert decode_certified(chain.since(oldest - 1)[0]).view.number == oldest
    assert chain.since(oldest - 2) == (), "mine do not reach back"


def test_a_learner_follows_from_portions_alone():
    teacher, learner = grown(), founded()
    for number in (5, 4, 3):
        teacher.extend(certify(successor(teacher, MEMBERS[:number]), signers(5)))
    while raw := teacher.since(learner.newest.number, limit=2):
        for entry in raw:
            learner.extend(decode_certified(entry))
    assert learner.newest == teacher.newest


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_decode_to_a_view_or_are_refused(raw):
    for decode in (decode_view, decode_certified):
        try:
            decode(raw)
        except BadView as error:
            assert str(error)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 255))
def test_an_altered_view_is_refused_or_another_one(place, value):
    good = certify(successor(founded(), MEMBERS), signers(1))
    raw = bytearray(encode(good))
    raw[place % len(raw)] = value
    try:
        altered = decode_certified(bytes(raw))
    except BadView:
        return
    chain = founded()
    if altered == good:
        assert chain.extend(altered)
    else:
        with pytest.raises(BadView):
            assert not chain.extend(altered), "only an older view is no news"
            raise BadView


def members_of(count):
    return tuple(Member(f"peer{number:02d}", number) for number in range(count))


@pytest.mark.parametrize(
    "raw",
    [
        encode(View(1, bytes(32), 1, members_of(MAX_MEMBERS + 1))),
        encode(View(1, bytes(32), 1, ())),
        encode(View(1, bytes(31), 1, members_of(1))),
        encode(View(1, bytes(32), 1, (Member("a", 1), Member("a", 2)))),
        encode(View(1, bytes(32), 1, (Member("x" * 65, 1),))),
        encode(View(1, bytes(32), -1, members_of(1))),
        encode(View(1, bytes(32), 1, (Member("a", 2**63),))),
        msgspec.msgpack.encode([1, bytes(32), 1, [[b"\xff\xfe", 1]]]),
        b"\x94\x01\xc4\x20"
        + bytes(32)
        + b"\x01\x91\x92\xa2\xff\xfe\x01",  # a peer id that is not UTF-8
        b"\x95" + encode(View(1, bytes(32), 1, members_of(1)))[1:] + b"\x91" * 100_000,
    ],
    ids=[
        "many",
        "nobody",
        "short hash",
        "twice",
        "long id",
        "negative",
        "incarnation",
        "bytes",
        "not text",
        "deep",
    ],
)
def test_a_hostile_encoding_is_refused(raw):
    with pytest.raises(BadView):
        decode_view(raw)
    with pytest.raises(BadView):
        decode_certified(raw)


def test_a_certified_view_over_the_limit_is_refused_before_it_is_read():
    with pytest.raises(BadView, match="over the limit"):
        decode_certified(bytes(10**6))


def test_every_incarnation_that_a_record_may_state_fits_a_view():
    view = View(1, bytes(32), 1, (Member("a", 2**63 - 1),))
    assert decode_view(encode(view)) == view


# The members of the next view.

A, B, C, D = (Member(name, 1) for name in "abcd")
VIEW = View(4, bytes(32), 40, (C, A, B))


def test_a_view_lists_its_members_in_any_life():
    assert [peer for peer in "abcd" if VIEW.lists(peer)] == sorted(VIEW.peers)


def following(lives=None, joining=(), leaving=()):
    return next_members(VIEW, lives or {}, {member.peer: member for member in joining}, leaving)


def test_nothing_changes_if_no_peer_comes_or_goes():
    assert following() is None
    assert following({"a": "alive", "b": "suspect", "c": "unknown"}) is None
    assert following(joining=[A]) is None, "a member that asks to be let in is in already"


def test_the_dead_and_the_leaving_go_and_the_others_keep_their_seniority():
    assert following({"a": "dead"}) == (C, B)
    assert following(leaving={"c"}) == (A, B)
    assert following({"a": "dead", "b": "suspect"}, leaving={"c"}) == (B,)


def test_a_restarted_member_is_replaced_by_its_new_life_at_the_end_of_the_line():
    again = Member("c", 2)
    assert following(joining=[again]) == (A, B, again)
    assert following({"c": "dead"}, joining=[again]) == (A, B, again)


def test_joiners_follow_in_the_order_of_their_ids():
    assert following(joining=[Member("z", 1), D]) == (C, A, B, D, Member("z", 1))
    assert following(joining=[D], leaving={"d"}) is None


def test_the_last_one_does_not_dissolve_the_run():
    alone = View(4, bytes(32), 40, (A,))
    assert next_members(alone, {"a": "dead"}, {}, ()) is None


def test_there_is_room_for_so_many_members_and_no_more():
    full = View(1, bytes(32), 1, members_of(MAX_MEMBERS))
    late = {"aaa": Member("aaa", 1), "zzz": Member("zzz", 1)}
    assert next_members(full, {}, late, ()) is None
    assert next_members(full, {"peer03": "dead"}, late, ()) == (
        *(member for member in full.members if member.peer != "peer03"),
        late["aaa"],
    )


def test_wishes_to_join_expire_and_their_table_is_bounded():
    candidates = Candidates()
    candidates.join(A, expires_s=5.0)
    candidates.join(B, expires_s=9.0)
    assert candidates.live(4.0) == {"a": A, "b": B}
    assert candidates.live(5.0) == {"b": B}
    for number in range(1000):
        candidates.join(Member(f"p{number}", 0), expires_s=100.0)
    assert len(candidates.joining) == 2 * MAX_MEMBERS
    candidates.join(Member("b", 2), expires_s=100.0)
    assert candidates.live(50.0)["b"] == Member("b", 2), "a member that is in the table can renew"


def test_a_member_that_left_must_ask_again_and_an_earlier_lifes_goodbye_does_not_count():
    candidates = Candidates()
    candidates.join(A, expires_s=9.0)
    candidates.leave(A)
    assert candidates.live(0.0) == {}
    assert candidates.leaving == {"a"}
    again = Member("a", 2)
    candidates.join(again, expires_s=9.0)
    assert candidates.leaving == set()
    candidates.leave(A)
    assert candidates.leaving == set()
    assert candidates.live(0.0) == {"a": again}
