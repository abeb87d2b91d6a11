"""All collective exchanges of one peer: its streams, their logs, and what the node asks of them.

A stream's rounds form one log: round r+1 begins only where round r is decided, so a member that was
away learns what it missed in order (`following`), and no contribution can count twice. An exchange
has no time-out of its own: it resolves when its round is decided and its content is here, or when
the round has left everybody's log (`lost`).
"""

import asyncio

from farflock.swarm.links import PeerId
from farflock.swarm.messages import Decided, Forgotten, Key, LogQuery, Offer
from farflock.swarm.peer.catch_up import CatchUp
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.peer.filling import Filling
from farflock.swarm.peer.machines import Machines
from farflock.swarm.peer.round_log import RoundLog
from farflock.swarm.peer.streams import RoundOutcome, Stream, StreamState, outcome, work_pin
from farflock.swarm.protocol.exchange.close_list import told
from farflock.swarm.protocol.exchange.collective import MachineMessage
from farflock.swarm.protocol.log_truncation import LogTruncation, oldest_of
from farflock.swarm.protocol.views import View

RoundMessage = MachineMessage | LogQuery | Forgotten


class Rounds:
    """All collective exchanges of one peer."""

    def __init__(self, port: PeerContext) -> None:
        self._port = port
        self._streams: dict[str, StreamState] = {}
        self._log = RoundLog(port, lambda key: self.machines.drop(key))
        filling = Filling(port, self._log)
        self.machines = Machines(port, self._streams, self._log, filling)
        self._following = CatchUp(port, self._log, self.machines, filling)

    # what the node calls

    def open(self, stream: Stream, after_round: int = -1, tokens: int = 0) -> None:
        """Begin a stream whose rounds up to `after_round` are in my state.

        Called again after adopting a snapshot, it begins anew there.
        """
        state, after = self._streams.get(stream.name), stream.cadence.upto(after_round)
        if state is None or after > state.newest:
            self._forget(state)
            self._streams[stream.name] = StreamState(stream, after, tokens, tokens, seen=after)
            self._port.staged |= stream.stage is not None

    async def exchange(self, name: str, offer: Offer) -> RoundOutcome:
        """Bring an offer, whose shards are in the store, to its round; wait for the outcome."""
        try:
            return await self._exchange(self._streams[name], offer)
        finally:
            if offer.key not in self.machines:  # else it releases them when it is complete
                self._port.store.release(work_pin(offer.key))

    async def _exchange(self, state: StreamState, offer: Offer) -> RoundOutcome:
        name, number = offer.key.stream, offer.key.round
        known = self.decided(name, number)
        if known is not None:
            return known
        if number <= state.newest and number not in state.log:
            return RoundOutcome(offer.key, "lost", state.next)
        assert number not in state.waiting, f"{offer.key} is asked for twice"
        future: asyncio.Future[RoundOutcome] = asyncio.get_running_loop().create_future()
        state.waiting[number] = future
        state.offers[number], state.ends_s[number] = (
            offer,
            self._port.now() + state.stream.terms.deadline_s,
        )
        self.machines.place_offers(state)
        try:
            return await future
        finally:
            state.waiting.pop(number, None)
            state.offers.pop(number, None)
            state.ends_s.pop(number, None)

    def decided(self, name: str, number: int) -> RoundOutcome | None:
        """The outcome of a round from the log, if it is decided and its content is here."""
        state = self._streams[name]
        entry = state.log.get(number)
        return outcome(state.stream, number, entry, self._port.store) if entry and entry.complete else None

    def told(self, name: str, number: int) -> tuple[bytes, ...] | None:
        """The last shards of a decided round, or what they were reduced to; empty if it failed.

        None if they are not here yet.
        """
        state = self._streams[name]
        entry = state.entry(number)
        if entry is None or not entry.complete:
            return None
        return tuple(self._port.store.get(item.digest) or b"" for item in told(entry.close, state.stream.terms.shards))

    def oldest(self, name: str) -> int:
        """The first round that the log still has, or the next one."""
        state = self._streams[name]
        return next(iter(state.log), state.next)

    def oldest_told(self, name: str) -> int:
        """The first round of which `told` may still know something, or the next one."""
        return next(iter(self._streams[name].annals), self.oldest(name))

    def newest(self, name: str) -> int:
        """The last round of a stream that is known here to be decided."""
        return self._streams[name].newest

    def heard_of(self, name: str, number: int) -> None:
        """Somebody is at this round of a stream: who lacks one before it asks for that."""
        state = self._streams[name]
        state.seen = max(state.seen, number)

    def called(self, name: str) -> bool:
        """True if others have brought theirs to the stream's next round, and I have not.

        Also if the round has left the logs of most: a peer that brings something to it is told so.
        """
        state = self._streams[name]
        if self._following.lost(state):
            return True
        machine = self.machines.get(Key(name, state.next))
        return machine is not None and bool(machine.content.offers) and state.next not in state.offers

    def close(self, name: str) -> None:
        """End a stream at this peer; to have another part in it, it is opened again."""
        self._forget(self._streams.pop(name, None))

    def tokens(self, name: str) -> int:
        """The run's agreed tokens as of that round."""
        return self._streams[name].tokens

    @property
    def staged(self) -> bool:
        """Whether there are streams of stages."""
        return any(state.stream.stage is not None for state in self._streams.values())

    @property
    def names(self) -> tuple[str, ...]:
        """The open streams."""
        return tuple(self._streams)

    def next_views(self) -> list[View]:
        """The views that decide what comes next: those of each stream's next round."""
        nexts = (self._port.views.at(state.next, state.stream.stage) for state in self._streams.values())
        return [view for view in nexts if view is not None]

    def floor(self) -> int:
        """The first round that is not wholly here: a branch may begin with it, or later."""
        return max((state.whole + 1 for state in self._streams.values()), default=0)

    def reach(self, stage: int | None = None) -> int:
        """The earliest round from which logs can bring a state up to date.

        `stage` is the state's, None for the whole model. The round is mine; or, where others have
        forgotten what comes next in a stream, theirs: otherwise another peer that lags behind would
        give me the state that I have.
        """
        known = self._streams.values()
        streams = [state for state in known if state.stream.wants == "all" and state.stream.stage == stage]
        lost = [(state, said) for state in streams if (said := self._following.lost(state))]
        if lost:
            return max(max(state.next, oldest_of(said) - state.stream.cadence.stride) for state, said in lost)
        return min(
            (self.oldest(state.stream.name) - state.stream.cadence.stride for state in streams),
            default=-1,
        )

    def rewind(self, first_round: int) -> None:
        """Begin a branch with this round: what others decided of it without me is not its past.

        My open offers go into the branch's rounds.
        """
        self.machines.rewind(first_round)
        for state in self._streams.values():
            assert state.whole < first_round, f"round {state.whole} is in my state; a branch must begin after it"
            self._log.rewind(state, first_round)
            state.forgotten = LogTruncation()
            if state.newest >= first_round:
                state.newest = state.seen = state.stream.cadence.upto(first_round - 1)
                last = state.entry(state.newest)
                state.tokens = last.close.tokens if last is not None else state.opened_tokens

    def _forget(self, state: StreamState | None) -> None:
        """Drop what a stream held: a snapshot has taken its place."""
        if state is None:
            return
        self._log.clear(state)
        self.machines.close(state.stream.name)
        self._log.give_up(state, state.next)

    def abandon(self) -> tuple[str, ...]:
        """Give up my line of views: open exchanges are lost, and the logs are empty.

        The streams wait to be opened again. Returns their names.
        """
        for name, state in list(self._streams.items()):
            self._forget(state)
            self._streams[name] = StreamState(state.stream, state.stream.cadence.upto(-1))
        return self.names

    def waits(self) -> list[tuple[Key, tuple[PeerId, ...], float]]:
        """What is waited for now: (exchange, from whom, until when on the local clock)."""
        waits = [(machine.key, machine.awaited(), machine.ends_s) for machine in self.machines if not machine.complete]
        for name, state in self._streams.items():
            keys = (Key(name, number) for number in state.offers)
            waits += [
                (key, self._living(key.round, state.stream.stage), state.ends_s[key.round])
                for key in keys
                if key not in self.machines
            ]
        return waits

    def _living(self, number: int, stage: int | None) -> tuple[PeerId, ...]:
        """Who can decide a round that I have no part in, or still has what it decided."""
        view = self._port.views.at(number, stage) or self._port.views.newest
        return tuple(peer for peer in view.peers if peer != self._port.me and not self._port.gone(view, peer))

    # what the peer's loops call

    def receive(self, sender: PeerId, incarnation: int, message: RoundMessage) -> None:
        """Route a member's message to the machine of its round, or to what keeps up with others."""
        state = self._streams.get(message.key.stream)
        if state is None:
            self._port.drop("unknown stream")
        elif isinstance(message, LogQuery):
            self._following.answer_query(state, sender, message)
        elif isinstance(message, Forgotten):
            self._following.take_forgotten(state, sender, incarnation, message)
        elif isinstance(message, Decided) and message.key not in self.machines:
            self._following.take_decided(state, sender, incarnation, message)
        else:
            self.machines.receive(state, sender, incarnation, message)

    def tick(self) -> None:
        """Let time pass: place offers that had to wait, and ask for what was missed."""
        self.machines.tick()
        for state in self._streams.values():
            self.machines.place_offers(state)
            self._following.follow(state)
