"""One identity in two lives: the elder is asked, and the younger is a restart or is told."""

import pytest
from worlds.fleet import got, identity, meet, run, silent, until

from farflock.swarm.zmq.links import LinkOptions, ZmqLinks
from farflock.swarm.zmq.message import PING, TWIN
from farflock.swarm.zmq.outbox import CONTROL, Outbox, Pool
from farflock.swarm.zmq.partner import Partner, PartnerTable, Route
from farflock.swarm.zmq.twins import ANSWER_S, ASK_EVERY_S, Twins
from farflock.swarm.zmq.zap import Gate


class Port:
    """A socket with open connections by descriptor, and what was written on them."""

    lane = CONTROL

    def __init__(self):
        self.connections, self.written, self.kicked = {}, [], []

    def write(self, address, payload):
        self.written.append((address, payload))
        return True

    def kick(self, descriptor, reason):
        self.kicked.append(descriptor)
        self.connections.pop(descriptor, None)


class World:
    """A peer with a partner whose elder life is connected, and a younger life that comes."""

    def __init__(self):
        self.table = PartnerTable("me", Gate("run", "me", ()))
        self.partner = self.table.partners["p"] = Partner("p", Outbox(Pool()))
        self.port, self.twins = Port(), Twins(self.table)
        self.elder, self.younger = self.route(1, life=11), self.route(2, life=12)
        self.partner.routes[CONTROL].append(self.elder)

    def route(self, descriptor, life):
        self.port.connections[descriptor] = None
        return Route(self.port, b"%d" % descriptor, descriptor, "p", "key", life=life)

    @property
    def asked(self):
        return [payload for address, payload in self.port.written if payload[:1] == PING]

    def close(self, route):
        del self.port.connections[route.descriptor]
        self.partner.routes[CONTROL].remove(route)


@pytest.fixture
def world():
    return World()


def test_a_connection_of_the_same_life_or_of_a_peer_without_another_waits_for_nothing(world):
    assert not world.twins.holds_back(world.partner, world.route(3, life=11), 0.0)
    world.close(world.elder)
    assert not world.twins.holds_back(world.partner, world.younger, 0.0)


def test_an_elder_that_answers_stays_and_the_younger_is_told_before_it_is_cut_off(world):
    assert world.twins.holds_back(world.partner, world.younger, 0.0)
    assert world.twins.tick(0.1) == []
    (ping,) = world.asked
    world.elder.answered = int.from_bytes(ping[1:], "big")
    assert world.twins.tick(0.35) == []
    assert world.port.written[-1] == (b"2", TWIN)
    assert world.port.kicked == []
    assert world.twins.tick(0.6) == []
    assert world.port.kicked == [2]
    assert world.twins.tick(0.85) == []
    assert world.partner.routes[CONTROL] == [world.elder]


def test_an_old_answer_is_none_and_a_silent_elder_is_asked_again_and_then_gone(world):
    world.partner.pings = world.elder.answered = 7
    assert world.twins.holds_back(world.partner, world.younger, 0.0)
    times = [0.25 * turn for turn in range(int(ANSWER_S / 0.25))]
    assert all(world.twins.tick(now_s) == [] for now_s in times)
    assert len(world.asked) == ANSWER_S / ASK_EVERY_S
    assert world.twins.tick(ANSWER_S) == [world.younger]
    assert world.port.kicked == [1]


def test_a_younger_life_that_dials_again_is_not_asked_for_from_the_start(world):
    assert world.twins.holds_back(world.partner, world.younger, 0.0)
    world.twins.tick(1.0)
    world.port.connections.pop(2)
    assert world.twins.tick(3.0) == []
    again = world.route(3, life=12)
    assert world.twins.holds_back(world.partner, again, 3.5)
    assert world.twins.tick(ANSWER_S) == [again]


def test_an_elder_whose_connections_end_is_gone_at_once(world):
    assert world.twins.holds_back(world.partner, world.younger, 0.0)
    world.close(world.elder)
    assert world.twins.tick(0.25) == [world.younger]


def test_one_liar_does_not_send_away_a_peer_that_others_have_let_in(world):
    assert world.twins.told("p"), "nobody else has let it in"
    for number in range(2):
        other = world.table.partners[f"other {number}"] = Partner("other", Outbox(Pool()))
        other.routes[CONTROL].append(world.route(10 + number, life=1))
    assert not world.twins.told("p")
    assert not world.twins.told("q")
    assert world.twins.told("r")


async def life_of(fleet, seed, life, sequence, told=None):
    on_twin = (lambda: None) if told is None else lambda: told.append(life)
    options = LinkOptions(incarnation=life, sequence=sequence, on_twin=on_twin)
    links = await ZmqLinks.open(identity(seed), "run", options)
    fleet.push_async_callback(links.close)
    return links


@pytest.mark.net
def test_a_copy_that_comes_while_the_elder_lives_is_told_and_disturbs_nothing():
    async def main(fleet):
        a, elder = await fleet.peer(1), await life_of(fleet, 2, 21, 1)
        elder.learn(a.record())
        await meet(elder, a)
        copy = await life_of(fleet, 2, 22, 100, told := [])
        copy.learn(a.record())
        assert copy.send(a.me, b"from the copy")
        await until(lambda: told)
        assert elder.send(a.me, b"still here")
        assert await got(a) == (elder.me, b"still here")
        assert a.send(elder.me, b"to whom it was")
        assert await got(elder) == (a.me, b"to whom it was")
        assert await silent(copy)

    run(main)


@pytest.mark.net
def test_a_restart_that_is_faster_than_the_notice_of_its_death_is_let_in():
    async def main(fleet):
        a, elder = await fleet.peer(1), await life_of(fleet, 2, 21, 1)
        elder.learn(a.record())
        await meet(elder, a)
        again = await life_of(fleet, 2, 22, 100)
        again.learn(a.record())
        assert again.send(a.me, b"back")
        await elder.close()
        assert await got(a) == (again.me, b"back")

    run(main)
