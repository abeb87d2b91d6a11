"""All collective exchanges of one peer: its streams, their logs, and the node's calls on them.

A stream's rounds form one log: round r+1 begins only where round r is decided, so a member that was
away learns what it missed in order (`catch_up`), and no contribution can count twice. An exchange
has no timeout of its own: it resolves when its round is decided and its content is here, or when
the round has left every log (`lost`).

Read `Rounds.exchange` first, then `OpenRounds` (open_rounds.py), which routes messages to the
machines of the open rounds and carries out their actions.
"""

import asyncio
from types import MappingProxyType

from farflock.swarm.context import PeerContext
from farflock.swarm.identity import Identity
from farflock.swarm.links import PeerId
from farflock.swarm.messages import (
    ContentMessage,
    Decided,
    Forgotten,
    Key,
    LogMessage,
    LogQuery,
    Offer,
    PaxosMessage,
)
from farflock.swarm.peer.rounds.catch_up import CatchUp, NamedLists
from farflock.swarm.peer.rounds.forks import Forks
from farflock.swarm.peer.rounds.open_rounds import OpenRounds
from farflock.swarm.peer.rounds.round_log import (
    OpenOffer,
    RoundLog,
    StreamState,
    begun_after,
    outcome,
    work_pin,
)
from farflock.swarm.protocol.exchange.close_list import last_bundles
from farflock.swarm.protocol.exchange.collective import Collective
from farflock.swarm.protocol.exchange.streams import RoundOutcome, Stream
from farflock.swarm.protocol.log_truncation import LogTruncation, oldest_of
from farflock.swarm.protocol.views import View

# An observer makes no offers by which it would notice a missed decision, so it asks this often.
ASK_ANYWAY_S = 2.0


class Rounds:
    """All collective exchanges of one peer."""

    def __init__(self, context: PeerContext, identity: Identity) -> None:
        self._context = context
        self._streams: dict[str, StreamState] = {}
        self.streams = MappingProxyType(self._streams)  # what is known of each stream's rounds
        self.machines: dict[Key, Collective] = {}  # of the open rounds
        self.lists = NamedLists(context)
        self.forks = Forks(context, self._streams)
        self._log = RoundLog(context, self.machines)
        self._catch_up = CatchUp(context, self._log)
        self._open_rounds = OpenRounds(
            context, identity, self._streams, self.machines, self._log, self._catch_up
        )

    # what the node calls

    def open(self, stream: Stream, after_round: int = -1, tokens: int = 0) -> None:
        """Begin a stream whose rounds up to `after_round` are in this peer's state.

        Called again after adopting a snapshot, it begins again there."""
        state, after = self._streams.get(stream.name), stream.cadence.upto(after_round)
        if state is None or after > state.newest:
            self._forget(state)
            self._streams[stream.name] = begun_after(stream, after, tokens, self._context.now())

    async def exchange(self, name: str, offer: Offer) -> RoundOutcome:
        """Bring an offer, whose shards are in the store, to its round and wait for the outcome."""
        state, number = self._streams[name], offer.key.round
        try:
            if (known := self.decided(name, number)) is not None:
                return known
            if number <= state.newest and number not in state.log:
                return RoundOutcome(offer.key, "lost", state.next)
            assert number not in state.offers, f"{offer.key} is asked for twice"
            ends_s = self._context.now() + state.stream.terms.deadline_s
            placed = state.offers[number] = OpenOffer(
                offer, ends_s, asyncio.get_running_loop().create_future()
            )
            self._open_rounds.place_offers(state)
            return await placed.outcome
        finally:
            state.offers.pop(number, None)
            if offer.key not in self.machines:  # a live machine releases them when it completes
                self._context.store.release(work_pin(offer.key))

    def decided(self, name: str, number: int) -> RoundOutcome | None:
        """Return a round's outcome from the log; None unless it is decided and complete."""
        state = self._streams[name]
        entry = state.log.get(number)
        if entry is None or not entry.complete:
            return None
        return outcome(state.stream, number, entry, self._context.bundles)

    def last_shards(self, name: str, number: int) -> tuple[bytes, ...] | None:
        """Return the last shards of a decided round, or their reduction; empty if the round failed.

        None if they are not here yet."""
        state = self._streams[name]
        entry = state.entry(number)
        if entry is None or not entry.complete:
            return None
        return tuple(
            self._context.store.get(item.digest) or b""
            for item in last_bundles(entry.close, state.stream.terms.bundles)
        )

    def oldest(self, name: str) -> int:
        """Return the first round still in the log, or the next round."""
        state = self._streams[name]
        return next(iter(state.log), state.next)

    def oldest_kept(self, name: str) -> int:
        """Return the first round whose last shards may still be kept, or the next round."""
        return next(iter(self._streams[name].old_log), self.oldest(name))

    def newest(self, name: str) -> int:
        """Return the last round of a stream known here to be decided."""
        return self._streams[name].newest

    def heard_of(self, name: str, number: int) -> None:
        """Note that some peer is at this round, so that this one asks for earlier decisions."""
        state = self._streams[name]
        state.seen = max(state.seen, number)

    def called(self, name: str) -> bool:
        """True if others contributed to the stream's next round and this peer has not.

        Also true if the round has left most logs: a contribution to it is then reported as lost."""
        state = self._streams[name]
        if self._catch_up.lost(state):
            return True
        machine = self.machines.get(Key(name, state.next))
        has_offers = machine is not None and bool(machine.content.offers)
        return has_offers and state.next not in state.offers

    def close(self, name: str) -> None:
        """End a stream at this peer, so that it can be opened again with another part in it."""
        self._forget(self._streams.pop(name, None))

    def tokens(self, name: str) -> int:
        """Return the run's agreed tokens after the newest decided round."""
        return self._streams[name].tokens

    @property
    def staged(self) -> bool:
        """True if there are streams of stages."""
        return any(state.stream.stage is not None for state in self._streams.values())

    @property
    def names(self) -> tuple[str, ...]:
        """The open streams."""
        return tuple(self._streams)

    def to_decide(self) -> list[tuple[View, float]]:
        """Return the views to which the streams' next rounds belong, and the deadlines of these
        rounds, or now where a round has not begun."""
        nexts: list[tuple[View, float]] = []
        for name, state in self._streams.items():
            view = self._context.views.at(state.next, state.stream.stage)
            machine = self.machines.get(Key(name, state.next))
            if view is not None:
                nexts.append((view, self._context.now() if machine is None else machine.ends_s))
        return nexts

    def floor(self) -> int:
        """Return the first round that is not wholly here: a branch may begin with it, or later."""
        return max((state.whole + 1 for state in self._streams.values()), default=0)

    def reach(self, stage: int | None = None) -> int:
        """Return the earliest round from which logs can bring a state of `stage` up to date.

        `stage` None is the whole model. The result is the start of this peer's own log. If others
        have forgotten a stream's next round, it is the start of their logs: otherwise another
        lagging peer could serve us the state that we already have."""
        known = self._streams.values()
        streams = [
            state for state in known if state.stream.wants == "all" and state.stream.stage == stage
        ]
        lost = [(state, said) for state in streams if (said := self._catch_up.lost(state))]
        if lost:
            return max(
                max(state.next, oldest_of(said) - state.stream.cadence.stride)
                for state, said in lost
            )
        return min(
            (self.oldest(state.stream.name) - state.stream.cadence.stride for state in streams),
            default=-1,
        )

    def rewind(self, first_round: int) -> None:
        """Begin a branch with this round, forgetting what others decided without us from it on.

        Open offers of this peer go into the branch's rounds."""
        self._open_rounds.rewind(first_round)
        for state in self._streams.values():
            assert state.whole < first_round, (
                f"round {state.whole} is in my state; a branch must begin after it"
            )
            self._log.rewind(state, first_round)
            state.forgotten = LogTruncation()
            if state.newest >= first_round:
                state.newest = state.seen = state.stream.cadence.upto(first_round - 1)
                last = state.entry(state.newest)
                state.list_known(last.precedent if last is not None else state.opened)

    def _forget(self, state: StreamState | None) -> None:
        """Drop everything a stream held: a snapshot has replaced it."""
        if state is None:
            return
        self._log.clear(state)
        self._open_rounds.close(state.stream.name)
        self._log.give_up(state, state.next)

    def abandon(self) -> tuple[str, ...]:
        """Give up this peer's chain of views: open exchanges are lost, and the logs are emptied.

        The streams wait to be opened again. Return their names."""
        for name, state in list(self._streams.items()):
            self._forget(state)
            self._streams[name] = StreamState(state.stream, state.stream.cadence.upto(-1))
        return self.names

    def waits(self) -> list[tuple[Key, tuple[PeerId, ...], float]]:
        """Return the open waits: (exchange, from whom, until when on the local clock)."""
        waits = [
            (machine.key, machine.awaited(), machine.ends_s)
            for machine in self.machines.values()
            if not machine.complete
        ]
        for name, state in self._streams.items():
            waits += [
                (Key(name, number), self._living(number, state.stream.stage), placed.ends_s)
                for number, placed in state.offers.items()
                if placed.offer.key not in self.machines
            ]
        return waits

    def _living(self, number: int, stage: int | None) -> tuple[PeerId, ...]:
        """Return the live peers that can decide a round without us, or still have the decision."""
        view = self._context.views.at(number, stage) or self._context.views.newest
        return tuple(
            peer
            for peer in view.peers
            if peer != self._context.me and not self._context.gone(view, peer)
        )

    # what the peer's loops call

    def receive(
        self, sender: PeerId, incarnation: int, message: ContentMessage | PaxosMessage | LogMessage
    ) -> None:
        """Route a member's message to the machine of its round, or to `catch_up`."""
        state = self._streams.get(message.key.stream)
        if isinstance(message, Decided):
            if not self._context.views.believes(message):
                self._context.accuse(sender, "a decision that no quorum has signed")
                return
            if message.key in self.lists.wanted:
                self.lists.hear(message)
            fits = state is None or state.fits(message)
            if state is not None and not fits and self.forks.compare(state, sender, message):
                return
        if state is None:
            self._context.drop("unknown stream")
        elif isinstance(message, LogQuery):
            view = self._catch_up.answer_query(state, sender, message)
            if view is not None:
                self._open_rounds.begin(state, message.key, view)
        elif isinstance(message, Forgotten):
            self._catch_up.take_forgotten(state, sender, incarnation, message)
        elif isinstance(message, Decided) and message.key not in self.machines:
            view = self._open_rounds.view_of(state, message)
            if view is not None:
                self._catch_up.take_decided(state, view, sender, incarnation, message)
        else:
            self._open_rounds.receive(state, sender, incarnation, message)

    def tick(self) -> None:
        """Let time pass: place offers that had to wait, and ask for missed decisions."""
        self._open_rounds.tick()
        self.forks.tick()
        for state in self._streams.values():
            self._open_rounds.place_offers(state)
            if state.forgotten.said:
                self._catch_up.heed(
                    state, is_open=Key(state.stream.name, state.next) in self.machines
                )
            if self._lags(state):
                self._catch_up.ask(state)

    def _lags(self, state: StreamState) -> bool:
        """True if the next round may be decided without this peer hearing of it."""
        number, views, now_s = state.next, self._context.views, self._context.now()
        view = views.at(number, state.stream.stage) or views.newest
        if state.wants_list or self._context.my_index(view) is None:
            return True  # decided without us, and not sent to us
        if state.stream.wants == "last" and now_s - state.asked_s >= ASK_ANYWAY_S:
            return True
        machine = self.machines.get(Key(state.stream.name, number))
        # Past its deadline a round is soon decided, and the message may have been lost.
        return state.seen > number or (machine is not None and now_s > machine.ends_s)
