"""The times of a peer's ticks: ten a second, or fewer while nothing is under way."""

import asyncio
import contextlib

from farflock.swarm.peer.calls import Calls
from farflock.swarm.peer.load_reports import LoadReports
from farflock.swarm.peer.membership import Membership
from farflock.swarm.peer.rounds import Rounds

TICK_S = 0.1  # short against the resend times, so that repeats are hardly late
LOOK_EVERY = 5  # ticks between checks for branches: those wait for minutes, and a check is costly
REST_TURNS = 2 * LOOK_EVERY  # between ticks while nothing is under way


class Ticks:
    """Numbers the turns of one peer's ticks, and waits for the next.

    With `rests`, only every `REST_TURNS`-th comes while no round, call or change of members is
    under way; `stirred` brings back the next. Simulations do not rest: their bits depend on the
    times of ticks."""

    def __init__(
        self,
        membership: Membership,
        rounds: Rounds,
        calls: Calls,
        loads: LoadReports,
    ) -> None:
        self.rests = False
        self.stirred = asyncio.Event()  # set by whatever may need the next tick
        self.turn = 0
        self._membership, self._rounds, self._calls = membership, rounds, calls
        self._loads = loads

    async def wait(self) -> None:
        """Wait for the next turn that has a tick."""
        if not (self.rests and self._is_quiet()):
            await asyncio.sleep(TICK_S)
            self.turn += 1
            return
        now = asyncio.get_running_loop().time
        begun_s, turns = now(), REST_TURNS - self.turn % REST_TURNS
        self.stirred.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(turns * TICK_S):
                await self.stirred.wait()
            lasted_s = now() - begun_s
            turns = min(turns, int(lasted_s / TICK_S) + 1)
            await asyncio.sleep(max(0.0, turns * TICK_S - lasted_s))
        self.turn += turns

    def _is_quiet(self) -> bool:
        return (
            not self._rounds.machines
            and not self._calls.is_busy
            and self._membership.is_settled
            and not self._loads.mine
        )
