"""A peer comes back to its run with what its folder kept: it goes on from its own state where that
is where the run goes on, and else takes another's.

`swarm/peer/branching.py` makes the return, if all keys of the newest view come back.
"""

import logging
from functools import partial

from farflock.node.assembly.resume import Resumable, cursors_of, load_shared
from farflock.node.errors import RefusedByRun
from farflock.node.state.checkpoint import Checkpoint
from farflock.node.train.driver import RunPosition
from farflock.node.train.state_sync import StateSync
from farflock.swarm.links import PeerId
from farflock.swarm.peer.peer import Peer
from farflock.swarm.peer.snapshots import DownloadProgress, SnapshotUnavailable

VIEW = "view"  # in a checkpoint: the hash of the view of the last round in it

log = logging.getLogger(__name__)


async def recall(node: Resumable, saved: Checkpoint | None) -> None:
    """Let a node hold the state of its last life, if the checkpoint says in which view that was;
    without one, the state with which the run began."""
    if saved is None:
        await node.state_sync.held.recall(RunPosition(), b"")
        return
    under = saved.meta.get(VIEW)
    if isinstance(under, str):
        await node.loop.compute(partial(load_shared, node, saved))
        await node.state_sync.held.recall(cursors_of(saved).place, bytes.fromhex(under))


async def come_back(
    peer: Peer, state: StateSync, downloaded: DownloadProgress = lambda here, total: None
) -> None:
    """Take up the run's state once it is known where the run goes on. A peer whose key the newest
    view lists waits for the others as long as it has patience; raise `RefusedByRun` then, and
    `SnapshotUnavailable` for any other peer once nothing of the state comes any more."""
    said: tuple[PeerId, ...] = ()

    def tell(awaited: tuple[PeerId, ...]) -> None:
        nonlocal said
        if awaited and awaited != said:
            log.info("%s", waits_for(awaited))
        said = awaited

    while True:
        try:
            begins = await peer.branching.returning.settled(tell)
        except TimeoutError:
            raise RefusedByRun(
                "the run's members have not come back", waits_for(said), "start them too"
            ) from None
        place = None if begins is None else state.held.place_in(begins)
        if place is not None:
            state.open(place.rounds, place.agreed_tokens)
            return
        try:
            await state.adopt(None, downloaded, -1 if begins is None else begins.first - 1)
            return
        except SnapshotUnavailable as error:
            if not peer.context.views.newest.lists(peer.me):
                raise
            log.info("the run's state is waited for: %s", error)


def waits_for(awaited: tuple[PeerId, ...]) -> str:
    """Return a phrase about the keys without which nothing can be decided."""
    whom = ", ".join(peer[-8:] for peer in awaited) or "an answer of the others"
    return f"waits for {whom}, without whom the run's members cannot decide anything"
