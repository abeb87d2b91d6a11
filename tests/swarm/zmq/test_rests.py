"""Peers that are all said to be at one address take turns there, and keep nothing meanwhile."""

import os

import pytest
from worlds.fleet import identity, run, until

from farflock.swarm.record import Record, seal
from farflock.swarm.zmq import partner as zmq_partner

pytestmark = pytest.mark.net

NOBODY = ("/ip4/127.0.0.1/tcp/9", "/ip4/127.0.0.1/tcp/10")
ELSEWHERE = ("/ip4/127.0.0.1/tcp/11", "/ip4/127.0.0.1/tcp/12")
DEAD = range(10, 30)


def dead(seed, endpoints=NOBODY):
    key = identity(seed).session_key().public_key().public_bytes_raw()
    return seal(identity(seed), Record("run", identity(seed).peer, 1, 1, key, endpoints))


def test_many_dead_peers_at_one_address_are_dialled_one_at_a_time(monkeypatch):
    monkeypatch.setattr(zmq_partner, "DIAL_S", 0.1)
    monkeypatch.setattr(zmq_partner, "REST_S", 0.05)
    monkeypatch.setattr(zmq_partner, "MAX_REST_S", 0.1)

    async def main(fleet):
        a = await fleet.peer(1)
        descriptors = len(os.listdir("/proc/self/fd"))
        for seed in DEAD:
            assert a.learn(dead(seed))
            a.send(identity(seed).peer, b"is anybody there?")
        dials, most = set(), 0

        def tried():
            nonlocal most
            under_way = [peer for peer, one in a.table.partners.items() if one.dial]
            most = max(most, len(under_way))
            dials.update(under_way)
            return len(dials) >= 4

        await until(tried)
        assert most == 1
        assert len(os.listdir("/proc/self/fd")) - descriptors < 20

    run(main)


def test_a_peer_with_a_second_address_takes_turns_with_who_has_only_the_shared_one(monkeypatch):
    for name, seconds in (("DIAL_S", 0.1), ("REST_S", 0.5), ("MAX_REST_S", 0.5)):
        monkeypatch.setattr(zmq_partner, name, seconds)

    async def main(fleet):
        a, dials = await fleet.peer(1), set()
        for seed, endpoints in ((10, (*ELSEWHERE, *NOBODY)), (11, NOBODY)):
            assert a.learn(dead(seed, endpoints))
            a.send(identity(seed).peer, b"is anybody there?")

        def both_tried():
            under_way = [(peer, one.dial) for peer, one in a.table.partners.items() if one.dial]
            shared = [peer for peer, dial in under_way if dial.endpoint.endswith(":9")]
            assert len(shared) <= 1
            dials.update(shared)
            return len(dials) == 2

        await until(both_tried)

    run(main)
