"""A stranger's visit to a run: a throwaway identity that cannot be dialled, publishes nothing and
never joins.
"""

import contextlib
import dataclasses
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from farflock.node.assembly.learnt import LearntTerms, learn_terms
from farflock.node.assembly.peer_world import Files, PeerWorld
from farflock.node.process.own_world import Listening, identity_of, open_world
from farflock.node.run.invite import Invite
from farflock.node.state.paths import RunFolder
from farflock.swarm.identity import Identity


@dataclasses.dataclass(frozen=True, slots=True)
class RunVisit:
    """A visitor in a run: its world, its identity, and what members told it."""

    world: PeerWorld
    identity: Identity
    learnt: LearntTerms


@contextlib.asynccontextmanager
async def visiting_run(
    invite: Invite, timeout_s: float, directory: bool = True
) -> AsyncIterator[RunVisit]:
    """RunVisit an invite's run while the block runs; raise what `learn_terms` raises. Members that the
    invite does not name are asked if there is a `directory`."""
    with tempfile.TemporaryDirectory(prefix="farflock-look-") as passing:
        folder, where = RunFolder(Path(passing)), Listening(client_mode=True)
        identity = identity_of(folder)
        async with open_world(folder, where, identity, invite.run, invite.members) as (world, _):
            # nothing is published or kept
            unseen = dataclasses.replace(world, directory=None, files=Files())
            learnt = await learn_terms(world if directory else unseen, invite, timeout_s)
            yield RunVisit(unseen, identity, learnt)
