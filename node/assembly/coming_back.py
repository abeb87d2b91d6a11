"""A peer comes back to its run with what its folder kept: it goes on from its own state where that
is where the run goes on, and else takes another's.

`swarm/peer/returning.py` makes the return, if all keys of the newest view come back.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Protocol

from farflock.node.assembly.resume import Resumable, cursors_of, load_shared
from farflock.node.errors import RefusedByRun
from farflock.node.state.checkpoint import Checkpoint
from farflock.node.train.driver import RunPosition
from farflock.node.train.state_sync import StateSync
from farflock.swarm.messages import HeldState
from farflock.swarm.peer.peer import Peer
from farflock.swarm.peer.returning import Returning
from farflock.swarm.peer.snapshots import DownloadProgress, SnapshotUnavailable
from farflock.swarm.tasks import Silence, cancel

VIEW = "view"  # in a checkpoint: the hash of the view of the last round in it
LOOK_EVERY_S = 1.0  # at whether a member is there
POLL_S = 0.05  # between two looks at whether this peer is one

log = logging.getLogger(__name__)


class Returner(Resumable, Protocol):
    """A node with a whole model; it may have been in its run before."""

    @property
    def peer(self) -> Peer: ...
    @property
    def before(self) -> Checkpoint | None: ...  # of its last life in this run
    @property
    def begins_alike(self) -> bool: ...  # its first weights are those with which the run began


async def enter(
    node: Returner,
    records: Sequence[bytes],
    timeout_s: float,
    downloaded: DownloadProgress = lambda here, total: None,
) -> None:
    """Bring a node into its run through the members with these records: learn the views within
    `timeout_s`, take up the state, which takes as long as it comes, and ask to be admitted."""
    if node.before is not None:
        await recall(node, node.before)
    await node.peer.meet(records, timeout_s)
    await node.peer.membership.admission.find_room()
    was_member = node.peer.context.views.newest.lists(node.peer.me)
    if node.before is None and node.begins_alike and was_member:
        await recall(node, None)
    await come_back(node.peer, node.state_sync, downloaded)
    node.peer.ask_in()
    node.training_task.joined_at = node.loop.step


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
    while True:
        begins = await settled(peer)
        place = None if begins is None else state.held.place_in(begins[0])
        if place is not None:
            state.open(place.rounds, place.agreed_tokens)
            return
        try:
            await state.adopt(None, downloaded, 0 if begins is None else begins[0].first)
            return
        except SnapshotUnavailable as error:
            require_listed(peer, error)


async def settled(peer: Peer) -> dict[int, HeldState] | None:
    """Wait until it is known where the run goes on: from these states, by axis, or (None) where its
    members are. Say for whom this peer waits; raise `RefusedByRun` at the end of its patience."""
    returning = peer.branching.returning
    tell = _teller(returning)
    try:
        return await returning.settled(tell)
    except TimeoutError:
        raise _not_back(tell()) from None


async def admitted(peer: Peer, silent_s: float) -> None:
    """Wait until a peer that has asked for it is a member, as long as one is there; raise
    `TimeoutError` once none has been for `silent_s`. A key that the newest view lists waits for the
    others as long as it has patience, as before: they may have ended again before the return was
    made. Raise `RefusedByRun` then."""
    returning, is_listed = peer.branching.returning, peer.context.views.newest.lists(peer.me)
    tell = _teller(returning)
    try:
        async with while_there(peer, returning.timeout_s if is_listed else silent_s):
            while not peer.membership.is_member:
                tell()
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        if not is_listed:
            raise
        raise _not_back(tell()) from None


@contextlib.asynccontextmanager
async def while_there(peer: Peer, silent_s: float) -> AsyncIterator[None]:
    """Let the block last as long as a member is there; raise `TimeoutError` once none has been for
    so long."""
    silence, context = Silence(), peer.context

    async def look() -> None:
        while True:
            if any(context.life(each) == "alive" for each in peer.membership.book.others()):
                silence.heard("member")
            await asyncio.sleep(LOOK_EVERY_S)

    async with silence.limited(silent_s):
        looking = asyncio.create_task(look())
        try:
            yield
        finally:
            await cancel(looking)


def _teller(returning: Returning) -> Callable[[], str]:
    """Return a function that says for whom a peer waits, whenever that has changed, and returns
    what it has said last."""
    said = ""

    def tell() -> str:
        nonlocal said
        if (words := waits_for(returning)) and words != said:
            log.warning("%s", words)  # a program shows no other lines while it waits
        said = words or said
        return said

    return tell


def _not_back(said: str) -> RefusedByRun:
    why = said or "nobody answers"
    return RefusedByRun("the run's members have not come back", why, "start them too")


def require_listed(peer: Peer, error: SnapshotUnavailable) -> None:
    """Raise the error again unless the newest view lists this peer's key: that waits for others."""
    if not peer.context.views.newest.lists(peer.me):
        raise error
    log.info("the run's state is waited for: %s", error)


def waits_for(returning: Returning) -> str | None:
    """Return a phrase about the keys, or the stages' states, without which nothing can be decided;
    None if there is nothing to wait for."""
    if awaited := returning.awaited:
        whom = ", ".join(peer[-8:] for peer in awaited)
        return f"waits for {whom}, without whom the run's members cannot decide anything"
    if stages := returning.lacking:
        which = ", ".join(map(str, stages))
        what = "the run's state" if None in stages else f"the state of stage {which}"
        return f"waits for {what}, which no member here has"
    return None
