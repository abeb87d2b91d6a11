"""Views that members have given up: this peer's own, and those of which others say so."""

from farflock.swarm.context import MAX_GIVEN_UP, GivenUp
from farflock.swarm.protocol.views import Member, View

PEERS = ("one", "other")


def view(number):
    return View(number, bytes(32), 0, tuple(Member(peer, 1) for peer in PEERS))


def test_what_a_peer_gives_up_is_its_own_and_the_oldest_are_forgotten():
    given_up = GivenUp()
    given_up.add([view(0)])
    assert view(0) in given_up
    assert view(1) not in given_up
    assert not given_up.by(view(0), "other")
    given_up.add(map(view, range(1, MAX_GIVEN_UP + 1)))
    assert view(0) not in given_up
    assert view(MAX_GIVEN_UP) in given_up


def test_what_others_give_up_is_kept_with_the_views():
    given_up = GivenUp()
    given_up.hear(view(1), "one", [view(1), view(2)])
    given_up.hear(view(2), "other", [view(1), view(2)])
    known = [[peer for peer in PEERS if given_up.by(view(number), peer)] for number in (1, 2)]
    assert known == [["one"], ["other"]]
    assert view(1) not in given_up
    given_up.hear(view(3), "one", [view(2), view(3)])
    assert not given_up.by(view(1), "one")
    assert given_up.by(view(2), "other")
