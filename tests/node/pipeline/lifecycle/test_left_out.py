"""A server that a view has left out gives its work up once, and keeps its life where it has to."""

from types import SimpleNamespace

import pytest

from farflock.node.pipeline.lifecycle.left_out import LeftOutServer
from farflock.node.pipeline.lifecycle.rebalancer import LifeOver
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.protocol.views import Member, View
from farflock.swarm.sim.virtual_time import run_virtual

ME, OTHER = Member("me", 1, 2), Member("other", 1, 2)


class Peer:
    """A peer that knows views with these members, in turn."""

    stayed, is_member = PeerContext.stayed, PeerContext.is_member

    def __init__(self):
        self.me, self.views = "me", SimpleNamespace(views=[], newest=None)
        self.chain = self.views  # `is_member` asks whether there is one

    def learn(self, *views):
        for members in views:
            view = View(len(self.views.views), b"", 0, members)
            self.views.views.append(SimpleNamespace(view=view))
            self.views.newest = view

    def my_index(self, view):
        return view.index("me", 1)


@pytest.fixture
def peer():
    return Peer()


def left_out(peer, its_own=False):
    given_up = []

    async def give_up():
        given_up.append(peer.views.newest.number)
        return 3

    return LeftOutServer(peer, 2, its_own, give_up), given_up


def may_step(found):
    return run_virtual(found.may_step())


@pytest.mark.parametrize("at_once", [False, True])
def test_it_gives_its_work_up_once_even_if_it_hears_of_both_views_together(peer, at_once, caplog):
    found, given_up = left_out(peer)
    peer.learn((OTHER,))
    assert may_step(found), "it has not been a member yet"
    peer.learn((OTHER, ME), (ME, OTHER))
    assert may_step(found)
    assert not given_up
    peer.learn((OTHER,))
    if not at_once:
        assert found.happened
        assert not may_step(found)
        assert may_step(found)
    peer.learn((OTHER, ME))
    assert may_step(found) != at_once
    peer.learn((OTHER, ME))
    assert may_step(found)
    assert not found.happened
    assert len(given_up) == 1
    assert "gives up 3 microbatches" in caplog.text


def test_that_it_was_left_out_between_its_admission_and_its_first_step_is_noticed(peer):
    found, given_up = left_out(peer)
    peer.learn((OTHER,), (OTHER, ME), (OTHER,), (OTHER, ME))
    assert not may_step(found)
    assert may_step(found)
    assert len(given_up) == 1


def test_whoever_knows_only_views_before_its_return_does_not_know_of_its_membership(peer):
    found, _ = left_out(peer)
    peer.learn((OTHER,), (OTHER, ME), (ME, OTHER))
    assert [found.is_known_in(number) for number in range(4)] == [False, True, True, True]
    peer.learn((OTHER,))
    assert not found.is_known_in(9), "it is none"
    peer.learn((OTHER, ME))
    assert [found.is_known_in(number) for number in (2, 3, 4)] == [False, False, True]
    del peer.views.views[:4]
    assert [found.is_known_in(number) for number in (3, 4, 5)] == [False, True, True]


def test_another_life_of_its_key_is_not_it(peer):
    found, _ = left_out(peer)
    peer.learn((ME,), (Member("me", 2, 2),))
    assert found.happened


@pytest.mark.parametrize(("stage", "ends"), [(2, True), (1, False)])
def test_weights_of_its_own_are_given_up_where_others_serve_the_stage(peer, stage, ends):
    found, given_up = left_out(peer, its_own=True)
    other = Member("other", 1, stage)
    peer.learn((ME, other))
    assert may_step(found)
    peer.learn((other,), (ME, other))
    if ends:
        with pytest.raises(LifeOver, match="left this server out"):
            may_step(found)
    else:
        assert not may_step(found)
    assert len(given_up) == (not ends)


@pytest.mark.parametrize("stayed", [True, False])
def test_a_stage_in_which_no_twin_has_stayed_may_have_been_begun_anew(peer, stayed):
    found, given_up = left_out(peer)
    again = OTHER if stayed else Member("other", 2, 2)
    peer.learn((ME, OTHER))
    assert may_step(found)
    peer.learn((OTHER,), (again, ME))
    if stayed:
        assert not may_step(found)
    else:
        with pytest.raises(LifeOver, match="left this server out"):
            may_step(found)
    assert len(given_up) == stayed


def test_what_leaves_it_behind_otherwise_ends_its_life(peer):
    found, given_up = left_out(peer)
    peer.learn((ME, OTHER))
    with pytest.raises(LifeOver, match="round 4 is gone"):
        run_virtual(found.begin_again("round 4 is gone"))
    peer.learn((OTHER,), (ME, OTHER))
    run_virtual(found.begin_again("round 4 is gone"))
    assert given_up == [2]
