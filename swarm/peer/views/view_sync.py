"""Synchronisation of views: a peer sends others the certified views that they are missing.

A newcomer has an `FirstViews` (swarm/protocol/arrival.py) until it knows which chain it follows. A
peer whose views end before those that others still keep has one too, and changes to the longer
chain if that one has its quorum."""

import asyncio
import logging
from collections.abc import Callable, Collection

from farflock.swarm.context import PeerContext
from farflock.swarm.links import PeerId
from farflock.swarm.messages import Decided, ViewQuery, Views
from farflock.swarm.protocol import backbone, views
from farflock.swarm.protocol.arrival import Choice, FirstViews
from farflock.swarm.protocol.views import BadView, Certified, Chain, Forgery
from farflock.swarm.statements import AnchoredView

RESEND_S = 0.5  # the same views go to a peer no more often: many messages may call for them
MAX_SENT = 1024  # peers whose last views sent, or whose views are welcome; strangers may be many

log = logging.getLogger(__name__)


class ViewSync:
    """Sends views to peers that are missing them, and appends received ones to the chain.

    `changed` is called after each appended view."""

    def __init__(self, context: PeerContext, founder: PeerId, changed: Callable[[], None]) -> None:
        self.known = asyncio.Event()  # set once the views are known
        # Called with a branch of the newest view, and with a peer whose views do not follow ours.
        self.on_branch: Callable[[PeerId, Certified], None] = lambda sender, branch: None
        self.on_other_chain: Callable[[PeerId], None] = lambda peer: None
        # Called with a chain from view 0 on that is to replace one that ended long before.
        self.on_longer_chain: Callable[[Chain], None] = lambda chain: None
        self.choice = ""  # why this peer follows one of several chains
        self._context, self._founder, self._changed = context, founder, changed
        self._arrival = FirstViews(context.run, founder)
        self._asked: dict[PeerId, None] = {}  # peers whose views are read before any is known
        # Peers whose views are followed beside our own chain, and when each was asked first.
        self._far: dict[PeerId, float] = {}
        # (of which view, and pinned one, links with the numbers of their views)
        self._proof: tuple[tuple[bytes, int], tuple[tuple[int, bytes], ...]] = (b"", -1), ()
        # By peer: (newest sent, after which, with links, when).
        self._sent: dict[PeerId, tuple[int, int, bool, float]] = {}

    def begin(self, chain: Chain) -> None:
        """Start with this chain, the first views known here."""
        self._context.chain = chain
        backbone.pin(chain, self._context.entrance.orders.anchor)
        self._arrival = FirstViews(self._context.run, self._founder)
        self.known.set()

    def found(self, first: Certified) -> None:
        """Start the run with this view 0, which its founder signed."""
        self.begin(backbone.begun(self._context.run, self._founder, first))

    def change_chain(self, chain: Chain) -> None:
        """Replace the chain, and forget what was sent of the old one."""
        self._context.chain = chain
        self._sent.clear()

    def expect(self, peers: Collection[PeerId]) -> None:
        """Accept the first views also from these peers, which are asked for them now."""
        for peer in peers:
            self._asked.pop(peer, None)
            self._asked[peer] = None
        while len(self._asked) > MAX_SENT:
            del self._asked[next(iter(self._asked))]

    def ask(self, peer: PeerId) -> None:
        """Ask a peer for the views after our newest one."""
        chain = self._context.chain
        if chain is None:
            self._ask_from_start(peer)
        else:
            self._context.send(peer, ViewQuery(chain.newest.number + 1))

    def _ask_from_start(self, peer: PeerId) -> None:
        """Ask a peer for the way from view 0 to its newest view, or for the rest of it."""
        self._context.send(peer, ViewQuery(self._arrival.next_number(peer), links=True))

    def tick(self) -> None:
        """Follow a chain once it is clear which one."""
        if self._context.chain is None or self._far:
            self._choose()

    def look_far(self, peer: PeerId) -> None:
        """Follow a peer from view 0 on, beside our own chain."""
        now_s = self._context.now()
        is_recent = now_s - self._far.get(peer, -1e9) < RESEND_S
        if not is_recent and (peer in self._far or len(self._far) < MAX_SENT):
            self._far[peer] = now_s
            self._ask_from_start(peer)

    def send_views(self, peer: PeerId, after_number: int, links: bool = False) -> None:
        """Send a peer the views that it is missing after `after_number`, or `links` to them.

        The same views are not resent at once, however many messages show that they are missing."""
        chain, now_s = self._context.chain, self._context.now()
        if chain is None or after_number >= chain.newest.number:
            return
        newest, after, linked, sent_s = self._sent.get(peer, (-1, -1, False, -1e9))
        is_repeated = (newest, after, linked) == (chain.newest.number, after_number, links)
        if is_repeated and now_s - sent_s < RESEND_S:
            return
        message = self._missing(chain, after_number, links)
        if message.views or message.links:
            if len(self._sent) >= MAX_SENT:
                self._sent.clear()
            self._sent[peer] = (chain.newest.number, after_number, links, now_s)
            self._context.send(peer, message)

    def _missing(self, chain: Chain, after: int, takes_links: bool) -> Views:
        """Return as much as one message holds of what leads from a view to our newest one."""
        known, number = chain.since(after), chain.newest.number
        if known and not takes_links:
            return Views(known, (), number)
        past, steps = chain.past, self._links(chain)
        links = views.fitting(raw for to, raw in steps if to > after)
        if not links or past is None:
            return Views(known, (), number)
        return Views((views.encode(past.first),) if after < 0 else (), links, number)

    def _links(self, chain: Chain) -> tuple[tuple[int, bytes], ...]:
        """Return the proof of our chain, which is computed once for each newest view."""
        made_for = chain.newest.hash, -1 if chain.past is None else chain.past.pinned
        if self._proof[0] != made_for:
            self._proof = made_for, backbone.packed_proof(chain)
        return self._proof[1]

    def repeat_newest(self) -> None:
        """Send the newest view again to its members, if it has been decided to go on without this
        peer: nobody else may know of it."""
        newest = self._context.views.newest
        if self._context.my_index(newest) is None:
            for peer in newest.peers:
                self.send_views(peer, newest.number - 1)

    def reconcile(self, peer: PeerId, digest: bytes) -> None:
        """Find out which side lags, after a message named a view that is not our newest."""
        chain = self._context.chain
        if chain is None:
            return
        view = chain.by_hash(digest)
        if view is None:
            self.ask(peer)
            self.on_other_chain(peer)
        else:
            self.send_views(peer, view.number)

    def receive(self, sender: PeerId, message: Views) -> None:
        """Take in the views that a peer sent, oldest first."""
        chain = self._context.chain
        if chain is None and sender not in self._asked:
            self._context.drop("views of strangers")
            return
        try:
            if chain is None or self._is_from_start(sender, message):
                self._arrive(sender, message)
            elif message.links and not message.views:
                self._look_far(sender, chain, message)
            else:
                self._follow(sender, chain, message)
        except Forgery as error:
            self._context.accuse(sender, "a false view")
            log.warning("views of %s are refused: %s", sender, error)
        except BadView:
            self._context.drop("bad view")
            if self._context.chain is not None:
                self.on_other_chain(sender)

    def receive_decided(self, sender: PeerId, decided: Decided) -> None:
        """Take in a view that was decided without this peer."""
        try:
            self._take(sender, views.certified_by(decided))
        except BadView:
            self._context.drop("bad view")

    def receive_give_up(self, sender: PeerId, incarnation: int, digest: bytes) -> None:
        """Note that a member of a view takes no part in it any more."""
        chain = self._context.chain
        view = None if chain is None else chain.by_hash(digest)
        if chain is not None and view is not None and view.index(sender, incarnation) is not None:
            self._context.given_up.hear(view, sender, [entry.view for entry in chain.views])

    def _follow(self, sender: PeerId, chain: Chain, message: Views) -> None:
        before = chain.newest.number
        for raw in message.views:
            self._take(sender, views.decode_certified(raw))
        newest = self._context.views.newest.number
        if before < newest < message.newest:
            self.ask(sender)

    def _take(self, sender: PeerId, certified: Certified) -> None:
        chain = self._context.views
        if certified.view.previous == chain.newest.branch_mark:
            self.on_branch(sender, certified)
        elif chain.extend(certified):
            self._changed()
        elif chain.differs(certified.view):
            raise BadView(f"view {certified.view.number} is another one here")

    # peers that do not know which chain to follow

    def _is_from_start(self, sender: PeerId, message: Views) -> bool:
        """True if a message goes on with the views that a peer was asked for from view 0 on."""
        if sender not in self._far or message.links:
            return sender in self._far
        begins = (views.decode_certified(raw).view.number for raw in message.views[:1])
        return next(begins, -1) in (0, self._arrival.next_number(sender))

    def _look_far(self, sender: PeerId, chain: Chain, message: Views) -> None:
        """Follow a peer from view 0 on that keeps no view as old as our newest one."""
        if message.newest > chain.newest.number:
            self.look_far(sender)

    def _arrive(self, sender: PeerId, message: Views) -> None:
        """Follow a peer's views from view 0 on."""
        if self._arrival.take(sender, message, self._context.now()):
            self._ask_from_start(sender)
        self._choose()

    def _choose(self) -> None:
        """Follow a chain, if it is clear which one."""
        anchor = self._context.entrance.orders.anchor
        choice = self._arrival.choice(self._context.now(), anchor)
        if choice is None:
            return
        chain = self._context.chain
        if chain is None:
            self._tell(choice)
            self.begin(choice.line.chain)
        elif _replaces(choice, chain, anchor):
            self._arrival = FirstViews(self._context.run, self._founder)
            self._far.clear()
            self._tell(choice)
            self.on_longer_chain(choice.line.chain)

    def _tell(self, choice: Choice) -> None:
        if choice.left:
            self.choice = str(choice)
            log.warning("%s", choice)


def _replaces(choice: Choice, mine: Chain, anchor: AnchoredView | None) -> bool:
    """True if a chain is the one that the founder anchored, and ours does not lead there; or, where
    the anchor does not decide, if it has its quorum and has gone on beyond the views that would."""
    line, newest = choice.line, mine.newest
    if anchor is not None:
        has_it = backbone.holds(line.chain, anchor)
        if has_it and backbone.lacks(mine, anchor) and line.chain.by_hash(newest.hash) is None:
            return True
        if backbone.holds(mine, anchor) and not has_it:
            return False
    is_later = line.newest.number > newest.number and line.chain.by_hash(newest.hash) is None
    return line.has_quorum and is_later and line.newest.branches <= newest.branches
