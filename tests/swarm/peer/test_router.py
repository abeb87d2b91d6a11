"""Each message goes to one part of a peer, chosen by its type alone."""

import collections
import typing
from types import SimpleNamespace

import pytest
from worlds.peers import identity, peer_in

from farflock.swarm.frame import Frame
from farflock.swarm.messages import Key, Leave, Message, Offer, PairPropose, Ping, Prepare
from farflock.swarm.peer.peer import Router, RunTerms, view_hash_of
from farflock.swarm.protocol.views import view_key
from farflock.swarm.sim.network import SimNetwork
from farflock.swarm.sim.virtual_time import run_virtual

VIEW = bytes(range(32))
OFFER = Offer(Key("weights", 7), VIEW, (), (), 1.0, 0)


class Part:
    """A part that records what it receives; the views of its messages are out of date."""

    def __init__(self, world, name):
        self.world, self.name, self.sync = world, name, world

    def receive(self, sender, incarnation, message):
        self.world.came.append((self.name, sender, incarnation, message))
        self.world.context.counters["stale view"] += self.name != "membership"


class RouterWorld:
    def __init__(self, chain="known"):
        self.came, self.reconciled = [], []
        self.context = SimpleNamespace(chain=chain, counters=collections.Counter())
        self.router = Router(self.context, Part(self, "membership"), Part(self, "rounds"))

    def reconcile(self, peer, view):
        self.reconciled.append((peer, view))

    def deliver(self, message):
        self.router.deliver("somebody", Frame(3, message))
        return [
            (name, sender, incarnation)
            for name, sender, incarnation, said in self.came
            if said is message
        ]


def test_a_peer_has_a_receiver_for_every_message():
    async def main():
        peer = peer_in(SimNetwork(1), identity(0), RunTerms("run", 1))
        assert peer.router.kinds == set(typing.get_args(Message))

    run_virtual(main())


def test_a_second_receiver_of_a_kind_is_a_mistake():
    with pytest.raises(AssertionError, match="Leave has a receiver already"):
        RouterWorld().router.add(print, Leave)


@pytest.mark.parametrize(
    ("key", "part"), [(view_key(7), "membership"), (Key("weights", 7), "rounds")]
)
def test_a_vote_goes_where_its_key_is_decided(key, part):
    assert RouterWorld().deliver(Prepare(key, VIEW, (1, 0))) == [(part, "somebody", 3)]


def test_only_what_is_about_views_and_time_is_taken_in_before_a_view_is_known():
    world = RouterWorld(chain=None)
    assert world.deliver(Ping(1.0)) == [("membership", "somebody", 3)]
    assert world.deliver(Prepare(view_key(7), VIEW, (1, 0)))
    assert not world.deliver(OFFER)
    assert not world.deliver(Prepare(OFFER.key, VIEW, (1, 0)))


def test_after_a_message_of_another_view_the_views_are_reconciled():
    world = RouterWorld()
    assert world.deliver(OFFER)
    assert world.reconciled == [("somebody", VIEW)]
    world.deliver(Prepare(view_key(7), VIEW, (1, 0)))  # the decision sees to that itself
    assert len(world.reconciled) == 1


def test_a_proposal_to_a_pair_names_the_view_of_its_offer():
    assert view_hash_of(PairPropose(OFFER)) == VIEW
    assert view_hash_of(Ping(1.0)) is None
