"""The asyncio glue of collective exchanges: routes messages to their machines, carries out what the machines want, and
keeps the log of the last rounds.

A stream's rounds form one log: round r+1 begins only where round r is decided, so a member that was away learns what
it missed in order (`_follow`), and no contribution can count twice. An exchange has no time-out of its own: it resolves
when its round is decided and its content is here, or when the round has left everybody's log (`lost`).
"""

import asyncio
from collections.abc import Callable

import msgspec

from farflock.swarm.links import PeerId
from farflock.swarm.messages import (
    Accepted,
    Decided,
    Forgotten,
    Holds,
    Key,
    LogQuery,
    Offer,
    Prepare,
    Promise,
    Propose,
    Reduced,
    Rejected,
)
from farflock.swarm.peer.chunks import STALL_S
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.peer.following import FETCH_TIMEOUT_S, HOPELESS_S, Following
from farflock.swarm.peer.round_log import RoundLog
from farflock.swarm.peer.streams import Outcome, Reduction, Stream, StreamState, outcome, work_pin
from farflock.swarm.protocol.collective import (
    Action,
    BadCloseList,
    Collective,
    Fetch,
    Reduce,
    told,
)
from farflock.swarm.protocol.forgetting import Forgetting, oldest_of
from farflock.swarm.protocol.groups import order, rotation
from farflock.swarm.protocol.views import View

MachineMessage = Offer | Reduced | Holds | Prepare | Promise | Propose | Accepted | Rejected | Decided
RoundMessage = MachineMessage | LogQuery | Forgotten


class Rounds:
    """All collective exchanges of one peer."""

    def __init__(self, port: PeerContext) -> None:
        self._port = port
        self._streams: dict[str, StreamState] = {}
        self._machines: dict[Key, Collective] = {}
        self._log = RoundLog(port, lambda key: self._machines.pop(key, None))
        self._following = Following(port, self._log, lambda key: self._machines.get(key), self._machine, self._view_of)

    # what the node calls

    def open(self, stream: Stream, after_round: int = -1, tokens: int = 0) -> None:
        """Begin (after adopting a snapshot: begin again) a stream whose rounds up to `after_round` are in my state."""
        state, after = self._streams.get(stream.name), stream.upto(after_round)
        if state is None or after > state.newest:
            self._forget(state)
            self._streams[stream.name] = StreamState(stream, after, tokens, tokens, seen=after)
            self._port.staged |= stream.stage is not None

    async def exchange(self, name: str, offer: Offer) -> Outcome:
        """Bring an offer, whose shards are in the store, to its round; resolves once, whenever that is decided."""
        try:
            return await self._exchange(self._streams[name], offer)
        finally:
            if offer.key not in self._machines:  # else it releases them when it is complete
                self._port.store.release(work_pin(offer.key))

    async def _exchange(self, state: StreamState, offer: Offer) -> Outcome:
        name, number = offer.key.stream, offer.key.round
        known = self.decided(name, number)
        if known is not None:
            return known
        if number <= state.newest and number not in state.log:
            return Outcome(offer.key, "lost", state.next)
        assert number not in state.waiting, f"{offer.key} is asked for twice"
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        state.waiting[number] = future
        state.offers[number], state.ends_s[number] = offer, self._port.now() + state.stream.deadline_s
        self._place_offers(state)
        try:
            return await future
        finally:
            state.waiting.pop(number, None)
            state.offers.pop(number, None)
            state.ends_s.pop(number, None)

    def decided(self, name: str, number: int) -> Outcome | None:
        """The outcome of a round from the log, if it is decided and its content is here."""
        state = self._streams[name]
        entry = state.log.get(number)
        return outcome(state.stream, number, entry, self._port.store) if entry and entry.complete else None

    def told(self, name: str, number: int) -> tuple[bytes, ...] | None:
        """Everybody's last shard of a decided round, or the one that it was reduced to; none of a round that failed. None if
        that is not here yet."""
        state = self._streams[name]
        entry = state.entry(number)
        if entry is None or not entry.complete:
            return None
        return tuple(self._port.store.get(item.digest) or b"" for item in told(entry.close, state.stream.shards))

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
        """Whether others have brought theirs to the stream's next round, and I have not; or it has left the logs of most, which
        who brings something to it is told."""
        state = self._streams[name]
        if self._following.lost(state):
            return True
        machine = self._machines.get(Key(name, state.next))
        return machine is not None and bool(machine.offers) and state.next not in state.offers

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
        """The views that decide what comes next: of each stream the one that its next round belongs to."""
        nexts = (self._port.views.at(state.next, state.stream.stage) for state in self._streams.values())
        return [view for view in nexts if view is not None]

    def floor(self) -> int:
        """The first round that is not wholly here: a branch may begin with it, or later."""
        return max((state.whole + 1 for state in self._streams.values()), default=0)

    def reach(self, stage: int | None = None) -> int:
        """The earliest round whose state, of a stage (None: of the whole model), logs can bring up to date: mine, or where
        others forgot what comes next in a stream, theirs. Else who lags behind as I do would give me the state that I have."""
        known = self._streams.values()
        streams = [state for state in known if state.stream.wants == "all" and state.stream.stage == stage]
        lost = [(state, said) for state in streams if (said := self._following.lost(state))]
        if lost:
            return max(max(state.next, oldest_of(said) - state.stream.stride) for state, said in lost)
        return min((self.oldest(state.stream.name) - state.stream.stride for state in streams), default=-1)

    def rewind(self, first_round: int) -> None:
        """A branch begins with this round: what others may have decided of it, without its content, is not its past. My
        open offers go into the branch's rounds."""
        self._machines = {key: machine for key, machine in self._machines.items() if key.round < first_round}
        for state in self._streams.values():
            assert state.whole < first_round, f"round {state.whole} is in my state; a branch must begin after it"
            self._log.rewind(state, first_round)
            state.forgotten = Forgetting()
            if state.newest >= first_round:
                state.newest = state.seen = state.stream.upto(first_round - 1)
                last = state.entry(state.newest)
                state.tokens = last.close.tokens if last is not None else state.opened_tokens

    def _forget(self, state: StreamState | None) -> None:
        """Drop what a stream held: a snapshot has taken its place."""
        if state is None:
            return
        self._log.clear(state)
        for key in [key for key in self._machines if key.stream == state.stream.name]:
            del self._machines[key]
            self._port.store.release(work_pin(key))
        self._log.give_up(state, state.next)

    def abandon(self) -> tuple[str, ...]:
        """Another line of views takes the place of mine: open exchanges are lost, the logs are empty, and the streams wait
        to be opened again. Returns their names."""
        for name, state in list(self._streams.items()):
            self._forget(state)
            self._streams[name] = StreamState(state.stream, state.stream.upto(-1))
        return self.names

    def waits(self) -> list[tuple[Key, tuple[PeerId, ...], float]]:
        """What is waited for now: (exchange, from whom, until when on the local clock)."""
        waits = [
            (key, machine.awaited(), machine.ends_s) for key, machine in self._machines.items() if not machine.complete
        ]
        for name, state in self._streams.items():
            keys = (Key(name, number) for number in state.offers)
            waits += [
                (key, self._living(key.round, state.stream.stage), state.ends_s[key.round])
                for key in keys
                if key not in self._machines
            ]
        return waits

    def _living(self, number: int, stage: int | None) -> tuple[PeerId, ...]:
        """Who can decide a round that I have no part in, or still has what it decided."""
        view = self._port.views.at(number, stage) or self._port.views.newest
        return tuple(peer for peer in view.peers if peer != self._port.me and not self._port.gone(view, peer))

    # what the peer's loops call

    def receive(self, sender: PeerId, incarnation: int, message: RoundMessage) -> None:
        """Route a member's message to its machine, making one if this member is still on its way to the round."""
        state = self._streams.get(message.key.stream)
        if state is None:
            self._port.drop("unknown stream")
        elif isinstance(message, LogQuery):
            self._following.answer_query(state, sender, message)
        elif isinstance(message, Forgotten):
            self._following.take_forgotten(state, sender, incarnation, message)
        elif isinstance(message, Decided) and message.key not in self._machines:
            self._following.take_decided(state, sender, incarnation, message)
        else:
            self._to_machine(state, sender, incarnation, message)

    def tick(self) -> None:
        """Time passes for every machine; offers that had to wait are placed; what was missed is asked for."""
        now_s = self._port.now()
        for machine in list(self._machines.values()):
            view = self._port.views.at(machine.key.round, self._streams[machine.key.stream].stream.stage)
            if view is None or self._retire(machine, view):
                continue
            suspects = {
                i for i, peer in enumerate(machine.group) if self._port.gone(view, peer) or self._port.left(peer)
            }
            machine.tick(now_s, frozenset(suspects))
            self._carry_out(machine)
            self._hand_over(machine)
        for state in self._streams.values():
            self._place_offers(state)
            self._following.follow(state)

    def _hand_over(self, machine: Collective) -> None:
        """A stage's content that has not come long after the decision is sought like that of a round which I had no part in."""
        state, overdue = self._streams[machine.key.stream], self._port.now() > machine.ends_s + HOPELESS_S
        if overdue and machine.close is not None and state.stream.stage is not None and self._is_live(machine):
            del self._machines[machine.key]
            self._following.fill_later(state, machine.key)

    # machines

    def _place_offers(self, state: StreamState) -> None:
        """Put my offer into its round as soon as that is the stream's next one and I am a member."""
        offer = state.offers.get(state.next)
        if offer is None:
            return
        view = self._port.views.at(offer.key.round, state.stream.stage)
        machine = self._machine(state, offer.key, view) if view is not None else None
        if machine is not None and machine.contributes and machine.me not in machine.offers:
            machine.offer(self._port.now(), msgspec.structs.replace(offer, view=machine.view))
            self._carry_out(machine)

    def _to_machine(
        self,
        state: StreamState,
        sender: PeerId,
        incarnation: int,
        message: MachineMessage,
    ) -> None:
        view = self._view_of(sender, message.view, message.key)
        if view is None:
            return
        member = view.index(sender, incarnation)
        if member is None:
            self._port.drop("not from a member")
            return
        state.seen = max(state.seen, message.key.round)
        entry = state.log.get(message.key.round)
        if entry is not None and message.key not in self._machines:
            if isinstance(message, Offer | Reduced | Holds | Prepare | Propose):
                self._port.send(sender, entry.decided)
            return
        machine = self._machine(state, message.key, view)
        if machine is None:
            return
        try:
            machine.receive(self._port.now(), member, message)
        except BadCloseList:
            self._port.drop("bad close list")
        self._carry_out(machine)

    def _view_of(self, sender: PeerId, digest: bytes, key: Key) -> View | None:
        """The view that a message names, if it is the one that its round belongs to."""
        views = self._port.views
        view = views.by_hash(digest)
        if view is None or view is not views.at(key.round, self._streams[key.stream].stream.stage):
            self._port.drop("other view")
            self._port.counters["stale view"] += 1
            return None
        return view

    def _machine(self, state: StreamState, key: Key, view: View) -> Collective | None:
        """The machine of a key; made if this is the stream's next round, I am a member, and no view change is due."""
        machine = self._machines.get(key)
        if machine is not None and not self._retire(machine, view):
            return machine
        me = self._port.my_index(view)
        if (
            me is None
            or key.round != state.next
            or key.attempt
            or self._port.views.blocked(key.round, state.stream.stage)
        ):
            return None
        if state.stream.stage is None:  # a stage's are touched by voting: till then a next view may take them over
            self._port.touch(None, key.round)
        machine = self._make(key, view, me, state)
        self._machines[key] = machine
        return machine

    def _retire(self, machine: Collective, view: View) -> bool:
        """Drop a machine that was begun under a view which did not come to hold for its round: whatever it did there
        counts nowhere, and its group's indices mean others now. My offer goes into the round's true machine."""
        if machine.view == view.hash:
            return False
        self._machines.pop(machine.key, None)
        return True

    def _make(self, key: Key, view: View, me: int, state: StreamState) -> Collective:
        now_s, seed, peers, terms = self._port.now(), self._port.seed, view.peers, state.stream.terms
        serving = view.serving(state.stream.stage)
        first = order([peers[index] for index in serving], seed, view.hash, key)
        others = order([peer for peer in peers if peer not in first], seed, view.hash, key)
        ordered = tuple(peers.index(peer) for peer in (*first, *others))  # who has nothing to put forward comes last
        rotated = tuple(peers.index(peer) for peer in rotation(first, seed, key.stream))
        holding = self._holding(key)
        tokens, stage = None if state.skipped else state.tokens, state.stream.stage

        def holds_back() -> bool:
            return stage is not None and self._port.views.blocked(key.round, stage)

        return Collective(
            key, view.hash, peers, me, ordered, terms, now_s, tokens, holding, rotated, holds_back=holds_back
        )

    def _holding(self, key: Key) -> Callable[[bytes], bool]:
        """Whether a chunk is here; if so it stays until the exchange is over, whoever brought it."""

        def holding(digest: bytes) -> bool:
            here = digest in self._port.store
            if here:
                self._port.store.pin(digest, work_pin(key))
            return here

        return holding

    def _carry_out(self, machine: Collective) -> None:
        """Do what a machine wants; log its decision and resolve whoever waits once it is complete."""
        if not self._is_live(machine):
            return
        if machine.decision.accepted is not None:
            self._port.touch(self._streams[machine.key.stream].stream.stage, machine.key.round)
        while actions := machine.take():
            for action in actions:
                self._act(machine, action)
        state = self._streams[machine.key.stream]
        if machine.close is not None and machine.key.round == state.next:
            self._log.enter(
                state,
                machine.key,
                machine.close,
                machine.group,
                len(machine.contributors),
                machine.decision.announcement(),
                machine.taken(),
            )
        if machine.complete and self._is_live(machine):
            del self._machines[machine.key]
            if machine.contributes:
                self._log.completed(state, machine.key.round)
            else:
                self._following.fill_later(state, machine.key)

    def _is_live(self, machine: Collective) -> bool:
        return self._machines.get(machine.key) is machine

    def _act(self, machine: Collective, action: Action) -> None:
        stream = self._streams[machine.key.stream].stream  # which may be closed while these are at work
        match action:
            case Fetch():
                self._port.spawn(self._fetch_for(machine, stream, action))
            case Reduce():
                self._port.spawn(self._reduce_for(machine, stream, action))
            case (member, message):
                self._port.send(machine.group[member], message)

    async def _fetch_for(self, machine: Collective, stream: Stream, wanted: Fetch) -> None:
        fits = wanted.size <= stream.max_shard_bytes
        patience_s = max(FETCH_TIMEOUT_S, stream.deadline_s)

        def holders() -> list[PeerId]:
            return [machine.group[member] for member in wanted.holders()]

        pin = work_pin(machine.key)
        there = fits and await self._port.chunks.fetch(wanted.digest, wanted.size, holders, pin, patience_s)
        if self._is_too_late(machine):
            return
        corrupt = not fits
        if there and stream.kind == "gather":
            data = self._port.store.get(wanted.digest) or b""
            corrupt = not await self._port.compute(lambda: stream.check(machine.key.round, wanted.shard, data))
        if not there:
            await asyncio.sleep(STALL_S / 2)
        machine.fetched(self._port.now(), wanted.digest, intact=there, corrupt=corrupt)
        self._carry_out(machine)

    def _is_too_late(self, machine: Collective) -> bool:
        """Whether a machine was over before its work was done: then nobody else would release what that brought."""
        state = self._streams.get(machine.key.stream)
        offered = state is not None and machine.key.round in state.offers  # and waits for the next machine
        if machine.key not in self._machines and not offered:
            self._port.store.release(work_pin(machine.key))
        return not self._is_live(machine)

    async def _reduce_for(self, machine: Collective, stream: Stream, wanted: Reduce) -> None:
        inputs = [
            (machine.group[member], weight, self._port.store.get(digest) or b"")
            for member, weight, digest in wanted.inputs
        ]
        reduction: Reduction = await self._port.compute(lambda: stream.reduce(machine.key.round, wanted.shard, inputs))
        if self._is_too_late(machine):
            return
        rejected = tuple(machine.group.index(peer) for peer in reduction.rejected)
        self._port.counters["corrupt payloads"] += len(rejected)
        now_s = self._port.now()
        if reduction.data is None:
            machine.unreduced(now_s, wanted.shard)
        else:
            digest = self._port.store.put(reduction.data, work_pin(machine.key))
            machine.reduced(now_s, wanted.shard, digest, len(reduction.data), rejected)
        self._carry_out(machine)
