"""Newcomers and late peers find the way to the newest view, however long the run has lasted."""

import asyncio

import pytest
from worlds.herd import Herd, grown, identity
from worlds.waiting import until

from farflock.swarm import statements
from farflock.swarm.frame import unpack
from farflock.swarm.messages import Views
from farflock.swarm.peer.peer import Peer, RunTerms
from farflock.swarm.protocol import backbone, views
from farflock.swarm.record import Record, seal
from farflock.swarm.sim.virtual_time import run_virtual

KEPT = 8


@pytest.fixture(autouse=True)
def few_views_are_kept(monkeypatch):
    monkeypatch.setattr(views, "KEPT_VIEWS", KEPT)
    monkeypatch.setattr(backbone, "MAX_TAIL", KEPT)
    monkeypatch.setattr(backbone, "RECENT_BYTES", 2000)


def old_run(members, main):
    async def whole():
        herd = Herd()
        await grown(herd, members)
        await main(herd)
        await herd.end()
        herd.check_tokens()

    run_virtual(whole())


async def changed(herd, times):
    """Let as many visitors come and go again."""
    for number in range(100, 100 + times):
        await visited(herd, number)


async def visited(herd, number):
    node = herd.start(number)
    await until(lambda: node.id in herd.nodes[0].members, 40, "a visitor's admission")
    node.peer.leave()
    await until(lambda: node.id not in herd.nodes[0].members, 40, "its goodbye")
    node.task.cancel()
    del herd.nodes[number]


def listening(node, seen):
    """Note the messages with views that a node gets."""
    receive = node.peer.membership.sync.receive

    def noting(sender, message):
        seen.append(message)
        receive(sender, message)

    node.peer.membership.sync.receive = noting


def test_a_newcomer_follows_links_into_a_run_whose_first_views_nobody_keeps():
    async def main(herd):
        await changed(herd, 3 * KEPT)
        assert herd.nodes[0].view.number > 5 * KEPT
        seen, node = [], herd.start(3)
        listening(node, seen)
        await until(lambda: herd.nodes[0].members == {each.id for each in herd.nodes.values()}, 30)
        chain = node.peer.context.views
        assert any(message.links for message in seen)
        assert chain.past.first.view.members[0].peer == herd.founder
        assert len(chain.past.links) < 3 * KEPT, "a link leads over many views"
        herd.kill(0)  # and it can lead others the same way
        herd.nodes.pop(0)
        heir = herd.start(4)
        await until(lambda: heir.peer.context.chain is not None, 30, "its first views")
        assert heir.peer.context.chain.past.first == chain.past.first

    old_run(3, main)


def test_a_peer_that_missed_more_views_than_anybody_keeps_follows_links_from_view_0_on():
    """It only looks on, and was cut off for long."""

    async def main(herd):
        mine = identity(9)
        blob = seal(mine, Record("run", mine.peer, 1, 1, bytes(32)))
        links, terms = herd.network.links(mine.peer), RunTerms("run", 7, herd.founder)
        peer = Peer(terms, mine, links, None, incarnation=1, record=lambda: blob)
        async with peer.running():
            await peer.meet(herd.records(but=None), 30.0)
            before = peer.context.views
            for node in herd.nodes.values():
                herd.network.cut(mine.peer, node.id)
            await changed(herd, 2 * KEPT)
            assert peer.context.views is before
            herd.network.heal()
            await until(lambda: peer.context.views.newest == herd.nodes[0].view, 30, "the views")
            assert peer.context.views.past.first == before.past.first
            assert not list(peer.context.accusations)

    old_run(3, main)


@pytest.mark.parametrize("is_told", [True, False], ids=["anchor told", "anchor not told"])
def test_a_peer_with_the_anchor_follows_no_longer_chain_that_does_not_show_it(is_told):
    async def main(herd):
        mine = identity(9)
        blob = seal(mine, Record("run", mine.peer, 1, 1, bytes(32)))
        links, terms = herd.network.links(mine.peer), RunTerms("run", 7, herd.founder)
        peer = Peer(terms, mine, links, None, incarnation=1, record=lambda: blob)
        async with peer.running():
            await peer.meet(herd.records(but=None), 30.0)
            before = peer.context.views
            anchor = before.newest.number, before.newest.hash
            told = statements.Statement("run", herd.founder, 1, bytes(32), "anchor", view=anchor)
            sealed = statements.seal(herd.inviter, told)
            for node in herd.nodes.values():
                herd.network.cut(mine.peer, node.id)
                if is_told:
                    node.peer.membership.admission.statements.take([sealed])
            peer.membership.admission.statements.take([sealed])
            await changed(herd, 2 * KEPT)
            herd.network.heal()
            await asyncio.sleep(30)
            assert (peer.context.views is not before) == is_told
            assert not is_told or backbone.holds(peer.context.views, anchor)

    old_run(3, main)


def test_a_newcomer_gets_many_views_without_waiting_between_messages(monkeypatch):
    monkeypatch.setattr(backbone, "RECENT_BYTES", 10**6)
    monkeypatch.setattr(views, "KEPT_VIEWS", 512)
    monkeypatch.setattr(views, "MAX_SENT_BYTES", 3000)

    async def main(herd):
        await changed(herd, 15)
        seen, node = [], herd.start(3)
        listening(node, seen)
        await until(lambda: node.peer.context.chain is not None, 0.9, "before it asks again")
        assert node.view.number == herd.nodes[0].view.number
        assert len(seen) > 3

    old_run(3, main)


def test_answers_are_bounded_and_are_not_repeated_at_once():
    async def main(herd):
        await changed(herd, 3 * KEPT)
        node, asker = herd.nodes[0], herd.nodes[1].id
        sent = []
        node.peer.context.links.send = lambda peer, packed: sent.append(unpack(packed).message)
        for _ in range(20):
            node.peer.membership.sync.send_views(asker, -1, links=True)
        assert [type(message) for message in sent] == [Views]
        assert sent[0].newest == node.view.number
        node.peer.membership.sync.send_views(asker, node.view.number + 5, links=True)
        assert len(sent) == 1
        del node.peer.context.links.send
        await asyncio.sleep(0)

    old_run(3, main)
