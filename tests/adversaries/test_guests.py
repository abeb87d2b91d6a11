"""Peers that want to be served and relayed for, made of the product's own parts, in simulated runs
and on real links: those that show a capability are, and no others."""

import asyncio
import contextlib

import pytest
from worlds import fleet
from worlds.herd import VIEW_S, identity, in_virtual_time
from worlds.waiting import until

from farflock.swarm import statements
from farflock.swarm.capability import EXPIRY_GRACE_S, MAX_UNIX_S, Ticket
from farflock.swarm.frame import Frame, pack, unpack
from farflock.swarm.guests import MAX_UNADMITTED, PLACE_LASTS_S
from farflock.swarm.messages import Join, Knock, Piece, StateOffer, StateQuery, Want
from farflock.swarm.peer.peer import Peer, RunTerms
from farflock.swarm.peer.views.admission_sync import KNOCK_EVERY_S
from farflock.swarm.record import Record, seal

FALSE = "refused: a knock with a false capability"


def issued(issuer, uses=0, expires=MAX_UNIX_S, secret=bytes(32), run="run"):
    return Ticket.issue(issuer, run, secret, expires, uses, 0)


def knock(ticket, key):
    return ticket.knock("run", key.peer)


class Visitor:
    """A peer that is no member, with links of its own and the record that the run knows of it."""

    def __init__(self, herd, number):
        self.herd, self.key, self.got = herd, identity(number), []
        self.links = herd.network.links(self.key.peer)
        self.record = seal(self.key, Record("run", self.key.peer, 1, 1, bytes(32)))
        for node in herd.nodes.values():
            node.peer.membership.book.learn(self.record)

    def say(self, *messages):
        for node in self.herd.nodes.values():
            for message in messages:
                self.links.send(node.id, pack(Frame(1, message)))

    async def hear(self, kind, timeout_s=2.0):
        """Return the next message of this kind; None if none comes in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    _, packed = await self.links.receive()
                    if isinstance(message := unpack(packed).message, kind):
                        return message
        return None

    async def is_served(self):
        """Whether members tell it of their state, give it a chunk of it, and would relay for it: if
        any of them does one of these, all of them do all."""
        standings = {node.peer.context.standing(self.key.peer) for node in self.herd.nodes.values()}
        self.say(StateQuery("state"))
        offer = await self.hear(StateOffer)
        self.say(Want(await listing_of(self.herd), 0, 1))
        piece = await self.hear(Piece)
        facts = {standings == {"candidate"}, offer is not None, piece is not None}
        assert len(facts) == 1
        assert facts == {True} or standings == {"stranger"}
        return facts.pop()


async def listing_of(herd):
    """The digest of a state that all members serve, however a stranger came to know it."""
    for node in herd.nodes.values():
        node.peer.context.store.put(b"a state", "served")
    return herd.nodes[0].peer.context.store.put(b"a state", "served")


def counted(herd, name):
    return [node.peer.context.counters[name] for node in herd.nodes.values()]


@in_virtual_time(3)
async def test_a_stranger_whose_record_is_known_is_served_nothing(herd):
    stranger = Visitor(herd, 9)
    assert all(stranger.key.peer in node.peer.membership.records for node in herd.nodes.values())
    assert not await stranger.is_served()
    stranger.say(Join(stranger.record), Knock(b"", b""))
    await asyncio.sleep(1.0)
    assert not await stranger.is_served()
    assert min(counted(herd, "dropped: state query of a stranger")) == 2
    assert min(counted(herd, "dropped: knock: it shows no capability")) == 1
    assert all(
        node.peer.context.chunks.dropped["want of a stranger"] for node in herd.nodes.values()
    )


@in_virtual_time(3)
async def test_a_holder_of_a_capability_is_served_while_it_asks_for_it(herd):
    guest = Visitor(herd, 9)
    guest.say(knock(issued(herd.inviter), guest.key))
    await asyncio.sleep(1.0)
    assert await guest.is_served()
    await asyncio.sleep(2 * VIEW_S)
    assert all(guest.key.peer not in node.members for node in herd.nodes.values())
    await asyncio.sleep(PLACE_LASTS_S)
    assert not await guest.is_served()


@pytest.mark.parametrize(
    ("ticket", "name"),
    [
        (
            lambda herd: issued(herd.inviter, expires=0),
            "dropped: knock: its capability has expired",
        ),
        (
            lambda herd: issued(identity(7)),
            "dropped: knock: the issuer of its capability may not issue any",
        ),
        (lambda herd: issued(herd.inviter, run="another"), FALSE),
    ],
)
def test_an_expired_or_foreign_capability_gets_nothing(ticket, name):
    @in_virtual_time(2)
    async def main(herd):
        await asyncio.sleep(EXPIRY_GRACE_S + 100)
        guest = Visitor(herd, 9)
        guest.say(knock(ticket(herd), guest.key))
        await asyncio.sleep(1.0)
        assert not await guest.is_served()
        assert counted(herd, name) == [1, 1]
        accused = {each.peer for each in herd.nodes[0].peer.context.accusations}
        assert accused == ({guest.key.peer} if name == FALSE else set())

    main()


@in_virtual_time(3)
async def test_a_used_up_capability_gets_nothing_and_the_key_that_it_let_in_is_served_again(herd):
    ticket = issued(herd.inviter, uses=1)
    first, second = Visitor(herd, 8), Visitor(herd, 9)

    def everywhere(is_in):
        return all((first.key.peer in node.members) == is_in for node in herd.nodes.values())

    async def admitted():
        while not everywhere(True):
            first.say(ticket.request("run", first.key.peer, first.record))
            await asyncio.sleep(1.0)

    await asyncio.wait_for(admitted(), 60)
    herd.network.kill(first.key.peer)
    await until(lambda: everywhere(False), 60, "its departure")
    second.say(knock(ticket, second.key))
    await asyncio.sleep(1.0)
    assert not await second.is_served()
    assert counted(herd, "dropped: knock: its capability is used up") == [1, 1, 1]
    back = Visitor(herd, 8)
    assert await back.is_served()  # admitted once, it may come in again, and shows nothing


@in_virtual_time(3)
async def test_a_banned_key_and_a_new_one_of_a_closed_run_are_served_nothing_more(herd):
    ticket = issued(herd.inviter)
    banned, late = Visitor(herd, 8), Visitor(herd, 9)
    banned.say(knock(ticket, banned.key))
    late.say(knock(ticket, late.key))
    await asyncio.sleep(1.0)
    assert await banned.is_served()
    says = herd.nodes[0].peer.membership.admission.statements
    for order in (("ban", banned.key.peer), ("close",)):
        says.take([statements.seal(herd.inviter, says.log.next(herd.founder, *order))])
    await asyncio.sleep(1.0)
    for guest in (banned, late):
        guest.say(knock(ticket, guest.key))
    await asyncio.sleep(1.0)
    assert not await banned.is_served()
    assert not await late.is_served()


@in_virtual_time(3)
async def test_a_knock_that_was_overheard_serves_no_other_key_and_admits_nobody(herd):
    owner, thief = Visitor(herd, 8), Visitor(herd, 9)
    seen = knock(issued(herd.inviter), owner.key)
    thief.say(seen, Join(owner.record, seen.capability, seen.proof))
    await asyncio.sleep(1.0)
    assert not await thief.is_served()
    assert not await owner.is_served()
    assert min(counted(herd, FALSE)) == 1
    assert min(counted(herd, "refused: a request to join with a false capability")) == 1
    accused = {each.peer for each in herd.nodes[0].peer.context.accusations}
    assert accused == {thief.key.peer}


@in_virtual_time(2)
async def test_of_a_hundred_keys_of_one_capability_eight_are_served_and_a_ninth_waits(herd):
    ticket = issued(herd.inviter, uses=50)
    crowd = [Visitor(herd, number) for number in range(100, 200)]
    for guest in crowd:
        guest.say(knock(ticket, guest.key))
    await asyncio.sleep(1.0)
    standings = [node.peer.context.standing for node in herd.nodes.values()]
    served = [
        [guest for guest in crowd if each(guest.key.peer) != "stranger"] for each in standings
    ]
    assert [len(some) for some in served] == [MAX_UNADMITTED] * 2
    assert counted(herd, "dropped: knock: others have the places") == [100 - MAX_UNADMITTED] * 2
    other = Visitor(herd, 9)
    other.say(knock(issued(herd.inviter, secret=bytes([1]) * 32), other.key))
    await asyncio.sleep(1.0)
    assert await other.is_served()
    await asyncio.sleep(PLACE_LASTS_S)
    ninth = next(guest for guest in crowd if not any(guest in some for some in served))
    ninth.say(knock(ticket, ninth.key))
    await asyncio.sleep(1.0)
    assert await ninth.is_served()


@in_virtual_time(2)
async def test_of_guests_by_twenty_capabilities_of_one_member_eight_are_served(herd):
    crowd = [Visitor(herd, number) for number in range(100, 120)]
    for number, guest in enumerate(crowd):
        ticket = issued(identity(1), uses=1, secret=bytes([number]) * 32)
        guest.say(knock(ticket, guest.key))
    await asyncio.sleep(1.0)
    for node in herd.nodes.values():
        standings = [node.peer.context.standing(guest.key.peer) for guest in crowd]
        assert standings.count("candidate") == MAX_UNADMITTED
    other = Visitor(herd, 9)
    other.say(knock(issued(herd.inviter), other.key))
    await asyncio.sleep(1.0)
    assert await other.is_served()


@in_virtual_time(2)
async def test_of_a_capability_with_two_uses_two_keys_are_served(herd):
    ticket = issued(herd.inviter, uses=2)
    guests = [Visitor(herd, number) for number in range(7, 10)]
    for guest in guests:
        guest.say(knock(ticket, guest.key))
        await asyncio.sleep(0.5)
    assert [await guest.is_served() for guest in guests] == [True, True, False]


@in_virtual_time(2)
async def test_a_newcomer_has_places_before_it_meets_the_members_and_until_it_is_one(
    herd,
):
    """It may need the run's data first, and takes its time."""
    key = identity(9)
    record = seal(key, Record("run", key.peer, 1, 1, bytes(32)))
    links = herd.network.links(key.peer)
    terms = RunTerms("run", 7, herd.founder, VIEW_S)
    newcomer = Peer(terms, key, links, None, incarnation=1, record=lambda: record)
    newcomer.membership.bring(issued(herd.inviter), [node.record for node in herd.nodes.values()])
    nodes = herd.nodes.values()

    def standings():
        return {node.peer.context.standing(key.peer) for node in nodes}

    async with newcomer.running():
        await until(lambda: standings() == {"candidate"}, 5, "a place at all")
        await asyncio.sleep(3 * PLACE_LASTS_S)
        assert standings() == {"candidate"}
        await newcomer.join([node.record for node in nodes], 10.0)
        await until(lambda: newcomer.membership.is_member, 30, "its admission")
        asked = sum(counted(herd, "dropped: knock: the roll is not known here"))
        places = [node.peer.membership.guests.guests for node in nodes]
        newcomer.leave()
        await asyncio.sleep(PLACE_LASTS_S + KNOCK_EVERY_S)
        assert asked == 0
        assert not any(each.has(key.peer, newcomer.context.now()) for each in places)


def test_a_relay_forwards_for_a_holder_of_a_capability_and_not_for_a_stranger_with_a_record():
    async def main(peers):
        founder = fleet.identity(3)
        links = await peers.peer(3)
        terms = RunTerms("run", 7, founder.peer, VIEW_S)
        relay = Peer(terms, founder, links, None, incarnation=3, record=links.record)
        links.detours.standing = relay.context.entrance.standing
        guest, stranger, target = [await peers.peer(seed, listen=None) for seed in (1, 2, 4)]
        async with relay.running():
            relay.found()
            blob = target.record(relays=[links.me])
            target.learn(links.record())
            for each in (guest, stranger):
                each.learn(links.record())
                relay.membership.book.learn(each.record())
                each.learn(blob)
            ticket, standing = issued(founder), relay.context.standing
            for each in (guest, target):
                each.send(links.me, pack(Frame(1, ticket.knock("run", each.me))))
                await fleet.until(lambda each=each: standing(each.me) == "candidate")
            assert guest.send(target.me, b"from the guest")
            assert await fleet.got(target) == (guest.me, b"from the guest")
            assert links.relayed_bytes(guest.me) > 0
            assert stranger.me in relay.membership.records
            assert stranger.send(target.me, b"from the stranger")
            await fleet.until(lambda: links.counters["forward: from a stranger"])
            assert await fleet.silent(target, 1.0)
            assert links.relayed_bytes(stranger.me) == 0

    fleet.run(main)
