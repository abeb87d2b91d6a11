"""Synchronisation of views: a peer sends others the certified views that they are missing."""

import asyncio
from collections.abc import Callable, Collection

from farflock.swarm.links import PeerId
from farflock.swarm.messages import Decided, ViewQuery, Views
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.protocol import views
from farflock.swarm.protocol.views import BadView, Certified, Chain

RESEND_S = 0.5  # the same views go to a peer no more often: many messages may call for them
MAX_SENT = 1024  # peers whose last views sent are remembered; strangers may be any number


class ViewSync:
    """Sends views to peers that are missing them, and appends received ones to the chain.

    `changed` is called after each appended view."""

    def __init__(self, context: PeerContext, changed: Callable[[], None]) -> None:
        self.known = asyncio.Event()  # set once the views are known
        # Called with a branch of the newest view, and with a peer whose views do not follow ours.
        self.on_branch: Callable[[PeerId, Certified], None] = lambda sender, branch: None
        self.on_other_chain: Callable[[PeerId], None] = lambda peer: None
        # Puts views, and goodbyes to the newest one, on the disk before it returns.
        self.store: Callable[[Chain], None] = lambda chain: None
        self._context, self._changed = context, changed
        self._asked: Collection[PeerId] = ()  # trusted for the first views
        self._remembered = False  # the views are of this peer's last life, and no more came yet
        self._sent: dict[PeerId, tuple[int, int, float]] = {}  # (newest sent, after which, when)

    def keep(self) -> None:
        """Put the views on the disk. Whoever acted in a view must know it in its next life too, so
        this comes before anything is done in a new one."""
        self.store(self._context.views)

    def begin(self, chain: Chain) -> None:
        """Start with this chain, the first views known here."""
        self._context.chain = chain
        self.known.set()

    def remember(self, chain: Chain) -> None:
        """Begin with the views of this peer's last life, which may be too old to be continued."""
        self.begin(chain)
        self._remembered = True

    def change_chain(self, chain: Chain) -> None:
        """Replace the chain, and forget what was sent of the old one."""
        self._context.chain = chain
        self._sent.clear()

    def expect(self, peers: Collection[PeerId]) -> None:
        """Accept the first views from these peers only."""
        self._asked = peers

    def ask(self, peer: PeerId) -> None:
        """Ask a peer for the views after our newest one."""
        chain = self._context.chain
        self._context.send(peer, ViewQuery(chain.newest.number + 1 if chain else 0))

    def send_views(self, peer: PeerId, after_number: int) -> None:
        """Send a peer the views that it is missing after `after_number`.

        The same views are not resent at once, however many messages show that they are missing."""
        chain, now_s = self._context.chain, self._context.now()
        if chain is None or after_number >= chain.newest.number:
            return
        newest, after, sent_s = self._sent.get(peer, (-1, -1, -1e9))
        if (newest, after) == (chain.newest.number, after_number) and now_s - sent_s < RESEND_S:
            return
        # A peer too far behind for a gapless answer gets all kept views, and compares chains.
        known = chain.since(after_number) or chain.since(chain.views[0].view.number - 1)
        if known:
            if len(self._sent) >= MAX_SENT:
                self._sent.clear()
            self._sent[peer] = (chain.newest.number, after_number, now_s)
            self._context.send(peer, Views(known))

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

    def receive(self, sender: PeerId, encoded: tuple[bytes, ...]) -> None:
        """Take in the views that a peer sent, oldest first."""
        if self._context.chain is None and sender not in self._asked:
            self._context.drop("views of strangers")
            return
        try:
            decoded = [views.decode_certified(raw) for raw in encoded]
            if decoded and self._is_beyond(sender, decoded[0]):
                self._context.chain = None
            for certified in decoded:
                self._take(sender, certified)
        except BadView:
            self._context.drop("bad view")
            self.on_other_chain(sender)

    def receive_decided(self, sender: PeerId, decided: Decided) -> None:
        """Take in a view that was decided without this peer."""
        try:
            view = views.decode_view(decided.value)
            self._take(sender, Certified(view, decided.ballot, decided.proofs))
        except BadView:
            self._context.drop("bad view")

    def _is_beyond(self, sender: PeerId, oldest: Certified) -> bool:
        """True if a member that is asked no longer keeps the view after those of this peer's last
        life: then the first views are trusted as a newcomer trusts them."""
        newest = self._context.views.newest.number if self._context.chain else 0
        return self._remembered and sender in self._asked and oldest.view.number > newest + 1

    def _take(self, sender: PeerId, certified: Certified) -> None:
        chain = self._context.chain
        if chain is None:
            self.begin(Chain(self._context.run, [certified]))
            self._remembered = False
            self.keep()
        elif certified.view.parts_from(chain.newest):
            self.on_branch(sender, certified)
        elif chain.extend(certified):
            self._remembered = False
            self._changed()
