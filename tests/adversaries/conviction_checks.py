"""The checks of convictions and of forks, each with a test that misses it."""

from adversaries.check import Check

PROOFS = "swarm/protocol/agreement/test_convictions.py::test_"
CONVICTED = "adversaries/test_convictions.py::test_"
FORKS = "adversaries/test_forks.py::test_"
SYNC = "swarm/peer/views/conviction_sync.py"
MODULE = "swarm/protocol/agreement/convictions.py"

CONVICTION_CHECKS = [
    Check(
        "conviction: the statements contradict each other",
        MODULE,
        "if not contradict(said.vote, said.against):",
        "if False:",
        f"{PROOFS}statements_that_do_not_contradict_each_other_prove_nothing",
    ),
    Check(
        "conviction: both are signed",
        MODULE,
        "return all(verify(said.peer, vote_domain(run), text, proof) for text, proof in texts)",
        "return bool(texts)",
        f"{PROOFS}nothing_in_a_proof_can_be_changed",
    ),
    Check(
        "conviction: not of two votes for one value",
        MODULE,
        "return vote.ballot == other.ballot and vote.digest != other.digest",
        "return vote.ballot == other.ballot",
        f"{PROOFS}an_acceptor_never_contradicts_itself_whatever_it_is_asked_in_whichever_order",
    ),
    Check(
        "conviction: not of a vote after the promise",
        MODULE,
        "if vote.ballot >= other.ballot:",
        "if False:",
        f"{PROOFS}an_acceptor_never_contradicts_itself_whatever_it_is_asked_in_whichever_order",
    ),
    Check(
        "conviction: on nobody's word",
        SYNC,
        "if not is_proven(context.run, said):",
        "if False:",
        f"{CONVICTED}a_member_that_shows_what_proves_nothing_convicts_nobody",
    ),
    Check(
        "conviction: of a key that was admitted",
        SYNC,
        "if not self._is_known(said.peer) or len(raw) > MAX_PROOF_BYTES:",
        "if len(raw) > MAX_PROOF_BYTES:",
        f"{CONVICTED}a_member_that_shows_what_proves_nothing_convicts_nobody",
    ),
    Check(
        "conviction: it outlasts a restart",
        SYNC,
        "        self._keep()\n",
        "",
        f"{CONVICTED}proofs_outlast_a_restart_of_all_that_hold_them",
    ),
    Check(
        "conviction: not on the word of a broken disk",
        SYNC,
        "                if is_proven(self._context.run, said):",
        "                if True:",
        f"{CONVICTED}proofs_on_a_broken_disk_convict_nobody",
    ),
    Check(
        "conviction: the convicted do not come back",
        "swarm/peer/views/admission.py",
        "if peer in self.convictions.proofs:",
        "if False:",
        f"{CONVICTED}one_that_holds_a_proof_shows_it_to_all_and_the_convicted_never_comes_back",
    ),
    Check(
        "conviction: the convicted propose nothing",
        "swarm/peer/views/next_view.py",
        "elif isinstance(message, Prepare | Propose) and sender in convicted:",
        "elif False:",
        f"{CONVICTED}a_convicted_member_proposes_no_view_any_more",
    ),
    Check(
        "certificate: its proofs are true",
        MODULE,
        'if not is_proven(run, said):\n            raise BadProof("a proof that proves nothing")',
        "pass",
        f"{PROOFS}what_proves_nothing_leaves_nobody_out",
    ),
    Check(
        "certificate: its proofs are against voters, once each",
        MODULE,
        "if said.peer not in electorate.keys_that_vote or said.peer in convicted:",
        "if False:",
        f"{PROOFS}what_proves_nothing_leaves_nobody_out",
    ),
    Check(
        "certificate: the convicted sign none that convicts them",
        "swarm/protocol/agreement/electorate.py",
        "return Electorate(self.hash, self.peers, self.lives, self.learners | out)",
        "return self",
        f"{PROOFS}the_convicted_sign_no_certificate_that_convicts_them",
    ),
    Check(
        "certificate: a link over views leaves no voter out",
        "swarm/protocol/backbone.py",
        "if link.convictions:",
        "if False:",
        f"{PROOFS}a_link_over_views_has_no_convictions",
    ),
    Check(
        "proposer: promises of the convicted do not count",
        "swarm/protocol/agreement/decide.py",
        "if not self.judges.electorate.votes(sender):",
        "if False:",
        f"{PROOFS}what_the_convicted_promise_or_accept_does_not_count",
    ),
    Check(
        "proposer: acceptances of the convicted do not count",
        "swarm/protocol/agreement/decide.py",
        "if not self.judges.electorate.votes(sender) or not",
        "if not",
        f"{PROOFS}what_the_convicted_promise_or_accept_does_not_count",
    ),
    Check(
        "proposer: what the convicted promised before is forgotten",
        "swarm/protocol/agreement/decide.py",
        "self.proposer.forget(self.judges.left_out)",
        "pass",
        f"{PROOFS}what_the_convicted_promise_or_accept_does_not_count",
    ),
    Check(
        "fork: one list is kept",
        "swarm/peer/rounds/forks.py",
        "has_lost = _rank(other) < _rank(mine)",
        "has_lost = True",
        f"{FORKS}members_on_two_sides_of_a_fork_convict_the_voter_that_made_it_and_are_equal",
    ),
    Check(
        "fork: a list that does not follow is not taken",
        "swarm/peer/rounds/round_log.py",
        "return not is_next or previous_of(decided.value) in (None, newest)",
        "return True",
        f"{FORKS}members_on_two_sides_of_a_fork_convict_the_voter_that_made_it_and_are_equal",
    ),
    Check(
        "fork: the side that lost signs where the fork is",
        "swarm/peer/views/refounding.py",
        "is_within = first <= view.first_round <= last",
        "is_within = True",
        f"{FORKS}the_side_that_lost_lets_nobody_take_back_more_than_the_fork",
    ),
    Check(
        "fork: no vote beside forgotten ones",
        "swarm/peer/branching.py",
        "self._context.give_up(but=view)",
        "pass",
        f"{FORKS}members_on_two_sides_of_a_fork_convict_the_voter_that_made_it_and_are_equal",
    ),
    Check(
        "fork: no state of those that lost, too",
        "swarm/peer/peer.py",
        "sources = self.branching.drift.sources",
        "sources = frozenset[PeerId]()",
        f"{FORKS}a_state_in_place_of_one_that_lost_is_asked_of_those_that_kept_the_list",
    ),
]
