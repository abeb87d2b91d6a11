"""Peers that want in without being invited, made of the product's own parts, in simulated runs."""

import asyncio

import pytest
from worlds.herd import VIEW_S, identity, in_virtual_time
from worlds.waiting import now, until

from farflock.node.simulate.liars.lines import Hijacker
from farflock.swarm import statements
from farflock.swarm.capability import MAX_UNIX_S, Ticket
from farflock.swarm.frame import Frame, pack
from farflock.swarm.messages import Join, Statements, Views
from farflock.swarm.peer.views.admission import (
    MAX_CANDIDATES_EACH,
    MAX_CLAIMANTS,
    MAX_INVITED_EACH,
)
from farflock.swarm.record import Record, seal

CHANGES_S = 2 * VIEW_S + 3  # time for two changes of members


def record_of(key, life=1):
    return seal(key, Record("run", key.peer, life, life, bytes(32)))


def say(herd, key, *messages):
    """Send messages to every node of a herd over links of this key's own."""
    links = herd.network.links(key.peer)
    for node in herd.nodes.values():
        for message in messages:
            links.send(node.id, pack(Frame(1, message)))
    return links


async def asking(herd, key, *messages):
    """Repeat messages to every node for long enough to be admitted, if they can do that."""
    links = say(herd, key, *messages)
    for _ in range(int(CHANGES_S)):
        await asyncio.sleep(1.0)
        for node in herd.nodes.values():
            for message in messages:
                links.send(node.id, pack(Frame(1, message)))


def issued(issuer, uses=0, expires=MAX_UNIX_S, secret=bytes(32)):
    return Ticket.issue(issuer, "run", secret, expires, uses, 0)


def lets_in(herd, key):
    return [key.peer in node.members for node in herd.nodes.values()]


def candidates(herd):
    return {
        peer
        for node in herd.nodes.values()
        for peer in node.peer.membership.admission.candidates.joining
    }


@in_virtual_time(3)
async def test_a_stranger_that_knows_the_run_and_an_address_is_never_a_candidate(herd):
    stranger = identity(9)
    attack = asyncio.create_task(asking(herd, stranger, Join(record_of(stranger))))
    for _ in range(int(CHANGES_S)):
        await asyncio.sleep(1.0)
        assert stranger.peer not in candidates(herd)
    await attack
    assert not any(lets_in(herd, stranger))
    for node in herd.nodes.values():
        assert node.peer.context.counters["dropped: join: it shows no capability"] > 3


def taken_from(herd, key):
    """A request that its owner made, as whoever heard it can repeat it."""
    return issued(herd.inviter).request("run", key.peer, record_of(key))


@in_virtual_time(3)
async def test_a_request_that_was_overheard_admits_no_other_key(herd):
    owner, thief = identity(8), identity(9)
    seen = taken_from(herd, owner)
    own_record = Join(record_of(thief), seen.capability, seen.proof)
    await asking(herd, thief, seen, own_record)
    assert not any(lets_in(herd, thief))
    assert not any(lets_in(herd, owner))  # a stranger speaks for nobody else
    for node in herd.nodes.values():
        counters = node.peer.context.counters
        assert counters["dropped: join for somebody else"] > 3
        assert counters["refused: a request to join with a false capability"] > 3


@pytest.mark.parametrize(
    ("ticket", "why"),
    [
        (lambda herd: issued(herd.inviter, expires=0), "its capability has expired"),
        (
            lambda herd: issued(identity(7)),
            "the issuer of its capability may not issue any",
        ),
    ],
)
def test_an_expired_capability_or_one_by_nobody_lets_nobody_in(ticket, why):
    @in_virtual_time(2)
    async def main(herd):
        await asyncio.sleep(700)  # past the grace, on the virtual clock of these voters
        newcomer = identity(9)
        request = ticket(herd).request("run", newcomer.peer, record_of(newcomer))
        await asking(herd, newcomer, request)
        assert not any(lets_in(herd, newcomer))
        assert herd.nodes[0].peer.context.counters[f"dropped: join: {why}"] > 3

    main()


@in_virtual_time(5)
async def test_of_forty_keys_with_a_capability_of_three_uses_three_come_in_and_others_still_can(
    herd,
):
    """Five members decide without the three: how many votes keys bring is not decided here."""
    ticket = issued(herd.inviter, uses=3)
    keys = [identity(number) for number in range(100, 140)]
    for key in keys:
        say(herd, key, ticket.request("run", key.peer, record_of(key)))
    attacks = [
        asyncio.create_task(asking(herd, key, ticket.request("run", key.peer, record_of(key))))
        for key in keys
    ]
    herd.start(5)
    await until(lambda: herd.nodes[5].id in herd.nodes[0].members, 60, "the honest newcomer")
    await asyncio.gather(*attacks)
    for node in herd.nodes.values():
        assert len({key.peer for key in keys} & node.members) <= 3
        roll = node.peer.membership.admission.rolls.roll
        assert roll is not None
        assert len({key.peer for key in keys if key.peer in roll}) == 3


def crowd_of(member, count):
    """Requests of so many keys, each by a capability of its own that this member issued."""
    keys = [identity(number) for number in range(100, 100 + count)]
    tickets = (issued(member, uses=1, secret=key.public) for key in keys)
    return {
        key.peer: (key, ticket.request("run", key.peer, record_of(key)))
        for key, ticket in zip(keys, tickets, strict=True)
    }


@in_virtual_time(3)
async def test_of_forty_keys_that_one_member_invites_eight_wait_at_a_time(herd):
    crowd = crowd_of(identity(1), 40)
    attacks = [asyncio.create_task(asking(herd, *each)) for each in crowd.values()]
    most, ends_s = 0, now() + CHANGES_S
    while now() < ends_s:
        for node in herd.nodes.values():
            waiting = crowd.keys() & node.peer.membership.admission.candidates.joining.keys()
            most = max(most, len(waiting - node.members))
        await asyncio.sleep(0.2)
    await asyncio.gather(*attacks)
    assert most == MAX_CANDIDATES_EACH
    assert crowd.keys() & herd.nodes[0].members, "they come in, a few at a time"


@in_virtual_time(3)
async def test_requests_that_a_member_passes_on_displace_none_of_others(herd):
    """Its own keys ask nobody; their requests come from a member as those of a proposal do."""
    liar, honest = herd.nodes[1], herd.nodes[0]
    crowd = crowd_of(identity(1), MAX_CLAIMANTS + 20)
    newcomer = identity(9)
    await asyncio.sleep(VIEW_S)
    say(herd, newcomer, issued(herd.inviter).request("run", newcomer.peer, record_of(newcomer)))
    await asyncio.sleep(0.2)
    for _, request in crowd.values():
        liar.peer.context.send(honest.id, request)
    await asyncio.sleep(0.2)
    heard = honest.peer.membership.admission.asked()
    assert newcomer.peer in heard
    assert len(heard.keys() & crowd.keys()) == MAX_INVITED_EACH


@in_virtual_time(2)
async def test_a_newcomer_that_is_not_let_in_knows_why(herd):
    newcomer = herd.start(2)
    newcomer.peer.membership.bring(issued(identity(7)))
    admission = newcomer.peer.membership.admission
    await until(lambda: admission.own_refusal is not None, 30, "the reason")
    assert admission.own_refusal == "the issuer of its capability may not issue any"
    newcomer.peer.membership.bring(issued(herd.inviter))
    assert admission.own_refusal is None
    await until(lambda: newcomer.id in herd.nodes[0].members, 30, "its admission")


@in_virtual_time(2)
async def test_a_member_may_invite_and_a_use_is_counted_whoever_comes_back(herd):
    ticket = issued(identity(1), uses=1)
    first, second = identity(8), identity(9)
    await asking(herd, first, ticket.request("run", first.peer, record_of(first)))
    assert all(lets_in(herd, first))
    herd.network.kill(first.peer)
    await until(lambda: not any(lets_in(herd, first)), 60, "its departure")
    await asking(herd, second, ticket.request("run", second.peer, record_of(second)))
    assert not any(lets_in(herd, second))
    await asking(herd, first, Join(record_of(first, life=2)))
    assert all(lets_in(herd, first))  # admitted once: it needs no second use, and no capability


@in_virtual_time(3)
async def test_a_peer_that_is_asked_learns_nothing_that_lets_another_key_in(herd):
    """So a decoy that a newcomer asks first gains nothing."""
    thief, heard = identity(9), []
    asked = herd.nodes[0].peer.membership.admission
    receive = asked.receive_join

    def listen(sender, request):
        heard.append(request)
        receive(sender, request)

    asked.receive_join = listen
    newcomer = herd.start(3)
    await until(lambda: newcomer.id in herd.nodes[1].members, 40, "the newcomer")
    seen = heard[0]
    assert newcomer.peer.membership.admission.ticket.secret not in pack(Frame(1, seen))
    await asking(herd, thief, seen, Join(record_of(thief), seen.capability, seen.proof))
    assert not any(lets_in(herd, thief))


@in_virtual_time(3)
async def test_a_voter_that_a_newcomer_cannot_reach_hears_its_request_from_the_proposer(herd):
    """Else a voter behind a broken line would keep newcomers out, or sign what it cannot check."""
    newcomer = identity(9)
    unreached = herd.nodes[2]
    links = herd.network.links(newcomer.peer)
    request = issued(herd.inviter).request("run", newcomer.peer, record_of(newcomer))
    for _ in range(int(CHANGES_S)):
        for number in (0, 1):
            links.send(herd.nodes[number].id, pack(Frame(1, request)))
        await asyncio.sleep(1.0)
    assert all(lets_in(herd, newcomer))
    assert unreached.peer.membership.admission.claims.heard(0.0)[newcomer.peer]


@in_virtual_time(3)
async def test_a_view_with_a_newcomer_that_asked_nobody_is_signed_by_no_honest_member(herd):
    """A proposer that lies about who asked gets no votes for it."""
    liar, ghost = herd.nodes[0], identity(9)
    admission = liar.peer.membership.admission
    request = Join(record_of(ghost))
    from farflock.swarm.protocol.enrolment import claim_of

    claim = claim_of(request, "run", 0.0)
    admission.candidates.join(claim.member, 1e9)
    admission.enrolled = lambda view: view
    admission.unjustified = lambda view: None
    await asyncio.sleep(CHANGES_S)
    for node in herd.nodes.values():
        assert ghost.peer not in node.members


def state(herd, *orders):
    """Make statements as the founder, and give them to its node."""
    log = herd.nodes[0].peer.membership.admission.statements
    for kind, *rest in orders:
        statement = log.log.next(herd.founder, kind, *rest)
        log.take([statements.seal(herd.inviter, statement)])


def orders(herd):
    return [node.peer.context.entrance.orders for node in herd.nodes.values()]


@in_virtual_time(4)
async def test_a_banned_member_is_out_with_the_next_view_and_never_comes_back(herd):
    banned = herd.nodes[3]
    state(herd, ("ban", banned.id))
    others = [herd.nodes[number] for number in range(3)]
    await until(lambda: all(banned.id not in node.members for node in others), 20, "its end")
    assert {order.newest[0] for order in orders(herd)} == {1}
    assert all(node.view.statement == node.peer.context.entrance.orders.newest for node in others)
    applied = others[0].applied
    herd.kill(3)
    del herd.nodes[3]
    again = asyncio.create_task(
        asking(herd, identity(3), taken_from(herd, identity(3)), Join(record_of(identity(3), 999)))
    )
    await again
    assert all(banned.id not in node.members for node in others)
    assert others[0].applied > applied  # and the others train on
    assert others[1].peer.context.counters["dropped: of a banned peer"] > 3


@in_virtual_time(3)
async def test_a_closed_run_takes_no_new_key_and_lets_its_own_come_back(herd):
    state(herd, ("close",))
    await until(lambda: all(order.closed for order in orders(herd)), 10, "word of it")
    newcomer = identity(9)
    await asking(herd, newcomer, taken_from(herd, newcomer))
    assert not any(lets_in(herd, newcomer))
    herd.kill(2)
    herd.start(2)
    await until(
        lambda: (
            herd.nodes[2].view.index(herd.nodes[2].id, herd.incarnation) is not None
            if herd.nodes[2].peer.context.chain
            else False
        ),
        60,
        "its return",
    )
    state(herd, ("open",))
    await asking(herd, newcomer, taken_from(herd, newcomer))
    assert all(lets_in(herd, newcomer))


@in_virtual_time(3)
async def test_a_newcomer_and_a_member_that_missed_it_learn_what_was_stated(herd):
    cut = {herd.nodes[2].id}
    rest = {herd.nodes[number].id for number in (0, 1)}
    herd.network.partition(cut, rest)
    state(herd, ("ban", identity(9).peer), ("close",), ("open",))
    await asyncio.sleep(1.0)
    assert orders(herd)[2].newest[0] == 0
    herd.network.heal()
    herd.start(3)
    await until(
        lambda: (
            {order.newest[0] for order in orders(herd)} == {3}
            and herd.nodes[3].peer.membership.is_member
        ),
        40,
        "the statements everywhere",
    )
    assert all(identity(9).peer in order.banned for order in orders(herd))


@in_virtual_time(3)
async def test_a_statement_in_the_founders_name_by_somebody_else_moves_nobody(herd):
    liar = identity(1)
    forged = statements.Statement("run", liar.peer, 1, bytes(32), "ban", herd.nodes[2].id)
    await asking(herd, liar, Statements((statements.seal(liar, forged),)))
    assert all(order == statements.NO_ORDERS for order in orders(herd))
    assert all(len(node.members) == 3 for node in herd.nodes.values())
    accused = {each.peer for each in herd.nodes[0].peer.context.accusations}
    assert accused == {liar.peer}


@in_virtual_time(3)
async def test_a_newcomer_that_hears_a_quorum_follows_no_branch_of_one_member(herd):
    liar, node = herd.nodes[2], herd.start(3)
    hijacker, context = Hijacker(liar.peer, liar.identity), node.peer.context
    await until(lambda: context.chain is not None, 10, "its first views")
    lured = 0
    while not context.is_member:
        lured += context.views.newest == liar.view
        liar.peer.context.send(node.id, Views(hijacker.lure().views))
        await asyncio.sleep(0.1)
        assert context.views.branch is None
    assert lured > 5
