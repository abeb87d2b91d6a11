"""A whole swarm in one process, for notebooks and tests: real peers, agreement and codecs.

Only the wire is simulated: `SimNetwork` carries the frames in memory and in real time, with the
given rates and latency, so that a slow line can be tried too.
"""

import asyncio
import contextlib
import functools
import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from torch import nn

from farflock.node.assembly.known_run import own_run
from farflock.node.assembly.peer_world import PeerWorld, Workers
from farflock.node.assembly.session import Session
from farflock.node.errors import Usage
from farflock.node.library.background import Background, BackgroundContext, in_threads
from farflock.node.library.presence import JoinRequest, OptimizerNode, present
from farflock.node.library.run_options import LocalOptions
from farflock.node.library.swarm_optimizer import SwarmOptimizer
from farflock.node.run.manifest import Manifest
from farflock.node.run.user_terms import GivenMethod, founded, require_agreed
from farflock.swarm.compute import Compute, Worker
from farflock.swarm.identity import Identity
from farflock.swarm.record import Record, seal
from farflock.swarm.sim.network import LinkModel, SimNetwork

T = TypeVar("T")
Optimize = Callable[..., SwarmOptimizer]  # SwarmOptimizer's constructor, but for `invite`
RankFunction = Callable[[int, Optimize], T]

MAX_PEERS = 64
RANKS_TIMEOUT_S = 120.0  # for all ranks to call `optimize`
QUICK = LinkModel(up_bytes_per_s=1e9, down_bytes_per_s=1e9, latency_s=0.0005, jitter_s=0.0)
VIEW_S = 3.0  # long enough for all ranks to ask, so that one change of the view admits them all


class LocalPeers:
    """The peers of a local swarm, on the event loop that runs them; one for each rank.

    Rank 0 starts the run, and the others wait for it and join."""

    def __init__(self, count: int, seed: int, link: LinkModel, compute: Compute) -> None:
        self.count, self.network = count, SimNetwork(seed, link)
        self._identities = [Identity.from_seed(_seed(seed, rank)) for rank in range(count)]
        self._compute = compute
        self._all_here, self._all_ready = asyncio.Barrier(count), asyncio.Barrier(max(count - 1, 1))
        self._founded = asyncio.Event()
        self._manifest: Manifest | None = None  # once rank 0 has started the run
        self._listed = b""  # of its model
        self._sessions: list[Session] = []

    @contextlib.asynccontextmanager
    async def inside(self, rank: int, join_request: JoinRequest) -> AsyncIterator[OptimizerNode]:
        """Run one peer, from its first frame to its goodbye."""
        await self._wait_for_all(self._all_here)
        terms = await self._terms_for(rank, join_request)
        known = own_run(self._identities[0], terms)
        known = replace(known, records=[self._record(0, known.run)])
        session = Session(self._world(rank, known.run), self._identities[rank], known)
        self._sessions.append(session)
        try:
            async with session.running():
                here = OptimizerNode.assemble(
                    join_request, terms, session.peer, self._compute, _no_invite, founder=rank == 0
                )
                here.gate = functools.partial(self._wait_for_all, self._all_ready)
                async with present(session, here):
                    self._founded.set()
                    yield here
        finally:
            self.network.kill(session.peer.me)  # the end of a process closes its connections, too

    def _world(self, rank: int, run: str) -> PeerWorld:
        links, record = self.network.links(self._identities[rank].peer), self._record(rank, run)
        links.record = lambda: record
        return PeerWorld(links, None, workers=Workers(self._compute))

    def leave_together(self) -> None:
        """Let no peer stay for the others, for all leave now."""
        for session in self._sessions:
            session.silent = True

    async def _wait_for_all(self, barrier: asyncio.Barrier) -> None:
        try:
            async with asyncio.timeout(RANKS_TIMEOUT_S):
                await barrier.wait()
        except (TimeoutError, asyncio.BrokenBarrierError):
            why = f"not all {self.count} ranks called `optimize` within {RANKS_TIMEOUT_S:.0f} s"
            raise Usage(
                "this rank gets no optimizer", why, "call `optimize` once in each rank's thread"
            ) from None

    async def _terms_for(self, rank: int, join_request: JoinRequest) -> Manifest:
        if rank == 0:
            self._manifest, self._listed = founded(join_request.wished), join_request.listed
            return self._manifest
        async with asyncio.timeout(RANKS_TIMEOUT_S):
            await self._founded.wait()
        assert self._manifest is not None
        require_agreed(self._manifest, join_request.wished, join_request.listed, self._listed)
        return self._manifest

    def _record(self, rank: int, run: str) -> bytes:
        identity = self._identities[rank]
        return seal(identity, Record(run, identity.peer, 1, 1, curve=bytes(32)))


@dataclass(frozen=True, slots=True)
class _LocalDoor:
    """The entry point of one rank, whose peer runs in the swarm's thread."""

    swarm: "LocalSwarm"
    rank: int

    def enter(
        self, join_request: JoinRequest
    ) -> tuple[BackgroundContext[OptimizerNode], Callable[[], None]]:
        """See `presence.EntryPoint`."""
        peers = self.swarm.peers
        life = self.swarm.background.enter(lambda: peers.inside(self.rank, join_request))
        return life, life.end


class LocalSwarm:
    """A swarm of `peers` peers in this process, which lasts as long as its `with` block."""

    def __init__(
        self,
        peers: int,
        method: str | GivenMethod | None,
        seed: int,
        link: LinkModel,
        options: dict[str, Any],
    ) -> None:
        if not 1 <= peers <= MAX_PEERS:
            raise Usage("local_swarm", f"it cannot have {peers} peers", f"choose 1 to {MAX_PEERS}")
        enough = getattr(method, "enough", options.get("enough", 0))
        if enough > peers:
            raise Usage(
                "enough",
                f"a round would wait for {enough} contributions from {peers} peers",
                f"choose {peers} or fewer",
            )
        self._codecs = Worker("codec")
        self.peers = LocalPeers(peers, seed, link, self._codecs)
        self.optimizers: dict[int, SwarmOptimizer] = {}
        self._terms = {"method": method, "seed": seed, **options}
        self.background = Background("local swarm")

    @property
    def network(self) -> SimNetwork:
        """The network between the peers."""
        return self.peers.network

    def train(self, work: RankFunction[T]) -> list[T]:
        """Call `work(rank, optimize)` for each rank in its own thread; return the results by rank.

        `optimize(model, inner=…, lr=…)` makes the rank's optimizer, once, and returns when all
        ranks have theirs. Steps wait for each other, so each rank needs its own thread. The
        first error ends all ranks and is raised."""
        if self.optimizers:
            raise Usage(
                "this swarm has already trained", "its run is over", "make a new local_swarm"
            )
        return in_threads(
            self.peers.count,
            lambda rank: work(rank, functools.partial(self._optimize, rank)),
            self._end,
        )

    def disturb(self, what: Callable[[SimNetwork], object]) -> None:
        """Change the network as in a simulation: `kill(peer)`, `cut`, `slow` or `set_link`."""
        self.background.run(lambda: what(self.network))

    def close(self) -> None:
        """End all peers."""
        self._end()
        self._codecs.close()

    def _end(self) -> None:
        self.peers.leave_together()
        self.background.close()

    def __enter__(self) -> Self:
        """Return this swarm."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End all peers."""
        self.close()

    def _optimize(self, rank: int, model: nn.Module, **options: Any) -> SwarmOptimizer:  # noqa: ANN401 - see SwarmOptimizer
        if rank in self.optimizers:
            raise Usage(
                f"rank {rank} already has an optimizer",
                "a rank is one peer",
                "call `optimize` once per rank, each with its own model",
            )
        made = SwarmOptimizer(model, invite=_LocalDoor(self, rank), **{**self._terms, **options})
        self.optimizers[rank] = made
        made.wait_for_members(self.peers.count)
        return made


def local_swarm(
    peers: int,
    method: str | GivenMethod | None = None,
    *,
    seed: int = 0,
    view_s: float = VIEW_S,
    link: LinkModel = QUICK,
    **options: Unpack[LocalOptions],
) -> LocalSwarm:
    """Return a swarm of this many peers in this process; use it in a `with` statement.

    `link` is the speed and latency of all lines; the rest are `SwarmOptimizer`'s options of a run::

        with farflock.local_swarm(4, method="noloco", period=10) as swarm:
            losses = swarm.train(work)  # work(rank, optimize) in four threads
    """
    return LocalSwarm(peers, method, seed, link, {"view_s": view_s, **options})


def _no_invite() -> str:
    raise Usage(
        "no invite can be made",
        "a local swarm exists in this process only",
        "start a run with SwarmOptimizer",
    )


def _seed(seed: int, rank: int) -> bytes:
    return hashlib.sha256(f"local peer {seed}/{rank}".encode()).digest()
