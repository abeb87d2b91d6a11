"""The glue of returns: keys of a view without a quorum, all of which are here again, in whatever
lives, go on together (docs/decisions/039-a-return.md).
"""

import asyncio
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from farflock.swarm.identity import Identity, verify
from farflock.swarm.links import PeerId
from farflock.swarm.messages import HeldState, ReturnAsk, ReturnMessage, ReturnSign, Roll
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.peer.membership import Membership
from farflock.swarm.peer.round_log import change, first_open
from farflock.swarm.peer.rounds import Rounds
from farflock.swarm.protocol import axes, branches, views
from farflock.swarm.protocol.branches import Petition
from farflock.swarm.protocol.quorum import is_quorum
from farflock.swarm.protocol.returns import RollCall, return_of
from farflock.swarm.protocol.views import BadView, Member, View
from farflock.swarm.record import unseal
from farflock.swarm.roles import EVERY, UNMEASURED, stage_of

PROBED = 16  # peers asked at once; each may answer with many views
RESEND_S = 1.0  # petitions may be lost; several repetitions fit into `SIGNATURE_TIMEOUT_S`
SIGNATURE_TIMEOUT_S = 10.0  # for which a key is bound to one petitioner
# The next member in seniority takes over if the one before it makes no return.
STEP_IN_S = 20.0
ROLL_EVERY_S = 1.0  # several fit into the time for which an answer counts
# Before a key signs a return, it asks the peers that it knows outside the view for a later one.
ASK_OUTSIDE_S = 5.0
SETTLED_EVERY_S = 0.2
# A state of which nobody tells for so long, while all are here, is called missing; until then,
# somebody may be hashing it.
LACKS_S = 10.0
# A return of pairs begins at most so many rounds ahead of them, however often they pass it.
MAX_LEAD = 1000


class Chains(Protocol):
    """The chains of views at a peer, as a return needs them (branching.py)."""

    @property
    def is_sure(self) -> bool: ...
    @property
    def adrift(self) -> frozenset[str]: ...

    def ask(self, peer: PeerId) -> None: ...

    def complete(self, petition: Petition) -> None: ...

    def lose_state(self) -> None: ...


class Returning:
    """One peer's part in a return: it tells the keys of its newest view that it is here, hears who
    else is, and collects or gives signatures (docs/decisions/039-a-return.md)."""

    def __init__(
        self,
        context: PeerContext,
        identity: Identity,
        membership: Membership,
        rounds: Rounds,
        chains: Chains,
    ) -> None:
        self._context, self._identity, self._membership = context, identity, membership
        self._rounds, self._chains = rounds, chains
        self.timeout_s = math.inf  # of `settled`
        self.axes: tuple[int, ...] = (0,)  # of the run's states; of a pipeline, its stages'
        self._roll: RollCall | None = None  # of the newest view, while that may have no quorum
        self._since_s = self._sent_s = self._told_s = -1e9
        self._random = random.Random(f"{context.seed}/{context.me}/return")
        self._petition: Petition | None = None
        self._lead = 0  # rounds by which a return of pairs begins ahead of all
        self._signed: tuple[bytes, PeerId, float] = (b"", "", -1e9)  # (hash, for whom, when)

    @property
    def awaited(self) -> tuple[PeerId, ...]:
        """The keys whose answer this peer waits for, while it does not know whether its view can
        decide; those that answer in two lives too."""
        if self._roll is None:
            return ()
        now_s, me = self._context.now(), self._context.me
        missing = self._roll.silent(now_s, self._context.views.goodbyes)
        awaited = {*missing, *self._roll.doubled(now_s)} - {me}
        return tuple(peer for peer in self._roll.view.peers if peer in awaited)

    @property
    def lacking(self) -> tuple[int | None, ...]:
        """The stages (None: the whole model) whose state nobody has who is here, while this peer
        waits for one."""
        now_s = self._context.now()
        if self._roll is None or now_s - self._told_s < LACKS_S:
            return ()
        newest = self._roll.newest(self._context.views, now_s)
        return tuple(axes.stage_on(place) for place in self.axes if place not in newest)

    @property
    def is_open(self) -> bool:
        """True while nobody is awaited, but the members that have come back are yet to sign."""
        return self._may_return(self._context.now())

    def tick(self) -> None:
        """Tell the other keys that this one is here, and collect signatures once all of them are,
        if it is our turn."""
        now_s, view = self._context.now(), self._context.views.newest
        if not view.lists(self._context.me) or self._decides(view):
            self._roll = self._petition = None
            return
        if self._roll is None or self._roll.view.hash != view.hash:
            self._roll, self._petition, self._since_s = RollCall(view), None, now_s
            self._lead = 0
        roll, mine = self._roll, self._answer(view)
        roll.hear(Member(self._context.me, self._context.incarnation, mine.stage), mine.held, now_s)
        if roll.silent(now_s, self._context.views.goodbyes) or self._begins(roll, now_s):
            self._told_s = now_s
        if now_s - self._sent_s >= ROLL_EVERY_S:
            self._sent_s = now_s
            for peer in view.peers:
                if peer != self._context.me:
                    self._context.send(peer, mine)
            if not roll.has_quorum(now_s):
                self._ask_outside(view)
        if not self._may_return(now_s):
            self._petition = None
        elif begins := self._begins(roll, now_s):
            if any(self._is_older(begins[place]) for place in self._mine()):
                self._chains.lose_state()  # nobody is left who could lead us on from ours
            else:
                self._collect(roll, begins, now_s)

    def _begins(self, roll: RollCall, now_s: float) -> dict[int, HeldState]:
        """Return the states with which a return begins, by axis; none if one of them is held by
        nobody here."""
        newest = roll.newest(self._context.views, now_s)
        known = {place: newest[place] for place in self.axes if place in newest}
        return known if len(known) == len(self.axes) else {}

    def _is_older(self, begins: HeldState) -> bool:
        """True if this peer's streams have begun with an older state."""
        stage = axes.stage_on(begins.axis)
        streams = self._rounds.streams
        return change(streams, stage) and begins.first > first_open(streams, stage)

    def _mine(self) -> tuple[int, ...]:
        """Return the axes of the states that this peer is to have: of the stages that it serves."""
        stage = self._stage()
        every = self.axes == (0,) or stage in (EVERY, UNMEASURED)
        return self.axes if every else tuple(p for p in self.axes if axes.stage_on(p) == stage)

    def _decides(self, view: View) -> bool:
        """True if this peer is a member, and hears a quorum of the view in the lives that that
        lists."""
        present = self._membership.admission.present(view)
        return self._context.is_member and is_quorum(present, len(view.members))

    def _answer(self, view: View) -> Roll:
        return Roll(view.hash, self._stage(), self._held())

    def _held(self) -> tuple[HeldState, ...]:
        """Return the states of this chain that this peer holds: none while what it holds is of a
        chain that it has given up, or is older than what a return begins with."""
        return () if self._chains.adrift else self._context.own.states()

    def _stage(self) -> int:
        """Return the stage in this peer's record."""
        sealed = self._membership.book.mine
        return stage_of(unseal(sealed, self._context.run).role) if sealed else EVERY

    def _ask_outside(self, view: View) -> None:
        """Ask peers outside the view whether they know a later one, or another chain."""
        known, me = self._membership.records, self._context.me
        ever = branches.elsewhere(self._context.views, known, me, member=False)
        others = [peer for peer in ever if not view.lists(peer)]
        for peer in self._random.sample(others, min(len(others), PROBED)):
            self._chains.ask(peer)

    async def settled(self, look: Callable[[], object]) -> dict[int, HeldState] | None:
        """Wait until this peer knows what to do in a view that lists its key: take the state of
        members that decide (None), or go on from the newest states that keys hold, by axis. `look`
        is called now and then meanwhile; raise `TimeoutError` after `timeout_s`."""
        ends_s = self._context.now() + self.timeout_s
        while self._context.now() < ends_s:
            look()
            view, roll, now_s = self._context.views.newest, self._roll, self._context.now()
            others = roll is not None and roll.view.hash == view.hash and roll.has_quorum(now_s)
            if not view.lists(self._context.me) or self._decides(view) or others:
                return None
            begins = self._begins(roll, now_s) if roll is not None else None
            if begins and self._may_return(now_s):
                return begins
            await asyncio.sleep(SETTLED_EVERY_S)
        raise TimeoutError

    def _may_return(self, now_s: float) -> bool:
        """True if each key is here, in one life, and the view has no quorum; and if peers outside
        it had time to name a later one."""
        roll = self._roll
        return (
            roll is not None
            and roll.view.hash == self._context.views.newest.hash
            and now_s - self._since_s >= ASK_OUTSIDE_S
            and self._chains.is_sure
            and not roll.silent(now_s, self._context.views.goodbyes)
            and not roll.doubled(now_s)
            and not roll.has_quorum(now_s)
        )

    def _collect(self, roll: RollCall, begins: dict[int, HeldState], now_s: float) -> None:
        """Collect the signatures of all keys; the most senior one does so first."""
        parent, gone = roll.view, self._context.views.goodbyes
        staying = [peer for peer in parent.peers if peer not in gone]
        if self._context.me not in staying:
            return
        turn_s = ASK_OUTSIDE_S + STEP_IN_S * staying.index(self._context.me)
        view = return_of(parent, roll.here(now_s).values(), gone, self._ahead(begins))
        if now_s - self._since_s < turn_s or not self._can_sign(roll, view, now_s):
            return
        petition = self._petition
        if petition is None or petition.view != view:
            petition = self._petition = Petition(parent, view, now_s)
            petition.proofs[parent.peers.index(self._context.me)] = self._sign(view)
            petition.proofs |= {parent.peers.index(peer): gone[peer] for peer in gone}
        if not petition.missing:
            self._chains.complete(petition)
        elif now_s - petition.asked_s >= RESEND_S:
            petition.asked_s = now_s
            said = tuple((parent.peers.index(peer), proof) for peer, proof in gone.items())
            for index in petition.missing:
                self._context.send(parent.peers[index], ReturnAsk(views.encode(view), said))

    def _can_sign(self, roll: RollCall, view: View, now_s: float) -> bool:
        """True if a return lists this life and those that are heard here, and begins where this
        peer stands: it has the states of what it serves, and no round after them."""
        here = roll.here(now_s)
        listed = view.index(self._context.me, self._context.incarnation) is not None
        if not listed or any(here.get(member.peer) != member for member in view.members):
            return False
        if len(view.begins) != 1 + max(self.axes):
            return False
        held = {each.axis: each for each in self._held()}
        return self._context.own.is_open and all(
            place in held and self._begins_here(view, held[place]) for place in self._mine()
        )

    def _ahead(self, begins: Mapping[int, HeldState]) -> Mapping[int, HeldState]:
        """Return where the next petition's return begins. In pairs of whole models all train on
        until it is made, each in rounds of its own: where they have passed the round of a petition
        before all have signed, the next one is farther ahead. The servers of a stage have rounds in
        common, also where they merge in pairs (docs/decisions/038)."""
        held = begins.get(axes.axis(None))
        if held is None or change(self._rounds.streams):
            return begins
        first = held.first if self._petition is None else self._petition.view.first_round
        if first < held.first:
            self._lead = min(2 * self._lead + 1, MAX_LEAD)
            first = held.first + self._lead
        return {held.axis: msgspec.structs.replace(held, first=first)}

    def _begins_here(self, view: View, held: HeldState) -> bool:
        """True if a return begins with this state, and no later round is here."""
        place, stage = held.axis, axes.stage_on(held.axis)
        begins, streams = axes.at(view.begins, stage), self._rounds.streams
        if not change(streams, stage):  # in pairs each has a state and rounds of its own
            return held.first <= begins
        mine = held.first, first_open(streams, stage), held.state
        return mine == (begins, begins, view.state(place))

    def _sign(self, view: View) -> bytes:
        return self._identity.sign(views.return_domain(self._context.run), views.encode(view))

    def receive(self, sender: PeerId, incarnation: int, message: ReturnMessage) -> None:
        """Handle a message about returns."""
        if self._context.chain is None:
            return
        try:
            match message:
                case Roll():
                    self._take_roll(sender, incarnation, message)
                case ReturnAsk():
                    self._take_ask(sender, incarnation, message)
                case ReturnSign():
                    self._take_signature(sender, message)
        except BadView:
            self._context.drop("bad return")

    def _take_roll(self, sender: PeerId, incarnation: int, message: Roll) -> None:
        """Note who is here, and answer; or find out which side knows a later view."""
        view, now_s = self._context.views.newest, self._context.now()
        if message.view != view.hash:
            self._membership.sync.reconcile(sender, message.view)
            return
        if not view.lists(sender):
            self._context.drop("not from a member")
            return
        self._context.lives[sender] = incarnation
        if self._roll is not None:
            self._roll.hear(Member(sender, incarnation, message.stage), message.held, now_s)
        elif view.lists(self._context.me):  # it decides: whoever asks takes the state as it comes
            self._context.send(sender, Roll(view.hash, self._stage()))

    def _take_ask(self, sender: PeerId, incarnation: int, message: ReturnAsk) -> None:
        """Sign a return if it is as this peer sees it too."""
        parent, view = self._context.views.newest, views.decode_view(message.view)
        views.require_return_shape(parent, view)
        if view.index(sender, incarnation) is None:
            self._context.drop("not from a member")
            return
        self._learn_goodbyes(parent, view, message.goodbyes)
        now_s, (signed, whom, signed_s) = self._context.now(), self._signed
        # A key signs for one petitioner at a time, else two returns could both be complete.
        is_bound = now_s - signed_s < SIGNATURE_TIMEOUT_S
        elsewhere = is_bound and signed != view.hash and whom != sender
        roll = self._roll if self._may_return(now_s) and not elsewhere else None
        if roll is not None and self._can_sign(roll, view, now_s):
            self._signed = (view.hash, sender, now_s)
            self._context.send(sender, ReturnSign(view.hash, self._sign(view)))

    def _learn_goodbyes(self, parent: View, view: View, said: Sequence[tuple[int, bytes]]) -> None:
        """Take in goodbyes that the petitioner knows, of members that its return leaves out."""
        run, known = self._context.run, self._context.views.goodbyes
        for index, proof in said:
            peer = parent.peers[index] if index < len(parent.peers) else ""
            if not view.lists(peer) and views.is_goodbye(run, parent, peer, proof):
                known[peer] = proof

    def _take_signature(self, sender: PeerId, message: ReturnSign) -> None:
        petition = self._petition
        asked = petition is not None and petition.view.hash == message.digest
        if petition is None or not asked or not petition.view.lists(sender):
            return
        raw, domain = views.encode(petition.view), views.return_domain(self._context.run)
        if verify(sender, domain, raw, message.proof):
            petition.proofs[petition.parent.peers.index(sender)] = message.proof
        else:
            self._context.drop("bad return")
