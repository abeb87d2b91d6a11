"""Herds whose nodes have disks, so that they come back with what they knew and held.

A power cut takes what was not put on the disk for good. The law of returns: no key signs the return
of a view after it has acted in a later one.
"""

from dataclasses import dataclass, field

from worlds.chains.lines import Lines
from worlds.herd import Node
from worlds.waiting import now

from farflock.swarm.messages import HeldState
from farflock.swarm.peer.snapshots import SnapshotUnavailable
from farflock.swarm.protocol import views
from farflock.swarm.protocol.views import Chain

SAVES = 1  # rounds from one saved state to the next
SILENT_S = 20.0


@dataclass
class Disk:
    """What a node put on its disk; with `syncs` false, its last view is in the system's cache."""

    syncs: bool = True
    views: tuple = ()
    goodbyes: dict = field(default_factory=dict)
    saved: tuple = ()  # (last round, state, tokens, hash of the view of the last round)

    def keep(self, chain):
        known = tuple(views.encode(entry) for entry in chain.views)
        self.views = known if self.syncs else known[:-1] or known
        self.goodbyes = dict(chain.goodbyes)

    def chain(self, run):
        first, *others = (views.decode_certified(raw) for raw in self.views)
        chain = Chain(run, [first])
        for entry in others:
            chain.extend(entry)
        chain.goodbyes.update(self.goodbyes)
        return chain


def is_same(one, other):
    return (one.first, one.state) == (other.first, other.state)


class KeepingNode(Node):
    """One life of a peer that begins with what is on its disk."""

    def __init__(self, herd, number, incarnation, founds):
        self.disk = herd.disks.setdefault(number, Disk())
        super().__init__(herd, number, incarnation, founds)

    async def life(self):
        async with self.peer.running():
            context = self.peer.context
            context.own.held[0], self.peer.membership.sync.store = self.held, self.disk.keep
            if self.founds:
                self.peer.found()
                self.open()
            else:
                if self.disk.views:
                    self.peer.membership.sync.remember(self.disk.chain(context.run))
                if self.disk.saved:
                    self.applied, self.state, self.tokens, _ = self.disk.saved
                await self.peer.meet(self.herd.records(but=self), 600.0)
                await self.come_back()
                self.peer.ask_in()
            await self.work()

    def open(self):
        super().open()
        self.peer.context.own.is_open = True

    async def come_back(self):
        """Go on from the state on the disk where that is the newest; else take another's."""
        while True:
            begins = await self.peer.branching.returning.settled(lambda: None)
            held = self.held()
            if begins is not None and held is not None and is_same(begins[0], held):
                self.open()
                return
            try:
                await self.adopt(-1 if begins is None else begins[0].first - 1, SILENT_S)
                return
            except SnapshotUnavailable:
                continue

    def held(self):
        """What this node tells others that it holds."""
        context = self.peer.context
        if self.applied < 0:
            return HeldState(0) if context.own.is_open or self.disk.saved else None
        if context.own.is_open and not self.peer.branching.adrift:
            view = context.views.at(self.applied)
            under = b"" if view is None else view.hash
        elif self.disk.saved:
            under = self.disk.saved[3]
        else:
            return None
        state = self.state if self.herd.is_exact else b""
        return HeldState(self.applied + 1, state, self.tokens, under)

    def apply(self, outcome, name):
        super().apply(outcome, name)
        if self.applied % self.herd.saves == 0:
            under = self.peer.context.views.at(self.applied).hash
            self.disk.saved = (self.applied, self.state, self.tokens, under)


class Homes(Lines):
    """A herd of nodes with disks; `saves` is the number of rounds between two saved states."""

    node = KeepingNode

    def __init__(self, saves=SAVES, syncs=True, **options):
        super().__init__(**options)
        self.disks, self.saves, self.syncs = {}, saves, syncs
        self.is_exact = not self.stream.is_paired
        self.branch_after_s = 600.0
        self.known = {}  # views by hash
        self.acted = {}  # by (key, hash of the view): when first
        self.made = {}  # by the same: when one was first known
        self.forgetful = set()  # keys whose disks lost a view

    def start(self, number):
        self.disks.setdefault(number, Disk(self.syncs))
        return super().start(number)

    def forget_view(self, number):
        """Take the last view from the disk of a node that is not running."""
        self.disks[number].views = self.disks[number].views[:-1]
        self.forgetful.add(self.nodes[number].id)

    def applied(self, node, outcome, contents, name):
        super().applied(node, outcome, contents, name)
        self.look(node)
        view = node.peer.context.views.at(outcome.key.round)
        if name is not None and view is not None:
            self.acted.setdefault((node.id, view.hash), now())

    def look(self, node):
        """Note the views that a node knows, and when the first node knew them."""
        for entry in node.peer.context.views.views:
            if entry.view.hash not in self.known:
                self.known[entry.view.hash] = entry.view
                self.made[entry.view.hash] = now()

    def check_returns(self):
        """Check that nobody signed the return of a view after acting in a later one."""
        parents = {}
        for view in self.known.values():
            for mark in (view.hash, view.branch_mark, view.return_mark):
                parents[mark] = view
        returns = [
            view
            for view in self.known.values()
            if view.previous in parents and view.previous == parents[view.previous].return_mark
        ]
        for made in returns:
            for (key, digest), since_s in self.acted.items():
                view = self.known[digest]
                is_bound = key in made.peers and key not in self.forgetful
                if not is_bound or since_s >= self.made[made.hash]:
                    continue
                while view.number > made.number:
                    view = parents.get(view.previous, view)
                    if view.previous not in parents:
                        break
                is_later = view.number == made.number and view.hash != made.hash
                assert not (is_later and parents.get(view.previous) is parents[made.previous]), (
                    f"{key} acted in a view after {made.number - 1}, and signed a return of that"
                )
        return returns
