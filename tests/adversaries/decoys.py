"""Strangers that answer a newcomer's question for the run's views, each in its own way.

They know the run's id and its members' records, and hold no view that lists them. They send
well-formed messages over simulated links, as fast as they are asked."""

import asyncio
import itertools

from worlds.herd import VIEW_S

from farflock.swarm.frame import Frame, pack, unpack
from farflock.swarm.identity import Identity
from farflock.swarm.messages import ViewQuery, Views
from farflock.swarm.peer.peer import Peer, RunTerms
from farflock.swarm.protocol import views
from farflock.swarm.protocol.agreement.certificates import signed_text
from farflock.swarm.protocol.agreement.justified import vote_domain
from farflock.swarm.protocol.views import Certified, Member
from farflock.swarm.record import Record, seal

RUN, LIFE = "run", 1
ENDLESS = 64  # forged views in an answer


class Decoy:
    """A stranger with links and a record; `answer` is its answer to each question."""

    def __init__(self, herd, number, answer):
        self.identity = Identity.from_seed(b"decoy" + bytes(26) + bytes([number]))
        self.me, self._answer = self.identity.peer, answer
        self.record = seal(self.identity, Record(RUN, self.me, LIFE, LIFE, bytes(32)))
        self.herd, self.asked = herd, 0
        self.links = herd.network.links(self.me)
        self.joins = 0
        self.task = asyncio.create_task(self._live())

    async def _live(self):
        while True:
            sender, packed = await self.links.receive()
            message = unpack(packed).message
            if isinstance(message, ViewQuery):
                self.asked += 1
                for said in self._answer(self, message):
                    self.links.send(sender, pack(Frame(LIFE, said)))


def silence(decoy, asked):
    """Nothing at all."""
    return ()


def garbage(decoy, asked):
    """Bytes that are no views, and no links."""
    return (Views((b"\xff" * 100,), (), 5), Views((), (b"\x00" * 200,), 5), Views((), (), 2**62))


def line_of_its_own(decoy, asked):
    """A run that the decoy began itself under the same id, signed as it should be."""
    first = views.founded(RUN, decoy.identity, Member(decoy.me, LIFE))
    second = _next(decoy.identity, first.view, (Member(decoy.me, LIFE),))
    encoded = tuple(map(views.encode, (first, second)))
    return (Views(encoded, (), 1),)


def unsigned_founding(decoy, asked):
    """The founder's own view 0, as any version of it without a signature."""
    founder = Member(decoy.herd.founder, 101)
    return (Views((views.encode(Certified(views.genesis(RUN, founder))),), (), 0),)


def endless(decoy, asked):
    """The run's true view 0, and forged views without end after it."""
    first = _true(decoy)[0]
    made, parent = [], first.view
    for _ in range(ENDLESS):
        made.append(_next(decoy.identity, parent, (Member(decoy.me, LIFE),)))
        parent = made[-1].view
    encoded = tuple(map(views.encode, [first, *made]))
    return (Views(encoded[:ENDLESS], (), 2**62),)


def old_views(decoy, asked):
    """The run's true first views, as if there were no others."""
    true = _true(decoy)[:2]
    return (Views(tuple(map(views.encode, true)), (), len(true) - 1),)


def all_views_but_slowly(decoy, asked):
    """One true view at a time, and a promise of endlessly many."""
    true = _true(decoy)[asked.number : asked.number + 1]
    return (Views(tuple(map(views.encode, true)), (), 2**62),)


ANSWERS = (
    silence,
    garbage,
    line_of_its_own,
    unsigned_founding,
    endless,
    old_views,
    all_views_but_slowly,
)


def _true(decoy):
    """What everybody who asks is told."""
    return decoy.herd.nodes[0].peer.context.views.views


def _next(identity, parent, members):
    view = views.successor(parent, members)
    text = signed_text(views.view_key(view.number), parent.hash, (0, 0), views.encode(view))
    return Certified(view, (0, 0), ((0, identity.sign(vote_domain(RUN), text)),))


def crowd(herd, count, answers):
    """Start decoys that answer in these ways, in turn."""
    chosen = itertools.cycle(answers)
    return [Decoy(herd, number, next(chosen)) for number in range(count)]


class Eclipse(Decoy):
    """A whole peer that founded its own run under the same id, as the attack of record did."""

    def __init__(self, herd, number):
        self.herd = herd
        self.identity = Identity.from_seed(b"decoy" + bytes(26) + bytes([number]))
        self.me = self.identity.peer
        self.record = seal(self.identity, Record(RUN, self.me, LIFE, LIFE, bytes(32)))
        self.peer = Peer(
            RunTerms(RUN, 7, self.me, VIEW_S),
            self.identity,
            herd.network.links(self.me),
            None,
            incarnation=LIFE,
            record=lambda: self.record,
        )
        self.task = asyncio.create_task(self._live())

    async def _live(self):
        async with self.peer.running():
            self.peer.found()
            await asyncio.sleep(1e6)
