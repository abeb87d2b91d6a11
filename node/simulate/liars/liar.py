"""A member that lies: beside an honest peer, a hostile part with its key and its links.

It hears what comes for that peer, and may keep it to itself; it may replace what the peer sends;
and it says things of its own. Between its lies the peer is one like any other.
"""

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from typing import ClassVar

from farflock.swarm.frame import Frame, message_kind, pack, unpack
from farflock.swarm.identity import Identity
from farflock.swarm.links import PeerId
from farflock.swarm.messages import Key, Message
from farflock.swarm.peer.peer import Peer
from farflock.swarm.protocol import views
from farflock.swarm.protocol.agreement.justified import vote_domain
from farflock.swarm.protocol.groups import order, proposers
from farflock.swarm.protocol.views import View
from farflock.swarm.tasks import cancel

ACT_S = 0.1  # between two acts

Send = Callable[[PeerId, bytes], bool]


class Liar:
    """A member that lies while `lying()`.

    `act` is called every `ACT_S`, `keeps` with each message that comes: if it returns True, the
    honest peer does not get it. `instead` gets each message that this peer sends of a kind in
    `replaced`. `needs_lists` tells whether it lies about rounds that members vote on, and
    `only_answers` whether it has to be asked."""

    needs_lists: ClassVar[bool] = False
    only_answers: ClassVar[bool] = False
    replaced: ClassVar[Collection[bytes]] = ()  # kinds of message (swarm/frame.py)

    def __init__(self, peer: Peer, identity: Identity) -> None:
        self.peer, self.identity, self.run = peer, identity, peer.context.run
        self.said: collections.Counter[str] = collections.Counter()  # statements by kind
        self.kept = 0  # messages that came and that the peer did not get
        self._speaks = False  # itself, not its peer

    @contextlib.asynccontextmanager
    async def lying(self) -> AsyncIterator[None]:
        """Lie while the block runs."""
        with self._listening(), self.replacing():
            acting = asyncio.create_task(self._acts())
            try:
                yield
            finally:
                (end,) = await cancel(acting)
        if not isinstance(end, asyncio.CancelledError):
            raise end

    async def _acts(self) -> None:
        while True:
            await asyncio.sleep(ACT_S)
            if self.is_member:
                self.act()

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        router = self.peer.router
        deliver = router.deliver

        def heard(sender: PeerId, frame: Frame) -> None:
            if self.is_member and self.keeps(sender, frame.message):
                self.kept += 1
            else:
                deliver(sender, frame)

        router.deliver = heard  # type: ignore[method-assign]
        try:
            yield
        finally:
            router.deliver = deliver  # type: ignore[method-assign]

    @contextlib.contextmanager
    def replacing(self) -> Iterator[None]:
        """Replace what its peer sends while the block runs, and no more than that."""
        links = self.peer.context.links
        send = links.send

        def replaced(peer: PeerId, frame: bytes) -> bool:
            if self._speaks or message_kind(frame) not in self.replaced:
                return send(peer, frame)
            return self._send_instead(send, peer, unpack(frame))

        links.send = replaced  # type: ignore[method-assign]
        try:
            yield
        finally:
            links.send = send  # type: ignore[method-assign]

    def _send_instead(self, send: Send, peer: PeerId, frame: Frame) -> bool:
        said = self.instead(frame.message)
        self.said.update(kind_of(each) for each in said if each is not frame.message)
        sent = [send(peer, pack(Frame(frame.incarnation, each))) for each in said]
        return all(sent)

    # what each kind of liar does

    def act(self) -> None:
        """Say something of its own."""

    def keeps(self, sender: PeerId, message: Message) -> bool:
        """Return whether a message that comes is kept from the peer."""
        return False

    def instead(self, message: Message) -> Sequence[Message]:
        """Return what is sent in place of a message."""
        return (message,)

    # what it knows

    @property
    def view(self) -> View:
        """The newest view that its peer knows."""
        return self.peer.context.views.newest

    @property
    def is_member(self) -> bool:
        """True if its peer is in the newest view."""
        return self.peer.context.is_member

    @property
    def me(self) -> int:
        """Its index in the newest view."""
        index = self.index_in(self.view)
        assert index is not None, "it is no member"
        return index

    def index_in(self, view: View) -> int | None:
        """Return its index in a view, or None."""
        return view.index(self.peer.me, self.peer.context.incarnation)

    def open_keys(self) -> list[Key]:
        """Return the keys of all streams' next rounds."""
        return [Key(name, state.next) for name, state in self.peer.rounds.streams.items()]

    def view_of(self, key: Key) -> View:
        """Return the view to which a round belongs."""
        stage = self.peer.rounds.streams[key.stream].stream.stage
        return self.peer.context.views.at(key.round, stage) or self.view

    @property
    def next_round(self) -> int:
        """A round that no stream has reached yet."""
        return max((key.round for key in self.open_keys()), default=0)

    @property
    def view_key(self) -> Key:
        """The key of the next view."""
        return views.view_key(self.view.number + 1)

    def order(self, view: View, key: Key) -> tuple[int, ...]:
        """Return the members that may propose for a key, in their order."""
        seeded = order(view.peers, self.peer.context.seed, view.hash, key)
        places = [view.peers.index(peer) for peer in seeded]
        state = self.peer.rounds.streams.get(key.stream)
        stage = None if state is None else state.stream.stage
        return proposers(places, view.serving(stage), view.electorate.votes, stage)

    # what it does

    def send(self, peer: PeerId, message: Message) -> None:
        """Say something to one peer."""
        self.said[kind_of(message)] += 1
        self._speaks = True
        self.peer.context.send(peer, message)
        self._speaks = False

    def say(self, message: Message) -> None:
        """Say something to all other members."""
        for peer in self.view.peers:
            if peer != self.peer.me:
                self.send(peer, message)

    def sign(self, text: bytes) -> bytes:
        """Return its signature under a vote."""
        return self.identity.sign(vote_domain(self.run), text)


def kind_of(message: Message) -> str:
    """Return the tag of a message."""
    tag = message.__struct_config__.tag
    assert isinstance(tag, str), "every message has a tag"
    return tag
