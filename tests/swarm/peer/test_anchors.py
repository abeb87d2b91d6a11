"""Of two lines of views, the one that the founder has anchored stays, and nobody else can say which
one that is."""

import asyncio
import dataclasses

import msgspec
import pytest
from adversaries.lines import (
    AFTER_S,
    claim,
    forked,
    has_served_since,
    ids,
    is_one,
    lines,
    names_of,
    progress,
    suspects,
)
from worlds.herd import identity
from worlds.waiting import now, until

from farflock.swarm import statements
from farflock.swarm.frame import Frame
from farflock.swarm.messages import Lineage, Statements
from farflock.swarm.peer.branching import Drift
from farflock.swarm.protocol import backbone, views
from farflock.swarm.protocol.agreement.certificates import signed_text
from farflock.swarm.protocol.agreement.justified import vote_domain
from farflock.swarm.protocol.branches import PREFIX_BYTES, branch_of, trail
from farflock.swarm.protocol.views import Certified, encode

REFUSED = "dropped: branch of a line that has its quorum"
NOWHERE = bytes([7]) * 32  # the hash of no view


def anchored(herd, node, view=None):
    """Give a node the founder's anchor of its newest view, or of another one."""
    log = node.peer.membership.admission.statements
    newest = node.view
    view = view or (newest.number, newest.hash)
    blob = statements.seal(herd.inviter, log.log.next(herd.founder, "anchor", view=view))
    log.take([blob])
    return view, blob


def anchors(herd, *numbers):
    return {herd.nodes[number].peer.context.entrance.orders.anchor for number in numbers}


def holding(herd, anchor, *numbers):
    """True if these nodes are all on the line with the anchor."""
    chains = [herd.nodes[number].peer.context.views for number in numbers]
    return all(backbone.holds(chain, anchor) for chain in chains)


async def two_branches(herd):
    """Kill the founder, and let nodes 1 and 2 branch from nodes 3 to 5."""
    herd.kill(0)
    herd.network.partition(ids(herd, 1, 2), ids(herd, 3, 4, 5))
    await until(lambda: None not in names_of(herd, *range(1, 6)), AFTER_S + 30, "two branches")
    start = progress(herd, *range(1, 6))
    await until(lambda: progress(herd, *range(1, 6)) > start + 4, 30, "progress of both")


@lines(6)
async def test_of_two_branches_the_one_that_the_founder_anchors_stays_although_it_has_fewer_tokens(
    herd,
):
    await two_branches(herd)
    assert herd.nodes[1].tokens < herd.nodes[3].tokens
    mine = names_of(herd, 1, 2)
    anchor, _ = anchored(herd, herd.nodes[1])
    herd.network.heal()
    moment_s = now()
    await until(lambda: is_one(herd, *range(1, 6)), 60, "one view of all")
    await until(lambda: has_served_since(herd, moment_s, *range(1, 6)), 30, "a round with all")
    assert names_of(herd, *range(1, 6)) == mine
    assert anchors(herd, *range(1, 6)) == {anchor}
    for number in (1, 2):
        assert not any(status == "lost" for _, _, status in herd.nodes[number].events)
    herd.check_line(*range(1, 6))


@lines(5)
async def test_a_line_that_has_its_quorum_is_given_up_for_the_branch_that_the_founder_anchors(herd):
    herd.network.partition(ids(herd, 0, 1, 2), ids(herd, 3, 4))
    await until(lambda: None not in names_of(herd, 3, 4), AFTER_S + 15, "the branch")
    await until(lambda: len(herd.nodes[0].members) == 3, 20, "the main line's view")
    branch = names_of(herd, 3, 4)
    anchor, _ = anchored(herd, herd.nodes[3])
    herd.network.heal()
    moment_s = now()
    await until(lambda: is_one(herd, *range(5)), 60, "one view of all")
    await until(lambda: has_served_since(herd, moment_s, *range(5)), 30, "a round with all")
    assert names_of(herd, *range(5)) == branch
    assert holding(herd, anchor, *range(5))
    for number in (3, 4):
        assert not any(status == "lost" for _, _, status in herd.nodes[number].events)
    herd.check_line(*range(5))


@lines(6)
async def test_the_line_with_the_anchor_is_followed_whatever_its_members_claim_and_not_believed(
    herd,
):
    await two_branches(herd)
    anchor, _ = anchored(herd, herd.nodes[1])
    for number in (1, 2):
        claim(herd.nodes[number], 2**61)
    believed, begin = [], Drift.begin

    def noted(drift, tokens, **how):
        believed.append(tokens)  # it forgets them as soon as it has the other line's state
        begin(drift, tokens, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drift, "begin", noted)
        herd.network.heal()
        await until(lambda: holding(herd, anchor, 3, 4, 5), 60, "their change of lines")
    assert len(believed) >= 3
    assert max(believed) < 2**60
    await until(lambda: is_one(herd, *range(1, 6)), 60, "one view of all")


@lines(5)
async def test_an_anchor_further_on_than_a_message_reaches_is_found_from_the_start(herd):
    herd.network.partition(ids(herd, 0, 1, 2), ids(herd, 3, 4))
    await until(lambda: None not in names_of(herd, 3, 4), AFTER_S + 15, "the branch")
    await until(lambda: len(herd.nodes[0].members) == 3, 20, "the main line's view")
    fork = herd.nodes[3].view.number
    for _ in range(2):
        herd.kill(4)
        await until(lambda: len(herd.nodes[3].members) == 1, 40, "a view without one")
        herd.start(4)
        await until(lambda: len(herd.nodes[3].members) == 2, 40, "a view with it")
    anchor, _ = anchored(herd, herd.nodes[3])
    assert anchor[0] > fork + 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(views, "MAX_VIEWS_SENT", 1)
        herd.network.heal()
        await until(lambda: holding(herd, anchor, 0, 1, 2), 60, "their change of lines")
        await until(lambda: is_one(herd, *range(5)), 60, "one view of all")


@lines(5)
async def test_the_newest_anchor_decides_also_where_only_an_older_one_was_known(herd):
    herd.network.partition(ids(herd, 0, 1, 2), ids(herd, 3, 4))
    await until(lambda: None not in names_of(herd, 3, 4), AFTER_S + 15, "the branch")
    await until(lambda: len(herd.nodes[0].members) == 3, 20, "the main line's view")
    _, old = anchored(herd, herd.nodes[3])
    herd.nodes[0].peer.membership.admission.statements.take([old])
    anchor, _ = anchored(herd, herd.nodes[0])
    claim(herd.nodes[3], 2**40)
    herd.network.heal()
    liar = herd.nodes[3].peer.context
    for _ in range(60):
        for number in range(5):
            liar.send(herd.nodes[number].id, Statements((old,)))
        await asyncio.sleep(0.5)
        assert holding(herd, anchor, 0, 1, 2)
    await until(lambda: is_one(herd, *range(5)), 60, "one view of all")
    assert names_of(herd, *range(5)) == {None}
    assert anchors(herd, *range(5)) == {anchor}


@lines(5)
async def test_an_anchor_that_somebody_else_made_up_moves_nobody(herd):
    herd.network.partition(ids(herd, 0, 1, 2), ids(herd, 3, 4))
    await until(lambda: None not in names_of(herd, 3, 4), AFTER_S + 15, "the branch")
    await until(lambda: len(herd.nodes[0].members) == 3, 20, "the main line's view")
    liar, newest = herd.nodes[3], herd.nodes[3].view
    log = liar.peer.membership.admission.statements.log
    said = log.next(liar.id, "anchor", view=(newest.number, newest.hash))
    forged = statements.seal(liar.identity, said)
    herd.network.heal()
    for _ in range(20):
        for number in (0, 1, 2):
            liar.peer.context.send(herd.nodes[number].id, Statements((forged,)))
        await asyncio.sleep(1)
        assert names_of(herd, 0, 1, 2) == {None}
    assert anchors(herd, 0, 1, 2) == {None}
    what = "a false statement in the founder's name"
    assert all((liar.id, what) in suspects(herd.nodes[number]) for number in (0, 1, 2))


@lines(5)
async def test_a_line_that_does_not_hear_of_the_anchor_draws_nobody_off_the_anchored_one(herd):
    herd.network.partition(ids(herd, 0, 1, 2), ids(herd, 3, 4))
    await until(lambda: None not in names_of(herd, 3, 4), AFTER_S + 15, "the branch")
    await until(lambda: len(herd.nodes[0].members) == 3, 20, "the main line's view")
    branch = names_of(herd, 3, 4)
    anchor, _ = anchored(herd, herd.nodes[3])
    await until(lambda: anchors(herd, 3, 4) == {anchor}, 10, "word of it")
    for number in (0, 1, 2):
        deaf = herd.nodes[number].peer.membership.admission.statements
        deaf.take = lambda blobs, sender=None: None
    herd.network.heal()
    for _ in range(30):
        await asyncio.sleep(1)
        assert names_of(herd, 3, 4) == branch
        assert names_of(herd, 0, 1, 2) == {None}


def line_of_one(chain, number):
    """The chain up to its newest view, and two views of a member (by number) that it alone signed:
    a branch, and its successor."""
    liar, own = identity(number), backbone.cut(chain, chain.newest.number)
    me = own.newest.peers.index(liar.peer)
    lone = branch_of(own.newest, {me}, 1000)
    proof = liar.sign(views.branch_domain("run"), encode(lone))
    assert own.extend(Certified(lone, proofs=((me, proof),)))
    after = views.successor(lone, lone.members)
    text = signed_text(views.view_key(after.number), lone.hash, (0, 0), encode(after))
    assert own.extend(Certified(after, (0, 0), ((0, liar.sign(vote_domain("run"), text)),)))
    return own


@lines(5)
async def test_a_trail_with_the_anchor_is_no_proof_that_a_line_has_it(herd):
    liar, honest = herd.nodes[3], [herd.nodes[number] for number in range(3)]
    own = line_of_one(liar.peer.context.views, 3)
    herd.kill(3)
    await until(lambda: all(len(node.members) == 4 for node in honest), 20, "a view without it")
    anchor, _ = anchored(herd, honest[0], (own.newest.number, NOWHERE))
    await until(lambda: anchors(herd, 0, 1, 2) == {anchor}, 10, "word of it")
    lie = trail(own)[:-PREFIX_BYTES] + NOWHERE[:PREFIX_BYTES]
    raw = tuple(encode(entry) for entry in own.views[-2:])
    lure = Lineage(1000, own.newest.number, lie, raw, True)
    for _ in range(15):
        for node in honest:
            for said in (msgspec.structs.replace(lure, views=()), lure):
                node.peer.router.deliver(liar.id, Frame(liar.incarnation, said))
        await asyncio.sleep(1)
        assert not any(node.peer.membership.branch for node in honest)
    assert all(node.peer.context.counters[REFUSED] > 5 for node in honest)


@pytest.mark.parametrize("late", [(), (0, 1, 2)], ids=["none", "main line"])
def test_a_newcomer_between_two_full_lines_follows_the_one_that_the_founder_anchored(late):
    @lines(5)
    async def main(herd):
        await forked(herd)
        for number in late:
            slow = herd.network.model(herd.nodes[number].id)
            herd.network.set_link(herd.nodes[number].id, dataclasses.replace(slow, latency_s=0.7))
        anchor, _ = anchored(herd, herd.nodes[3])
        await until(lambda: anchors(herd, 3, 4) == {anchor}, 10, "word of it")
        node = herd.start(5)
        await until(lambda: is_one(herd, 3, 4, 5), 60, "its admission to the anchored line")
        assert holding(herd, anchor, 5)
        said = node.peer.membership.sync.choice
        assert "the founder's anchor decided" in said or late == (), "it knew before it chose"

    main()
