"""Work of a stage server that a view has left out, although it is there again in the same life.

While it is left out, as behind a broken cable, trainers ask other servers for what it had merged
and no round has named (decision 014). If it brought that to a later round, it would count twice. So
it gives up all that no round has named, and goes back to the state after its last round. It keeps
its life, for it may be the only server of its stage: then nobody else has the stage's weights.

A trainer that has yet to hear of it believes that nothing has changed, and will ask others once it
hears. So a server that is back merges only for trainers that know the view which took it in again.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from farflock.node.assembly.core import Core
from farflock.node.pipeline.lifecycle.rebalancer import LifeOver
from farflock.node.pipeline.server.server import StageServer
from farflock.node.pipeline.server.task import BatchTrigger
from farflock.node.train.driver import Driver
from farflock.node.train.ending import drop
from farflock.optimizers.parts.stateful import live_state
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.protocol.views import Member, View

WHY = "a change of members left this server out"

log = logging.getLogger(__name__)


@dataclass(slots=True)
class LeftOutServer:
    """A server of stage `index`, as far as that goes: `give_up` gives up its work, and returns how
    many microbatches that were. Weights that are `its_own` are in no other server, and hold such
    work."""

    context: PeerContext
    index: int
    its_own: bool
    give_up: Callable[[], Awaitable[int]]
    _since: int | None = None  # the last view that was looked at; None: no member yet

    def is_known_in(self, view: int) -> bool:
        """Return whether a peer that knows views up to this number knows of this membership."""
        context = self.context  # views before the oldest that is kept may have left it out
        is_kept = context.is_member and context.views.views[0].view.number <= view
        return is_kept and context.stayed(view - 1)

    @property
    def happened(self) -> bool:
        """True if a view has left this life out since its work was last good."""
        if self._since is None:
            views = (entry.view for entry in self.context.views.views)
            mine = (view.number for view in views if self.context.my_index(view) is not None)
            self._since = next(mine, None)
        if self._since is None:
            return False
        if not self.context.stayed(self._since):
            return True
        self._since = self.context.views.newest.number
        return False

    async def go_back(self) -> None:
        """Give up the work; raise `LifeOver` where others serve the stage now. They have what is
        needed in place of weights of its own; and if none of them did when this server was still
        in, they may have begun the stage anew."""
        views, newest = self.context.views.views, self.context.views.newest
        known = (entry.view for entry in views if entry.view.number == self._since)
        before = set().union(*map(self._twins, known))
        others = self._twins(newest)
        if others and (self.its_own or not others & before):
            raise LifeOver(WHY)
        self._since = newest.number
        if count := await self.give_up():
            log.warning(
                "%s: it gives up %d microbatches that had not counted, which their trainers ask"
                " for again",
                *(WHY, count),
            )

    def _twins(self, view: View) -> set[Member]:
        """Return the other members that serve the stage in a view."""
        found = {view.members[index] for index in view.serving(self.index)}
        return {member for member in found if member.peer != self.context.me}

    async def may_step(self) -> bool:
        """Return whether a step may be made of the work here; give it up if not."""
        if not self.happened:
            return True
        await self.go_back()
        return False

    async def begin_again(self, reason: str) -> None:
        """Go on after the group has left this server behind for a reason; raise `LifeOver` if that
        is another one."""
        if not self.happened:
            raise LifeOver(reason)
        await self.go_back()


def watched(core: Core, server: StageServer, batch: BatchTrigger, index: int) -> LeftOutServer:
    """Return what watches a server of a stage, which goes on from its last round once it has been
    left out. Its steps are to be asked for with `may_step`."""
    loop, driver, model = core.loop, core.driver, server.passes.stage.model

    def clear() -> None:
        server.accounts.sums.clear()
        model.zero_grad()

    async def give_up() -> int:
        await drop(loop.under_way)
        count, batch.steps = server.renounce(), 0
        await loop.compute(partial(go_back, driver, clear))
        core.state_sync.open(driver.position.rounds, driver.position.agreed_tokens)
        return count

    its_own = driver.method.equality == "per-peer"
    found = LeftOutServer(loop.client.peer.context, index, its_own, give_up)
    loop.adopt, server.is_known_in = found.begin_again, found.is_known_in
    batch.is_left_out = loop.client.is_left_out = lambda: found.happened
    return found


def go_back(driver: Driver, beside: Callable[[], None]) -> None:
    """Give up all local work and what waits for a result: the state is that after the last applied
    rounds again. In the worker, with what is to be done `beside`."""
    with driver.cuts.changing():
        shared = live_state(driver.method, driver.replica).shared
        state = {name: tensor.clone() for name, tensor in shared.items()}
        driver.method.restore(driver.replica, state, "adopt")
        driver.forget()
        beside()
