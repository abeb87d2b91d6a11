"""What a newcomer learns of a run from the members of its invite, before it reads any manifest."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.peers import end, identity, peer_in, record_of

from farflock.node.assembly.learnt import LearntTerms, learn_terms, shown
from farflock.node.assembly.peer_world import PeerWorld
from farflock.node.errors import RefusedByRun
from farflock.node.run.head import Head, run_id, seal_head
from farflock.node.run.invite import Invite, founder_of
from farflock.node.run.manifest import simulated_default
from farflock.swarm.chunk_store import digest_of
from farflock.swarm.contact import Contact
from farflock.swarm.peer.peer import RunTerms
from farflock.swarm.sim.network import LinkModel, SimNetwork
from farflock.swarm.sim.virtual_time import run_virtual

FOUNDER, NEWCOMER, SILENT = map(identity, range(3))
TEXT = simulated_default(()).canonical()
RUN = run_id(TEXT, FOUNDER.peer)
HEAD = seal_head(FOUNDER, Head(RUN, FOUNDER.peer, digest_of(TEXT), len(TEXT), 0))
LEARN_S = 20.0


def invite(*members):
    contacts = [Contact(one.peer, bytes(32), "192.0.2.7", 1, 2) for one in members]
    return Invite(RUN, founder_of(FOUNDER.peer), tuple(contacts), "a run", 0)


class Unreachable:
    """A directory that nobody should ask, or that tells what it is given."""

    def __init__(self, heads=None, records=()):
        self._heads, self._records, self.asked = heads, records, 0

    async def heads(self, run):
        self.asked += 1
        if self._heads is None:
            raise ConnectionError("no directory")
        return self._heads

    async def peers(self, run):
        return self._records


def learn(invited, directory=None, head=HEAD, text=TEXT):
    """What a newcomer learns beside a founder that tells this head and serves this text."""

    async def whole():
        network = SimNetwork(1, LinkModel())
        founder = peer_in(network, FOUNDER, RunTerms(RUN, 1))
        running = asyncio.create_task(_run(founder))
        await asyncio.sleep(0)
        founder.found()
        founder.membership.introductions.head = head
        founder.context.store.put(text, "manifest")
        world = PeerWorld(network.links(NEWCOMER.peer), directory)
        try:
            return await learn_terms(world, invited, LEARN_S)
        finally:
            await end(running)

    return run_virtual(whole())


async def _run(peer):
    async with peer.running():
        await asyncio.Event().wait()


def test_one_member_that_answers_is_enough_and_no_directory_is_asked():
    directory = Unreachable()
    learnt = learn(invite(SILENT, FOUNDER), directory)
    assert (learnt.text, learnt.head, directory.asked) == (TEXT, HEAD, 0)
    assert list(learnt.records) == [record_of(FOUNDER, RUN)]
    assert learnt.contacts == invite(SILENT, FOUNDER).members


def test_the_directory_is_asked_if_no_member_answers():
    directory = Unreachable([HEAD], [record_of(FOUNDER, RUN)])
    assert learn(invite(SILENT), directory).text == TEXT
    with pytest.raises(ConnectionError, match="no directory"):
        learn(invite(SILENT), Unreachable())


def test_a_node_does_not_ask_itself():
    with pytest.raises(ConnectionError, match="no directory"):
        learn(invite(NEWCOMER), Unreachable())


@pytest.mark.parametrize(
    "head",
    [
        b"nonsense",
        seal_head(SILENT, Head(RUN, SILENT.peer, digest_of(TEXT), len(TEXT), 0)),
        seal_head(FOUNDER, Head("ab" * 16, FOUNDER.peer, digest_of(TEXT), len(TEXT), 0)),
        seal_head(FOUNDER, Head(RUN, FOUNDER.peer, digest_of(TEXT), 2**20, 0)),
    ],
)
def test_a_head_that_is_not_the_founders_of_this_run_is_no_answer(head):
    with pytest.raises(RefusedByRun, match="none of its members answered within 20 s"):
        learn(invite(FOUNDER), head=head)


def test_terms_of_another_run_are_refused_even_if_the_founder_has_signed_them():
    other = TEXT.replace(b"seed = ", b"seed = 9")
    head = seal_head(FOUNDER, Head(RUN, FOUNDER.peer, digest_of(other), len(other), 0))
    with pytest.raises(RefusedByRun, match="the manifest of another run"):
        learn(invite(FOUNDER), head=head, text=other)


def test_a_run_of_another_protocol_is_named_as_such():
    head = seal_head(FOUNDER, Head(RUN, FOUNDER.peer, digest_of(TEXT), len(TEXT), 0, 99))
    with pytest.raises(RefusedByRun, match="it speaks version 99"):
        learn(invite(FOUNDER), head=head)


def terms_of(text):
    return LearntTerms(RUN, FOUNDER.peer, text, HEAD, ())


def test_the_terms_can_be_shown_and_give_a_peer_what_it_needs():
    manifest = simulated_default(())
    terms = shown(terms_of(TEXT))
    assert terms.said() == (
        f"{manifest.run.name}, method {manifest.method.name}, {manifest.run.total_tokens:,} tokens"
    )
    exchange = manifest.exchange
    assert terms.for_peers(RUN) == RunTerms(
        RUN, manifest.run.seed, exchange.view_s, exchange.branch_after_s
    )


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff",
        b"[run",
        b"a = 1",
        TEXT.replace(b"seed = ", b'seed = "x" #'),
        TEXT.replace(b'name = "', b'name = "\\u001b[2J'),
        b"a." * 5000 + b"a = 1",
        b"a = " + b"[" * 3000,
    ],
)
def test_terms_that_make_no_sense_are_refused_in_one_sentence(text):
    with pytest.raises(RefusedByRun, match="the run's terms cannot be read") as refusal:
        shown(terms_of(text))
    assert "\n" not in str(refusal.value)
    assert "\x1b" not in str(refusal.value)


@given(st.binary(max_size=300))
def test_any_terms_at_all_are_shown_or_refused(text):
    with pytest.raises(RefusedByRun):
        shown(replace(terms_of(TEXT), text=text))
