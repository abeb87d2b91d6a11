"""Two signed statements that no honest member makes both, and nothing else, convict."""

import random

import msgspec
import pytest
from worlds.decisions import KEY, VIEW, Ruled, Schedule, electorate_of

from farflock.swarm.identity import Identity
from farflock.swarm.messages import (
    MAX_PROOFS_SENT,
    Accepted,
    Decided,
    Ground,
    Key,
    Promise,
    Propose,
)
from farflock.swarm.protocol.agreement.certificates import signed_text
from farflock.swarm.protocol.agreement.convictions import (
    MAX_KEPT,
    Contradiction,
    Judges,
    SignedPromise,
    SignedVote,
    Testimony,
    contradict,
    is_proven,
)
from farflock.swarm.protocol.agreement.decide import Decision
from farflock.swarm.protocol.agreement.electorate import Electorate
from farflock.swarm.protocol.agreement.justified import (
    digest_of,
    promise_text,
    vote_domain,
    vote_text,
)
from farflock.swarm.protocol.agreement.rules import SignedRules
from farflock.swarm.protocol.backbone import Link, link_between, pack, require_link, unpack
from farflock.swarm.protocol.views import (
    Certified,
    Chain,
    Forgery,
    Member,
    View,
    encode,
    successor,
    view_key,
)

RUN = "run"
IDENTITIES = [Identity.from_seed(bytes([number + 1]) * 32) for number in range(5)]
ONE, OTHER = b"1" * 32, b"2" * 32


def vote(ballot, digest=ONE):
    return SignedVote((ballot, 0), digest, b"")


def promise(ballot, accepted=None, digest=ONE):
    shown = None if accepted is None else (accepted, 0)
    return SignedPromise((ballot, 0), (), shown, b"" if accepted is None else digest, b"")


@pytest.mark.parametrize(
    "others",
    [
        (vote(2), vote(2, OTHER)),
        (vote(2), promise(3)),
        (vote(2), promise(3, 1)),
        (vote(2), promise(3, 2, OTHER)),
    ],
    ids=["two values", "a hidden vote", "an older vote", "another vote"],
)
def test_these_contradict_each_other(others):
    assert contradict(*others)


@pytest.mark.parametrize(
    "others",
    [
        (vote(2), vote(2)),
        (vote(2), vote(3, OTHER)),
        (vote(2), promise(3, 2)),
        (vote(1), promise(3, 2, OTHER)),
        (vote(3), promise(3)),
        (vote(3), promise(2)),
    ],
)
def test_these_do_not(others):
    assert not contradict(*others)


class Acceptor:
    """An honest acceptor as the paper has it: the slow twin of what is not proof."""

    def __init__(self):
        self.promised, self.accepted, self.said = (0, 0), None, []

    def prepare(self, ballot):
        if ballot >= self.promised:
            self.promised = ballot
            accepted, digest = self.accepted or (None, b"")
            self.said.append(SignedPromise(ballot, (), accepted, digest, b""))

    def propose(self, ballot, digest):
        is_second = self.accepted and self.accepted[0] == ballot and self.accepted[1] != digest
        if ballot >= self.promised and not is_second:
            self.promised, self.accepted = ballot, (ballot, digest)
            self.said.append(SignedVote(ballot, digest, b""))


@pytest.mark.parametrize("seed", range(300))
def test_an_acceptor_never_contradicts_itself_whatever_it_is_asked_in_whichever_order(seed):
    chance, acceptor = random.Random(seed), Acceptor()
    for step in range(40):
        ballot = max(1, step // 3 + chance.randint(-2, 2)), 0  # some come late
        if chance.random() < 0.5:
            acceptor.prepare(ballot)
        else:
            acceptor.propose(ballot, chance.choice([ONE, OTHER]))
    votes = [each for each in acceptor.said if isinstance(each, SignedVote)]
    assert 1 < len(votes) < len(acceptor.said)
    assert not [(a, b) for a in votes for b in acceptor.said if contradict(a, b)]


def test_no_schedule_of_losses_repetitions_and_crashes_convicts_an_honest_member(monkeypatch):
    found, heard = [], []
    monkeypatch.setattr(Ruled, "convict", lambda self, said: found.append(said), raising=False)
    hear = Testimony.hear_promises
    monkeypatch.setattr(
        Testimony, "hear_promises", lambda self, *said: (heard.append(said), hear(self, *said))
    )
    for seed in range(300):
        schedule = Schedule(seed, refusals=0.1)
        schedule.disturb(200)
        schedule.calm_down()
    assert heard
    assert not found


# What is shown to others.


def signed(identity, text):
    return identity.sign(vote_domain(RUN), text)


def proof_of_two_values(identity=IDENTITIES[0]):
    ballot = (2, 1)
    votes = [
        SignedVote(ballot, digest, signed(identity, vote_text(KEY, VIEW, ballot, digest)))
        for digest in (ONE, OTHER)
    ]
    return Contradiction(identity.peer, KEY, VIEW, *votes)


def proof_of_a_hidden_vote(identity=IDENTITIES[0]):
    vote = SignedVote((2, 0), ONE, signed(identity, vote_text(KEY, VIEW, (2, 0), ONE)))
    text = promise_text(Promise(KEY, VIEW, (2, 1), floor=(5, 6)))
    against = SignedPromise((2, 1), (5, 6), None, b"", signed(identity, text))
    return Contradiction(identity.peer, KEY, VIEW, vote, against)


PROOFS = {"two values": proof_of_two_values(), "a hidden vote": proof_of_a_hidden_vote()}


@pytest.mark.parametrize("said", PROOFS.values(), ids=PROOFS)
def test_a_contradiction_proves_itself_to_anybody_in_its_run_and_nowhere_else(said):
    raw = msgspec.msgpack.encode(said)
    again = msgspec.msgpack.decode(raw, type=Contradiction)
    assert again == said
    assert len(raw) < 500
    assert is_proven(RUN, again)
    assert not is_proven("another run", again)


def changes(said):
    replace = msgspec.structs.replace
    vote, against = said.vote, said.against
    yield replace(said, peer=IDENTITIES[1].peer)
    yield replace(said, key=Key(KEY.stream, KEY.round + 1))
    yield replace(said, electorate=b"e" * 32)
    yield (
        replace(said, vote=against)
        if isinstance(against, SignedVote)
        else replace(said, vote=replace(vote, ballot=(0, 1)))
    )
    yield replace(said, vote=replace(vote, digest=b"3" * 32))
    yield replace(said, vote=replace(vote, proof=bytes(64)))
    yield replace(said, against=replace(against, ballot=(1, 1)))
    yield replace(said, against=replace(against, digest=ONE))
    yield replace(said, against=replace(against, proof=bytes(64)))
    if isinstance(against, SignedPromise):
        yield replace(said, against=replace(against, floor=()))
        yield replace(said, against=replace(against, accepted=(0, 0)))


@pytest.mark.parametrize("said", PROOFS.values(), ids=PROOFS)
def test_nothing_in_a_proof_can_be_changed(said):
    changed = list(changes(said))
    assert len(changed) >= 9
    assert not [each for each in changed if is_proven(RUN, each)]


def test_statements_that_do_not_contradict_each_other_prove_nothing():
    signer = IDENTITIES[0]
    votes = [
        SignedVote(ballot, ONE, signed(signer, vote_text(KEY, VIEW, ballot, ONE)))
        for ballot in ((1, 0), (2, 0))
    ]
    assert not is_proven(RUN, Contradiction(signer.peer, KEY, VIEW, *votes))


# Who notices.


class Voters:
    """Voters that sign, of which the first says what it likes."""

    def __init__(self, count=3):
        peers = tuple(each.peer for each in IDENTITIES[:count])
        self.electorate = Electorate(VIEW, peers, (1,) * count)
        self.found = []

    def decision(self, me, proposers=(1, 2, 0)):
        rules = SignedRules(RUN, IDENTITIES[me], self.electorate, notes=self)
        return Decision(KEY, self.electorate, me, proposers, rules=rules)

    def accuse(self, peer, what):
        raise AssertionError(what)

    def convict(self, said):
        self.found.append(said)

    def convicted(self):
        assert all(is_proven(RUN, each) for each in self.found)
        return {each.peer for each in self.found}

    def vote(self, ballot, value, member=0):
        text = vote_text(KEY, VIEW, ballot, digest_of(value))
        return member, signed(IDENTITIES[member], text)

    def hidden(self, ballot, member=0):
        said = Promise(KEY, VIEW, ballot)
        proof = signed(IDENTITIES[member], promise_text(said))
        return msgspec.structs.replace(said, proof=proof)


def test_a_proposer_whose_value_a_member_accepted_finds_the_promise_that_hides_it():
    voters = Voters(5)
    proposer = voters.decision(1, (1, 2, 0, 3, 4))
    proposer.propose(b"mine")
    proposer.receive(0, Accepted(KEY, VIEW, (0, 1), voters.vote((0, 1), b"mine")[1]))
    proposer.propose(b"mine")
    assert proposer.proposer.state == "preparing"
    assert not voters.found
    proposer.receive(0, voters.hidden(proposer.proposer.ballot))
    assert voters.convicted() == {IDENTITIES[0].peer}


@pytest.mark.parametrize("is_judge", [True, False], ids=["a judge", "a learner"])
def test_whoever_sees_promises_and_a_certificate_compares_them(is_judge):
    """The liar helped to decide in ballot 0, and promises in ballot 2 as if it had not."""
    voters = Voters()
    member = voters.decision(2, (1, 0, 2))
    grounds = [Ground(number, (), voters.hidden((2, 0), number).proof) for number in (0, 1)]
    certificate = Decided(
        KEY,
        VIEW,
        b"theirs",
        (0, 1),
        (voters.vote((0, 1), b"theirs"), voters.vote((0, 1), b"theirs", 2)),
    )
    member.take_turns(0.0)
    member.pass_time(60.0, {1})
    if is_judge:
        member.receive(0, Propose(KEY, VIEW, (2, 0), b"mine", tuple(grounds)))
    else:
        member.testimony.hear_promises((2, 0), grounds)
    assert not voters.found
    member.receive(1, certificate)
    assert member.decided == b"theirs"
    assert voters.convicted() == {IDENTITIES[0].peer}


def test_only_the_newest_statements_of_a_member_are_kept():
    found = []
    testimony = Testimony(KEY, electorate_of(3), found.append)
    for number in range(5 * MAX_KEPT):
        testimony.hear_votes((number, 0), ONE, [(1, b"")])
    assert not found
    newest = 5 * MAX_KEPT - 1
    testimony.hear_votes((newest, 0), OTHER, [(1, b"")])
    testimony.hear_votes((0, 0), OTHER, [(1, b"")])
    assert [each.vote.ballot for each in found] == [(newest, 0)]


def chain_of(count):
    """A chain whose newest view has these members, all with votes, and their identities."""
    members = tuple(Member(each.peer, 1) for each in IDENTITIES[:count])
    parent = View(1, ONE, 5, members)
    return Chain(RUN, [Certified(parent)]), parent


def successor_of(parent, signers, convictions=(), ballot=(1, 0)):
    """The view without the convicted, signed by these members (indices)."""
    view = successor(parent, parent.members[-1:])
    text = signed_text(view_key(view.number), parent.hash, ballot, encode(view))
    proofs = tuple((at, IDENTITIES[at].sign(vote_domain(RUN), text)) for at in sorted(signers))
    return Certified(view, ballot, proofs, tuple(convictions))


def proof_of(member, signer=None, run=RUN):
    key, peer = view_key(2), IDENTITIES[member].peer
    sign = IDENTITIES[member if signer is None else signer].sign
    votes = [
        SignedVote((1, 0), digest, sign(vote_domain(run), vote_text(key, VIEW, (1, 0), digest)))
        for digest in (ONE, OTHER)
    ]
    return msgspec.msgpack.encode(Contradiction(peer, key, VIEW, *votes))


@pytest.mark.parametrize(
    ("members", "signers", "convicted"),
    [
        (2, [1], [0]),
        (3, [1], [0]),
        (3, [0], [2]),
        (4, [1, 2], [0]),
        (5, [0, 1], [2]),
        (5, [1], [0, 2, 3]),
    ],
)
def test_votes_of_the_convicted_are_left_out_of_the_quorum_that_a_view_needs(
    members, signers, convicted
):
    chain, parent = chain_of(members)
    with pytest.raises(Forgery, match="lacks the signatures"):
        chain.extend(successor_of(parent, signers))
    assert chain.extend(successor_of(parent, signers, map(proof_of, convicted)))


def test_what_proves_nothing_leaves_nobody_out():
    chain, parent = chain_of(2)
    for proofs in (
        [proof_of(0, signer=1)],
        [proof_of(0, run="another run")],
        [proof_of(0), proof_of(0)],
        [proof_of(3)],
        [b"\xff"],
    ):
        with pytest.raises(Forgery, match="the certificate of view 2 has"):
            chain.extend(successor_of(parent, [1], proofs))


def test_the_convicted_sign_no_certificate_that_convicts_them():
    chain, parent = chain_of(3)
    with pytest.raises(Forgery, match="lacks the signatures"):
        chain.extend(successor_of(parent, [0, 1], [proof_of(0)]))


def test_a_link_leads_over_no_view_by_a_quorum_without_the_convicted():
    _, parent = chain_of(2)
    entry = successor_of(parent, [1], [proof_of(0)])
    link = link_between(parent, parent, entry)
    require_link(RUN, parent, unpack(pack(link, parent), [parent])[1])
    later = successor_of(entry.view, [0])
    far = link_between(parent, entry.view, later)
    assert far is None, "the one that is left was no quorum of the first view"


def test_a_link_over_views_has_no_convictions():
    _, parent = chain_of(3)
    between = successor(parent, parent.members)
    view, ballot = successor(between, parent.members), (1, 0)
    text = signed_text(view_key(view.number), between.hash, ballot, encode(view))
    proofs = tuple((at, IDENTITIES[at].sign(vote_domain(RUN), text)) for at in range(3))
    require_link(RUN, parent, Link(parent.hash, view, ballot, proofs))
    with pytest.raises(Forgery, match="has convictions"):
        require_link(RUN, parent, Link(parent.hash, view, ballot, proofs, (proof_of(0),)))


def test_voters_decide_without_the_convicted_and_say_by_which_proofs():
    voters = Electorate(VIEW, tuple(each.peer for each in IDENTITIES[:3]), (1, 1, 1))
    rules = [SignedRules(RUN, each, voters) for each in IDENTITIES[:3]]
    one = Decision(view_key(2), voters, 1, (1, 2, 0), rules=rules[1])
    raw = proof_of(0)
    one.convict({IDENTITIES[0].peer: raw, "no voter": b"x"})
    sends = one.propose(b"view")
    assert one.decided == b"view", "of the two that are left, the senior one decides"
    announced = one.announcement()
    assert (announced.convictions, [at for at, _ in announced.proofs]) == ((raw,), [1])
    proposals = [message for _, message in sends if isinstance(message, Propose)]
    assert all(each.convictions == (raw,) for each in proposals)


def test_a_quorum_of_all_needs_no_proofs_in_its_certificate():
    voters = Electorate(VIEW, tuple(each.peer for each in IDENTITIES[:3]), (1, 1, 1))
    rules = [SignedRules(RUN, each, voters) for each in IDENTITIES[:3]]
    one, other = (Decision(view_key(2), voters, me, (2, 1, 0), rules=rules[me]) for me in (1, 2))
    for decision in (one, other):
        decision.convict({IDENTITIES[0].peer: proof_of(0)})
    (proposal, *_) = [message for _, message in other.propose(b"view")]
    assert other.decided is None
    ((_, accepted),) = one.receive(2, proposal)
    other.receive(1, accepted)
    assert (other.decided, other.announcement().convictions) == (b"view", ())


@pytest.mark.parametrize("known", ["before", "after"])
def test_what_the_convicted_promise_or_accept_does_not_count(known):
    """Other judges would refuse a proposal or a certificate with its signature."""
    voters = Electorate(VIEW, tuple(each.peer for each in IDENTITIES), (1,) * 5)
    rules = [SignedRules(RUN, each, voters) for each in IDENTITIES]
    rules[2].in_step = False
    one, key = Decision(view_key(2), voters, 2, (2, 0, 1, 3, 4), rules=rules[2]), view_key(2)
    proofs = {IDENTITIES[0].peer: proof_of(0)}
    if known == "before":
        one.convict(proofs)
    ballot = one.propose(b"view")[0][1].ballot

    def promised(member):
        said = Promise(key, VIEW, ballot)
        return msgspec.structs.replace(said, proof=rules[member].sign(promise_text(said)))

    for member in (0, 3):
        one.receive(member, promised(member))
        if known == "after":
            one.convict(proofs)
    sends = one.receive(1, promised(1))
    proposal = next(message for _, message in sends)
    assert [each.member for each in proposal.grounds] == [1, 2, 3]
    text = signed_text(key, VIEW, ballot, b"view")
    for member in (0, 3, 1):
        assert one.decided is None
        one.receive(member, Accepted(key, VIEW, ballot, rules[member].sign(text)))
    assert [at for at, _ in one.announcement().proofs] == [1, 2, 3]


def test_a_round_has_no_convictions():
    voters = Electorate(VIEW, tuple(each.peer for each in IDENTITIES[:3]), (1,) * 3)
    me = Decision(KEY, voters, 1, (1, 2, 0), rules=SignedRules(RUN, IDENTITIES[1], voters))
    text = signed_text(KEY, VIEW, (0, 0), b"list")
    proofs = tuple((at, IDENTITIES[at].sign(vote_domain(RUN), text)) for at in (0, 2))
    me.receive(2, Decided(KEY, VIEW, b"list", (0, 0), proofs, (b"anything",)))
    assert me.decided is None
    me.receive(2, Decided(KEY, VIEW, b"list", (0, 0), proofs))
    assert me.decided == b"list"


def test_no_more_voters_are_left_out_than_a_message_has_proofs():
    peers = tuple(f"peer{number}" for number in range(MAX_PROOFS_SENT + 10))
    judges = Judges(Electorate(VIEW, peers, (1,) * len(peers), frozenset({0})))
    assert judges.leave_out({peer: peer.encode() for peer in peers[:-4]})
    assert sorted(judges.left_out) == list(range(1, MAX_PROOFS_SENT + 1))
    assert judges.proofs == tuple(peers[at].encode() for at in range(1, MAX_PROOFS_SENT + 1))
