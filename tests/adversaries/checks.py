"""Every check against liars: where it stands, what stands there without it, and a test that fails
then.

`PYTHONPATH=tests python -m adversaries.checks [ID…]` removes each one alone in a copy of the code,
and runs its test there; test_checks.py does so in the long tests. A check that can be removed
unnoticed is none.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from adversaries.anchor_checks import ANCHOR_CHECKS
from adversaries.check import Check
from adversaries.conviction_checks import CONVICTION_CHECKS
from adversaries.membership_checks import MEMBERSHIP_CHECKS
from adversaries.refounding_checks import REFOUNDING_CHECKS

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("compression", "experiments", "farflock", "node", "optimizers", "swarm", "tests")
IGNORED = shutil.ignore_patterns("__pycache__", ".hypothesis")
TIMEOUT_S = 600.0

VOTERS = "adversaries/test_voters.py::test_"
DECIDE = "swarm/protocol/agreement/test_decide.py::test_"
JUSTIFIED = "swarm/protocol/agreement/test_justified.py::test_"
REFUSED = f"{JUSTIFIED}what_does_not_justify_a_proposal_is_refused_and_its_proposer_accused"
MEMBERSHIP = "swarm/peer/views/test_membership.py::test_"
CHANGES = "swarm/protocol/test_view_changes.py::test_"
CLAIMS = "adversaries/test_claims.py"
BRANCHING = "swarm/peer/test_branching.py::test_"
LAGGARDS = "swarm/protocol/exchange/test_laggards.py::test_"
ENTITLED = "swarm/protocol/test_entitlement.py::test_"
COLLECTIVE = "swarm/protocol/exchange/test_collective.py::test_"

CHECKS = [
    Check(
        "decision: a quorum has signed it",
        "swarm/protocol/agreement/certificates.py",
        "or not is_whole or not electorate.is_quorum(proofs.keys()):",
        "or not is_whole:",
        f"{DECIDE}a_forged_certificate_is_refused",
    ),
    Check(
        "decision: its signatures are true",
        "swarm/protocol/agreement/certificates.py",
        "return all(checks(member, text, proof) for member, proof in proofs.items())",
        "return True",
        f"{DECIDE}a_forged_certificate_is_refused",
    ),
    Check(
        "decision: a round's is believed only if certified",
        "swarm/protocol/views.py",
        "return voters is None or is_certified(decided, voters, checker(self.run, voters))",
        "return True",
        "swarm/peer/rounds/test_forged_rounds.py",
    ),
    Check(
        "ballot: one value, ever",
        "swarm/protocol/agreement/decide.py",
        "if self.accepted is not None and self.accepted[0] == ballot and",
        "if False and",
        f"{DECIDE}a_member_accepts_one_value_in_a_ballot_ever",
    ),
    Check(
        "ballot: its owner's",
        "swarm/protocol/agreement/decide.py",
        "if ballot[1] != sender or owner(ballot[0], self.proposers) != sender:",
        "if False:",
        f"{DECIDE}no_member_may_use_the_ballot_of_another",
    ),
    Check(
        "ballot: in its turn",
        "swarm/protocol/agreement/decide.py",
        "return ballot[0] <= self._admitted",
        "return True",
        f"{JUSTIFIED}a_ballot_is_promised_once_its_turn_has_come_and_not_before",
    ),
    Check(
        "ballot: no number that no turn reaches",
        "swarm/protocol/agreement/decide.py",
        "if ballot[0] > MAX_NUMBER:",
        "if False:",
        f"{JUSTIFIED}a_ballot_is_promised_once_its_turn_has_come_and_not_before",
    ),
    Check(
        "ballot: a rejection names no far one",
        "swarm/protocol/agreement/decide.py",
        "if rejected.promised[0] <= self.turn + len(self.electorate):",
        "if True:",
        f"{JUSTIFIED}a_member_that_says_it_promised_a_far_ballot_costs_its_proposer_no_turn",
    ),
    Check(
        "promise: signed",
        "swarm/protocol/agreement/decide.py",
        "if not self.rules.checks(sender, promise_text(promise), promise.proof):",
        "if False:",
        f"{JUSTIFIED}a_promise_with_a_false_signature_counts_for_nothing",
    ),
    Check(
        "acceptance: signed",
        "swarm/protocol/agreement/decide.py",
        "or not self.rules.checks(sender, text, proof):",
        "or False:",
        f"{DECIDE}an_acceptance_with_a_false_signature_does_not_count",
    ),
    Check(
        "refusal: signed",
        "swarm/protocol/agreement/decide.py",
        "if self.rules.checks(sender, text, rejected.proof):",
        "if True:",
        f"{JUSTIFIED}a_refusal_with_a_false_signature_frees_nobody",
    ),
    Check(
        "proposal: a member that it drops may say so",
        "swarm/protocol/agreement/decide.py",
        "(lie := self.rules.contradicts(proposal)) is not None:",
        "(lie := None) is not None:",
        f"{VOTERS}a_view_without_the_others_is_signed_by_none_of_them",
    ),
    Check(
        "proposal: follows from its promises",
        "swarm/protocol/agreement/decide.py",
        "if not is_justified(proposal, voters, self.rules.checks):",
        "if False:",
        f"{JUSTIFIED}a_second_value_beside_a_chosen_one_gets_no_quorum",
    ),
    Check(
        "proposal: promises of members that exist",
        "swarm/protocol/agreement/justified.py",
        "not all(map(electorate.votes, grounds))",
        "False",
        REFUSED,
    ),
    Check(
        "proposal: promises of a quorum",
        "swarm/protocol/agreement/justified.py",
        "if not electorate.is_quorum(grounds.keys()):",
        "if False:",
        REFUSED,
    ),
    Check(
        "proposal: promises signed",
        "swarm/protocol/agreement/justified.py",
        "return checks(ground.member, text, ground.proof)",
        "return True",
        REFUSED,
    ),
    Check(
        "proposal: no promise with a later vote",
        "swarm/protocol/agreement/justified.py",
        "if ground.accepted is not None and ground.accepted >= proposal.ballot:",
        "if False:",
        REFUSED,
    ),
    Check(
        "proposal: the value that binds",
        "swarm/protocol/agreement/justified.py",
        "return bound == digest_of(proposal.value) or _is_impossible(",
        "return True or _is_impossible(",
        REFUSED,
    ),
    Check(
        "refusals: leave no quorum",
        "swarm/protocol/agreement/justified.py",
        "if electorate.is_quorum(set(range(len(electorate))) - refusals.keys()):",
        "if False:",
        REFUSED,
    ),
    Check(
        "refusals: signed",
        "swarm/protocol/agreement/justified.py",
        "electorate.votes(member) and checks(member, text, proof)",
        "True",
        REFUSED,
    ),
    Check(
        "view: nobody goes that is heard",
        "swarm/protocol/view_changes.py",
        "if not is_replaced and member.peer not in witness.leaving and witness.hears(member):",
        "if False:",
        f"{VOTERS}a_view_without_the_others_is_signed_by_none_of_them",
    ),
    Check(
        "view: nobody comes that did not ask",
        "swarm/protocol/view_changes.py",
        "if witness.asked.get(member.peer) != member:",
        "if False:",
        f"{CHANGES}a_view_with_a_change_that_nothing_known_justifies_is_not",
    ),
    Check(
        "view: those that stay keep their order",
        "swarm/protocol/view_changes.py",
        "if view.members[: len(staying)] != staying:",
        "if False:",
        f"{CHANGES}a_view_with_a_change_that_nothing_known_justifies_is_not",
    ),
    Check(
        "view: begins at a round that others reach",
        "swarm/peer/views/view_rules.py",
        "if not begins_in_time(view, self._view, limit):",
        "if False:",
        f"{VOTERS}a_view_that_begins_at_a_round_that_never_comes_is_signed_by_nobody",
    ),
    Check(
        "view: one member's floor does not count alone",
        "swarm/peer/views/view_rules.py",
        "begins = self._next_view.begins(lowest(begins, self._vouched(floors)))",
        "begins = self._next_view.begins(begins)",
        f"{MEMBERSHIP}a_floor_that_one_member_names_alone_does_not_move_where_a_view_begins",
    ),
    Check(
        "view: without a change only when due",
        "swarm/peer/views/view_rules.py",
        "if (view.members, view.learners) == kept and not self._next_view.is_due():",
        "if False:",
        f"{MEMBERSHIP}a_view_without_a_change_is_signed_once_it_is_due_and_not_before",
    ),
    Check(
        "view: a promise holds back only a member that wants one",
        "swarm/peer/views/next_view.py",
        "wants = self._next_members(now_s) is not None or chain.barrier is not None",
        "wants = True",
        "swarm/peer/rounds/test_stage_groups.py::"
        "test_a_member_that_asks_for_a_view_and_falls_silent_holds_nobody_back",
    ),
    Check(
        "list: signed by those that hold its content",
        "swarm/protocol/exchange/content.py",
        "return all(item.digest in held for item in self._lacking)",
        "return True",
        f"{VOTERS}a_list_of_content_that_nobody_has_is_signed_by_nobody_that_would_hold_it",
    ),
    Check(
        "reduction: one with an offer that is not here does not count",
        "swarm/protocol/exchange/mean.py",
        "return is_common and self.availability.knows_offers(item)",
        "return is_common",
        f"{COLLECTIVE}a_reducer_that_alone_has_its_offer_costs_the_others_no_round",
    ),
    Check(
        "reduction: whoever announced one with an offer that is not here is not waited for",
        "swarm/protocol/exchange/mean.py",
        "gone = gone.union(*(self._announcers.get(digest, ()) for digest in useless))",
        "pass",
        f"{COLLECTIVE}a_reducer_that_alone_has_its_offer_costs_the_others_no_round",
    ),
    Check(
        "reduction: one with an offer that is not here comes last",
        "swarm/protocol/exchange/availability.py",
        "not self.knows_offers(entry[1]),",
        "False,",
        "swarm/protocol/exchange/test_availability.py::"
        "test_every_step_leaves_what_looking_through_everything_finds",
    ),
    Check(
        "list: an own one passes the check of others'",
        "swarm/protocol/exchange/closing.py",
        "return []  # nobody would accept it, and what others offered must not end this peer",
        "pass",
        "swarm/protocol/exchange",
    ),
    Check(
        "claim: an offer's tokens and weight",
        "swarm/protocol/entitlement.py",
        "return tokens <= self.max_tokens(rounds) and weight <= self.max_weight(rounds)",
        "return True",
        CLAIMS,
    ),
    Check(
        "claim: a list's tokens and weights",
        "swarm/protocol/exchange/close_list.py",
        "if too_heavy or not prior.tokens <= close.tokens <= most:",
        "if False:",
        CLAIMS,
    ),
    Check(
        "claim: a list follows from the one before",
        "swarm/protocol/exchange/close_list.py",
        "if prior.hash is not None and (",
        "if False and (",
        f"{ENTITLED}a_list_that_does_not_follow_from_the_one_before_is_accepted_by_nobody",
    ),
    Check(
        "claim: a partner's estimate",
        "swarm/peer/rounds/pairing.py",
        "return max(mine, *(min(offer.tokens, most) for offer in offers))",
        "return max(mine, *(offer.tokens for offer in offers))",
        "swarm/peer/rounds/test_pairing.py",
    ),
    Check(
        "line: a newcomer that hears a quorum follows no branch",
        "swarm/peer/branching.py",
        "bound = not self._is_due() if listed else self._can_decide()",
        "bound = not self._is_due() if listed else False",
        "adversaries/test_newcomers.py"
        "::test_a_newcomer_that_hears_a_quorum_follows_no_branch_of_one_member",
    ),
    Check(
        "claim: a line's tokens",
        "swarm/peer/branching.py",
        "is_beyond = fork.number >= 0 and message.tokens > most",
        "is_beyond = False",
        f"{BRANCHING}of_two_branches_none_wins_by_tokens_that_nobody_can_have_trained",
    ),
    Check(
        "claim: a line that claims too much is not followed",
        "swarm/peer/branching.py",
        "if is_beyond and not has_anchor:",
        "if False:",
        f"{BRANCHING}of_two_branches_none_wins_by_tokens_that_nobody_can_have_trained",
    ),
    Check(
        "claim: of a line with another start nothing is known",
        "swarm/peer/branching.py",
        "is_beyond = fork.number >= 0 and message.tokens > most",
        "is_beyond = message.tokens > most",
        f"{BRANCHING}a_founder_that_starts_the_run_again_while_it_sees_no_peer"
        "_finds_back_to_the_others",
    ),
    Check(
        "claim: of a line's members only those that began it are accused",
        "swarm/peer/branching.py",
        "if is_beyond and branches.has_begun(other, fork, sender, incarnation):",
        "if is_beyond:",
        f"{BRANCHING}a_peer_that_was_told_of_too_many_tokens_is_not_accused_of_repeating_them",
    ),
    Check(
        "state: a list names what its members began with",
        "swarm/protocol/exchange/offers.py",
        "return 2 * others <= len(members)",
        "return True",
        f"{ENTITLED}a_list_names_the_state_from_which_its_members_began_or_nobody_accepts_it",
    ),
    Check(
        "state: named by a certified list",
        "node/train/state_sync.py",
        "if not self._is_exact or snapshot.sure:",
        "if True:",
        "node/train/test_lying_states.py",
    ),
    Check(
        "reducer: one that keeps its results is replaced",
        "swarm/protocol/exchange/mean.py",
        "return len(holders) <= max((len(self._roster.contributors) - 1) // 3, 1)",
        "return False",
        f"{LAGGARDS}a_reducer_that_keeps_its_results_costs_no_round_and_a_laggard_reduces_nothing",
    ),
    Check(
        "reducer: an accomplice's word for its results is not enough",
        "swarm/protocol/exchange/mean.py",
        "return len(holders) <= max((len(self._roster.contributors) - 1) // 3, 1)",
        "return len(holders) <= 1",
        f"{LAGGARDS}a_reducer_that_keeps_its_results_costs_no_round_and_a_laggard_reduces_nothing",
    ),
    Check(
        "reducer: a laggard is the last",
        "swarm/protocol/exchange/roster.py",
        "return tuple(sorted(rotated, key=lambda member: member in self._laggards))",
        "return rotated",
        f"{LAGGARDS}laggards_are_the_last_to_reduce_also_while_they_are_waited_for",
    ),
    *MEMBERSHIP_CHECKS,
    *REFOUNDING_CHECKS,
    *CONVICTION_CHECKS,
    *ANCHOR_CHECKS,
]


def fails_without(check: Check) -> bool:
    """True if the check's test fails in a copy of the code without the check."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=IGNORED)
        for name in ("pyproject.toml", "docs", "README.md"):
            (copy / name).symlink_to(ROOT / name)
        changed = copy / check.file
        changed.write_text(changed.read_text().replace(check.old, check.new))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        ran = subprocess.run(
            [*command, "-m", "not long", f"tests/{check.test}"],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )
        # 1: tests failed. Anything else, as no test found, shows nothing.
        assert ran.returncode in (0, 1), ran.stdout
        return ran.returncode == 1


def main(wanted: list[str]) -> int:
    """Remove the wanted checks, or all, one by one; return how many nobody missed."""
    unnoticed = 0
    for check in CHECKS:
        if not wanted or check.id in wanted:
            found = fails_without(check)
            unnoticed += not found
            sys.stdout.write(f"{'found' if found else 'NOT FOUND':9}  {check.id}\n")
            sys.stdout.flush()
    return unnoticed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
