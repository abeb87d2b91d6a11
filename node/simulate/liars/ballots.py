"""Liars that lie when they vote: in what they propose, promise and accept."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from farflock.node.simulate.liars import values
from farflock.node.simulate.liars.liar import Liar
from farflock.swarm.identity import Identity
from farflock.swarm.links import PeerId
from farflock.swarm.messages import (
    Accepted,
    Key,
    Message,
    Prepare,
    Promise,
    Propose,
)
from farflock.swarm.peer.peer import Peer
from farflock.swarm.protocol.agreement.certificates import signed_text
from farflock.swarm.protocol.agreement.decide import Decision, Sends
from farflock.swarm.protocol.agreement.electorate import Electorate
from farflock.swarm.protocol.agreement.justified import promise_text
from farflock.swarm.protocol.agreement.proposer import Proposer
from farflock.swarm.protocol.agreement.rules import SignedRules
from farflock.swarm.protocol.agreement.turns import next_ballot
from farflock.swarm.protocol.views import VIEW_STREAM, View

MakeValue = Callable[[Liar, Key], bytes]


@dataclass(slots=True)
class Unbound(Proposer):
    """A proposer that puts its own value whatever promises bind it to."""

    def bind(self, electorate: Electorate) -> bool:
        """Return False: nothing is taken over."""
        return False


class ProposingLiar(Liar):
    """Makes its peer propose other values: in its own ballots and turns, so that only the values
    are lies."""

    proposals: ClassVar[Sequence[MakeValue]] = ()  # more than one: all in one ballot
    of_views: ClassVar[bool] = False
    ignores_promises: ClassVar[bool] = False

    def act(self) -> None:
        """Propose its values for the next view, or for each open round."""
        for view, decision in self._decisions():
            ballot = decision.proposer.ballot
            if decision.decided is None and (ballot is None or decision.promised > ballot):
                value = self.proposals[0](self, decision.key)
                self._send_all(view, decision.propose(value))

    def _decisions(self) -> Iterator[tuple[View, Decision]]:
        """Yield its peer's open decisions, with the views whose members make them."""
        if self.of_views:
            decision = self.peer.membership.next_view.open_decision()
            # Its peer's own rules would revise the value.
            decision.rules = SignedRules(self.run, self.identity, decision.electorate)
            decision.rules.in_step = False
            yield self.view, decision
            return
        for key in self.open_keys():
            machine = self.peer.rounds.machines.get(key)
            view = self.view_of(key)
            if machine is not None and machine.closing.decision.view == view.hash:
                yield view, self._freed(machine.closing.decision)

    def _freed(self, decision: Decision) -> Decision:
        if self.ignores_promises and not isinstance(decision.proposer, Unbound):
            known = decision.proposer
            decision.proposer = Unbound(known.key, known.view)
            for name in ("state", "ballot", "value", "promises", "accepts", "highest"):
                setattr(decision.proposer, name, getattr(known, name))
        return decision

    def _send_all(self, view: View, sends: Sends) -> None:
        for member, message in sends:
            for said in self._variants(message):
                self.send(view.peers[member], said)

    def _variants(self, message: Message) -> list[Message]:
        if not isinstance(message, Propose):
            return [message]
        others = [value(self, message.key) for value in self.proposals[1:]]
        return [message, *(msgspec.structs.replace(message, value=other) for other in others)]


class EvictsAll(ProposingLiar):
    """Proposes the view of which it is the only member."""

    proposals, of_views = (values.itself_alone,), True


class FarViews(ProposingLiar):
    """Proposes a view that begins at a round that never comes."""

    proposals, of_views = (values.far_ahead,), True


class NeedlessViews(ProposingLiar):
    """Proposes the view again that there is."""

    proposals, of_views = (values.the_same_again,), True


class VoidLists(ProposingLiar):
    """Proposes lists of content that nobody has."""

    proposals, needs_lists = (values.void,), True


class EmptyLists(ProposingLiar):
    """Proposes in its turns that the round failed."""

    proposals, needs_lists = (values.empty,), True


class EndlessLists(ProposingLiar):
    """Proposes lists after which the run has more tokens than its members may claim."""

    proposals, needs_lists = (values.endless_tokens,), True


class TwoValues(ProposingLiar):
    """Proposes two lists in one ballot."""

    proposals, needs_lists = (values.empty, values.void), True


class IgnoresPromises(ProposingLiar):
    """Proposes its own list, whatever an earlier ballot may have chosen."""

    proposals, needs_lists, ignores_promises = (values.empty,), True, True


class FarFloors(Liar):
    """Promises that no view may begin at its place before a round that never comes."""

    only_answers = True
    replaced = (b"promise",)

    def instead(self, message: Message) -> Sequence[Message]:
        """Return its peer's promise about the next view with another floor."""
        assert isinstance(message, Promise), "nothing else is replaced"
        if message.key.stream != VIEW_STREAM:
            return (message,)
        far = msgspec.structs.replace(message, floor=(values.FAR,))
        return (msgspec.structs.replace(far, proof=self.sign(promise_text(far))),)


class FarBallots(Liar):
    """Begins ballots near the end of all numbers."""

    def act(self) -> None:
        """Ask for promises that no other ballot could follow."""
        for key in (self.view_key, *self.open_keys()):
            self.say(Prepare(key, self.view.hash, (values.FAR, self.me)))


class EarlyBallots(Liar):
    """Begins its next ballot for each round as early as it can, and proposes nothing in it."""

    needs_lists = True

    def __init__(self, peer: Peer, identity: Identity) -> None:
        super().__init__(peer, identity)
        self.heard: dict[Key, int] = {}

    def act(self) -> None:
        """Ask for promises above all that it heard of."""
        for key in self.open_keys():
            turns = self.order(self.view, key)
            if self.me in turns:
                number = next_ballot(self.heard.get(key, 0), turns, self.me)
                self.say(Prepare(key, self.view.hash, (number, self.me)))

    def keeps(self, sender: PeerId, message: Message) -> bool:
        """Note the ballots of others, and let none of its own come to a proposal."""
        if isinstance(message, Promise | Prepare):
            self.heard[message.key] = max(self.heard.get(message.key, 0), message.ballot[0])
        return isinstance(message, Promise) and message.key.stream != VIEW_STREAM


class TwoFaced(Liar):
    """Accepts every proposal, and promises as if it had accepted nothing."""

    only_answers = True

    def keeps(self, sender: PeerId, message: Message) -> bool:
        """Answer in its peer's place."""
        match message:
            case Propose(key=key, ballot=ballot, value=value):
                text = signed_text(key, message.view, ballot, value)
                self.send(sender, Accepted(key, message.view, ballot, self.sign(text)))
            case Prepare(key=key, ballot=ballot):
                promise = Promise(key, message.view, ballot)
                proof = self.sign(promise_text(promise))
                self.send(sender, msgspec.structs.replace(promise, proof=proof))
            case _:
                return False
        return True


class Mute(Liar):
    """Votes on nothing, and is there all the same."""

    only_answers = True

    def keeps(self, sender: PeerId, message: Message) -> bool:
        """Keep all that is to be voted on."""
        return isinstance(message, Prepare | Propose)
