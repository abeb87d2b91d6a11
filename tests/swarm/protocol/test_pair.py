"""Two peers swap payloads: the state table by hand, then thousands of rounds of bad luck in virtual
time."""

import msgspec
import pytest
from worlds.pair_rounds import DEADLINE_S, KEY, Round, follow, lead, offer_of, said
from worlds.seeds import blocks

from farflock.swarm.messages import (
    PairAbort,
    PairAccept,
    PairCommit,
    PairHave,
    PairPropose,
    PairRefuse,
)
from farflock.swarm.protocol.pair import COMMIT_MARGIN, RESEND_S

PROPOSE, ACCEPT = PairPropose(offer_of("a")), PairAccept(offer_of("b"))
COMMIT, ABORT = PairCommit(KEY), PairAbort(KEY)


def matched_leader():
    leader = lead()
    leader.start(0.0)
    leader.receive(0.1, ACCEPT)
    said(leader)
    return leader


def matched_follower():
    follower = follow()
    follower.start(0.0)
    follower.receive(0.1, PROPOSE)
    said(follower)
    return follower


def held_leader():
    leader = matched_leader()
    leader.complete(0.2)
    return leader


def held_follower():
    follower = matched_follower()
    follower.complete(0.2)
    said(follower)
    return follower


def have(ask=False):
    return PairHave(KEY, held_follower().joint_digest, ask)


# open


def test_the_leader_proposes_and_the_follower_waits():
    leader, follower = lead(), follow()
    leader.start(0.0)
    follower.start(0.0)
    assert said(leader) == [PROPOSE]
    assert said(follower) == []


def test_a_proposal_is_accepted_and_again_when_the_answer_was_lost():
    follower = follow()
    follower.receive(0.1, PROPOSE)
    follower.receive(0.6, PROPOSE)
    assert said(follower) == [ACCEPT, ACCEPT]
    assert follower.stage == "matched"


def test_a_leader_takes_no_proposal_and_a_follower_no_acceptance():
    leader, follower = lead(), follow()
    leader.receive(0.1, PairPropose(offer_of("b")))
    follower.receive(0.1, PairAccept(offer_of("a")))
    assert (leader.stage, follower.stage) == ("open", "open")
    assert said(leader) == said(follower) == []


def test_a_refusal_leaves_the_leader_alone():
    leader = lead()
    leader.receive(0.1, PairRefuse(KEY, 9))
    assert (leader.stage, leader.verdict) == ("done", "alone")


def test_a_refusal_after_the_match_means_nothing():
    leader = matched_leader()
    leader.receive(0.2, PairRefuse(KEY, 9))
    assert leader.stage == "matched"


def test_the_proposal_is_repeated_until_it_is_answered():
    leader = lead()
    leader.start(0.0)
    said(leader)
    leader.tick(RESEND_S / 2)
    assert said(leader) == []
    leader.tick(RESEND_S)
    assert said(leader) == [PROPOSE]
    leader.receive(0.5, ACCEPT)
    leader.tick(5.0)
    assert said(leader) == []


# matched and held


def test_the_first_offer_counts():
    leader = matched_leader()
    leader.receive(0.2, PairAccept(offer_of("x")))
    assert leader.theirs == offer_of("b")


def test_the_follower_says_what_it_holds_and_asks_until_it_hears_the_decision():
    follower = matched_follower()
    follower.complete(0.2)
    assert said(follower) == [have()]
    follower.tick(0.2 + RESEND_S)
    assert said(follower) == [have(ask=True)]
    follower.receive(0.9, COMMIT)
    assert follower.verdict == "applied"
    follower.tick(2.0)
    assert said(follower) == []


@pytest.mark.parametrize("payload_first", [True, False])
def test_the_leader_applies_once_both_hold_the_same_in_whatever_order_it_learns_that(payload_first):
    leader = matched_leader()
    if payload_first:
        leader.complete(0.2)
        assert (leader.stage, said(leader)) == ("held", [])
        leader.receive(0.3, have())
    else:
        leader.receive(0.2, have())
        assert (leader.stage, said(leader)) == ("matched", [])
        leader.complete(0.3)
    assert leader.verdict == "applied"
    assert said(leader) == [COMMIT]


def test_the_leader_does_not_apply_when_the_follower_holds_something_else():
    leader = held_leader()
    leader.receive(0.3, PairHave(KEY, bytes(32)))
    assert leader.stage == "held"
    assert said(leader) == []
    leader.receive(0.4, have())
    assert leader.verdict == "applied"


def test_the_leader_decides_nothing_when_the_follower_could_hardly_hear_it():
    last_s = DEADLINE_S * (1 - COMMIT_MARGIN)
    leader = held_leader()
    leader.receive(last_s, have())
    assert leader.stage == "held"
    punctual = held_leader()
    punctual.receive(last_s - 0.01, have())
    assert punctual.verdict == "applied"


def test_a_follower_applies_on_the_leaders_word_only_and_only_with_the_payload():
    follower = matched_follower()
    follower.receive(0.2, COMMIT)
    assert follower.stage == "matched"
    leader = held_leader()
    leader.receive(0.3, COMMIT)
    assert leader.stage == "held"


def test_a_payload_without_a_match_changes_nothing():
    follower = follow()
    follower.complete(0.2)
    assert follower.stage == "open"


def test_both_sides_compute_the_same_hash_of_both_payloads():
    assert held_leader().joint_digest == held_follower().joint_digest
    other = matched_follower()
    other.theirs = msgspec.structs.replace(offer_of("a"), digests=(b"x" * 32,))
    assert other.joint_digest != held_leader().joint_digest


# ends


@pytest.mark.parametrize(
    ("make", "verdict", "unsure"),
    [
        (lead, "alone", False),
        (follow, "alone", False),
        (matched_leader, "failed", False),
        (matched_follower, "failed", False),
        (held_leader, "failed", False),
        (held_follower, "failed", True),
    ],
)
@pytest.mark.parametrize("end", ["deadline", "partner lost"])
def test_every_state_ends_and_only_a_follower_that_holds_both_is_unsure(make, verdict, unsure, end):
    side = make()
    if end == "deadline":
        side.tick(DEADLINE_S)
    else:
        side.lost(0.5)
    assert (side.stage, side.verdict, side.unsure) == ("done", verdict, unsure)
    assert said(side)[-1:] == [ABORT]


@pytest.mark.parametrize(
    ("make", "verdict"),
    [(lead, "alone"), (follow, "alone"), (matched_leader, "failed"), (matched_follower, "failed"),
     (held_leader, "failed"), (held_follower, "failed")],
)  # fmt: skip
def test_an_abort_ends_every_state_and_leaves_no_side_unsure(make, verdict):
    side = make()
    side.receive(0.5, ABORT)
    assert (side.stage, side.verdict, side.unsure) == ("done", verdict, False)


def applied_leader():
    leader = held_leader()
    leader.receive(0.3, have())
    said(leader)
    return leader


def test_a_question_after_the_end_is_answered_with_the_decision():
    applied, failed = applied_leader(), held_leader()
    failed.lost(0.4)
    said(failed)
    applied.receive(1.0, have(ask=True))
    failed.receive(1.0, have(ask=True))
    assert said(applied) == [COMMIT]
    assert said(failed) == [ABORT]
    applied.receive(1.1, PairHave(KEY, bytes(32), True))
    assert said(applied) == [ABORT], "it asks about another payload than the one applied"


def test_a_proposal_after_the_end_hears_that_it_came_too_late():
    follower = follow()
    follower.tick(DEADLINE_S)
    said(follower)
    follower.receive(11.0, PROPOSE)
    assert said(follower) == [ABORT]


def test_nothing_changes_a_verdict():
    leader, follower = applied_leader(), held_follower()
    follower.receive(0.4, COMMIT)
    for side, verdict in ((leader, "applied"), (follower, "applied")):
        for message in (ABORT, COMMIT, PROPOSE, ACCEPT, PairRefuse(KEY, 7)):
            side.receive(1.0, message)
        side.lost(2.0)
        side.tick(99.0)
        side.complete(99.0)
        assert (side.stage, side.verdict, side.unsure) == ("done", verdict, False)


# Many rounds of bad luck, in steps of 50 ms.


def check(end):
    """The law of pairs: `applied` means that both sides held both payloads; one side alone applies
    only if the other could not hear of it."""
    leader, follower = end.sides
    if follower.verdict == "applied":
        assert leader.verdict == "applied", "a follower applied without its leader"
    if leader.verdict == "applied":
        assert follower.stage in ("held", "done")
        assert follower.theirs is not None
        assert follower.joint_digest == leader.joint_digest
    one_sided = end.verdicts.count("applied") == 1
    if one_sided and 1 not in end.crashed:
        assert follower.unsure, "a follower that missed the decision must know that it may have"
    return one_sided


def test_without_faults_everybody_applies():
    for seed in range(300):
        end = Round(seed, faults=False).run()
        assert end.verdicts == ["applied", "applied"], seed


def test_under_bad_luck_every_wait_ends_and_sides_differ_only_where_that_is_noted():
    rounds, one_sided, applied = 2000, 0, 0
    for seed in range(rounds):
        end = Round(seed, faults=True).run()
        one_sided += check(end)
        applied += end.verdicts == ["applied", "applied"]
    assert applied > rounds / 2
    assert 0 < one_sided < rounds / 50, f"{one_sided} of {rounds} rounds applied on one side only"


def test_both_alive_and_connected_end_equally():
    for seed in range(800):
        end = Round(seed, faults=True)
        end.cut_s = end.crash = None
        end.loss = min(end.loss, 0.1)
        end.run()
        assert not check(end), seed


@pytest.mark.long
@blocks(10**6, 10**6 + 100_000, size=10_000)
def test_the_same_holds_in_a_hundred_thousand_rounds(seeds):
    for seed in seeds:
        check(Round(seed, faults=True).run())
