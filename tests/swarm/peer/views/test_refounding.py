"""Whom a member holds for lost: where too few voters are left, the view can be re-founded."""

import asyncio

from worlds.herd import STREAM, in_virtual_time
from worlds.waiting import now, until

from farflock.swarm.frame import unpack
from farflock.swarm.messages import GiveUp, Key, Prepare, Propose
from farflock.swarm.peer.views.refounding import LOST_S
from farflock.swarm.protocol.views import view_key

NOTICED_S = 5.0  # in which a silent member is suspected


def refounding(node):
    return node.peer.membership.next_view.refounding


def apart(herd, alone, *others):
    herd.network.partition({alone.id}, {node.id for node in others})


@in_virtual_time(3)
async def test_silent_voters_may_come_back_for_a_while(herd):
    """They may have decided a round, and a re-founding would take it back."""
    alone, *others = herd.nodes.values()
    apart(herd, alone, *others)
    await asyncio.sleep(LOST_S - 1)
    assert not refounding(alone).is_stuck
    await until(lambda: refounding(alone).is_stuck, NOTICED_S, "the end of the wait")
    herd.network.heal()
    await until(lambda: not refounding(alone).is_stuck, NOTICED_S, "their return")
    assert herd.nodes[0].view.refoundings == 0


@in_virtual_time(3)
async def test_voters_that_have_another_life_are_lost_at_once(herd):
    stays = herd.nodes[0]
    for number in (1, 2):
        herd.kill(number)
        herd.start(number)
    begun_s = now()
    await until(lambda: refounding(stays).is_stuck, LOST_S / 2, "the loss of their old lives")
    assert now() - begun_s < NOTICED_S


@in_virtual_time(3)
async def test_a_voter_that_gave_a_view_up_has_no_vote_there_while_its_life_goes_on(herd):
    first, *others = herd.nodes.values()
    view = first.view
    for node in others:
        assert not refounding(first).is_stuck
        sync = first.peer.membership.sync
        sync.receive_give_up(node.id, node.incarnation + 1, view.hash)  # of another life
        sync.receive_give_up("a stranger", node.incarnation, view.hash)
        sync.receive_give_up(node.id, node.incarnation, bytes(32))
        assert not first.peer.context.has_given_up(view, node.id)
        sync.receive_give_up(node.id, node.incarnation, view.hash)
        assert first.peer.context.has_given_up(view, node.id)
        assert first.peer.context.gone(view, node.id)
        assert not first.peer.membership.admission.present(view) & {view.peers.index(node.id)}
    assert refounding(first).is_stuck
    assert not refounding(first).are_enough


@in_virtual_time(3)
async def test_the_convicted_have_no_vote_on_the_next_view_though_they_are_heard(herd):
    alone, *others = herd.nodes.values()
    apart(herd, alone, *others)
    await until(lambda: refounding(alone).is_stuck, LOST_S + NOTICED_S, "the loss of the others")
    assert not refounding(alone).are_enough
    alone.peer.context.entrance.convicted = {node.id for node in others}
    assert not refounding(alone).is_stuck, "it decides the next view by itself"
    assert refounding(alone).are_enough


def answers(herd, node, ask):
    """What a node sends in answer to a message of the first one."""
    said, first = [], herd.nodes[0]
    herd.network.tap = lambda when_s, sender, to, packed: (
        said.append((to, unpack(packed).message)) if sender == node.id else None
    )
    ask(first.id, first.incarnation)
    herd.network.tap = None
    return said


@in_virtual_time(3)
async def test_a_voter_says_that_it_gave_a_view_up_to_whoever_asks_for_its_vote_on_the_next(herd):
    first, second, _ = herd.nodes.values()
    second.peer.context.give_up()
    view = second.view
    asked = Prepare(view_key(view.number + 1), view.hash, (1, 0))
    said = answers(herd, second, lambda *me: second.peer.membership.receive(*me, asked))
    assert said == [(first.id, GiveUp(view.hash))]


@in_virtual_time(3)
async def test_a_voter_says_that_it_gave_a_view_up_to_whoever_asks_for_its_vote_on_a_round(herd):
    first, second, third = herd.nodes.values()
    second.peer.context.give_up()
    view, number = second.view, second.peer.rounds.streams[STREAM].next
    for asked in (
        Propose(Key(STREAM, number), view.hash, (0, 0), b"value"),
        Prepare(Key(STREAM, number), view.hash, (1, 0)),
    ):
        said = answers(
            herd, second, lambda *me, asked=asked: second.peer.rounds.receive(*me, asked)
        )
        assert said == [(first.id, GiveUp(view.hash))]
    await until(
        lambda: all(node.peer.context.has_given_up(view, second.id) for node in (first, third)),
        60,
        "word",
    )
