"""The checks of which line of views the founder has anchored."""

from adversaries.check import Check

ANCHORS = "swarm/peer/test_anchors.py::test_"
ARRIVAL = "swarm/protocol/test_arrival.py::test_"
BACKBONE = "swarm/protocol/test_backbone.py::test_"
STATEMENTS = "swarm/test_statements.py::test_"
FAR = "swarm/peer/views/test_view_sync.py::test_"
OVER = f"{BACKBONE}no_link_leads_over_the_anchor_so_that_everybody_sees_that_a_chain_has_it"

ANCHOR_CHECKS = [
    Check(
        "anchor: it names a view, and nothing else does",
        "swarm/statements.py",
        'if (statement.kind == "anchor") != (statement.view is not None):',
        "if False:",
        f"{STATEMENTS}an_anchor_and_nothing_else_names_a_view",
    ),
    Check(
        "anchor: by nobody but those that make statements",
        "swarm/statements.py",
        "if statement.author not in self.authors:",
        "if False:",
        f"{ANCHORS}an_anchor_that_somebody_else_made_up_moves_nobody",
    ),
    Check(
        "anchor: the newest holds",
        "swarm/statements.py",
        "anchors[-1] if anchors else None,",
        "anchors[0] if anchors else None,",
        f"{ANCHORS}the_newest_anchor_decides_also_where_only_an_older_one_was_known",
    ),
    Check(
        "anchor: its line is not left for one with more tokens",
        "swarm/peer/branching.py",
        "elif is_theirs or (is_stronger and not is_ours):",
        "elif is_theirs or is_stronger:",
        f"{ANCHORS}of_two_branches_the_one_that_the_founder_anchors_stays"
        "_although_it_has_fewer_tokens",
    ),
    Check(
        "anchor: its line is not left for one with its quorum",
        "swarm/peer/branching.py",
        "if message.stands and branches.parts(chain, fork) and not is_ours:",
        "if message.stands and branches.parts(chain, fork):",
        f"{ANCHORS}a_line_that_does_not_hear_of_the_anchor_draws_nobody_off_the_anchored_one",
    ),
    Check(
        "anchor: a trail is no proof of it",
        "swarm/peer/branching.py",
        "if backbone.holds(other, anchor):\n        return True",
        "return True",
        f"{ANCHORS}a_trail_with_the_anchor_is_no_proof_that_a_line_has_it",
    ),
    Check(
        "anchor: what its line claims beyond all bounds is not believed",
        "swarm/peer/branching.py",
        "self._tokens() if is_beyond else message.tokens",
        "message.tokens",
        f"{ANCHORS}the_line_with_the_anchor_is_followed_whatever_its_members_claim"
        "_and_not_believed",
    ),
    Check(
        "anchor: a newcomer leaves the lines that part from it",
        "swarm/protocol/arrival.py",
        "fit = lines if anchor is None else _with(anchor, lines)",
        "fit = lines",
        f"{ARRIVAL}of_two_full_lines_the_one_that_the_founder_anchored_is_followed"
        "_and_that_is_said",
    ),
    Check(
        "anchor: a newcomer waits for its line",
        "swarm/protocol/arrival.py",
        "best.newest.branches == 0 and not is_beside",
        "best.newest.branches == 0",
        f"{ARRIVAL}a_line_that_parted_from_the_anchored_one_is_not_followed_at_once"
        "_although_it_is_full",
    ),
    Check(
        "anchor: a longer chain that does not show it is not followed",
        "swarm/peer/views/view_sync.py",
        "if backbone.holds(mine, anchor) and not has_it:",
        "if False:",
        f"{FAR}a_peer_with_the_anchor_follows_no_longer_chain_that_does_not_show_it",
    ),
    Check(
        "anchor: no link leads over it",
        "swarm/protocol/backbone.py",
        "if number == self.pinned)",
        "if False)",
        OVER,
    ),
    Check(
        "anchor: the link to it is not replaced by a longer one",
        "swarm/protocol/backbone.py",
        "may_replace = self.links and at.number != self.pinned",
        "may_replace = bool(self.links)",
        OVER,
    ),
]
