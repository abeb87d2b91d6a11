"""One identity in two lives: the elder is asked, and the younger is a restart or is told."""

import pytest
from worlds.fleet import got, identity, meet, run, silent, until

from farflock.swarm.sim.virtual_time import run_virtual
from farflock.swarm.zmq.handshake import Handshakes
from farflock.swarm.zmq.links import LinkOptions, ZmqLinks
from farflock.swarm.zmq.message import ASK_VOUCH, FRAME, PING, TWIN, VOUCH
from farflock.swarm.zmq.outbox import BULK, CONTROL, Outbox, Pool
from farflock.swarm.zmq.partner import Partner, PartnerTable, Route
from farflock.swarm.zmq.rate_limit import RateLimit
from farflock.swarm.zmq.receiving import Receiver
from farflock.swarm.zmq.twins import ANSWER_S, ASK_EVERY_S, OwnLife, Twins
from farflock.swarm.zmq.zap import Gate


class Port:
    """A socket with open connections by descriptor, and what was written on them."""

    lane, owner = CONTROL, None

    def watch(self):
        pass

    def __init__(self):
        self.connections, self.written, self.kicked = {}, [], []

    def write(self, address, payload):
        self.written.append((address, payload))
        return True

    def kick(self, descriptor, reason):
        self.kicked.append(descriptor)
        self.connections.pop(descriptor, None)


ME, P = identity(1), identity(2)


def number(life):
    return life.to_bytes(8, "big")


class World:
    """A peer with a partner whose elder life is connected, and a younger life that comes."""

    def __init__(self):
        self.table = PartnerTable(ME.peer, Gate("run", ME.peer, ()))
        self.partner = self.table.partners[P.peer] = Partner(P.peer, Outbox(Pool()))
        self.port, self.twins = Port(), Twins(self.table, OwnLife(ME, "run", 7))
        self.elder, self.younger = self.route(1, life=11), self.route(2, life=12)
        self.partner.routes[CONTROL].append(self.elder)

    def route(self, descriptor, life):
        self.port.connections[descriptor] = None
        return Route(self.port, b"%d" % descriptor, descriptor, P.peer, "key", life=life)

    @property
    def asked(self):
        return [payload for address, payload in self.port.written if payload[:1] == ASK_VOUCH]

    def vouch(self, life=12, run="run", owner=P):
        return number(life) + OwnLife(owner, run, 11).vouch(number(life))

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
    assert world.asked == [ASK_VOUCH + number(12)]
    world.twins.hear(world.elder, world.vouch())
    assert world.twins.tick(0.35) == []
    address, told = world.port.written[-1]
    assert (address, told[:1]) == (b"2", TWIN)
    assert OwnLife(P, "run", 12).is_another_there(told[1:])
    assert world.port.kicked == []
    assert world.twins.tick(0.6) == []
    assert world.port.kicked == [2]
    assert world.twins.tick(0.85) == []
    assert world.partner.routes[CONTROL] == [world.elder]


def test_what_is_no_answer_counts_for_none_and_a_silent_elder_is_asked_again_and_then_gone(world):
    world.twins.hear(world.elder, world.vouch())  # before it was asked
    assert world.twins.holds_back(world.partner, world.younger, 0.0)
    for body in (b"", number(12), world.vouch(13), world.vouch(run="other"), world.vouch(owner=ME)):
        world.twins.hear(world.elder, body)
    world.twins.hear(world.younger, world.vouch())  # by itself, which wants to be sent away
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


def test_a_life_vouches_for_another_one_and_never_against_itself_and_not_without_end(world):
    world.twins.asked(world.partner, world.elder, number(7), 0.0)  # its own
    assert world.port.written == []
    for now_s in (1.0, 1.1, 2.0):
        world.twins.asked(world.partner, world.elder, number(8), now_s)
    first, second = (payload for _, payload in world.port.written)
    assert first == second
    assert first[:9] == VOUCH + number(8)
    assert OwnLife(ME, "run", 8).is_another_there(first[9:])


def test_only_ones_own_signature_of_this_very_life_sends_one_away(world):
    mine = OwnLife(ME, "run", 6).vouch(number(7))
    for lie in (b"", mine[:-1], OwnLife(P, "run", 6).vouch(number(7))):
        assert not world.twins.told(lie)
    assert not world.twins.told(OwnLife(ME, "run", 5).vouch(number(6))), "an earlier life's"
    assert not world.twins.told(OwnLife(ME, "other", 6).vouch(number(7)))
    assert world.twins.told(mine)


def test_a_connection_that_waits_is_known_by_its_place(world):
    world.twins.holds_back(world.partner, world.younger, 0.0)
    assert world.twins.waiting(world.port, b"2") is world.younger
    assert world.twins.waiting(world.port, b"1") is None
    assert world.twins.waiting(Port(), b"2") is None


class Coming:
    """A message as libzmq hands it over."""

    def __init__(self, message, descriptor):
        self.buffer, self.descriptor = memoryview(message), descriptor

    def get(self, which):
        return "" if which == "User-Id" else self.descriptor


def test_what_comes_on_a_connection_that_waits_is_passed_over_and_does_not_cut_it_off(world):
    async def main():
        handshakes = Handshakes(world.table, OwnLife(ME, "run", 7))
        world.twins = handshakes.twins
        receiver = Receiver(world.table, handshakes, None, None, RateLimit())
        world.port.owner, world.younger.address = P.peer, None  # this peer has dialled it
        assert world.twins.holds_back(world.partner, world.younger, 0.0)
        receiver.on_frame(world.port, None, Coming(PING + number(1), 2))
        assert world.port.kicked == []
        world.port.lane = BULK
        receiver.on_frame(world.port, None, Coming(FRAME + bytes(1000), 2))
        assert world.younger.window.received == 1000, "the other side may send as much again"
        world.port.kick(2, "it ends")
        assert world.twins.tick(0.1) == []
        receiver.on_frame(world.port, None, Coming(PING + number(1), 2))
        assert world.port.kicked == [2, 2]

    run_virtual(main())


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
