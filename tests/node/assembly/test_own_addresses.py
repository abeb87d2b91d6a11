"""The addresses that a peer publishes stay true: liars are outvoted, what is old ends, and one that
moves publishes where it is now."""

import asyncio
from types import SimpleNamespace

import pytest

from farflock.node.assembly.own_addresses import LOOK_S, MAX_WORDS, WORD_S, Listening, OwnAddresses
from farflock.swarm.addresses import LinkAddress
from farflock.swarm.sim.virtual_time import run_virtual

HOME, CAFE = "192.168.1.5", "192.168.7.9"
TRUE, FALSE = LinkAddress("203.0.113.7", 4002, 4003), LinkAddress("198.51.100.9", 4002, 4003)


class Links:
    """Links that listen at one port, and what was put into their record."""

    def __init__(self):
        self.listens = (LinkAddress("0.0.0.0", 4002, 4003),)
        self.witness, self.published = SimpleNamespace(), []

    def record(self, *, addresses, doors):
        self.published.append(([each.host for each in addresses], list(doors)))


class World:
    """A peer's own addresses at a time that the test sets, and how often they changed."""

    def __init__(self):
        self.links, self.now_s, self.hosts, self.changes = Links(), 0.0, [HOME], 0
        listening = Listening(("0.0.0.0",), 4002, 4001, interfaces=(HOME,), look=self.interfaces)
        self.own = OwnAddresses(self.links, listening, True, lambda: self.now_s)
        self.own.changed = self.change
        self.said = []
        self.own.tell_reach(self.said.append)

    def interfaces(self):
        return tuple(self.hosts)

    def change(self):
        self.changes += 1

    def say(self, address, *peers):
        for peer in peers:
            self.links.witness.confirmed(address, peer)

    @property
    def published(self):
        return [each.host for each in self.own.links]


@pytest.fixture
def world():
    return World()


def test_a_liar_is_believed_only_until_more_members_say_what_is_true(world):
    world.say(FALSE, "liar")
    assert world.published == ["198.51.100.9", HOME]
    world.say(TRUE, "honest", "another")
    world.say(FALSE, "liar", "liar")
    assert world.published == ["203.0.113.7", HOME]
    assert world.said[-1] == "confirmed from outside by another (203.0.113.7)"


def test_what_a_member_says_later_replaces_its_word(world):
    world.say(TRUE, "a", "b")
    world.say(FALSE, "a", "b")
    assert world.published == ["198.51.100.9", HOME]


def test_a_word_that_nobody_repeats_ends(world):
    world.say(FALSE, "liar")
    world.now_s = WORD_S - 1.0
    world.own.look()
    assert (world.published, world.changes) == (["198.51.100.9", HOME], 1)
    world.now_s = WORD_S
    world.own.look()
    assert (world.published, world.changes) == ([HOME], 2)
    assert world.links.published[-1] == ([HOME], [])
    assert world.said[-1] == f"this network ({HOME})"


def test_words_are_bounded_and_the_oldest_end(world):
    world.say(LinkAddress("2001:db8::7", 4002, 4003), "first")
    world.say(TRUE, *(f"member {number}" for number in range(MAX_WORDS - 1)))
    assert "2001:db8::7" in world.published
    world.say(TRUE, "one more")
    assert world.published == ["203.0.113.7", HOME]


def test_each_ip_version_has_a_confirmed_address(world):
    world.say(TRUE, "a")
    world.say(LinkAddress("2001:db8::7", 4002, 4003), "a")
    assert set(world.published) == {"203.0.113.7", "2001:db8::7", HOME}


def test_a_machine_that_moves_publishes_where_it_is_now_and_doors_that_lead_there(world):
    doors = {host: f"/ip4/{host}/tcp/4001/p2p/x" for host in (HOME, CAFE)}
    world.own.directory = lambda: tuple(doors.values())
    world.own.publish()
    assert world.links.published[-1] == ([HOME], [doors[HOME]])
    world.own.look()
    assert world.changes == 0
    world.hosts = [CAFE]
    world.own.look()
    assert world.links.published[-1] == ([CAFE], [doors[CAFE]])
    assert (world.changes, world.said[-1]) == (1, f"this network ({CAFE})")
    world.hosts = ["127.0.0.1"]  # between two networks
    world.own.look()
    assert world.published == [CAFE]


def test_it_is_looked_at_all_the_time(world):
    async def main():
        keeping = asyncio.create_task(world.own.keep())
        await asyncio.sleep(LOOK_S + 1.0)
        world.hosts = [CAFE]
        await asyncio.sleep(LOOK_S)
        assert world.published == [CAFE]
        keeping.cancel()

    run_virtual(main())
