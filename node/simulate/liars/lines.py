"""Liars that tell others of views that are not the run's, or of what was true long ago."""

import collections
from collections.abc import Sequence

import msgspec

from farflock.node.simulate.liars.liar import Liar
from farflock.swarm.identity import Identity
from farflock.swarm.links import PeerId
from farflock.swarm.messages import BranchAsk, Lineage, Message, ViewQuery, Views
from farflock.swarm.peer.peer import Peer
from farflock.swarm.protocol import views
from farflock.swarm.protocol.agreement.certificates import signed_text
from farflock.swarm.protocol.backbone import cut
from farflock.swarm.protocol.branches import branch_of, trail
from farflock.swarm.protocol.views import Certified, View, branch_domain, encode

BRANCH_TOKENS = 2**61
ENDLESS = 2**62  # views
OLD = 2  # views from the oldest kept one
REMEMBERED = 64  # statements of its peer
REPEATED = 4  # at once


class Hijacker(Liar):
    """Makes a branch of one of the newest view, and says that it has more tokens than any other,
    once it votes: no learner has a branch."""

    def __init__(self, peer: Peer, identity: Identity) -> None:
        super().__init__(peer, identity)
        self.branches: dict[bytes, Lineage] = {}

    def act(self) -> None:
        """Tell all members of the branch, and then of its tokens."""
        if self.peer.context.is_voter:
            lure = self.lure()
            self.say(Views(lure.views))
            self.say(msgspec.structs.replace(lure, views=()))

    def keeps(self, sender: PeerId, message: Message) -> bool:
        """Answer in its peer's place."""
        if isinstance(message, Lineage) and self.peer.context.is_voter:
            self.send(sender, self.lure())
        return isinstance(message, Lineage | BranchAsk)

    def lure(self) -> Lineage:
        """Return the line of views that ends with the branch, the same for each newest view: others
        may take their time to look at it."""
        parent = self.view
        if parent.hash not in self.branches:
            self.branches[parent.hash] = self._line_of_one(parent)
        return self.branches[parent.hash]

    def _line_of_one(self, parent: View) -> Lineage:
        lone = branch_of(parent, {self.me}, self.next_round)
        proof = self.identity.sign(branch_domain(self.run), encode(lone))
        own = cut(self.peer.context.views, parent.number)
        assert own.extend(Certified(lone, proofs=((self.me, proof),))), "it follows its parent"
        return Lineage(BRANCH_TOKENS, lone.number, trail(own), (encode(own.views[-1]),), True)


class StaleViews(Liar):
    """Tells whoever asks for views the oldest, and that there are endlessly many."""

    only_answers = True

    def keeps(self, sender: PeerId, message: Message) -> bool:
        """Answer in its peer's place."""
        if not isinstance(message, ViewQuery):
            return False
        old = self.peer.context.views.views[:OLD]
        self.send(sender, Views(tuple(map(encode, old)), (), ENDLESS))
        return True


class ForgedViews(Liar):
    """Tells all members of a next view that it alone has signed."""

    def act(self) -> None:
        """Say it."""
        parent = self.view
        view = views.successor(parent, (parent.members[self.me],))
        text = signed_text(self.view_key, parent.hash, (0, 0), encode(view))
        forged = Certified(view, (0, 0), ((self.me, self.sign(text)),))
        self.say(Views((encode(forged),), (), view.number))


class Replays(Liar):
    """Says again what its peer said in earlier rounds and views."""

    replaced = (b"offer", b"reduced", b"holds", b"promise", b"accepted", b"propose", b"decided")

    def __init__(self, peer: Peer, identity: Identity) -> None:
        super().__init__(peer, identity)
        self.remembered: collections.deque[Message] = collections.deque(maxlen=REMEMBERED)

    def instead(self, message: Message) -> Sequence[Message]:
        """Remember a message, and send it as it is."""
        self.remembered.append(message)
        return (message,)

    def act(self) -> None:
        """Repeat the oldest messages, to all members."""
        for message in list(self.remembered)[:REPEATED]:
            self.say(message)
