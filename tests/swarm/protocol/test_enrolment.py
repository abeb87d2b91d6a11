"""A view adds only those that asked in this life and hold a capability, and says which."""

import msgspec
import pytest

from farflock.swarm.capability import EXPIRY_GRACE_S, BadCapability, Issuers, Ticket
from farflock.swarm.identity import Identity
from farflock.swarm.messages import Join
from farflock.swarm.protocol import enrolment
from farflock.swarm.protocol.enrolment import (
    Enrolment,
    admittance_of,
    claim_of,
    enrolled,
    refusal,
)
from farflock.swarm.protocol.roll import Admittance, first_roll
from farflock.swarm.protocol.views import Member, View, genesis
from farflock.swarm.record import BadRecord, Record, seal
from farflock.swarm.roles import EVERY
from farflock.swarm.statements import Orders

RUN, END_S = "run", 10_000
FOUNDER, *KEYS = (Identity.from_seed(bytes([number]) * 32) for number in range(1, 20))
OUTSIDER = Identity.from_seed(bytes([99]) * 32)
TICKET = Ticket.issue(FOUNDER, RUN, bytes(32), END_S, uses=3, votes=0)
ISSUERS, ROLL = Issuers(FOUNDER.peer), first_roll(FOUNDER.peer)
PARENT = genesis(RUN, Member(FOUNDER.peer, 1))


def record(key, life=1):
    return seal(key, Record(RUN, key.peer, life, life, bytes(32)))


def claim(key, ticket=TICKET, life=1, asked_s=0.0):
    blob = record(key, life)
    request = Join(blob) if ticket is None else ticket.request(RUN, key.peer, blob)
    return claim_of(request, RUN, asked_s)


def heard(*claims):
    found = {}
    for each in claims:
        found.setdefault(each.member.peer, []).append(each)
    return found


def proposal(parent, *members):
    return View(parent.number + 1, parent.hash, 5, (*parent.members, *members))


def added(*claims, parent=PARENT, roll=ROLL, issuers=ISSUERS):
    wanted = proposal(parent, *(each.member for each in claims))
    return enrolled(parent, wanted, Enrolment(roll, heard(*claims), issuers))


def unjustified(parent, view, roll, claims, issuers):
    return enrolment.unjustified(parent, view, Enrolment(roll, claims, issuers))


def by(claimed):
    return admittance_of(claimed.capability, ISSUERS)


def test_what_is_enrolled_is_justified_and_names_the_next_roll():
    claims = [claim(key) for key in KEYS[:3]]
    view = added(*claims)
    assert [member.peer for member in view.members[1:]] == [key.peer for key in KEYS[:3]]
    assert unjustified(PARENT, view, ROLL, heard(*claims), ISSUERS) is None
    after = ROLL.with_keys([(key.peer, by(claims[0])) for key in KEYS[:3]])
    assert (view.roll, view.roll_bytes) == (after.root, len(after.encoded))
    assert view.admits == tuple((place, by(claims[0])) for place in (1, 2, 3))
    assert view.learners == (1, 2, 3), "their capability brings no votes"


def test_of_forty_keys_with_a_capability_of_three_uses_three_come_in():
    keys = [Identity.from_seed(number.to_bytes(32, "big")) for number in range(40)]
    claims = [claim(key) for key in keys]
    view = added(*claims)
    assert len(view.members) == 4
    more = proposal(PARENT, *(each.member for each in claims[:4]))
    root = ROLL.with_keys([(each.member.peer, by(claims[0])) for each in claims[:4]])
    more = msgspec.structs.replace(
        more,
        roll=root.root,
        roll_bytes=len(root.encoded),
        admits=tuple((place, by(claims[0])) for place in range(1, 5)),
        learners=(1, 2, 3, 4),
    )
    assert "used up" in unjustified(PARENT, more, ROLL, heard(*claims), ISSUERS)


def test_a_key_on_the_roll_comes_back_without_a_capability_and_uses_none():
    first = added(claim(KEYS[0]))
    roll = ROLL.with_keys([(KEYS[0].peer, by(claim(KEYS[0])))])
    alone = msgspec.structs.replace(first, number=2, members=PARENT.members, admits=(), learners=())
    back = claim(KEYS[0], ticket=None, life=2)
    view = enrolled(alone, proposal(alone, back.member), Enrolment(roll, heard(back), ISSUERS))
    assert view.members[-1] == back.member
    assert (view.roll, view.admits) == (alone.roll, ())
    assert unjustified(alone, view, roll, heard(back), ISSUERS) is None


def test_a_member_in_another_life_needs_its_own_request_and_no_roll():
    parent = added(claim(KEYS[0]))
    back = claim(KEYS[0], ticket=None, life=2)
    view = msgspec.structs.replace(
        proposal(parent), members=(*PARENT.members, back.member), roll=parent.roll
    )
    view = enrolled(parent, view, Enrolment(None, heard(back), ISSUERS))
    assert unjustified(parent, view, None, heard(back), ISSUERS) is None
    assert "no request" in unjustified(parent, view, None, {}, ISSUERS)


def test_a_view_that_adds_nobody_is_justified_without_a_roll():
    assert unjustified(PARENT, added(roll=None), None, {}, ISSUERS) is None


def test_without_the_roll_no_new_key_is_added_and_none_is_believed():
    view = added(claim(KEYS[0]))
    assert added(claim(KEYS[0]), roll=None).members == PARENT.members
    other = ROLL.with_keys([("x", Admittance(bytes(32), 1, 1))])
    assert added(claim(KEYS[0]), roll=other).members == PARENT.members
    for roll in (None, other):
        why = unjustified(PARENT, view, roll, heard(claim(KEYS[0])), ISSUERS)
        assert "roll is not known" in why


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({}, "no request"),
        (heard(claim(KEYS[0], life=2)), "no request of it in this life"),
        (heard(claim(KEYS[0], ticket=None)), "has not shown the capability"),
        (
            heard(claim(KEYS[0], Ticket.issue(FOUNDER, RUN, b"s" * 32, END_S, 0, 0))),
            "has not shown the capability",
        ),
        (heard(claim(KEYS[0], asked_s=END_S + EXPIRY_GRACE_S + 1)), "expired"),
    ],
)
def test_a_newcomer_is_not_justified_by_less_than_its_own_valid_request(wrong, why):
    view = added(claim(KEYS[0]))
    assert why in unjustified(PARENT, view, ROLL, wrong, ISSUERS)


def test_a_request_in_time_counts_however_long_the_decision_takes():
    late = claim(KEYS[0], asked_s=END_S + EXPIRY_GRACE_S)
    assert unjustified(PARENT, added(late), ROLL, heard(late), ISSUERS) is None


@pytest.mark.parametrize(
    "change",
    [
        {"roll": bytes(32)},
        {"roll_bytes": 7},
        {"admits": ()},
        {"admits": ((1, Admittance(bytes(32), 3, 0)),)},
        {"admits": ((0, Admittance(bytes(32), 3, 0)),)},
        {"admits": ((1, by(claim(KEYS[0]))),) * 2},
        {"admits": ((1, by(claim(KEYS[0]))), (9, Admittance(bytes(32), 3, 0)))},
        {"admits": ((1, msgspec.structs.replace(by(claim(KEYS[0])), votes=1)),)},
        {"admits": ((1, msgspec.structs.replace(by(claim(KEYS[0])), uses=1)),)},
        {"roll": PARENT.roll, "roll_bytes": PARENT.roll_bytes},
    ],
)
def test_a_view_that_says_something_else_of_its_roll_is_not_justified(change):
    view = msgspec.structs.replace(added(claim(KEYS[0])), **change)
    assert unjustified(PARENT, view, ROLL, heard(claim(KEYS[0])), ISSUERS) is not None


def test_a_view_without_newcomers_does_not_change_the_roll():
    view = msgspec.structs.replace(added(), roll=bytes(32))
    assert unjustified(PARENT, view, ROLL, {}, ISSUERS) == "it names another roll"


@pytest.mark.parametrize(
    "roll", [ROLL, ROLL.with_keys([(OUTSIDER.peer, Admittance(bytes(32), 1, 1))])]
)
@pytest.mark.parametrize("members", [True, False])
def test_a_capability_of_a_key_that_may_not_issue_lets_nobody_in(roll, members):
    ticket = Ticket.issue(OUTSIDER, RUN, bytes(32), END_S, 3, 0)
    issuers = Issuers(FOUNDER.peer, (), members)
    allowed = members and OUTSIDER.peer in roll
    assert (refusal(claim(KEYS[0], ticket), roll, issuers) is None) == allowed
    assert refusal(claim(KEYS[0], ticket), ROLL, Issuers(FOUNDER.peer, (OUTSIDER.peer,))) is None


def test_a_full_roll_takes_no_key_more(monkeypatch):
    monkeypatch.setattr(enrolment, "MAX_ADMITTED", 3)
    ticket = Ticket.issue(FOUNDER, RUN, bytes(32), END_S, 0, 0)
    assert len(added(*(claim(key, ticket) for key in KEYS)).members) == 3


def test_of_two_capabilities_of_one_key_the_view_says_which_was_used():
    spent = ROLL.with_keys([(f"k{number}", by(claim(KEYS[0]))) for number in range(3)])
    parent = msgspec.structs.replace(PARENT, roll=spent.root, roll_bytes=len(spent.encoded))
    other = Ticket.issue(FOUNDER, RUN, b"o" * 32, END_S, 1, 1)
    claims = claim(KEYS[0]), claim(KEYS[0], other)
    view = added(*claims, parent=parent, roll=spent)
    assert view.members[1:] == (claims[0].member,)  # once, whatever number of requests
    assert view.admits == ((1, by(claims[1])),)
    assert view.learners == (), "a capability for one key brings a vote, while there are few"
    assert unjustified(parent, view, spent, heard(*claims), ISSUERS) is None


def test_a_stolen_request_and_a_false_record_are_no_claims():
    stolen = TICKET.request(RUN, KEYS[0].peer, record(KEYS[1]))
    with pytest.raises(BadCapability):
        claim_of(stolen, RUN, 0.0)
    with pytest.raises(BadRecord):
        claim_of(TICKET.request(RUN, KEYS[0].peer, b"nonsense"), RUN, 0.0)
    assert claim(KEYS[0]).member == Member(KEYS[0].peer, 1, EVERY)


@pytest.mark.parametrize("ticket", [TICKET, None])
def test_a_banned_key_comes_in_by_nothing(ticket):
    orders = Orders((1, bytes(32)), frozenset({KEYS[0].peer}))
    roll = ROLL.with_keys([(KEYS[0].peer, by(claim(KEYS[0])))])
    assert refusal(claim(KEYS[0], ticket), roll, ISSUERS, (), orders) == "it is banned"
    parent = msgspec.structs.replace(PARENT, roll=roll.root, roll_bytes=len(roll.encoded))
    known = Enrolment(roll, heard(claim(KEYS[0], ticket)), ISSUERS, orders)
    view = proposal(parent, Member(KEYS[0].peer, 1))
    assert enrolled(parent, view, known).members == parent.members
    proposed = msgspec.structs.replace(view, roll=roll.root, roll_bytes=parent.roll_bytes)
    assert "banned" in enrolment.unjustified(parent, proposed, known)


def test_a_closed_run_takes_known_keys_alone():
    orders, roll = Orders(closed=True), ROLL.with_keys([(KEYS[0].peer, by(claim(KEYS[0])))])
    assert refusal(claim(KEYS[0], None), roll, ISSUERS, (), orders) is None
    assert "closed" in refusal(claim(KEYS[1]), roll, ISSUERS, (), orders)


def test_what_a_member_issues_brings_no_votes():
    roll = ROLL.with_keys([(OUTSIDER.peer, by(claim(KEYS[0])))])
    parent = msgspec.structs.replace(PARENT, roll=roll.root, roll_bytes=len(roll.encoded))
    own = claim(KEYS[1], Ticket.issue(OUTSIDER, RUN, bytes(32), END_S, 1, 1))
    view = added(own, parent=parent, roll=roll)
    assert (view.admits[0][1].votes, view.learners) == (0, (1,))
    founders = claim(KEYS[1], Ticket.issue(FOUNDER, RUN, bytes(32), END_S, 1, 1))
    assert added(founders, parent=parent, roll=roll).learners == ()


# Places of one capability.


PLACES = 8


def ticket(name, uses=64, issuer=FOUNDER):
    return Ticket.issue(issuer, RUN, name * 32, END_S, uses, votes=0)


PUBLIC, OTHER, SINGLE = ticket(b"p"), ticket(b"o"), ticket(b"s", uses=1)
OF_MEMBER = ticket(b"m", issuer=KEYS[0])


class Places:
    """A view of the founder and of keys by these tickets, and what a voter knows of it."""

    def __init__(self, *tickets, voting=()):
        self.mine = KEYS[: len(tickets)]
        claims = [claim(key, by) for key, by in zip(self.mine, tickets, strict=True)]
        roll = ROLL.with_keys(
            [(each.member.peer, admittance_of(each.capability, ISSUERS)) for each in claims]
        )
        self.roll = roll.with_votes([self.mine[number].peer for number in voting])
        self.view = msgspec.structs.replace(
            PARENT,
            number=1,
            members=(*PARENT.members, *(each.member for each in claims)),
            learners=tuple(n + 1 for n in range(len(tickets)) if n not in voting),
            roll=self.roll.root,
            roll_bytes=len(self.roll.encoded),
        )

    def knows(self, *claims):
        return Enrolment(self.roll, {each.member.peer: [each] for each in claims}, ISSUERS)

    def without(self, *numbers):
        """The same run, after a view in which these keys are members no more."""
        gone = {self.mine[number].peer for number in numbers}
        staying = tuple(member for member in self.view.members if member.peer not in gone)
        voters = self.roll.voting
        learners = tuple(n for n, member in enumerate(staying) if member.peer not in voters)
        self.view = msgspec.structs.replace(self.view, members=staying, learners=learners)
        return self

    def next(self, known, *coming, going=()):
        """Its next view, enrolled by a proposer that knows this."""
        gone = {self.mine[number].peer for number in going}
        staying = tuple(member for member in self.view.members if member.peer not in gone)
        wanted = View(2, self.view.hash, 5, (*staying, *(each.member for each in coming)))
        return enrolled(self.view, wanted, known)


@pytest.fixture
def places(monkeypatch):
    """Make views of few places."""
    monkeypatch.setattr(enrolment, "MAX_MEMBERS", PLACES)
    monkeypatch.setattr(enrolment, "MAX_PLACES_EACH", PLACES // 2)
    return Places


def listed(view, *claims):
    return [each.member in view.members for each in claims]


def test_a_full_run_takes_one_of_another_capability_and_none_of_that_with_half_of_the_places(
    places,
):
    run = places(*[PUBLIC] * 7)
    again, other = claim(KEYS[8], PUBLIC), claim(KEYS[9], OTHER)
    known = run.knows(again, other)
    assert enrolment.crowded(run.view, known) == {claim(KEYS[0], PUBLIC).capability.id}
    view = run.next(known, again, other, going=(6,))
    assert listed(view, again, other) == [False, True]
    assert enrolment.unjustified(run.view, view, known) is None
    alone = run.knows(again)  # a proposer that has not heard the other
    view = run.next(alone, again, going=(6,))
    assert listed(view, again) == [True]
    assert enrolment.unjustified(run.view, view, alone) is None, "as long as nobody else waits"
    assert (
        enrolment.unjustified(run.view, view, known)
        == f"{again.member.peer}: {enrolment.OUT_OF_TURN}"
    )


def test_while_places_are_left_for_all_that_wait_nobody_waits_for_others(places):
    run = places(*[PUBLIC] * 7).without(5, 6)
    again = claim(KEYS[8], PUBLIC)
    two, three = ([claim(KEYS[9 + n], OTHER) for n in range(count)] for count in (2, 3))
    assert not enrolment.crowded(run.view, run.knows(again, *two))
    assert enrolment.crowded(run.view, run.knows(again, *three))


@pytest.mark.parametrize("other", [SINGLE, OTHER])
def test_a_capability_below_half_has_not_to_wait(places, other):
    run = places(*[PUBLIC] * 4, *[other] * 3)
    waits = claim(KEYS[8], other if other is OTHER else ticket(b"t", uses=1))
    known = run.knows(waits)
    assert enrolment.crowded(run.view, known) == {claim(KEYS[0], PUBLIC).capability.id}
    assert listed(run.next(known, waits, going=(6,)), waits) == [True]


def test_of_two_capabilities_with_half_of_the_places_each_neither_goes_first(places, monkeypatch):
    monkeypatch.setattr(enrolment, "MAX_MEMBERS", 1 + PLACES)
    run = places(*[PUBLIC] * 4, *[OTHER] * 4)
    assert not enrolment.crowded(
        run.view, run.knows(claim(KEYS[9], PUBLIC), claim(KEYS[10], OTHER))
    )
    assert not enrolment.over_half(run.view, run.roll)


def test_nobody_waits_for_a_key_that_a_member_has_invited(places):
    run = places(*[PUBLIC] * 7)
    assert not enrolment.crowded(run.view, run.knows(claim(KEYS[9], OF_MEMBER)))


def test_nobody_waits_for_a_key_that_may_not_come_in(places):
    run = places(*[PUBLIC] * 6, SINGLE)
    assert not enrolment.crowded(run.view, run.knows(claim(KEYS[9], SINGLE))), "it is used up"


def test_a_key_that_was_put_out_waits_too_and_one_with_a_vote_comes_back_at_once(places):
    run = places(*[PUBLIC] * 7, voting=(5,)).without(5, 6)
    back, voter = claim(KEYS[6], PUBLIC, life=2), claim(KEYS[5], PUBLIC, life=2)
    others = [claim(KEYS[9 + n], OTHER) for n in range(3)]
    known = run.knows(back, voter, *others)
    view = run.next(known, back, voter, others[0])
    assert listed(view, back, voter, others[0]) == [False, True, True]
    assert enrolment.unjustified(run.view, view, known) is None
    wrong = run.next(run.knows(back), back)
    assert enrolment.OUT_OF_TURN in enrolment.unjustified(run.view, wrong, known)


def test_the_most_junior_learners_beyond_half_give_way_and_no_voter_does(places):
    run = places(*[PUBLIC] * 7, voting=(0, 5))
    expected = [run.mine[number].peer for number in (4, 6)]
    assert sorted(member.peer for member in enrolment.over_half(run.view, run.roll)) == sorted(
        expected
    )
    one_more = places(SINGLE, *[PUBLIC] * 4)
    assert not enrolment.over_half(one_more.view, one_more.roll)


def test_without_the_roll_nobody_waits_for_others(places):
    run = places(*[PUBLIC] * 7)
    other = claim(KEYS[9], OTHER)
    assert not enrolment.crowded(run.view, Enrolment(None, {other.member.peer: [other]}, ISSUERS))
