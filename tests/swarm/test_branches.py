"""Whose majority is gone for good goes on as a branch; when two lines of views meet, one stays, and nothing counts twice."""

import asyncio
import collections
import contextlib
import functools
import json
import random
import runpy
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.swarm import branches, views
from farflock.swarm.branches import Fork, Petition, Solitude, branch_of, fork_of, is_stronger, line_of, trail
from farflock.swarm.decide import signed_text
from farflock.swarm.identity import Identity
from farflock.swarm.messages import BranchAsk, BranchSign, Lineage, Views
from farflock.swarm.snapshots import SnapshotUnavailable
from farflock.swarm.views import BadView, Certified, Chain, Member, View, encode, genesis, view_key
from farflock.swarm.virtual import run_virtual

_HERD = runpy.run_path(str(Path(__file__).with_name("herd.py")))
Herd, grown, until, now = (_HERD[name] for name in ("Herd", "grown", "until", "now"))
TOKENS, STREAM = _HERD["TOKENS"], _HERD["STREAM"]
RUN = "run"
AFTER_S = 20.0
IDENTITIES = [Identity.from_seed(bytes([number]) * 32) for number in range(5)]
MEMBERS = tuple(Member(identity.peer, 10 + number) for number, identity in enumerate(IDENTITIES))


# What a branch is.


def chain_of(members=MEMBERS, first_round=5):
    """Genesis and one view of these members."""
    chain = Chain(RUN, [Certified(genesis(RUN, MEMBERS[0]))])
    assert chain.extend(decided(chain, members, first_round, [0]))
    return chain


def decided(chain, members, first_round, signers):
    newest = chain.newest
    view = View(newest.number + 1, newest.hash, first_round, tuple(members))
    text, domain = signed_text(view_key(view.number), (0, 0), encode(view)), views.signature_domain(RUN)
    sign = {member.peer: identity for member, identity in zip(MEMBERS, IDENTITIES, strict=True)}
    return Certified(view, (0, 0), tuple((i, sign[newest.peers[i]].sign(domain, text)) for i in signers))


def signed(view, signers, domain=None):
    domain = domain or views.branch_domain(RUN)
    return Certified(view, proofs=tuple((index, IDENTITIES[index].sign(domain, encode(view))) for index in signers))


def branched(chain, founders, first_round=7):
    """The same chain with a branch of these members of its newest view."""
    other = Chain(RUN, list(chain.views))
    assert other.extend(signed(branch_of(chain.newest, founders, first_round), founders))
    return other


def test_a_branch_that_all_its_members_have_signed_follows_and_is_known_for_one():
    chain = chain_of()
    assert chain.branch is None
    line = branched(chain, (1, 3))
    assert line.newest.members == (MEMBERS[1], MEMBERS[3])
    assert line.branch is line.newest
    assert line.extend(decided(line, [MEMBERS[3]], 9, [0]))
    assert line.branch is line.views[-2].view, "also later on"


@pytest.mark.parametrize("first_round", [0, 4, 5, 100])
def test_a_branch_begins_where_its_signers_say_also_before_a_view_whose_rounds_never_came(first_round):
    line = branched(chain_of(first_round=5), (4,), first_round)
    assert line.at(first_round) is line.newest
    assert first_round == 0 or line.at(first_round - 1) is not line.newest


FORGERIES = {
    "one signature missing": lambda parent, view: signed(view, (1,)),
    "none": lambda parent, view: Certified(view),
    "one signs twice": lambda parent, view: signed(view, (1, 1)),
    "somebody else signs": lambda parent, view: signed(view, (1, 2)),
    "one more signs": lambda parent, view: signed(view, (1, 2, 3)),
    "a false signature": lambda parent, view: msgspec.structs.replace(
        signed(view, (1, 3)), proofs=((1, bytes(64)), (3, bytes(64)))
    ),
    "signed as a view": lambda parent, view: signed(view, (1, 3), views.signature_domain(RUN)),
    "signed in another run": lambda parent, view: signed(view, (1, 3), views.branch_domain("other")),
    "a ballot": lambda parent, view: msgspec.structs.replace(signed(view, (1, 3)), ballot=(1, 0)),
    "altered": lambda parent, view: msgspec.structs.replace(
        signed(view, (1, 3)), view=msgspec.structs.replace(view, first_round=99)
    ),
    "no member": lambda parent, view: signed(with_members(view, Member("stranger", 1)), (1,)),
    "another life": lambda parent, view: signed(with_members(view, Member(MEMBERS[1].peer, 99)), (1,)),
    "another order": lambda parent, view: signed(with_members(view, MEMBERS[3], MEMBERS[1]), (1, 3)),
    "a later number": lambda parent, view: signed(msgspec.structs.replace(view, number=view.number + 1), (1, 3)),
    "of another view": lambda parent, view: signed(msgspec.structs.replace(view, previous=bytes(32)), (1, 3)),
    "as a successor": lambda parent, view: signed(msgspec.structs.replace(view, previous=parent.hash), (1, 3)),
}


def with_members(view, *members):
    return msgspec.structs.replace(view, members=members)


@pytest.mark.parametrize("forgery", FORGERIES.values(), ids=FORGERIES)
def test_a_forged_branch_is_refused(forgery):
    chain = chain_of()
    forged = forgery(chain.newest, branch_of(chain.newest, (1, 3), 7))
    with pytest.raises(BadView):
        chain.extend(forged)
    assert chain.newest.number == 1


def test_a_quorum_may_branch_to_take_over_rounds_of_older_views():
    chain = chain_of(first_round=9)
    assert branched(chain, (0, 1, 2), first_round=8).at(8).members == MEMBERS[:3]


def test_time_without_a_quorum_counts_from_the_last_one_and_only_while_awake():
    solitude = Solitude()
    for tick in range(100):
        solitude.look(tick * 0.1, can_decide=False)
    assert solitude.lasted_s == pytest.approx(9.9)
    solitude.look(3600.0, can_decide=False)
    assert solitude.lasted_s == pytest.approx(9.9 + branches.AWAKE_S), "an hour asleep is no hour of looking"
    solitude.look(3600.1, can_decide=True)
    assert solitude.lasted_s == 0.0
    solitude.look(3600.2, can_decide=False)
    assert solitude.lasted_s == pytest.approx(0.1)


def test_a_petition_is_complete_once_everybody_listed_has_signed():
    parent = chain_of().newest
    petition = Petition(parent, branch_of(parent, (3, 1), 7), begun_s=0.0)
    assert petition.missing == (1, 3)
    whole = signed(petition.view, (1, 3))
    petition.proofs[3] = whole.proofs[1][1]
    assert petition.missing == (1,)
    with pytest.raises(AssertionError, match="lacks signatures"):
        petition.certified()
    petition.proofs[1] = whole.proofs[0][1]
    assert petition.certified() == whole


# Two lines.


def both(mine, theirs):
    """The fork as each side sees it."""
    return (
        fork_of(mine, theirs.newest.number, trail(theirs)),
        fork_of(theirs, mine.newest.number, trail(mine)),
    )


def prefix(view):
    return view.hash[:8]


def test_both_sides_find_the_same_fork():
    chain = chain_of()
    one, other = branched(chain, (1,)), branched(chain, (2, 3))
    assert other.extend(decided(other, [MEMBERS[3]], 9, [0]))
    mine, theirs = both(one, other)
    assert (mine.number, mine.mine, mine.theirs) == (1, prefix(one.newest), prefix(other.views[2].view))
    assert theirs == Fork(1, mine.theirs, mine.mine)


def test_a_line_that_ends_where_the_other_branches_off_has_nothing_after_the_fork():
    chain = chain_of()
    mine, theirs = both(chain, branched(chain, (1,)))
    assert mine == Fork(1, b"", theirs.mine)
    assert both(chain, chain)[0] == Fork(1, b"", b"")


def test_lines_with_nothing_in_common_are_not_compared_unless_both_go_back_to_a_founding():
    chain = chain_of()
    again = Chain(RUN, [Certified(genesis(RUN, Member(MEMBERS[0].peer, 77)))])
    assert fork_of(chain, 0, trail(again)) == Fork(-1, prefix(chain.views[0].view), prefix(again.newest))
    assert fork_of(chain, 9, trail(again)) is None, "theirs begins at view 9"
    chain.views.pop(0)
    assert fork_of(chain, 0, trail(again)) is None, "mine does not go back"


def test_the_other_line_is_verified_from_the_fork_on():
    chain = chain_of()
    one, other = branched(chain, (1,)), branched(chain, (2, 3))
    other.extend(decided(other, [MEMBERS[3]], 9, [0]))
    mine, theirs = both(one, other)
    line = line_of(one, mine, branches.lacking(other, theirs))
    assert [entry.view.hash for entry in line.views] == [entry.view.hash for entry in other.views]
    assert one.newest.members == (MEMBERS[1],), "mine is untouched"
    assert branches.first_parting(line, mine) == 7
    assert branches.first_parting(chain, mine) is None


def test_a_founding_anew_by_the_same_founder_is_another_line_and_one_by_somebody_else_is_none():
    chain = chain_of()
    for founder, good in ((MEMBERS[0].peer, True), (MEMBERS[1].peer, False)):
        again = Chain(RUN, [Certified(genesis(RUN, Member(founder, 77)))])
        fork, theirs = both(chain, again)
        raw = branches.lacking(again, theirs)
        if good:
            assert line_of(chain, fork, raw).newest == again.newest
        else:
            with pytest.raises(BadView, match="founder"):
                line_of(chain, fork, raw)


@pytest.mark.parametrize(
    "spoil", [lambda raw: (), lambda raw: raw[1:], lambda raw: (raw[0], raw[0]), lambda raw: (b"x",)]
)
def test_another_line_with_views_missing_doubled_or_broken_is_refused(spoil):
    chain = chain_of()
    one, other = branched(chain, (1,)), branched(chain, (2, 3))
    other.extend(decided(other, [MEMBERS[3]], 9, [0]))
    mine, theirs = both(one, other)
    with pytest.raises(BadView):
        line_of(one, mine, spoil(branches.lacking(other, theirs)))


def test_a_line_that_is_not_the_one_that_was_announced_is_refused():
    chain = chain_of()
    one, other = branched(chain, (1,)), branched(chain, (2, 3))
    third = branched(chain, (4,))
    mine, _ = both(one, other)
    with pytest.raises(BadView, match="as it said"):
        line_of(one, mine, branches.lacking(third, both(third, one)[0]))


def test_what_a_message_holds_of_a_long_line_is_bounded_and_goes_on_from_the_fork(monkeypatch):
    chain = chain_of()
    line = branched(chain, (1,))
    for number in range(8, 40):
        assert line.extend(decided(line, [MEMBERS[1]], number, [0]))
    monkeypatch.setattr(branches, "MAX_LACKING_BYTES", 1500)
    fork = both(line, chain)[0]
    raw = branches.lacking(line, fork)
    assert 0 < sum(map(len, raw)) <= 1500
    assert line_of(chain, both(chain, line)[0], raw).newest.number == 1 + len(raw)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.binary(max_size=8), st.binary(max_size=8))
def test_of_two_lines_exactly_one_stays(mine, theirs, my_prefix, their_prefix):
    here = is_stronger(theirs, mine, Fork(1, my_prefix, their_prefix))
    there = is_stronger(mine, theirs, Fork(1, their_prefix, my_prefix))
    assert here != there or (mine == theirs and my_prefix == their_prefix)
    assert theirs <= mine or here


@settings(deadline=None)
@given(st.integers(0, 600), st.binary(min_size=1, max_size=200))
def test_any_trail_is_compared_or_refused(number, raw):
    fork = fork_of(chain_of(), number, raw)
    assert fork is None or fork.number >= -1


def test_who_may_be_elsewhere_is_everybody_ever_heard_of_who_is_not_with_me():
    line, me = branched(chain_of(), (1, 3)), MEMBERS[1].peer
    ever = {member.peer for member in MEMBERS}
    assert set(branches.elsewhere(line, ["new"], me, member=True)) == ever - {me, MEMBERS[3].peer} | {"new"}
    assert set(branches.elsewhere(line, ["new"], me, member=False)) == ever - {me} | {"new"}


# Whole peers.


class Lines(Herd):
    """A herd in which there may be several lines: the laws hold in each of them."""

    def __init__(self, **options):
        super().__init__(**options)
        self.branch_after_s = AFTER_S
        self.by_view = {}  # by (hash of the round's view, round): result

    def agreed(self, node, outcome, contents, name):
        number = outcome.key.round
        place = (node.peer.port.views.at(number).hash, number)
        result = (contents, outcome.participants, outcome.tokens, node.state)
        assert self.by_view.setdefault(place, result) == result, f"two results of round {number} in one view"

    def check_line(self, *numbers):
        """All these nodes are on one line, in its view, and nothing counts twice in its log."""
        chains = [self.nodes[number].peer.port.views for number in numbers]
        assert len({chain.newest.hash for chain in chains}) == 1
        assert all(self.nodes[number].peer.membership.is_member for number in numbers)
        counted, tokens, rounds = collections.Counter(), 0, 0
        for (digest, number), (contents, participants, after, _) in sorted(self.by_view.items(), key=lambda e: e[0][1]):
            if chains[0].at(number).hash == digest:
                counted.update(name for content in contents[:1] for name in json.loads(content)["names"])
                tokens += TOKENS * len(participants) if contents else 0
                assert after == tokens, f"round {number} says {after} tokens, {tokens} were trained"
                rounds += 1
        assert max(counted.values()) == 1, counted
        assert rounds == 1 + max(number for digest, number in self.by_view if chains[0].at(number).hash == digest)

    def check_tokens(self):
        """Done by `check_line`."""


def lines(count, **options):
    def decorate(main):
        @functools.wraps(main)
        def test():
            async def whole():
                herd = Lines(**options)
                await grown(herd, count)
                await main(herd)
                await herd.end()
                assert asyncio.all_tasks() == {asyncio.current_task()}

            run_virtual(whole())

        del test.__wrapped__  # pytest would look for a fixture `herd`
        return test

    return decorate


def ids(herd, *numbers):
    return {herd.nodes[number].id for number in numbers}


def progress(herd, *numbers):
    return min(herd.nodes[number].applied for number in numbers)


def names_of(herd, *numbers):
    return {herd.nodes[number].peer.membership.branch for number in numbers}


def is_one(herd, *numbers):
    """Whether these nodes are all members of one newest view."""
    nodes = [herd.nodes[number] for number in numbers]
    if not all(node.peer.port.chain and node.peer.membership.is_member for node in nodes):
        return False
    return len({node.view.hash for node in nodes}) == 1 and nodes[0].members == {node.id for node in nodes}


def has_served_since(herd, moment_s, *numbers):
    return all(
        any(at_s > moment_s and status in ("ok", "partial", "alone") for at_s, _, status in herd.nodes[n].events)
        for n in numbers
    )


@lines(5)
async def test_the_last_of_five_goes_on_alone_after_the_time_set_and_not_before(herd):
    for number in (0, 1, 2, 4):
        herd.kill(number)
    await asyncio.sleep(0.5)
    survivor, before = herd.nodes[3], herd.nodes[3].applied
    await asyncio.sleep(AFTER_S - 3)
    assert survivor.peer.membership.branch is None
    assert survivor.applied <= before + 1
    await until(lambda: survivor.applied >= before + 5, 30, "its progress alone")
    name, first_round = survivor.peer.membership.branch
    assert len(name) == 8
    assert before < first_round <= before + 2
    assert survivor.members == {survivor.id}
    assert not any(status in ("lost", "failed") for _, _, status in survivor.events), "its open exchange went on"
    herd.check_line(3)


@lines(5)
async def test_those_who_are_left_found_one_branch_together_and_newcomers_join_it(herd):
    for number in (0, 2, 4):
        herd.kill(number)
    await until(lambda: is_one(herd, 1, 3), AFTER_S + 10, "a branch of two")
    assert len(names_of(herd, 1, 3)) == 1
    moment_s = now()
    for number in (0, 4):
        herd.start(number)
    await until(lambda: is_one(herd, 0, 1, 3, 4), 30, "a view with the newcomers")
    await until(lambda: has_served_since(herd, moment_s, 0, 1, 3, 4), 30, "a round with all")
    herd.check_line(0, 1, 3, 4)


@lines(5)
async def test_a_majority_that_restarts_at_once_comes_back_although_its_old_lives_are_gone(herd):
    """The peers are there again, but with other incarnations: nobody of them may act in the old view."""
    for number in (0, 1, 2):
        herd.kill(number)
    await asyncio.sleep(1)
    for number in (0, 1, 2):
        herd.start(number)
    moment_s = now()
    await until(lambda: is_one(herd, *range(5)), AFTER_S + 40, "a view of all")
    await until(lambda: has_served_since(herd, moment_s, *range(5)), 30, "a round with all")
    herd.check_line(*range(5))


@lines(4)
async def test_two_halves_of_which_one_is_a_quorum_become_one_and_the_smaller_branch_gives_up(herd):
    herd.network.partition(ids(herd, 0, 1), ids(herd, 2, 3))
    await until(lambda: names_of(herd, 2, 3) != {None}, AFTER_S + 15, "the branch of the half without the senior one")
    await until(lambda: len(herd.nodes[0].members) == 2, 20, "the main line's view")
    start = progress(herd, 2, 3)
    await until(lambda: progress(herd, 2, 3) > start + 3, 20, "the branch's progress")
    assert progress(herd, 0, 1) > progress(herd, 2, 3) + 3
    herd.network.heal()
    moment_s = now()
    await until(lambda: is_one(herd, *range(4)), 60, "one view of all")
    await until(lambda: has_served_since(herd, moment_s, *range(4)), 30, "a round with all")
    assert names_of(herd, *range(4)) == {None}, "the main line stayed"
    for number in (2, 3):
        assert [status for _, _, status in herd.nodes[number].events].count("lost") == 1
        assert any(status == "adopted" and at_s > moment_s for at_s, _, status in herd.nodes[number].events)
    for number in (0, 1):
        assert not any(status == "lost" for _, _, status in herd.nodes[number].events)
    herd.check_line(*range(4))


@lines(6)
async def test_of_two_branches_that_both_lack_a_majority_one_stays_when_they_meet(herd):
    herd.kill(0)
    herd.network.partition(ids(herd, 1, 2), ids(herd, 3, 4, 5))
    await until(lambda: None not in names_of(herd, *range(1, 6)), AFTER_S + 30, "two branches")
    assert len(names_of(herd, *range(1, 6))) == 2
    start = progress(herd, *range(1, 6))
    await until(lambda: progress(herd, *range(1, 6)) > start + 4, 30, "progress of both")
    larger = names_of(herd, 3, 4, 5)
    herd.network.heal()
    moment_s = now()
    await until(lambda: is_one(herd, *range(1, 6)), 60, "one view of all")
    await until(lambda: has_served_since(herd, moment_s, *range(1, 6)), 30, "a round with all")
    assert names_of(herd, *range(1, 6)) == larger, "three train more tokens than two"
    herd.check_line(*range(1, 6))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_equal_branches_of_equal_speed_become_one(seed, loss):
    @lines(5, seed=seed)
    async def main(herd):
        from farflock.swarm.sim import Faults

        herd.kill(0)
        herd.network.partition(ids(herd, 1, 2), ids(herd, 3, 4))
        await asyncio.sleep(AFTER_S + 15 + seed)
        assert len(names_of(herd, 1, 2, 3, 4) - {None}) == 2
        herd.network.heal()
        herd.network.faults = Faults(loss=loss)
        moment_s = now()
        await until(lambda: is_one(herd, 1, 2, 3, 4), 150, "one view of all")
        await until(lambda: has_served_since(herd, moment_s, 1, 2, 3, 4), 60, "a round with all")
        herd.check_line(1, 2, 3, 4)

    main()


@lines(5)
async def test_who_stands_still_behind_a_broken_cable_for_less_than_the_time_set_founds_nothing(herd):
    herd.network.partition(ids(herd, 0, 1, 2), ids(herd, 3, 4))
    await asyncio.sleep(AFTER_S - 5)
    herd.network.heal()
    await until(lambda: is_one(herd, *range(5)), 20, "one run again")
    await asyncio.sleep(AFTER_S)
    assert names_of(herd, *range(5)) == {None}
    herd.check_line(*range(5))


@lines(5)
async def test_rounds_of_an_old_view_whose_members_were_all_replaced_since_are_taken_over(herd):
    """No majority is missing now: but the rounds until the newest view begins belong to lives that have ended."""
    for node in herd.nodes.values():
        node.quiet = True
    await asyncio.sleep(4)
    for number in (2, 3, 4):
        herd.kill(number)
        await asyncio.sleep(9)
        herd.start(number)
        herd.nodes[number].quiet = True
        await until(lambda: all(len(node.members) == 5 for node in herd.nodes.values() if node.peer.port.chain), 30)
        await asyncio.sleep(4)
    moment_s = now()
    for node in herd.nodes.values():
        node.quiet = False
    await until(lambda: has_served_since(herd, moment_s, *range(5)), AFTER_S + 60, "a round with all")
    await until(lambda: is_one(herd, *range(5)), 20, "a view of all")
    assert None not in names_of(herd, *range(5))
    herd.check_line(*range(5))


@lines(5)
async def test_a_round_that_was_decided_but_whose_content_died_with_the_others_is_decided_anew(herd):
    survivor = herd.nodes[3]
    herd.network.tap = lambda when_s, sender, to, packed: None if to == survivor.id and b"piece" in packed else packed
    state = survivor.peer.rounds._streams[STREAM]
    await until(lambda: any(not entry.complete for entry in state.log.values()), 20, "a decision without content")
    number = state.newest
    for other in (0, 1, 2, 4):
        herd.kill(other)
    herd.network.tap = None
    assert survivor.peer.rounds.floor() <= number
    await until(lambda: survivor.applied > number + 2, AFTER_S + 20, "its progress alone")
    assert survivor.peer.membership.branch[1] <= number
    herd.check_line(3)


@lines(4)
async def test_a_founder_that_founds_the_run_again_while_it_sees_nobody_finds_back_to_the_others(herd):
    await until(lambda: progress(herd, 0) > herd.nodes[0].view.first_round, 20, "a round of the view of all")
    herd.network.partition(ids(herd, 0), ids(herd, 1, 2, 3))
    herd.kill(0)
    await asyncio.sleep(1)
    herd.incarnation += 1
    herd.nodes[0] = _HERD["Node"](herd, 0, herd.incarnation, founds=True)
    for number in (1, 2, 3):
        herd.nodes[0].peer.membership.learn(herd.nodes[number].record)
    await until(lambda: herd.nodes[0].applied > 3 and len(herd.nodes[1].members) == 3, 30, "progress of both")
    herd.network.heal()
    await until(lambda: is_one(herd, *range(4)), 60, "one view of all")
    assert [status for _, _, status in herd.nodes[0].events].count("lost") == 1
    assert not any(status == "lost" for n in (1, 2, 3) for _, _, status in herd.nodes[n].events)
    herd.check_line(*range(4))


@lines(5, group=2)
async def test_pairs_branch_and_meet_too(herd):
    for node in herd.nodes.values():
        node.peer.port.progress_tokens = lambda node=node: node.serial * TOKENS
    herd.kill(0)
    herd.network.partition(ids(herd, 1, 2), ids(herd, 3, 4))
    await asyncio.sleep(AFTER_S + 15)
    assert len(names_of(herd, 1, 2, 3, 4) - {None}) == 2
    herd.network.heal()
    await until(lambda: is_one(herd, 1, 2, 3, 4), 60, "one view of all")
    losers = [n for n in (1, 2, 3, 4) if any(status == "lost" for _, _, status in herd.nodes[n].events)]
    assert losers in ([1, 2], [3, 4])


# Strangers, liars and old lives.


def told(herd, number, sender, message, incarnation=1):
    herd.nodes[number].peer._route(sender, incarnation, message, b"")


@lines(3)
async def test_nobody_signs_a_branch_while_a_quorum_is_there(herd):
    node, other = herd.nodes[0], herd.nodes[1]
    sent = []
    node.peer.port.links.send = lambda peer, frame: sent.append(frame) or True
    view = branch_of(node.view, (0,), node.applied + 5)
    index = {node.view.peers.index(other.id)}
    for founders in (index, {1}, {2}):
        view = branch_of(node.view, founders, node.applied + 5)
        told(herd, 0, other.id, BranchAsk(encode(view)), other.incarnation)
    assert not any(b"branch" in frame for frame in sent)
    del node.peer.port.links.send


@lines(3)
async def test_hostile_messages_about_branches_change_nothing_and_are_counted(herd):
    node, member = herd.nodes[0], herd.nodes[1]
    stranger = IDENTITIES[4].peer
    await asyncio.sleep(1)
    chain = node.peer.port.views
    view, me = chain.newest, chain.newest.peers.index(node.id)
    lone = branch_of(view, ({0, 1, 2} - {me, 0}) or {1}, 5)
    lure = trail(Chain("run", [*chain.views[:-1], Certified(lone)]))
    hostile = [
        BranchAsk(b"nonsense"),
        BranchAsk(encode(lone)),
        BranchSign(lone.hash, b"x" * 64, 0),
        Lineage(2**62, view.number, bytes(8 * 512)),
        Lineage(2**62, 2**62, b"short"),
        Lineage(2**62, lone.number, trail(chain) + lone.hash[:8], (encode(Certified(lone)),)),
        Lineage(2**62, view.number, lure, (encode(Certified(lone)),)),
        Lineage(2**62, view.number, lure, (b"x",) * 100),
        Views((encode(Certified(lone)),)),
    ]
    for sender, incarnation in ((stranger, 1), (member.id, 1), (member.id, member.incarnation)):
        for message in hostile:
            told(herd, 0, sender, message, incarnation)
        await asyncio.sleep(1.5)
    assert node.view.hash == view.hash
    assert not node.peer.branching.adrift
    assert sum(count for reason, count in node.peer.port.counters.items() if reason.startswith("dropped")) >= 12
    assert not any(status == "lost" for _, _, status in node.events)


@lines(5)
async def test_a_stranger_cannot_lend_tokens_to_a_line_that_it_is_not_in(herd):
    herd.network.partition(ids(herd, 0, 1, 2), ids(herd, 3, 4))
    await until(lambda: names_of(herd, 3, 4) != {None}, AFTER_S + 15, "the branch")
    await until(lambda: len(herd.nodes[0].members) == 3, 20, "the main line's view")
    node, stranger = herd.nodes[0], IDENTITIES[4].peer
    chain = herd.nodes[3].peer.port.views
    views_there = branches.lacking(chain, fork_of(chain, node.view.number, trail(node.peer.port.views)))
    message = Lineage(2**62, chain.newest.number, trail(chain), views_there)
    for _ in range(20):
        told(herd, 0, stranger, msgspec.structs.replace(message, views=()))
        told(herd, 0, stranger, message)
        await asyncio.sleep(1)
    assert node.peer.membership.branch is None
    assert node.peer.port.counters["dropped: not from a member"] >= 10


@lines(3)
async def test_who_gave_up_a_view_never_acts_in_it_again(herd):
    node = herd.nodes[2]
    old = node.view
    assert node.peer.port.my_index(old) is not None
    node.peer.port.forsake()
    assert node.peer.port.my_index(old) is None
    assert not node.peer.membership.is_member
    await until(lambda: node.view.number >= old.number + 2 and node.peer.membership.is_member, 30, "its return")
    assert node.peer.port.my_index(old) is None


# Seeded disasters.


async def misfortune(herd, draw):
    """Split the network, kill and restart peers, at any moment of whatever the others do about it."""
    count = len(herd.nodes)
    for _ in range(draw.randint(2, 5)):
        fate = draw.choice(["split", "split", "kill", "restart", "heal"])
        alive = [number for number, node in herd.nodes.items() if not node.task.cancelled()]
        if fate == "split":
            sides = [set(), set(), set()]
            for node in herd.nodes.values():
                draw.choice(sides[: draw.choice([2, 2, 3])]).add(node.id)
            herd.network.partition(*sides)
        elif fate == "heal":
            herd.network.heal()
        elif len(alive) > 2:
            victim = draw.choice(alive)
            herd.kill(victim)
            if fate == "restart":
                await asyncio.sleep(draw.uniform(0.1, 8))
                herd.start(victim)
        await asyncio.sleep(draw.choice([1, 5, AFTER_S, 2 * AFTER_S]) * draw.uniform(0.5, 1.5))
    assert count == len(herd.nodes)


def revived(herd):
    """Start again whoever was killed, or has found nobody to adopt from in time; whether nobody had to be."""
    ended = [number for number, node in herd.nodes.items() if node.task.done()]
    for number in ended:
        with contextlib.suppress(asyncio.CancelledError, TimeoutError, SnapshotUnavailable):
            herd.nodes[number].task.result()
        herd.start(number)
    return not ended


def ends_on_one_line(seed):
    draw = random.Random(f"branches/{seed}")

    @lines(draw.randint(3, 7), seed=seed, kind=draw.choice(["mean", "gather"]))
    async def main(herd):
        await misfortune(herd, draw)
        herd.network.heal()
        await asyncio.sleep(0.1)
        moment_s, everybody = now(), range(len(herd.nodes))
        await until(lambda: revived(herd) and is_one(herd, *everybody), 8 * AFTER_S, "one view of all")
        await until(lambda: has_served_since(herd, moment_s, *everybody), 60, "a round with all")
        await until(lambda: is_one(herd, *everybody), 30, "one view of all")
        herd.check_line(*everybody)

    main()


@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_all_end_on_one_line_and_nothing_counts_twice_in_it(seed):
    ends_on_one_line(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 250))
def test_the_same_for_many_more_seeds(seed):
    ends_on_one_line(seed)
