"""The asyncio glue of collective exchanges: routes messages to their machines, carries out what the machines want, and
keeps the log of the last rounds.

A stream's rounds form one log: round r+1 begins only where round r is decided, so a member that was away learns what
it missed in order (`_follow`), and no contribution can count twice. An exchange has no time-out of its own: it resolves
when its round is decided and its content is here, or when the round has left everybody's log (`lost`).
"""

import asyncio
import random
from collections.abc import Callable

import msgspec

from farflock.swarm.chunks import STALL_S
from farflock.swarm.collective import (
    Action,
    BadCloseList,
    CloseList,
    Collective,
    Fetch,
    Reduce,
    Terms,
    decode_close_list,
)
from farflock.swarm.groups import order, rotation
from farflock.swarm.holdings import Item
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
from farflock.swarm.port import Port
from farflock.swarm.streams import Logged, Outcome, Reduction, Stream, StreamState, outcome, work_pin
from farflock.swarm.views import View

LOG_ROUNDS = 8
FOLLOW_S = 0.5
FETCH_TIMEOUT_S = 10.0

MachineMessage = Offer | Reduced | Holds | Prepare | Promise | Propose | Accepted | Rejected | Decided
RoundMessage = MachineMessage | LogQuery | Forgotten


class Rounds:
    """All collective exchanges of one peer."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._streams: dict[str, StreamState] = {}
        self._machines: dict[Key, Collective] = {}
        self._random = random.Random(f"{port.seed}/{port.me}/follow")

    # what the node calls

    def open(self, stream: Stream, after_round: int = -1, tokens: int = 0) -> None:
        """Begin (after adopting a snapshot: begin again) a stream whose rounds up to `after_round` are in my state."""
        state, after = self._streams.get(stream.name), stream.upto(after_round)
        if state is None or after > state.newest:
            self._forget(state)
            self._streams[stream.name] = StreamState(stream, after, tokens, tokens, seen=after)

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

    def newest(self, name: str) -> int:
        """The last round of a stream that is known here to be decided."""
        return self._streams[name].newest

    def tokens(self, name: str) -> int:
        """The run's agreed tokens as of that round."""
        return self._streams[name].tokens

    @property
    def names(self) -> tuple[str, ...]:
        """The open streams."""
        return tuple(self._streams)

    def floor(self) -> int:
        """The first round that is not wholly here: a branch may begin with it, or later."""
        return max((state.whole + 1 for state in self._streams.values()), default=0)

    def reach(self) -> int:
        """The earliest round whose state my logs can bring up to date."""
        return min(
            (next(iter(state.log), state.next) - state.stream.stride for state in self._streams.values()), default=-1
        )

    def rewind(self, first_round: int) -> None:
        """A branch begins with this round: what others may have decided of it, without its content, is not its past. My
        open offers go into the branch's rounds."""
        self._machines = {key: machine for key, machine in self._machines.items() if key.round < first_round}
        for state in self._streams.values():
            assert state.whole < first_round, f"round {state.whole} is in my state; a branch must begin after it"
            for number in [number for number in state.log if number >= first_round]:
                del state.log[number]
                self._port.store.release(Key(state.stream.name, number))
            if state.newest >= first_round:
                state.newest = state.seen = state.stream.upto(first_round - 1)
                state.tokens = state.log[state.newest].close.tokens if state.log else state.opened_tokens

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
                (key, self._living(key.round), state.ends_s[key.round]) for key in keys if key not in self._machines
            ]
        return waits

    def _living(self, number: int) -> tuple[PeerId, ...]:
        """Who can decide a round that I have no part in, or still has what it decided."""
        view = self._port.views.at(number) or self._port.views.newest
        return tuple(peer for peer in view.peers if peer != self._port.me and not self._port.gone(view, peer))

    # what the peer's loops call

    def receive(self, sender: PeerId, incarnation: int, message: RoundMessage) -> None:
        """Route a member's message to its machine, making one if this member is still on its way to the round."""
        state = self._streams.get(message.key.stream)
        if state is None:
            self._port.drop("unknown stream")
        elif isinstance(message, LogQuery):
            self._answer_query(state, sender, message)
        elif isinstance(message, Forgotten):
            self._take_forgotten(state, sender, incarnation, message)
        elif isinstance(message, Decided) and message.key not in self._machines:
            self._take_decided(state, sender, incarnation, message)
        else:
            self._to_machine(state, sender, incarnation, message)

    def tick(self) -> None:
        """Time passes for every machine; offers that had to wait are placed; what was missed is asked for."""
        now_s = self._port.now()
        for machine in list(self._machines.values()):
            view = self._port.views.at(machine.key.round)
            if view is None or self._retire(machine, view):
                continue
            suspects = {i for i, peer in enumerate(machine.group) if self._port.gone(view, peer)}
            machine.tick(now_s, frozenset(suspects))
            self._carry_out(machine)
        for state in self._streams.values():
            self._place_offers(state)
            self._follow(state)

    # machines

    def _place_offers(self, state: StreamState) -> None:
        """Put my offer into its round as soon as that is the stream's next one and I am a member."""
        offer = state.offers.get(state.next)
        if offer is None:
            return
        view = self._port.views.at(offer.key.round)
        machine = self._machine(state, offer.key, view) if view is not None else None
        if machine is not None and machine.me not in machine.offers:
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
        if view is None or view is not views.at(key.round):
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
        if me is None or key.round != state.next or key.attempt or self._port.views.blocked(key.round):
            return None
        self._port.touched = max(self._port.touched, key.round)
        terms = _terms(state.stream)
        machine = self._make(key, view, me, terms, state.tokens)
        self._machines[key] = machine
        return machine

    def _retire(self, machine: Collective, view: View) -> bool:
        """Drop a machine that was begun under a view which did not come to hold for its round: whatever it did there
        counts nowhere, and its group's indices mean others now. My offer goes into the round's true machine."""
        if machine.view == view.hash:
            return False
        self._machines.pop(machine.key, None)
        return True

    def _make(self, key: Key, view: View, me: int, terms: Terms, prior_tokens: int) -> Collective:
        now_s, seed, peers = self._port.now(), self._port.seed, view.peers
        ordered = tuple(peers.index(peer) for peer in order(peers, seed, view.hash, key))
        rotated = tuple(peers.index(peer) for peer in rotation(peers, seed, key.stream))
        holding = self._holding(key)
        return Collective(key, view.hash, peers, me, ordered, terms, now_s, prior_tokens, holding, rotated)

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
        while actions := machine.take():
            for action in actions:
                self._act(machine, action)
        state = self._streams[machine.key.stream]
        if machine.close is not None and machine.key.round == state.next:
            self._log(
                state,
                machine.key,
                machine.close,
                machine.group,
                machine.decision.announcement(),
                machine.taken(),
            )
        if machine.complete and self._is_live(machine):
            del self._machines[machine.key]
            self._completed(state, machine.key.round)

    def _is_live(self, machine: Collective) -> bool:
        return self._machines.get(machine.key) is machine

    def _act(self, machine: Collective, action: Action) -> None:
        match action:
            case Fetch():
                self._port.spawn(self._fetch_for(machine, action))
            case Reduce():
                self._port.spawn(self._reduce_for(machine, action))
            case (member, message):
                self._port.send(machine.group[member], message)

    async def _fetch_for(self, machine: Collective, wanted: Fetch) -> None:
        stream = self._streams[machine.key.stream].stream
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
        offered = machine.key.round in self._streams[machine.key.stream].offers  # and waits for the next machine
        if machine.key not in self._machines and not offered:
            self._port.store.release(work_pin(machine.key))
        return not self._is_live(machine)

    async def _reduce_for(self, machine: Collective, wanted: Reduce) -> None:
        stream = self._streams[machine.key.stream].stream
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

    # the log

    def _log(
        self,
        state: StreamState,
        key: Key,
        close: CloseList,
        group: tuple[PeerId, ...],
        decided: Decided,
        taken: tuple[bool, ...],
    ) -> None:
        state.newest = key.round
        state.seen = max(state.seen, key.round)
        state.tokens = close.tokens
        state.log[key.round] = Logged(close, group, decided, taken)
        while len(state.log) > LOG_ROUNDS:
            self._evict(state, next(iter(state.log)))

    def _evict(self, state: StreamState, number: int) -> None:
        """Take a round from the log, and whatever still waits for its content."""
        key = Key(state.stream.name, number)
        del state.log[number]
        self._machines.pop(key, None)
        self._port.store.release(key)
        self._port.store.release(work_pin(key))
        future = state.waiting.get(number)
        if future is not None and not future.done():
            future.set_result(Outcome(key, "lost", state.next))

    def _completed(self, state: StreamState, number: int) -> None:
        entry = state.log.get(number)
        if entry is None:
            return
        key = Key(state.stream.name, number)
        for item in entry.close.items:
            self._port.store.pin(item.digest, key)
        self._port.store.release(work_pin(key))
        entry.complete = True
        future = state.waiting.get(number)
        if future is not None and not future.done():
            future.set_result(outcome(state.stream, number, entry, self._port.store))

    def _forget(self, state: StreamState | None) -> None:
        """Drop what a stream held: a snapshot has taken its place."""
        if state is None:
            return
        for number in list(state.log):
            self._evict(state, number)
        for key in [key for key in self._machines if key.stream == state.stream.name]:
            del self._machines[key]
            self._port.store.release(work_pin(key))
        self._give_up(state, state.next)

    def _give_up(self, state: StreamState, next_round: int) -> None:
        for number, future in state.waiting.items():
            if not future.done():
                future.set_result(Outcome(Key(state.stream.name, number), "lost", next_round))

    # what was missed

    def _follow(self, state: StreamState) -> None:
        """Ask somebody for the next round's decision if others are further, if I only watch, or if mine is overdue."""
        now_s = self._port.now()
        if now_s - state.asked_s < FOLLOW_S or state.stream.group:
            return
        number = state.next
        view = self._port.views.newest
        watching = self._port.my_index(self._port.views.at(number) or view) is None
        machine = self._machines.get(Key(state.stream.name, number))
        overdue = machine is not None and now_s > machine.ends_s
        if not (watching or overdue or state.seen > number):
            return
        others = [peer for peer in view.peers if peer != self._port.me and self._port.life(peer) != "dead"]
        if others:
            state.asked_s = now_s
            self._port.send(self._random.choice(others), LogQuery(Key(state.stream.name, number)))

    def _answer_query(self, state: StreamState, sender: PeerId, query: LogQuery) -> None:
        entry = state.log.get(query.key.round)
        if entry is not None:
            self._port.send(sender, entry.decided)
        elif query.key.round <= state.newest:
            oldest = next(iter(state.log), state.newest)
            self._port.send(sender, Forgotten(query.key, oldest, state.newest))

    def _take_forgotten(self, state: StreamState, sender: PeerId, incarnation: int, message: Forgotten) -> None:
        """The round has left the log of somebody we asked: this peer must adopt a snapshot."""
        if self._port.views.newest.index(sender, incarnation) is None:
            self._port.drop("not from a member")
            return
        if message.key.round != state.next or message.oldest <= message.key.round:
            return
        self._port.counters["lost rounds"] += 1
        self._give_up(state, message.newest + state.stream.stride)
        state.seen = max(state.seen, message.newest)

    def _take_decided(self, state: StreamState, sender: PeerId, incarnation: int, decided: Decided) -> None:
        """A decision that I had no part in: log it if it is the next one, and get its content."""
        view = self._view_of(sender, decided.view, decided.key)
        if view is None:
            return
        if self._port.views.newest.index(sender, incarnation) is None:
            self._port.drop("not from a member")
            return
        state.seen = max(state.seen, decided.key.round)
        if decided.key.round != state.next or decided.key.attempt:
            return
        try:
            close = decode_close_list(decided.value, _terms(state.stream), len(view.members))
        except BadCloseList:
            self._port.drop("bad close list")
            return
        nothing = (False,) * state.stream.shards
        self._log(state, decided.key, close, view.peers, decided, nothing)
        self._port.spawn(self._fill(state, decided.key))

    async def _fill(self, state: StreamState, key: Key) -> None:
        """Fetch the content of a logged round from whoever holds it."""
        entry = state.log[key.round]

        def holders() -> list[PeerId]:
            return [peer for peer in self._port.views.newest.peers if peer != self._port.me]

        async def fill(item: Item) -> None:
            there = False
            while not there and state.log.get(key.round) is entry:
                there = await self._port.chunks.fetch(item.digest, item.size, holders, key, FETCH_TIMEOUT_S)

        if any(item.size > state.stream.max_shard_bytes for item in entry.close.items):
            self._port.drop("item too large")
            return
        await asyncio.gather(*(fill(item) for item in entry.close.items))
        if state.log.get(key.round) is entry:
            self._completed(state, key.round)
        else:  # it has left the log meanwhile: nobody else would release what has come since
            self._port.store.release(key)


def _terms(stream: Stream) -> Terms:
    return Terms(stream.kind, stream.shards, stream.deadline_s, stream.min_participants, stream.enough, stream.uniform)
