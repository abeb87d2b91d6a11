"""The asyncio glue of pair exchanges: find the partner, run the pair's machine, fetch its payload.

Peers of such a stream may drift apart in their rounds. If a proposal names a
round that the peer has left, it answers with its own round; if it names a later one, the peer skips
to it. So partners meet again without synchronised clocks.
"""

import asyncio
import collections
import functools
from types import MappingProxyType

from farflock.swarm.links import PeerId
from farflock.swarm.messages import (
    Key,
    Message,
    Offer,
    PairAbort,
    PairAccept,
    PairHave,
    PairMessage,
    PairPropose,
    PairRefuse,
)
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.peer.round_log import work_pin
from farflock.swarm.protocol.exchange.bundles import BadBundle
from farflock.swarm.protocol.exchange.streams import RoundOutcome, RoundStatus, Stream
from farflock.swarm.protocol.groups import group_of
from farflock.swarm.protocol.pair import Pair
from farflock.swarm.protocol.views import View

TICK_S = 0.1  # a quarter of the resend time, so that repeats are hardly late
DONE_KEPT = 32  # ended pairs kept to answer a partner's repeated messages
MAX_JUMP = 1000  # rounds that one message may move this peer ahead, so that none ends its run


class Pairing:
    """All pair exchanges of one peer, one at a time per stream."""

    def __init__(self, context: PeerContext) -> None:
        self._context = context
        self._streams: dict[str, Stream] = {}
        self.streams = MappingProxyType(self._streams)
        self._current: dict[str, Pair] = {}
        self._changed: dict[str, asyncio.Event] = {}
        self._rounds: dict[str, int] = {}  # this peer's next round, by stream
        self._seen: dict[str, int] = {}
        self._abandoned: set[str] = set()  # not open again since a change of chain
        self._early: dict[tuple[str, PeerId], PairPropose] = {}
        self._done: collections.OrderedDict[Key, Pair] = collections.OrderedDict()
        self.unsure_rounds = 0  # no decision heard: perhaps applied on one side only

    @property
    def open_pairs(self) -> int:
        """The number of exchanges in progress."""
        return len(self._current)

    @property
    def remembered(self) -> int:
        """The number of ended exchanges, and of early proposals, that are kept for latecomers."""
        return len(self._done) + len(self._early)

    def open(self, stream: Stream, after_round: int = -1) -> None:
        """Begin a stream of pairs; its first round is the one after `after_round`."""
        self._streams[stream.name] = stream
        self._rounds[stream.name] = stream.cadence.since(after_round + 1)
        self._seen[stream.name] = after_round
        self._abandoned.discard(stream.name)

    def left_round(self, name: str) -> int:
        """Return the last round of a stream that this peer, or another that it heard of, has left:
        it is over, whatever state this peer adopts. -1 for streams that are not open in pairs, and
        after a change of chain."""
        if name not in self._streams or name in self._abandoned:
            return -1
        return self._streams[name].cadence.upto(max(self._rounds[name], self._seen[name]) - 1)

    def abandon(self) -> tuple[str, ...]:
        """End all exchanges after a change of chain; return the names of the streams to reopen."""
        for name, pair in self._current.items():
            pair.lost(self._context.now())
            self._changed[name].set()
        self._early.clear()
        self._abandoned.update(self._streams)
        return tuple(self._streams)

    async def exchange(self, name: str, offer: Offer) -> RoundOutcome:
        """Swap shards, already in the store, with this round's partner by the stream's deadline."""
        stream, key = self._streams[name], offer.key
        self._rounds[name] = key.round
        of_stream = [(place, early) for place, early in self._early.items() if place[0] == name]
        for place, early in of_stream:
            if early.offer.key < key:
                del self._early[place]
        view = self._context.views.at(key.round, stream.stage) or self._context.views.newest
        partner, leader = self._partner(view, stream, key)
        if partner is None or self._context.views.blocked(key.round, stream.stage):
            return self._outcome(stream, offer, None)
        self._context.touch(stream.stage, key.round)
        offer = Offer(
            key, view.hash, offer.digests, offer.sizes, offer.weight, offer.tokens, offer.state
        )
        begun_s, deadline_s = self._context.now(), stream.terms.deadline_s
        pair = Pair(key, self._context.me, partner, leader, offer, begun_s, deadline_s)
        self._current[name], self._changed[name] = pair, asyncio.Event()
        try:
            await self._run(view, stream, pair)
        finally:
            if pair.stage != "done":  # cancelled: this peer ends, and its partner need not wait
                pair.lost(self._context.now())
                self._flush(pair)
                self._context.store.release(work_pin(key))
                self._rounds[name] = stream.cadence.since(key.round + 1)
            del self._current[name]
            self._done[key] = pair
            while len(self._done) > DONE_KEPT:
                self._done.popitem(last=False)
        self.unsure_rounds += pair.unsure
        return self._outcome(stream, offer, pair)

    def receive(self, sender: PeerId, incarnation: int, message: PairMessage) -> None:
        """Route a partner's message to the running pair, or answer for one that is over."""
        key = message.offer.key if isinstance(message, PairPropose | PairAccept) else message.key
        if key.stream not in self._streams:
            self._context.drop("unknown stream")
            return
        if isinstance(message, PairPropose | PairAccept) and not self._is_member(
            sender, incarnation, message.offer
        ):
            self._refuse(sender, key)
            return
        pair = self._current.get(key.stream)
        if pair is None or pair.key != key or pair.partner != sender:
            self._receive_elsewhere(sender, incarnation, key, message)
            return
        if isinstance(message, PairRefuse):
            self._note_seen(key.stream, message.round)
        pair.receive(self._context.now(), message)
        self._changed[key.stream].set()

    def waits(self) -> list[tuple[Key, tuple[PeerId, ...], float]]:
        """Return the open waits: (exchange, from whom, until when on the local clock)."""
        return [
            (pair.key, (pair.partner,), pair.ends_s)
            for pair in self._current.values()
            if pair.stage != "done"
        ]

    def _partner(self, view: View, stream: Stream, key: Key) -> tuple[PeerId | None, bool]:
        """Return (this round's partner, True if we lead); None if there is none or it is gone."""
        peers = [view.peers[index] for index in view.serving(stream.stage)]
        if self._context.my_index(view) is None or self._context.me not in peers:
            return None, False
        group = group_of(self._context.me, peers, 2, self._context.seed, view.hash, key)
        partner = next((peer for peer in group if peer != self._context.me), None)
        if partner is None or self._is_missing(view, partner, key):
            return None, False
        early = self._early.get((key.stream, partner))
        if early is not None and early.offer.key.round > key.round:
            return None, False  # it has gone on to a later round and will not come back
        return partner, group[0] == self._context.me

    def _is_missing(self, view: View, partner: PeerId, key: Key) -> bool:
        return self._context.gone(view, partner) or self._context.is_away(partner, key)

    async def _run(self, view: View, stream: Stream, pair: Pair) -> None:
        pair.start(self._context.now())
        early = self._early.pop((pair.key.stream, pair.partner), None)
        if early is not None and early.offer.key == pair.key:
            pair.receive(self._context.now(), early)
        fetching = False
        while pair.stage != "done":
            if pair.theirs is not None and not fetching:
                fetching = True
                self._context.spawn(self._fetch(stream, pair))
            self._flush(pair)
            await self._wait(pair.key.stream)
            if self._is_missing(view, pair.partner, pair.key):
                pair.lost(self._context.now())
            pair.tick(self._context.now())
        self._flush(pair)

    async def _wait(self, name: str) -> None:
        changed = self._changed[name]
        try:
            async with asyncio.timeout(TICK_S):
                await changed.wait()
        except TimeoutError:
            return
        changed.clear()

    async def _fetch(self, stream: Stream, pair: Pair) -> None:
        """Fetch and check every bundle of the partner; a corrupt one ends the exchange."""
        assert pair.theirs is not None
        offer = pair.theirs
        fits = len(offer.digests) == len(offer.sizes) == stream.terms.bundles and all(
            self._context.bundles.fits(stream, bundle, size)
            for bundle, size in enumerate(offer.sizes)
        )
        fetches = (
            self._fetch_bundle(stream, pair, bundle) for bundle in range(stream.terms.bundles)
        )
        if fits and all(await asyncio.gather(*fetches)):
            pair.complete(self._context.now())
        else:
            pair.lost(self._context.now())
        self._flush(pair)
        self._changed[pair.key.stream].set()

    async def _fetch_bundle(self, stream: Stream, pair: Pair, bundle: int) -> bool:
        assert pair.theirs is not None
        entry = pair.theirs.digests[bundle], pair.theirs.sizes[bundle]
        # No longer than the pair lasts: after that its partner's payload is of no use.
        left_s, pin = pair.ends_s - self._context.now(), work_pin(pair.key)
        fetch = functools.partial(
            self._context.bundles.fetch, stream, bundle, entry, lambda: [pair.partner], pin, left_s
        )
        try:
            if left_s <= 0 or not await fetch():
                return False
            if pair.stage == "done":  # over meanwhile, so no other code releases it
                self._context.store.release(pin)
                return False
            intact = await self._context.bundles.check(stream, pair.key.round, bundle, entry[0])
        except BadBundle:
            intact = False
        self._context.counters["corrupt payloads"] += not intact
        return intact

    def _flush(self, pair: Pair) -> None:
        outbox, pair.outbox = pair.outbox, []
        for message in outbox:
            self._context.send(pair.partner, message)

    def _outcome(self, stream: Stream, offer: Offer, pair: Pair | None) -> RoundOutcome:
        """Return the outcome, with both payloads, ours or none, and release the chunks."""
        next_round = stream.cadence.since(max(offer.key.round + 1, self._seen[stream.name]))
        self._rounds[stream.name] = next_round
        verdict = "alone" if pair is None else pair.verdict
        offers = {self._context.me: offer}
        if pair is not None and pair.verdict == "applied":
            assert pair.theirs is not None
            offers[pair.partner] = pair.theirs
        contents = {
            peer: tuple(
                shard
                for bundle, digest in enumerate(entry.digests)
                for shard in self._context.bundles.shards(stream, bundle, digest)
            )
            for peer, entry in sorted(offers.items())
        }
        self._context.store.release(work_pin(offer.key))
        if verdict == "failed":
            return RoundOutcome(offer.key, "failed", next_round)
        status: RoundStatus = "ok" if verdict == "applied" else "alone"
        weights = tuple(offers[peer].weight for peer in contents)
        taken = (True,) * stream.terms.shards
        # Of two estimates of the run's tokens, the larger knows more.
        tokens = max(entry.tokens for entry in offers.values())
        return RoundOutcome(
            offer.key,
            status,
            next_round,
            tuple(contents),
            weights,
            gathered=contents,
            taken=taken,
            tokens=tokens,
        )

    def _receive_elsewhere(
        self, sender: PeerId, incarnation: int, key: Key, message: Message
    ) -> None:
        """Handle a message that is not for the running pair.

        Keep a proposal ahead of us, refuse one behind us, answer for an exchange that is over."""
        over = self._done.get(key)
        if over is not None and over.partner == sender:
            over.receive(self._context.now(), message)
            self._flush(over)
        elif isinstance(message, PairPropose):
            mine, busy = self._rounds[key.stream], key.stream in self._current
            if key.round > mine or (key.round == mine and not busy):
                self._early[key.stream, sender] = message
                self._note_seen(key.stream, key.round)
            else:
                self._refuse(sender, key)
        elif isinstance(message, PairRefuse):
            if self._context.views.newest.index(sender, incarnation) is not None:
                self._note_seen(key.stream, message.round)
        elif isinstance(message, PairAbort):
            self._early.pop((key.stream, sender), None)
        elif isinstance(message, PairAccept | PairHave):
            self._context.send(sender, PairAbort(key))

    def _note_seen(self, name: str, number: int) -> None:
        limit = self._rounds[name] + MAX_JUMP
        self._seen[name] = max(self._seen[name], min(number, limit))

    def _refuse(self, sender: PeerId, key: Key) -> None:
        self._context.send(sender, PairRefuse(key, self._rounds[key.stream]))

    def _is_member(self, sender: PeerId, incarnation: int, offer: Offer) -> bool:
        """True if the sender is a member, in this life, of the view that the round belongs to."""
        view, stage = self._context.views.by_hash(offer.view), self._streams[offer.key.stream].stage
        known = view is not None and view is self._context.views.at(offer.key.round, stage)
        if not known:
            self._context.counters["stale view"] += 1
        index = view.index(sender, incarnation) if known and view is not None else None
        return view is not None and index is not None and index in view.serving(stage)
