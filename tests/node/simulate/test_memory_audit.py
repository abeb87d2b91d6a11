"""Whatever grows inside a peer is found, wherever it hides; what all peers share is not counted."""

import asyncio
import collections
import operator

import pytest
from worlds.peers import identity, peer_in

from farflock.node.simulate.memory_audit import longest
from farflock.swarm.peer.peer import RunTerms
from farflock.swarm.sim.network import SimNetwork
from farflock.swarm.sim.virtual_time import run_virtual

MANY = 500


def in_a_peer(test):
    """Run `test(peer, network)` with a peer that has started a run on the network."""

    async def main():
        network = SimNetwork(1)
        peer = peer_in(network, identity(0), RunTerms("run", 1))
        peer.found()
        await test(peer, network)

    run_virtual(main())


def test_a_fresh_peer_holds_next_to_nothing():
    async def check(peer, network):
        count, way = longest(peer)
        assert 0 < count < 10
        assert way.startswith("peer.")

    in_a_peer(check)


@pytest.mark.parametrize(
    ("part", "name", "grown"),
    [
        ("rounds", "_machines", dict.fromkeys(range(MANY))),
        ("membership.sync", "_asked", set(range(MANY))),
        ("snapshots", "forgotten", [1] * MANY),
        ("pairing", "_early", {"one": collections.deque([0] * MANY)}),
        ("context", "counters", collections.Counter(range(MANY))),
    ],
)
def test_a_container_that_grows_is_found_and_named(part, name, grown):
    async def check(peer, network):
        setattr(operator.attrgetter(part)(peer), name, grown)
        count, way = longest(peer)
        assert count == MANY
        assert way.startswith(f"peer.{part}.{name}") or name in way

    in_a_peer(check)


def test_frames_that_are_never_taken_out_of_an_inbox_are_found():
    async def check(peer, network):
        other = network.links("somebody")
        for _ in range(MANY):
            assert other.send(peer.me, b"")
        await asyncio.sleep(60)
        length, way = longest(peer)
        assert length == MANY
        assert way.endswith("links._inbox.queue")

    in_a_peer(check)


def test_what_belongs_to_the_network_and_not_to_the_peer_is_not_counted():
    async def check(peer, network):
        before = longest(peer)
        for number in range(100):  # each looks at all pairs
            network.links(str(number))
        assert longest(peer) == before

    in_a_peer(check)
