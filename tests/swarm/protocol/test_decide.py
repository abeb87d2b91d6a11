"""One value for one key, whichever messages are lost, doubled or late and whichever members
crash."""

import itertools

import pytest
from worlds.decisions import KEY, VIEW, Ruled, Schedule
from worlds.seeds import blocks

from farflock.swarm.messages import Accepted, Decided, Key, Prepare, Promise, Propose, Rejected
from farflock.swarm.protocol import decide
from farflock.swarm.protocol.decide import Decision, is_certified, signed_text
from farflock.swarm.protocol.quorum import is_quorum

EVERYDAY_SCHEDULES = 3000


def group(size, proposers=None, **options):
    order = tuple(proposers or range(size))
    return [Decision(KEY, VIEW, me, order, **options) for me in range(size)]


def test_no_schedule_decides_two_values_or_one_that_was_never_proposed():
    decided = 0
    for seed in range(EVERYDAY_SCHEDULES):
        schedule = Schedule(seed)
        schedule.disturb(150)
        decided += bool(schedule.seen)
    assert decided > EVERYDAY_SCHEDULES / 2, "these schedules hardly test agreement"


@pytest.mark.long
@blocks(10**6, 10**6 + 100_000, size=10_000)
def test_no_schedule_of_a_hundred_thousand_decides_two_values(seeds):
    for seed in seeds:
        Schedule(seed).disturb(250)


def test_when_messages_flow_again_every_live_member_that_tries_learns_the_value():
    for seed in range(500):
        schedule = Schedule(seed)
        schedule.disturb(80)
        live = schedule.calm_down()
        if is_quorum(live, schedule.size):
            assert {schedule.members[me].decided for me in live} == {schedule.seen[live[0]]}, seed


def test_refusals_for_good_neither_break_agreement_nor_block_it():
    freed = 0
    for seed in range(400):
        schedule = Schedule(seed, size=3 + seed % 5, refusals=0.05)
        schedule.disturb(100)
        doubtful = list(schedule.proposed)
        live = schedule.calm_down(tries=6)
        if is_quorum(live, schedule.size) and not any(
            schedule.is_open(value, live) for value in doubtful
        ):
            assert {schedule.members[me].decided for me in live} == {schedule.seen[live[0]]}, seed
            freed += any(
                schedule.members[me].proposer.is_impossible(value, schedule.size)
                for me in live
                for value in doubtful
            )
    assert freed > 20, f"only {freed} of these schedules exclude a value"


@pytest.mark.long
@blocks(10**7, 10**7 + 30_000, size=10_000)
def test_no_schedule_of_thirty_thousand_with_refusals_decides_two_values(seeds):
    for seed in seeds:
        Schedule(seed, refusals=0.1).disturb(250)


def refusing_group(size, refusers):
    """Return members, some of which refuse the value `old`; only member 1 has accepted it, from
    member 0."""
    members = [
        Decision(
            KEY,
            VIEW,
            me,
            tuple(range(size)),
            rules=Ruled(floor=lambda value, me=me: (1,) * (value == b"old" and me in refusers)),
        )
        for me in range(size)
    ]
    ((_, offered),) = [entry for entry in members[0].propose(b"old") if entry[0] == 1]
    members[1].receive(0, offered)
    return members


def test_a_value_that_too_many_refuse_for_good_binds_no_member():
    members = [None, *refusing_group(5, {2, 3, 4})[1:]]
    run(members, members[2].propose(b"first try"), sender=2)
    assert members[2].decided is None, "it had to repeat the old one"
    run(members, members[2].propose(b"new"), sender=2)
    assert {member.decided for member in members[1:]} == {b"new"}


def test_a_value_that_a_quorum_may_have_accepted_binds_although_others_refuse_it():
    """Members 0 and 1 of three have accepted it, so it may be chosen: the third, which refuses it,
    must not propose its own."""
    members = [None, *refusing_group(3, {2})[1:]]
    for number in range(4):
        run(members, members[2].propose(b"own, try %d" % number), sender=2)
    assert members[2].decided is None
    assert members[1].accepted[1] == b"old"


def test_the_agreement_test_can_fail(monkeypatch):
    """With a quorum of one, the very same schedules must find two values."""
    monkeypatch.setattr(decide, "is_quorum", lambda members, size: len(members) >= 1)
    with pytest.raises(AssertionError, match="two values were decided"):
        for seed in range(300):
            Schedule(seed).disturb(150)


def test_an_acceptor_that_forgets_its_promises_breaks_agreement():
    """This is why a restarted member comes back under a new incarnation: with amnesia, the
    schedules find two values."""
    with pytest.raises(AssertionError, match="two values were decided"):
        for seed in range(3000):
            schedule = Schedule(seed, size=3)
            for _ in range(15):
                schedule.disturb(10)
                me = schedule.chance.randrange(3)
                if me not in schedule.seen:
                    old = schedule.members[me]
                    schedule.members[me] = Decision(KEY, VIEW, me, old.proposers)


@pytest.mark.parametrize("size", range(1, 9))
def test_any_two_quorums_share_a_member(size):
    quorums = [
        set(members)
        for count in range(size + 1)
        for members in itertools.combinations(range(size), count)
        if is_quorum(members, size)
    ]
    assert quorums
    assert all(one & other for one in quorums for other in quorums)


@pytest.mark.parametrize("size", [2, 4, 6, 8])
def test_of_exactly_half_only_the_half_with_the_senior_member_decides(size):
    half = size // 2
    assert is_quorum(range(half), size)
    assert not is_quorum(range(half, size), size)


def run(members, sends, sender=0):
    """Deliver everything in order, except to the dead (None); return how many messages that
    took."""
    bag = [(sender, to, message) for to, message in sends]
    count = 0
    while bag:
        sender, to, message = bag.pop(0)
        count += 1
        if members[to] is None:
            continue
        bag += [(to, after, answer) for after, answer in members[to].receive(sender, message)]
    return count


def test_an_undisturbed_decision_takes_one_round_trip_and_a_broadcast():
    members = group(5)
    count = run(members, members[0].propose(b"v"))
    assert {member.decided for member in members} == {b"v"}
    assert count == 4 + 4 + 4


def test_a_lone_member_decides_at_once():
    (only,) = group(1)
    assert only.propose(b"v") == []
    assert only.decided == b"v"


def test_only_the_first_proposer_may_use_ballot_zero():
    members = group(3, proposers=(1, 0, 2))
    assert members[2].receive(0, Propose(KEY, VIEW, (0, 0), b"stolen")) == []
    assert members[2].accepted is None
    assert members[2].receive(0, Prepare(KEY, VIEW, (0, 0))) == []
    (answer,) = members[2].receive(1, Propose(KEY, VIEW, (0, 1), b"rightful"))
    assert answer == (1, Accepted(KEY, VIEW, (0, 1)))


def test_no_member_may_use_the_ballot_of_another():
    members = group(3)
    assert members[2].receive(0, Prepare(KEY, VIEW, (4, 1))) == []
    assert members[2].receive(0, Propose(KEY, VIEW, (4, 1), b"v")) == []
    assert members[2].promised == (0, 0)


def test_a_later_proposer_takes_over_the_value_that_may_have_been_chosen():
    members = group(3)
    for to, message in members[0].propose(b"first"):
        if to == 1:
            # 0 and 1 have accepted: chosen, though no member knows; 0 dies
            members[1].receive(0, message)
    run([None, *members[1:]], members[1].propose(b"second"), sender=1)
    assert members[1].decided == members[2].decided == b"first"


def test_a_lower_ballot_is_told_which_one_was_promised():
    members = group(3)
    members[2].receive(1, Prepare(KEY, VIEW, (5, 1)))
    assert members[2].receive(0, Prepare(KEY, VIEW, (4, 0))) == [
        (0, Rejected(KEY, VIEW, (4, 0), (5, 1)))
    ]
    members[0].propose(b"v")
    members[0].receive(2, Rejected(KEY, VIEW, (0, 0), (5, 1)))
    ballots = {message.ballot for _, message in members[0].propose(b"v")}
    assert ballots == {(6, 0)}


def test_retry_repeats_only_what_has_not_been_answered():
    members = group(4)
    first = members[0].propose(b"v")
    assert {to for to, _ in first} == {1, 2, 3}
    for answer in members[1].receive(0, first[0][1]):
        members[0].receive(1, answer[1])
    assert members[0].decided == b"v", "half with the senior member is a quorum"
    assert members[0].retry() == []
    members = group(5)
    first = members[0].propose(b"v")
    members[0].receive(1, members[1].receive(0, first[0][1])[0][1])
    assert {to for to, _ in members[0].retry()} == {2, 3, 4}


def test_answers_to_an_older_ballot_count_for_nothing():
    members = group(5)
    members[1].propose(b"old")
    members[1].receive(0, Promise(KEY, VIEW, (1, 1)))
    members[1].propose(b"new")
    members[1].receive(2, Promise(KEY, VIEW, (1, 1)))
    members[1].receive(3, Promise(KEY, VIEW, (1, 1)))
    members[1].receive(4, Accepted(KEY, VIEW, (1, 1)))
    assert members[1].retry()[0][1] == Prepare(KEY, VIEW, (2, 1))


def test_a_value_below_the_floor_is_refused_and_the_proposer_learns_the_floor():
    members = group(3, rules=Ruled(floor=lambda value: () if value == b"late enough" else (12,)))
    sends = members[0].propose(b"too early")
    for to, message in sends:
        for _, answer in members[to].receive(0, message):
            members[0].receive(to, answer)
    assert members[0].decided is None
    assert members[0].known_floor == (12,)
    run(members, members[0].propose(b"late enough"))
    assert {member.decided for member in members} == {b"late enough"}


def test_members_out_of_step_tell_their_floors_before_any_value_is_accepted():
    """A value that two slow members accept and a fast one refuses binds them for good once the
    other slow one is dead."""
    begun = (0, 7, 1, 0)
    members = [
        Decision(
            KEY,
            VIEW,
            me,
            (2, 0, 1, 3),
            rules=Ruled(
                floor=lambda value, me=me: () if int(value) > begun[me] else (begun[me] + 1,),
                in_step=False,
                min_floor=lambda me=me: (begun[me] + 1,),
                revised=lambda value, floor, promised: b"%d" % max(int(value), *floor),
            ),
        )
        for me in range(4)
    ]
    run([None, *members[1:]], members[2].propose(b"3"), 2)
    assert {member.decided for member in members[1:]} == {b"8"}
    assert members[2].known_floor == (8,)


def test_a_member_that_works_on_a_decided_key_is_told_the_decision():
    members = group(3)
    run([*members[:2], Decision(KEY, VIEW, 2, (0, 1, 2))], members[0].propose(b"v"))
    (answer,) = members[0].receive(2, Prepare(KEY, VIEW, (9, 2)))
    members[2].receive(0, answer[1])
    assert members[2].decided == b"v"
    assert members[2].propose(b"another") == []
    assert members[2].announcement() == members[0].announcement()


def test_nothing_can_be_announced_before_it_is_decided():
    with pytest.raises(AssertionError, match="not decided"):
        group(3)[0].announcement()


# Where members sign: what convinces outsiders.


def test_a_member_held_back_promises_and_accepts_nothing_until_it_may():
    held = {1, 2}
    members = [
        Decision(KEY, VIEW, me, (0, 1, 2), holds_back=lambda me=me: me in held) for me in range(3)
    ]
    assert members[1].propose(b"w") == []
    run(members, members[0].propose(b"v"))
    assert [member.accepted is not None for member in members] == [True, False, False]
    assert not any(member.decided for member in members), "one of three is no quorum"
    (answer,) = members[1].receive(0, Prepare(KEY, VIEW, (3, 0)))[:1]
    assert isinstance(answer[1], Promise), "a promise binds to nothing"
    held.clear()
    run(members, members[0].propose(b"v"))
    assert {member.decided for member in members} == {b"v"}


def test_a_member_held_back_still_learns_what_others_decided():
    members = [
        Decision(KEY, VIEW, me, (0, 1, 2), holds_back=lambda me=me: me == 2) for me in range(3)
    ]
    run(members, members[0].propose(b"v"))
    assert {member.decided for member in members} == {b"v"}
    assert members[2].accepted is None


def sign_as(member):
    return lambda text: b"%d:" % member + text[:40]


def checks(member, text, proof):
    return proof == sign_as(member)(text)


def signed_group(size):
    return [
        Decision(KEY, VIEW, me, tuple(range(size)), rules=Ruled(sign=sign_as(me), checks=checks))
        for me in range(size)
    ]


def certificate(signers, ballot=(0, 0), value=b"v", key=KEY):
    text = signed_text(KEY, ballot, b"v")
    return Decided(
        key, VIEW, value, ballot, tuple((member, sign_as(member)(text)) for member in signers)
    )


def test_a_decision_is_certified_by_the_signatures_of_a_quorum():
    members = signed_group(5)
    run(members, members[0].propose(b"v"))
    announcement = members[3].announcement()
    assert is_certified(announcement, 5, checks)
    assert len(announcement.proofs) == 3


@pytest.mark.parametrize(
    ("decided", "why"),
    [
        (certificate([0, 1]), "too few"),
        (certificate([0, 1, 1, 1]), "one signer counted three times"),
        (certificate([0, 1, 7, 8, 9]), "signers that do not exist"),
        (certificate([0, 1, 2], value=b"w"), "another value"),
        (certificate([0, 1, 2], key=Key("weights", 4)), "another key"),
        (Decided(KEY, VIEW, b"v", (1, 0), certificate([0, 1, 2]).proofs), "another ballot"),
        (Decided(KEY, VIEW, b"v", (0, 0), ((0, b""), (1, b""), (2, b""))), "no signatures"),
        (
            Decided(KEY, VIEW, b"v", (0, 0), (*certificate([0, 1, 2]).proofs, (3, b"forged"))),
            "one of them forged",
        ),
        (Decided(KEY, VIEW, b"v"), "nobody"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_forged_certificate_is_refused(decided, why):
    assert is_certified(certificate([0, 1, 2]), 5, checks)
    assert not is_certified(decided, 5, checks), why
    member = signed_group(5)[4]
    member.receive(0, decided)
    assert member.decided is None, why


def test_an_acceptance_with_a_false_signature_does_not_count():
    members = signed_group(3)
    members[0].propose(b"v")
    members[0].receive(1, Accepted(KEY, VIEW, (0, 0), b"forged"))
    assert members[0].decided is None
    members[0].receive(1, Accepted(KEY, VIEW, (0, 0), sign_as(1)(signed_text(KEY, (0, 0), b"v"))))
    assert members[0].decided == b"v"
