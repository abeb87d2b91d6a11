"""Path policies: the seam that decides which server gets a microbatch next.

Lazy next hops (SWARM), fixed maps (GPipe, 1F1B) and seeded permutations (NoLoCo) are functions from
(microbatch, stage, servers) to a peer; nothing else in a pipeline depends on the choice of policy.
"""

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, Protocol

from farflock.swarm.links import PeerId
from farflock.swarm.paths import noloco as mixing
from farflock.swarm.paths.round_robin import Announced, Balancer, CallFailure

CallOutcome = Literal["done", "busy"] | CallFailure
# Microbatches of one life of a trainer; the number of its first one is a multiple.
NUMBERS = 2**32


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The `index`-th microbatch of its lane in a step; a lane is its starting replica's number. A
    trainer numbers its microbatches, one a step: `step` modulo `NUMBERS` is the step."""

    step: int
    index: int
    lane: int


@dataclass(frozen=True, slots=True)
class StageServers:
    """The servers of each stage: `stages[s]` in any order.

    `membership` numbers the agreed member list behind it. `seniority[s]` are that list's servers of
    a stage in its own order, including those known to be gone, so that it is equal for all readers.
    `lanes` are those of its members, of which any may train.
    """

    membership: int
    stages: tuple[tuple[Announced, ...], ...]
    seniority: tuple[tuple[PeerId, ...], ...] = ()
    lanes: Mapping[PeerId, int] = field(default_factory=dict, hash=False)

    def peers(self, stage: int) -> list[PeerId]:
        """Return the servers of a stage in the order of their ids."""
        return sorted({server.peer for server in self.stages[stage]})

    def at(self, stage: int, place: int) -> PeerId | None:
        """Return the server at this place, by seniority or else by id; None if there are fewer."""
        servers = self.seniority[stage] if self.seniority else self.peers(stage)
        return servers[place] if place < len(servers) else None


@dataclass(frozen=True, slots=True)
class FinishedCall:
    """A call of `size` samples (backward times `BACKWARD_SIZE`); the server reports `took_s`."""

    peer: PeerId
    stage: int
    size: float
    started_s: float
    took_s: float | None = None


class PathPolicy(Protocol):
    """The routing of microbatches.

    Law (tests/swarm/paths/test_policy.py): `stage_order` names stages of the pipeline, each at most
    once, stage 0 first, and over many microbatches of a lane each as often as `share` says.
    `next_hop` is a server of that stage in `serving` that is not excluded. It is None if there is
    none, or none that may be asked yet: then `retry_s` is when to ask again, or None if only
    another `serving` or fewer exclusions can help. The same history and inputs give the same
    answer, in whatever order servers are listed. `pinned` promises that a lane keeps its servers
    while `serving` stays and nothing is excluded, which codecs that remember an edge's last sample
    need.
    """

    @property
    def pinned(self) -> bool: ...

    def stage_order(self, microbatch: Microbatch) -> tuple[int, ...]:
        """Return the stages that this microbatch visits, in order."""
        ...

    def share(self, stage: int) -> Fraction:
        """Return the fraction of all microbatches that visit this stage."""
        ...

    def next_hop(
        self,
        microbatch: Microbatch,
        stage: int,
        serving: StageServers,
        now_s: float,
        size: float = 1.0,
        exclude: Collection[PeerId] = (),
    ) -> PeerId | None:
        """Return the server for this stage of the microbatch; `size` as in `FinishedCall`."""
        ...

    def on_result(self, call: FinishedCall, outcome: CallOutcome, now_s: float) -> None:
        """Take in the outcome of a call."""
        ...

    def retry_s(self, stage: int) -> float | None:
        """Return when a stage whose servers are all shunned has one that may be asked again."""
        ...


class _AllStages:
    """Base of policies whose microbatches visit all stages in order."""

    def __init__(self, stages: int) -> None:
        if stages < 1:
            raise ValueError(f"a pipeline of {stages} stages; it needs at least one")
        self._order = tuple(range(stages))

    def stage_order(self, microbatch: Microbatch) -> tuple[int, ...]:
        return self._order

    def share(self, stage: int) -> Fraction:
        return Fraction(1)


class SwarmPaths(_AllStages):
    """Lazy next hops by interleaved weighted round-robin, one balancer per stage (SWARM)."""

    pinned = False

    def __init__(self, stages: int, chance: random.Random) -> None:
        super().__init__(stages)
        self._balancers = [Balancer(chance) for _ in self._order]
        self._seen: StageServers | None = None

    def next_hop(
        self,
        microbatch: Microbatch,
        stage: int,
        serving: StageServers,
        now_s: float,
        size: float = 1.0,
        exclude: Collection[PeerId] = (),
    ) -> PeerId | None:
        if serving is not self._seen:
            self._seen = serving
            for balancer, servers in zip(self._balancers, serving.stages, strict=True):
                balancer.refresh(servers, now_s)
        balancer = self._balancers[stage]
        return balancer.choose(size, now_s, exclude) or balancer.first_back(exclude)

    def on_result(self, call: FinishedCall, outcome: CallOutcome, now_s: float) -> None:
        balancer = self._balancers[call.stage]
        match outcome:
            case "done":
                balancer.finished(call.peer, call.size, call.started_s, now_s, call.took_s)
            case "busy":
                balancer.busy(call.peer)
            case _:
                balancer.failed(call.peer, outcome, now_s)

    def retry_s(self, stage: int) -> float | None:
        return self._balancers[stage].next_ban_ends_s


class ReorderedPaths:
    """Base of policies that change a path's stages, and so its edges, but not who serves them."""

    pinned = False

    def __init__(self, policy: PathPolicy) -> None:
        self._policy = policy

    def next_hop(
        self,
        microbatch: Microbatch,
        stage: int,
        serving: StageServers,
        now_s: float,
        size: float = 1.0,
        exclude: Collection[PeerId] = (),
    ) -> PeerId | None:
        return self._policy.next_hop(microbatch, stage, serving, now_s, size, exclude)

    def on_result(self, call: FinishedCall, outcome: CallOutcome, now_s: float) -> None:
        self._policy.on_result(call, outcome, now_s)

    def retry_s(self, stage: int) -> float | None:
        return self._policy.retry_s(stage)


class FixedPaths(_AllStages):
    """A fixed line of servers per microbatch, which goes to the first that is not excluded."""

    def __init__(
        self,
        stages: int,
        line: Callable[[Microbatch, int, StageServers], Sequence[PeerId]],
        pinned: bool,
    ) -> None:
        super().__init__(stages)
        self._line, self._pinned = line, pinned

    @property
    def pinned(self) -> bool:
        return self._pinned

    def next_hop(
        self,
        microbatch: Microbatch,
        stage: int,
        serving: StageServers,
        now_s: float,
        size: float = 1.0,
        exclude: Collection[PeerId] = (),
    ) -> PeerId | None:
        return next(
            (peer for peer in self._line(microbatch, stage, serving) if peer not in exclude), None
        )

    def on_result(self, call: FinishedCall, outcome: CallOutcome, now_s: float) -> None:
        pass

    def retry_s(self, stage: int) -> float | None:
        return None


def fixed(stages: int, me: PeerId = "") -> FixedPaths:
    """Return GPipe's and 1F1B's map: a lane takes the server of its number, modulo their count. The
    lane is that of the asking peer where the member list says it, else the microbatch's.

    Where that one is excluded, the next ones take over.
    """

    def line(microbatch: Microbatch, stage: int, serving: StageServers) -> Sequence[PeerId]:
        peers = serving.peers(stage)
        start = serving.lanes.get(me, microbatch.lane) % len(peers) if peers else 0
        return peers[start:] + peers[:start]

    return FixedPaths(stages, line, pinned=True)


def mixed(stages: int, seed: int, me: PeerId = "") -> FixedPaths:
    """Return NoLoCo's permutation for each (step, index) and stage; evaluation uses `fixed`. Lanes
    are as there. Trainers that are equally far share a permutation, in whichever life each is, so
    as many of them as a stage has servers take one each."""

    def line(microbatch: Microbatch, stage: int, serving: StageServers) -> Sequence[PeerId]:
        step, lane = microbatch.step % NUMBERS, serving.lanes.get(me, microbatch.lane)
        draw = mixing.Draw(seed, serving.membership, step, microbatch.index)
        return mixing.line(draw, serving.peers(stage), stage, lane)

    return FixedPaths(stages, line, pinned=False)
