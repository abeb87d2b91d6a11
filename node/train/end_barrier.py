"""How a run of whole replicas ends where the method promises equal states: all with the same rounds, so with one state.

A node that went by its own estimate of the run's tokens would end when that is reached: who was left out of a round, came in
late or is faster than the others would end a round before them. So it goes by the agreed tokens, which after each round are
the same for all: the run ends with the first round that brings them to its total. Some may have begun more by then, in other
streams or because nobody took what they brought. So each tells the others which rounds are in its state, and goes when the
same are in all states.
"""

import asyncio
from collections.abc import Awaitable, Callable

from farflock.node.train.driver import Driver
from farflock.node.train.state_sync import StateSync
from farflock.swarm.links import PeerId
from farflock.swarm.messages import Key
from farflock.swarm.peer.peer import OpenWait, Peer

END_S = 30.0  # at most, beside the deadline of a round that is open then, for the others when the run is over here
CUT_OFF_S = 30.0  # nobody has been heard for so long: who was merely slow to answer is not
LOOK_EVERY_S = 0.05


class EndBarrier:
    """One node's part in its run's end."""

    def __init__(self, peer: Peer, driver: Driver, state_sync: StateSync) -> None:
        self._peer, self._driver, self._state_sync = peer, driver, state_sync
        self._alone_s: float | None = None  # since when
        self._agreed = (-1, 0)  # the run's agreed tokens, and what this node's estimate was when they came to be that
        self._ends_s: float | None = None  # until when it waits, once the run is over here
        self._has_told = False  # what is in its state: before, nobody can be compared with it

    def is_due(self, total_tokens: int) -> bool:
        """Whether the run has its tokens. Where nobody is there to agree with it goes by the estimate; so it does where nothing
        is ever agreed upon, once the run could have been trained again in the meantime."""
        agreed, estimate, is_cut_off = self._driver.position.agreed_tokens, self._driver.tokens, self._is_cut_off()
        if agreed != self._agreed[0]:
            self._agreed = agreed, estimate
        if estimate < total_tokens or agreed >= total_tokens:
            return agreed >= total_tokens
        return is_cut_off or estimate - self._agreed[1] >= total_tokens

    async def end(self, take_in: Callable[[], Awaitable[None]], stopping: Callable[[], bool]) -> None:
        """Wait until all have ended with the same rounds. `take_in` brings what is known of them into the method's state."""
        context = self._peer.context
        deadline_s = max((entry.deadline_s for entry in self._driver.streams), default=0.0)
        self._ends_s = context.now() + deadline_s + END_S
        while not stopping():
            await take_in()
            if self._agree() or context.now() >= self._ends_s:
                break
            await asyncio.sleep(LOOK_EVERY_S)
        self._ends_s = None

    def waits(self) -> list[OpenWait]:
        """For whom it waits now, by stream: who has not ended with the rounds that it has."""
        if self._ends_s is None or not self._has_told or self._driver.pending:
            return []  # what it waits for then is an exchange
        left_s = self._ends_s - self._peer.context.now()
        awaited = {
            Key(name, number): self._apart(name, number) for name, number in self._state_sync.next_rounds.items()
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
        """Once nothing of mine is open, tell the others what is in my state; whether all have told the same."""
        if self._driver.pending:
            return False
        agree = True
        for name, number in self._state_sync.next_rounds.items():
            self._peer.tallies.end(name, None, number)
            newest = max((told.round for told in self._peer.tallies.reports(name).values()), default=number)
            self._peer.rounds.heard_of(name, newest)  # who lacks a round that somebody has asks for it
            agree &= not self._apart(name, number) and not self._peer.rounds.called(name)
        self._has_told = True
        return agree

    def _apart(self, name: str, number: int) -> tuple[PeerId, ...]:
        """Who has not ended before this round of the stream."""
        told = self._peer.tallies.reports(name)
        return tuple(sorted(peer for peer, each in told.items() if not each.over or each.round != number))
