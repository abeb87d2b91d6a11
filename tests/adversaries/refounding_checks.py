"""The checks of views that are re-founded, and of what a voter knows of its earlier lives."""

from adversaries.check import Check

REFOUNDING = "sim/test_refounding.py::test_"
MEMORY = "swarm/stable/test_recollection.py::test_"
CONVICTED = "adversaries/test_convictions.py::test_"
LOST = "swarm/peer/views/test_refounding.py::test_"
VIEWS = "swarm/protocol/test_views.py::test_"
EARLIER = f"{VIEWS}no_other_view_begins_before_the_view_that_it_follows"

REFOUNDING_CHECKS = [
    Check(
        "re-founding: only of views that cannot go on",
        "swarm/peer/views/refounding.py",
        'if not self.is_stuck:\n            return "the view before can go on"',
        'if False:\n            return "the view before can go on"',
        f"{REFOUNDING}nobody_signs_a_re_founding_of_a_view_that_can_go_on",
    ),
    Check(
        "re-founding: from the signer's own state on",
        "swarm/peer/views/refounding.py",
        "not reached <= view.first_round <= reached + self._context.lead",
        "view.first_round > reached + self._context.lead",
        f"{REFOUNDING}a_voter_that_is_back_signs_only_what_begins_where_its_state_ends",
    ),
    Check(
        "re-founding: no later than its state and a few rounds",
        "swarm/peer/views/refounding.py",
        "not reached <= view.first_round <= reached + self._context.lead",
        "view.first_round < reached",
        f"{REFOUNDING}a_voter_that_is_back_signs_only_what_begins_where_its_state_ends",
    ),
    Check(
        "re-founding: by keys of the view before",
        "swarm/protocol/views.py",
        "if view.admits or not all(map(before.lists, view.peers)):",
        "if view.admits:",
        EARLIER,
    ),
    Check(
        "re-founding: lets nobody in",
        "swarm/protocol/views.py",
        "if view.admits or not all(map(before.lists, view.peers)):",
        "if not all(map(before.lists, view.peers)):",
        EARLIER,
    ),
    Check(
        "re-founding: on no branch, and with no rounds of stages",
        "swarm/protocol/views.py",
        "if view.branches != before.branches or view.stage_rounds or before.stage_rounds:",
        "if False:",
        EARLIER,
    ),
    Check(
        "re-founding: counted one by one",
        "swarm/protocol/views.py",
        "return view.refoundings == before.refoundings + 1",
        "return view.refoundings > before.refoundings",
        EARLIER,
    ),
    Check(
        "re-founding: no link leads over it",
        "swarm/protocol/views.py",
        "if view.refoundings != before.refoundings:",
        "if False:",
        "swarm/protocol/test_backbone.py::"
        "test_a_re_founding_is_linked_from_its_parent_alone_and_no_link_leads_over_it",
    ),
    Check(
        "abandonment: only of content that may not come any more",
        "swarm/peer/peer.py",
        "if rounds.staged or is_filling(rounds.streams):",
        "if rounds.staged:",
        f"{REFOUNDING}no_round_is_abandoned_while_a_holder_of_its_content_is_there",
    ),
    Check(
        "lives: a voter that forgot its votes casts none",
        "swarm/peer/views/refounding.py",
        "return self.recollection.covers(chain) and self.reached() is not None",
        "return self.reached() is not None",
        f"{REFOUNDING}a_voter_that_has_lost_its_disk_waits_for_the_others",
    ),
    Check(
        "lives: votes are kept before they are told",
        "swarm/peer/views/next_view.py",
        "if not self.refounding.recollection.keep_votes(decision) and decision.decided is None:",
        "if False:",
        f"{REFOUNDING}a_voter_tells_nobody_what_its_disk_does_not_keep",
    ),
    Check(
        "lives: a restarted voter accepts no view that needs its old life's rounds",
        "swarm/peer/views/view_rules.py",
        "return accepted is None or accepted[1] != value",
        "return False",
        f"{REFOUNDING}a_voter_that_is_back_accepts_no_view_that_leaves_its_old_rounds_open",
    ),
    Check(
        "lives: votes of an earlier life count only where the view cannot go on",
        "swarm/peer/views/next_view.py",
        "if member is None and newest.lists(sender) and self.refounding.is_stuck:",
        "if member is None and newest.lists(sender):",
        "swarm/peer/views/test_membership.py::test_only_a_member_in_its_present_life_changes_anything",
    ),
    Check(
        "lives: a founder goes on alone only where its vote alone decides",
        "swarm/peer/views/membership.py",
        "if newest.stage_rounds or not newest.electorate.is_quorum(me):",
        "if newest.stage_rounds:",
        f"{REFOUNDING}a_founder_whose_vote_is_not_enough_begins_the_run_again",
    ),
    Check(
        "memory: covers the line that it was kept on",
        "swarm/stable/recollection.py",
        "return self._views is not None and chain.by_hash(self._views.newest) is not None",
        "return self._views is not None",
        f"{MEMORY}a_memory_covers_what_follows_the_views_that_it_has_and_no_other_line",
    ),
    Check(
        "memory: begins with a life that a view lists",
        "swarm/stable/recollection.py",
        "or (self._views is None and not is_member)",
        "or False",
        f"{MEMORY}a_memory_begins_with_a_life_that_a_view_lists",
    ),
    Check(
        "memory: of this run",
        "swarm/stable/recollection.py",
        "return kept if kept is not None and kept.run == self._run else None",
        "return kept",
        f"{MEMORY}another_run_in_the_same_folder_is_not_this_one",
    ),
    Check(
        "re-founding: of a silent voter only after a while",
        "swarm/peer/views/refounding.py",
        "return silent_s >= (LEFT_S if member in self._left else LOST_S)",
        "return True",
        f"{LOST}silent_voters_may_come_back_for_a_while",
    ),
    Check(
        "re-founding: of a voter with another life",
        "swarm/peer/views/refounding.py",
        "if heard != member.incarnation:",
        "if False:",
        f"{LOST}voters_that_have_another_life_are_lost_at_once",
    ),
    Check(
        "re-founding: of a voter that gave the view up",
        "swarm/peer/views/refounding.py",
        "and not self._context.has_given_up(view, members[at].peer)",
        "",
        f"{LOST}a_voter_that_gave_a_view_up_has_no_vote_there_while_its_life_goes_on",
    ),
    Check(
        "re-founding: of a convicted voter",
        "swarm/peer/views/refounding.py",
        "and members[at].peer not in convicted",
        "",
        f"{CONVICTED}one_of_three_goes_on_at_once_without_two_that_are_convicted",
    ),
    Check(
        "giving up: said by a member of the view in this life",
        "swarm/peer/views/view_sync.py",
        "and view.index(sender, incarnation) is not None:",
        "and True:",
        f"{LOST}a_voter_that_gave_a_view_up_has_no_vote_there_while_its_life_goes_on",
    ),
    Check(
        "giving up: kept for known views alone",
        "swarm/context.py",
        "if place in known}",
        "}",
        "swarm/test_context.py::test_what_others_give_up_is_kept_with_the_views",
    ),
    Check(
        "giving up: said to whoever asks for a vote",
        "swarm/peer/views/next_view.py",
        "elif newest in self._context.given_up:",
        "elif False:",
        f"{LOST}a_voter_says_that_it_gave_a_view_up_to_whoever_asks_for_its_vote_on_the_next",
    ),
    Check(
        "giving up: said to whoever asks for a vote on a round",
        "swarm/peer/rounds/open_rounds.py",
        "if view in self._context.given_up and isinstance(message, Offer | Prepare | Propose):",
        "if False:",
        f"{LOST}a_voter_says_that_it_gave_a_view_up_to_whoever_asks_for_its_vote_on_a_round",
    ),
    Check(
        "votes: on no view that takes over a round with a vote",
        "swarm/peer/views/view_rules.py",
        "if self._context.views.refuses(value, self._context.touched.bound):",
        "if self._context.views.refuses(value, ()):",
        "swarm/peer/views/test_membership.py"
        "::test_a_view_may_take_over_a_round_that_has_begun_but_none_with_a_vote",
    ),
    Check(
        "turns: no faster than twice",
        "swarm/protocol/agreement/turns.py",
        "self._since_s -= max(now_s - self._looked_s, 0.0)",
        "self._since_s -= 9 * max(now_s - self._looked_s, 0.0)",
        "swarm/protocol/agreement/test_turns.py"
        "::test_whoever_names_far_ballots_has_turns_pass_twice_as_fast_and_no_faster",
    ),
]
