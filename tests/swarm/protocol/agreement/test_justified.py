"""Proposals in later ballots: an acceptor believes signed promises, and no proposer."""

import pytest
from msgspec.structs import replace
from worlds.decisions import KEY, VIEW, Ruled, electorate_of

from farflock.swarm.identity import Identity
from farflock.swarm.messages import Accepted, Ground, Prepare, Promise, Propose, Rejected
from farflock.swarm.protocol.agreement.certificates import checker, signed_text
from farflock.swarm.protocol.agreement.decide import Decision
from farflock.swarm.protocol.agreement.electorate import Electorate
from farflock.swarm.protocol.agreement.justified import (
    digest_of,
    ground_of,
    is_justified,
    promise_text,
    refusal_text,
    vote_domain,
)
from farflock.swarm.protocol.agreement.proposer import Proposer
from farflock.swarm.protocol.agreement.rules import JUSTIFY_TIMEOUT_S, SignedRules
from farflock.swarm.protocol.agreement.turns import EARLY_S, TAKEOVER_S, next_ballot

RUN, SIZE, LIAR = "run", 5, 4
KEYS = [Identity.from_seed(bytes([number + 1]) * 32) for number in range(SIZE)]
VOTERS = Electorate(VIEW, tuple(key.peer for key in KEYS), (1,) * SIZE)
BALLOT = (next_ballot(0, range(SIZE), LIAR), LIAR)
checks = checker(RUN, VOTERS)


class Member:
    """A voter with its rules, and whom it accuses of what."""

    def __init__(self, me):
        self.accused = []
        rules = SignedRules(RUN, KEYS[me], VOTERS, notes=self)
        self.decision = Decision(KEY, VOTERS, me, tuple(range(SIZE)), rules=rules)

    def accuse(self, peer, what):
        self.accused.append((peer, what))

    def convict(self, said):
        raise AssertionError(said)

    def receive(self, sender, message):
        return self.decision.receive(sender, message)


def promise_of(member, ballot=BALLOT, accepted=None, value=None, floor=()):
    said = Promise(KEY, VIEW, ballot, accepted, value, floor)
    return replace(said, proof=KEYS[member].sign(vote_domain(RUN), promise_text(said)))


def grounds_of(*promises):
    """Grounds of these (member, promise)."""
    return tuple(ground_of(member, promise) for member, promise in promises)


def refusals_of(value, *members):
    text = refusal_text(KEY, VIEW, digest_of(value))
    return tuple((member, KEYS[member].sign(vote_domain(RUN), text)) for member in members)


FREE = grounds_of((0, promise_of(0)), (1, promise_of(1)), (2, promise_of(2)))
BOUND = (ground_of(0, promise_of(0, accepted=(0, 0), value=b"old")), *FREE[1:])


def proposal(value, grounds=(), refusals=()):
    return Propose(KEY, VIEW, BALLOT, value, grounds, refusals)


def test_whoever_is_free_may_propose_anything_and_whoever_is_bound_only_what_binds():
    assert is_justified(proposal(b"new", FREE), VOTERS, checks)
    assert is_justified(proposal(b"old", BOUND), VOTERS, checks)
    assert not is_justified(proposal(b"new", BOUND), VOTERS, checks)


def test_a_value_that_too_many_refuse_binds_nobody():
    assert is_justified(proposal(b"new", BOUND, refusals_of(b"old", 1, 2, 3)), VOTERS, checks)


@pytest.mark.parametrize("values", [(b"one", b"two"), (b"two", b"one")])
def test_of_two_values_in_one_ballot_a_proposer_takes_the_one_that_acceptors_expect(values):
    """A liar had both accepted: an honest proposer must not seem to lie in its place."""
    promises = {at: promise_of(at, accepted=(0, 0), value=value) for at, value in enumerate(values)}
    proposer = Proposer(KEY, VIEW, "preparing", BALLOT, b"own", {**promises, 2: promise_of(2)})
    assert proposer.bind(VOTERS)
    proposer.put(proposer.value)
    assert is_justified(proposer.proposal(()), VOTERS, checks)
    assert (digest_of(b"one") > digest_of(b"two")) != (b"one" > b"two"), "no order gives both"


@pytest.mark.parametrize(
    ("grounds", "refusals", "why"),
    [
        ((), (), "none"),
        (FREE[:2], (), "too few"),
        ((FREE[0], FREE[1], FREE[1]), (), "one of them twice"),
        ((*FREE[:2], replace(FREE[2], member=63)), (), "a member that does not exist"),
        ((*FREE[:2], replace(FREE[2], member=3)), (), "the signature of another member"),
        ((*FREE[:2], Ground(2, (), b"forged")), (), "a forged signature"),
        ((*FREE[:2], replace(FREE[2], floor=(2**62,))), (), "another floor than was signed"),
        ((replace(BOUND[0], accepted=None, digest=b""), *FREE[1:]), (), "a vote left out"),
        ((replace(BOUND[0], digest=digest_of(b"new")), *FREE[1:]), (), "another value"),
        (
            grounds_of(*((n, promise_of(n, (BALLOT[0] + SIZE, LIAR))) for n in range(3))),
            (),
            "the promises for another ballot",
        ),
        (
            grounds_of(
                (0, promise_of(0)),
                (1, promise_of(1)),
                (2, promise_of(2, accepted=(BALLOT[0] + 1, 0), value=b"new")),
            ),
            (),
            "a promise with a later vote",
        ),
        (BOUND, refusals_of(b"old", 1, 2), "refusals that leave a quorum"),
        (BOUND, refusals_of(b"old", 1, 2, 2), "a refusal twice"),
        (BOUND, refusals_of(b"another", 1, 2, 3), "refusals of another value"),
        (BOUND, (*refusals_of(b"old", 1, 2), (3, b"forged")), "a forged refusal"),
        (BOUND, (*refusals_of(b"old", 1, 2), (63, b"")), "a refusal of nobody"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_justify_a_proposal_is_refused_and_its_proposer_accused(
    grounds, refusals, why
):
    assert not is_justified(proposal(b"new", grounds, refusals), VOTERS, checks), why
    member = Member(1)
    assert member.receive(LIAR, proposal(b"new", grounds, refusals)) == []
    assert member.decision.accepted is None
    assert member.accused == [
        (KEYS[LIAR].peer, "a proposal that does not follow from its promises")
    ]


def test_a_second_value_beside_a_chosen_one_gets_no_quorum():
    """Members 0, 1 and 2 have accepted a value, so it is chosen, though only member 0 knows. A liar
    ignores what they promise."""
    members = [Member(number) for number in range(SIZE)]
    for to, message in members[0].decision.propose(b"chosen"):
        if to in (1, 2):
            members[to].receive(0, message)
    promises = []
    for number in (0, 2, 3):
        members[number].decision.decided = None
        (answer,) = members[number].receive(LIAR, Prepare(KEY, VIEW, BALLOT))
        promises.append((number, answer[1]))
    lie = proposal(b"second", grounds_of(*promises))
    answers = [members[number].receive(LIAR, lie) for number in (0, 2, 3)]
    assert not any(isinstance(message, Accepted) for sends in answers for _, message in sends)
    truth = proposal(b"chosen", grounds_of(*promises))
    assert all(members[number].receive(LIAR, truth) for number in (0, 2, 3))


def test_a_promise_with_a_false_signature_counts_for_nothing():
    member = Member(LIAR)
    member.decision.propose(b"mine")
    for other in (0, 1, 2):
        member.receive(other, replace(promise_of(other), proof=b"forged"))
    assert member.decision.proposer.state == "preparing"
    for other in (0, 1):
        member.receive(other, promise_of(other))
    assert member.decision.proposer.state == "proposing"


def test_a_refusal_with_a_false_signature_frees_nobody():
    member = Member(0)
    member.decision.propose(b"mine")
    for other in (1, 2, 3):
        member.receive(other, Rejected(KEY, VIEW, (0, 0), (0, 0), refused=True, proof=b"forged"))
    assert not member.decision.proposer.is_impossible(b"mine", VOTERS)
    for other, proof in refusals_of(b"mine", 1, 2, 3):
        member.receive(other, Rejected(KEY, VIEW, (0, 0), (0, 0), refused=True, proof=proof))
    assert member.decision.proposer.is_impossible(b"mine", VOTERS)


def test_a_member_that_says_it_promised_a_far_ballot_costs_its_proposer_no_turn():
    member = Member(0)
    member.decision.turn = 1
    member.decision.propose(b"mine")
    member.receive(LIAR, Rejected(KEY, VIEW, (0, 0), (2**62, LIAR)))
    member.decision.turn = 6
    assert member.decision.may_begin


def test_a_ballot_is_promised_once_its_turn_has_come_and_not_before():
    member = Member(1)
    member.decision.pass_time(0.0, ())
    assert member.receive(0, Prepare(KEY, VIEW, (1, 0))) == [], "nobody needs one yet"
    member.decision.take_turns(begun_s=10.0)
    comes_s = 10.0 + (BALLOT[0] - 1) * TAKEOVER_S
    member.decision.pass_time(comes_s - 1.01 * EARLY_S, ())
    assert member.receive(LIAR, Prepare(KEY, VIEW, BALLOT)) == []
    assert not member.accused, "its clock may be ahead of ours"
    member.decision.pass_time(comes_s - 0.99 * EARLY_S, ())
    assert member.receive(LIAR, Prepare(KEY, VIEW, BALLOT))
    far = (next_ballot(2**40, range(SIZE), LIAR), LIAR)
    member.receive(LIAR, Prepare(KEY, VIEW, far))
    assert member.accused == [(KEYS[LIAR].peer, "a ballot that no turn reaches")]


def test_whoever_sends_two_values_in_one_ballot_is_accused():
    member = Member(1)
    member.receive(0, Propose(KEY, VIEW, (0, 0), b"one"))
    member.receive(0, Propose(KEY, VIEW, (0, 0), b"other"))
    assert member.decision.accepted == ((0, 0), b"one")
    assert member.accused == [(KEYS[0].peer, "two values in one ballot")]


def test_a_value_not_justified_yet_is_accepted_once_it_is():
    known = set()
    rules = Ruled(is_justified=lambda value, floors: value in known)
    member = Decision(KEY, electorate_of(3, VIEW), 1, (0, 1, 2), rules=rules)
    assert member.receive(0, Propose(KEY, VIEW, (0, 0), b"v")) == []
    assert member.resume() == []
    known.add(b"v")
    ((to, answer),) = member.resume()
    assert (to, answer) == (0, Accepted(KEY, VIEW, (0, 0)))


class Late:
    """A member that can justify a value from some moment on, and hears it proposed at some."""

    def __init__(self):
        self.known = set()
        rules = Ruled(is_justified=lambda value, floors: value in self.known)
        self.decision = Decision(KEY, electorate_of(3, VIEW), 1, (0, 1, 2), rules=rules)

    def hear(self, now_s):
        self.decision.pass_time(now_s, ())
        (_, answer), *_ = [*self.decision.receive(0, Propose(KEY, VIEW, (0, 0), b"v")), (0, None)]
        return answer

    def hear_until(self, end_s, begin_s=0.0):
        moments = [begin_s + tenth / 10 for tenth in range(round(10 * (end_s - begin_s)))]
        return [self.hear(now_s) for now_s in moments]


def test_a_value_that_cannot_be_justified_for_long_is_refused_for_good():
    member = Late()
    assert set(member.hear_until(JUSTIFY_TIMEOUT_S)) == {None}
    assert member.hear(JUSTIFY_TIMEOUT_S).refused
    member.known.add(b"v")
    assert member.hear(JUSTIFY_TIMEOUT_S + 1).refused


def test_a_value_that_is_justified_by_then_is_accepted_however_late_it_is_proposed_again():
    """Its proposer may have been cut off meanwhile."""
    member = Late()
    assert member.hear(0.0) is None
    member.known.add(b"v")
    assert member.hear(10 * JUSTIFY_TIMEOUT_S) == Accepted(KEY, VIEW, (0, 0))


def test_a_member_that_was_cut_off_from_a_value_has_time_to_justify_it():
    member, back_s = Late(), 10 * JUSTIFY_TIMEOUT_S
    assert member.hear(0.0) is None
    waits = member.hear_until(back_s + JUSTIFY_TIMEOUT_S, back_s)
    assert set(waits) == {None}
    assert member.hear(back_s + JUSTIFY_TIMEOUT_S).refused


def test_signed_statements_of_different_kinds_never_have_one_text():
    digest = digest_of(b"v")
    texts = {
        signed_text(KEY, VIEW, BALLOT, b"v"),
        promise_text(Promise(KEY, VIEW, BALLOT)),
        promise_text(Promise(KEY, VIEW, BALLOT, (0, 0), b"v")),
        refusal_text(KEY, VIEW, digest),
    }
    assert len(texts) == 4
