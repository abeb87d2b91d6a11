"""The end of a run of whole replicas with an exact method: all end after the same rounds.

A node that stopped at its own token estimate could end a round before the others: it may be faster,
have joined late, or have been left out of a round. So nodes follow the agreed tokens, which are
equal everywhere after each round: the run ends with the first round that brings them to its total.
By then some nodes may have begun further rounds, in other streams or because a round left out their
contribution. So each node announces the rounds in its state, and leaves once all states agree.
"""

import asyncio
from collections.abc import Awaitable, Callable

from farflock.node.train.driver import Driver
from farflock.node.train.state_sync import StateSync
from farflock.swarm.links import PeerId
from farflock.swarm.messages import Key
from farflock.swarm.peer.peer import OpenWait, Peer

END_S = 30.0  # maximum wait for the others, on top of an open round's deadline
CUT_OFF_S = 30.0  # silence of all others, after which a node is cut off; slow peers answer sooner
# The deadlines of so many rounds must pass without any agreed tokens before a node that could have
# trained the whole run meanwhile goes by its own estimate: a short run is a few rounds long.
FRUITLESS_ROUNDS = 6
LOOK_EVERY_S = 0.05


class EndBarrier:
    """One node's part in the end of its run."""

    def __init__(self, peer: Peer, driver: Driver, state_sync: StateSync) -> None:
        self._peer, self._driver, self._state_sync = peer, driver, state_sync
        self._alone_s: float | None = None  # when this peer became alone
        # agreed tokens, and this node's estimate and the time when they last changed
        self._agreed = (-1, 0, 0.0)
        self._ends_s: float | None = None  # end of the wait for the others
        self._has_told = False  # announced its rounds; before that, it compares nothing

    def is_due(self, total_tokens: int) -> bool:
        """Return whether the agreed tokens have reached the total.

        The node's own estimate decides instead while the node is cut off, or once that estimate
        has grown by the whole total since the agreed tokens last changed, some time ago."""
        agreed, estimate = self._driver.position.agreed_tokens, self._driver.tokens
        is_cut_off = self._is_cut_off()  # called every time: it measures how long
        now_s = self._peer.context.now()
        if agreed != self._agreed[0]:
            self._agreed = agreed, estimate, now_s
        if estimate < total_tokens or agreed >= total_tokens:
            return agreed >= total_tokens
        # without this bound, rounds that fail forever would keep the node in the run
        _, before, since_s = self._agreed
        is_long = now_s - since_s >= FRUITLESS_ROUNDS * self._longest_s
        return is_cut_off or (is_long and estimate - before >= total_tokens)

    @property
    def _longest_s(self) -> float:
        return max((entry.deadline_s for entry in self._driver.streams), default=0.0)

    async def end(
        self, take_in: Callable[[], Awaitable[None]], stopping: Callable[[], bool]
    ) -> None:
        """Wait until all peers have ended with the same rounds, which `take_in` applies, or time
        is up."""
        context = self._peer.context
        self._ends_s = context.now() + self._longest_s + END_S
        while not stopping():
            await take_in()
            if self._agree() or context.now() >= self._ends_s:
                break
            await asyncio.sleep(LOOK_EVERY_S)
        self._ends_s = None

    def waits(self) -> list[OpenWait]:
        """Return the peers awaited now, by stream: those that have not ended with these rounds."""
        if self._ends_s is None or not self._has_told or self._driver.pending:
            return []  # it waits for an exchange instead
        left_s = self._ends_s - self._peer.context.now()
        awaited = {
            Key(name, number): self._apart(name, number)
            for name, number in self._state_sync.next_rounds.items()
        }
        return [OpenWait(key, whom, left_s) for key, whom in awaited.items() if whom]

    def _is_cut_off(self) -> bool:
        now_s = self._peer.context.now()
        if len(self._peer.context.views.newest.members) == 1 or not self._peer.alone:
            self._alone_s = None
        elif self._alone_s is None:
            self._alone_s = now_s
        return self._alone_s is not None and now_s - self._alone_s >= CUT_OFF_S

    def _agree(self) -> bool:
        """Announce this node's rounds if no exchange is pending; return True if all peers announced
        the same rounds."""
        if self._driver.pending:
            return False
        agree = True
        for name, number in self._state_sync.next_rounds.items():
            self._peer.tallies.end(name, None, number)
            reports = self._peer.tallies.reports(name).values()
            newest = max((report.round for report in reports), default=number)
            self._peer.rounds.heard_of(name, newest)  # so that a missing round is requested
            agree &= not self._apart(name, number) and not self._peer.rounds.called(name)
        self._has_told = True
        return agree

    def _apart(self, name: str, number: int) -> tuple[PeerId, ...]:
        """Return the peers that have not ended with `number` as the next round of the stream."""
        told = self._peer.tallies.reports(name)
        return tuple(
            sorted(peer for peer, each in told.items() if not each.over or each.round != number)
        )
