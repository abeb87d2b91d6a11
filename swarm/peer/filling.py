"""Fetches the content of logged rounds, from whoever has it, until it is here or given up.

Where a stage's last round died with the only peer that had its content, the members that had no
part in it go on without: to the stage, that round has failed.
"""

import asyncio

from msgspec.structs import replace

from farflock.swarm.links import PeerId
from farflock.swarm.messages import Key
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.peer.round_log import RoundLog
from farflock.swarm.peer.streams import LoggedRound, StreamState
from farflock.swarm.protocol.decide import is_quorum
from farflock.swarm.protocol.exchange.availability import RoundItem

FETCH_TIMEOUT_S = 10.0
RETRY_S = 0.5
HOPELESS_S = 20.0  # nobody has had a content for so long: whoever had it is out of the view by now


class Filling:
    """One peer's search for content that no machine of its own will bring."""

    def __init__(self, port: PeerContext, log: RoundLog) -> None:
        self._port, self._log = port, log

    def begin(self, state: StreamState, key: Key) -> None:
        """Get what this peer wants of a logged round."""
        if state.stream.wanted(state.log[key.round].close):
            self._port.spawn(self._fill(state, key))
        else:
            self._log.completed(state, key.round)

    async def _fill(self, state: StreamState, key: Key) -> None:
        entry = state.log[key.round]
        wanted = state.stream.wanted(entry.close)
        if any(item.size > state.stream.max_shard_bytes for item in wanted):
            self._port.drop("item too large")
            return
        await asyncio.gather(*(self._fetch(state, key, entry, item) for item in wanted))
        if state.entry(key.round) is entry:
            self._log.completed(state, key.round)
        else:  # it has left the log meanwhile: nobody else would release what has come since
            self._port.store.release(key)

    async def _fetch(self, state: StreamState, key: Key, entry: LoggedRound, item: RoundItem) -> None:
        """Ask for one item until it is here, or the round has left the log or been given up."""
        fetch = self._port.chunks.fetch
        hopeless_s: float | None = None  # since when nobody had it
        while state.entry(key.round) is entry and entry.close.items:
            asked_s = self._port.now()
            if await fetch(item.digest, item.size, self._holders, key, FETCH_TIMEOUT_S, final=True):
                return
            now_s = self._port.now()
            nobody = now_s - asked_s < FETCH_TIMEOUT_S
            hopeless_s = (asked_s if hopeless_s is None else hopeless_s) if nobody else None
            is_hopeless = hopeless_s is not None and now_s - hopeless_s >= HOPELESS_S
            if is_hopeless and self._may_forsake(state):
                self._forsake(state, key.round)
            await asyncio.sleep(RETRY_S if nobody else 0.0)

    def _holders(self) -> list[PeerId]:
        return [peer for peer in self._port.views.newest.peers if peer != self._port.me]

    def _may_forsake(self, state: StreamState) -> bool:
        """Whether a content that nobody has may be done without.

        Only a stage's, which would stand still, and only among a quorum: others may have it on the
        other side of a cut.
        """
        view, port = self._port.views.newest, self._port
        members = enumerate(view.peers)
        there = [i for i, peer in members if peer == port.me or not port.gone(view, peer)]
        whole = state.stream.stage is not None and state.stream.wants == "all"
        return whole and is_quorum(there, len(view.peers))

    def _forsake(self, state: StreamState, number: int) -> None:
        """Give a round's content up: for a peer that brought nothing to the round, it has failed.

        A contributor must not bring the same again, for it counts: that peer is behind for good,
        and its state with it.
        """
        self._port.counters["forsaken rounds"] += 1
        entry = state.log[number]
        if any(entry.taken):
            self._log.evict(state, number)
        else:
            entry.close = replace(entry.close, items=(), members=())
