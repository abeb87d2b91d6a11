"""A newcomer follows the chain for which the run's members speak, whoever answers first."""

import itertools
import random

import pytest

from farflock.swarm.identity import Identity
from farflock.swarm.messages import Views
from farflock.swarm.protocol import arrival, views
from farflock.swarm.protocol.agreement.certificates import signed_text
from farflock.swarm.protocol.agreement.justified import vote_domain
from farflock.swarm.protocol.arrival import MEET_S, FirstViews
from farflock.swarm.protocol.backbone import Link, begun, cut, pack
from farflock.swarm.protocol.branches import branch_of
from farflock.swarm.protocol.views import BadView, Certified, Forgery, Member, encode

RUN = "run"
IDENTITIES = [Identity.from_seed(bytes([number + 1]) * 32) for number in range(6)]
MEMBERS = tuple(Member(each.peer, 10 + number) for number, each in enumerate(IDENTITIES))
A, B, C, D, E, F = (each.peer for each in IDENTITIES)
NUMBER = {each.peer: number for number, each in enumerate(IDENTITIES)}


def sign(peer, domain, text):
    return IDENTITIES[NUMBER[peer]].sign(domain, text)


def extended(chain, members):
    parent = chain.newest
    view = views.successor(parent, tuple(members))
    text = signed_text(views.view_key(view.number), parent.hash, (0, 0), encode(view))
    proofs = ((at, sign(peer, vote_domain(RUN), text)) for at, peer in enumerate(parent.peers))
    assert chain.extend(Certified(view, (0, 0), tuple(proofs)))
    return chain


def main_line(length=4):
    """View 0 of A, then ones of A to E."""
    chain = begun(RUN, A, views.founded(RUN, IDENTITIES[0], MEMBERS[0]))
    for _ in range(length):
        extended(chain, MEMBERS[:5])
    return chain


def branched(chain, *founders):
    other = cut(chain, chain.newest.number)
    branch = branch_of(chain.newest, founders, 5)
    domain, raw = views.branch_domain(RUN), encode(branch)
    peers = chain.newest.peers
    proofs = tuple((at, sign(peers[at], domain, raw)) for at in founders)
    assert other.extend(Certified(branch, proofs=proofs))
    return other


def said(chain, told=None):
    """What a peer on this chain answers, which says that its newest view is number `told`."""
    entries = tuple(encode(entry) for entry in chain.views)
    return Views(entries, (), chain.newest.number if told is None else told)


class Asking(FirstViews):
    def __init__(self):
        super().__init__(RUN, A)

    def hears(self, chain, *peers, now_s=0.0, told=None):
        for peer in peers:
            self.take(peer, said(chain, told), now_s)

    def follows(self, now_s=0.0, anchor=None):
        choice = self.choice(now_s, anchor)
        return choice and choice.line.newest


def anchor_of(view):
    return view.number, view.hash


def test_a_quorum_of_members_on_a_chain_without_a_branch_is_followed_at_once():
    newcomer, chain = Asking(), main_line()
    newcomer.hears(chain, A, B)
    assert newcomer.follows() is None
    newcomer.hears(chain, C)
    assert newcomer.follows() == chain.newest
    assert newcomer.choice(0.0).left == ()


def test_what_no_member_of_its_newest_view_says_is_followed_never():
    newcomer = Asking()
    newcomer.hears(main_line(), F, "nobody")
    newcomer.hears(main_line(1), F, "nobody")
    assert newcomer.follows(1e9) is None
    assert newcomer.next_number(F) == 0, "nothing of it is kept"


def test_fewer_members_than_a_quorum_are_followed_after_a_while():
    newcomer, chain = Asking(), main_line()
    newcomer.hears(chain, B, now_s=100.0)
    assert newcomer.follows(100.0 + MEET_S - 0.1) is None
    assert newcomer.follows(100.0 + MEET_S) == chain.newest


def test_members_that_have_not_heard_of_the_newest_view_yet_speak_for_it_too():
    newcomer, old = Asking(), main_line(4)
    new = extended(cut(old, 4), MEMBERS[:5])
    newcomer.hears(old, A, B)
    newcomer.hears(new, C)
    assert newcomer.follows() == new.newest
    assert newcomer.choice(0.0).left == ()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_lines_with_a_quorum_the_one_without_the_branch_is_followed(order):
    chain = main_line()
    branch = branched(chain, 3, 4)
    for _ in range(5):
        extended(branch, branch.newest.members)
    newcomer = Asking()
    for each in order:
        newcomer.hears((chain, branch)[each], *((A, B, C), (D, E))[each])
    choice = newcomer.choice(MEET_S)
    assert choice.line.newest == chain.newest
    assert [line.newest for line in choice.left] == [branch.newest]
    assert str(choice) == (
        "the run has several lines of views: follows view 4 "
        f"({chain.newest.hash.hex()[:8]}; 3 of its 5 members answer), and leaves view 10 "
        f"({branch.newest.hash.hex()[:8]}; 2 of its 2 members answer, after 1 branch)"
    )


def test_a_branch_that_has_its_quorum_is_followed_if_the_other_line_has_none():
    chain = main_line()
    branch = branched(chain, 2, 3, 4)
    newcomer = Asking()
    newcomer.hears(chain, A, B)
    newcomer.hears(branch, C, D, E)
    assert newcomer.follows() is None, "more may answer"
    assert newcomer.follows(MEET_S) == branch.newest


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_full_lines_the_one_that_the_founder_anchored_is_followed_and_that_is_said(order):
    chain = main_line()
    branch = branched(chain, 3, 4)
    anchor = anchor_of(branch.newest)
    extended(branch, branch.newest.members)
    extended(chain, MEMBERS[:3])
    newcomer = Asking()
    for each in order:
        newcomer.hears((chain, branch)[each], *((A, B, C), (D, E))[each])
    choice = newcomer.choice(MEET_S, anchor)
    assert choice.line.newest == branch.newest
    assert [line.newest for line in choice.left] == [chain.newest]
    assert str(choice).endswith(f"; the founder's anchor decided, view 5 ({anchor[1].hex()[:8]})")
    assert "anchor" not in str(newcomer.choice(MEET_S))
    assert newcomer.follows(MEET_S) == chain.newest, "without the anchor"


def test_a_line_that_parted_from_the_anchored_one_is_not_followed_at_once_although_it_is_full():
    chain = main_line()
    anchor = anchor_of(branched(chain, 3, 4).newest)
    extended(chain, MEMBERS[:3])
    newcomer = Asking()
    newcomer.hears(chain, A, B, C)
    assert newcomer.follows(0.0, anchor) is None, "the anchored one may answer"
    assert newcomer.follows(MEET_S, anchor) == chain.newest, "it does not"
    assert newcomer.follows(0.0) == chain.newest


def test_a_line_too_short_to_have_the_anchor_is_compared_as_ever():
    chain = main_line()
    branch = branched(chain, 3, 4)
    newcomer = Asking()
    newcomer.hears(chain, A, B, C)
    newcomer.hears(branch, D, E)
    assert newcomer.follows(MEET_S, anchor_of(branch.newest)) == chain.newest
    parted = extended(cut(main_line(3), 3), MEMBERS[1:5])
    newcomer.hears(parted, A, B, C)
    assert newcomer.follows(MEET_S, anchor_of(branch.newest)) == branch.newest


def some_lines():
    """Lines that part from each other, and some views on the way to them."""
    chain = main_line(2)
    left, right = branched(chain, 1, 2), branched(chain, 3, 4)
    further = branched(left, 0)
    longer = extended(extended(cut(right, 3), right.newest.members), MEMBERS[3:4])
    return [chain, left, right, further, longer, extended(cut(chain, 2), MEMBERS[:3])]


def best_of(lines, anchor):
    """The slow twin of the order: no other line goes before this one."""
    hashes = {line.newest.hash: [entry.view.hash for entry in line.chain.views] for line in lines}
    holders = [line for line in lines if anchor[1] in hashes[line.newest.hash]]

    def is_beaten(line):
        way = hashes[line.newest.hash]
        is_short = len(way) <= anchor[0]
        leads = any(hashes[each.newest.hash][: len(way)] == way for each in holders)
        return bool(holders) and line not in holders and not (is_short and leads)

    return max((line for line in lines if not is_beaten(line)), key=lambda line: line.rank)


@pytest.mark.parametrize("seed", range(30))
def test_whatever_lines_answer_the_same_one_is_followed_as_by_a_slow_twin(seed):
    draw = random.Random(f"anchors/{seed}")
    lines = some_lines()
    views_there = [entry.view for entry in itertools.chain(*(line.views for line in lines))]
    newcomer = Asking()
    for line in draw.sample(lines, draw.randint(1, len(lines))):
        peers = line.newest.peers
        newcomer.hears(line, *draw.sample(peers, draw.randint(1, len(peers))))
    for view in views_there:
        choice = newcomer.choice(MEET_S, anchor_of(view))
        everyone = [choice.line, *choice.left]
        assert choice.line == best_of(everyone, anchor_of(view))


def test_an_old_member_that_shows_the_views_of_its_time_is_outvoted():
    newcomer, chain = Asking(), main_line()
    extended(chain, MEMBERS[1:5])
    now = extended(cut(chain, 5), MEMBERS[1:5])
    newcomer.hears(cut(chain, 1), A, told=1)
    assert newcomer.follows() is None
    newcomer.hears(now, B, C, D)
    assert newcomer.follows() == now.newest


def test_a_peer_that_says_that_there_is_more_is_asked_for_more_only_while_more_comes():
    newcomer, chain = Asking(), main_line()
    part = cut(chain, 2)
    assert newcomer.take(A, said(part, told=4), 0.0)
    assert newcomer.next_number(A) == 3
    assert not newcomer.take(A, said(part, told=4), 0.0), "it repeats itself"
    rest = Views(tuple(encode(entry) for entry in chain.views[3:]), (), 4)
    assert not newcomer.take(A, rest, 0.0)
    assert newcomer.next_number(A) == 5


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (said(begun(RUN, B, views.founded(RUN, IDENTITIES[1], MEMBERS[1]))), Forgery),
        (Views((b"nonsense",)), Forgery),
        (Views((encode(main_line().views[0]),), (b"nonsense",)), Forgery),
        (Views(tuple(encode(entry) for entry in main_line().views[1:])), BadView),
        (Views((), (), 9), BadView),
    ],
    ids=["another founder", "no view", "no link", "no view 0", "nothing"],
)
def test_views_that_do_not_begin_with_the_founders_view_0_are_refused_and_nothing_is_kept(
    message, error
):
    newcomer = Asking()
    with pytest.raises(error):
        newcomer.take(B, message, 0.0)
    assert newcomer.next_number(B) == 0
    assert newcomer.follows(1e9) is None


def test_links_that_a_peer_sends_again_take_nothing_back():
    newcomer, chain = Asking(), main_line()
    newcomer.hears(chain, A)
    parent, entry = chain.views[0].view, chain.views[1]
    again = pack(Link(parent.hash, entry.view, entry.ballot, entry.proofs), parent)
    assert not newcomer.take(A, Views((), (again,), 4), 0.0)
    assert newcomer.next_number(A) == 5
    assert newcomer.follows(MEET_S) == chain.newest


def test_peers_that_never_finish_take_no_place_from_the_members(monkeypatch):
    monkeypatch.setattr(arrival, "MAX_VISITS", 4)
    newcomer, chain = Asking(), main_line()
    newcomer.hears(chain, A, B)
    for number in range(20):
        newcomer.hears(cut(chain, 1), f"stranger {number}", told=10**6)
    newcomer.hears(chain, C)
    assert newcomer.follows() == chain.newest
