"""Who gets a microbatch next: the seam between a trainer that walks a microbatch through the stages and what it knows of
their servers.

Lazy next hops (SWARM), fixed maps (GPipe, 1F1B) and seeded permutations (NoLoCo) are functions from (microbatch, stage,
who serves what) to a peer; nothing else of a pipeline depends on which of them is in use.
"""

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, Protocol

from farflock.swarm.links import PeerId
from farflock.swarm.paths import noloco as mixing
from farflock.swarm.paths.round_robin import Announced, Balancer, CallFailure, JoinCharge

CallOutcome = Literal["done", "busy"] | CallFailure


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Which microbatch: the `index`-th of its lane in this step; the lane is the number of the replica that it starts
    from."""

    step: int
    index: int
    lane: int


@dataclass(frozen=True, slots=True)
class StageServers:
    """Who serves which stage: `stages[s]` in any order. `membership` numbers the agreed member list behind it, equal
    for all who read the same one; `seniority[s]` has that list's servers of a stage in its own order, also those that are
    known to be gone since, so that it is the same for all of them too."""

    membership: int
    stages: tuple[tuple[Announced, ...], ...]
    seniority: tuple[tuple[PeerId, ...], ...] = ()

    def peers(self, stage: int) -> list[PeerId]:
        """The servers of a stage in the order of their ids."""
        return sorted({server.peer for server in self.stages[stage]})

    def at(self, stage: int, place: int) -> PeerId | None:
        """Who has this place among the stage's servers, 0 the first to have come; they are in the order of their ids where
        that is not known. None if there are fewer."""
        servers = self.seniority[stage] if self.seniority else self.peers(stage)
        return servers[place] if place < len(servers) else None


@dataclass(frozen=True, slots=True)
class FinishedCall:
    """A call that was made: `size` in samples, backward times `wiring.BACKWARD_SIZE`; and what the server says that it took."""

    peer: PeerId
    stage: int
    size: float
    started_s: float
    took_s: float | None = None


class PathPolicy(Protocol):
    """How microbatches find their way.

    Law (tests/swarm/paths/test_policy.py): `stage_order` names stages of the pipeline, each at most once, stage 0
    first, and over many microbatches of a lane each as often as `share` says. `next_hop` is a server of that stage in
    `serving` that is not excluded; None if there is none, or none that may be asked yet: then `retry_s` is when to ask
    again, or None if only another `serving` or fewer exclusions can help. With the same history and inputs the answer
    is the same, in whatever order servers are listed. `pinned` promises that a lane keeps its servers as long as
    `serving` stays and nothing is excluded, which codecs that remember an edge's last sample need."""

    @property
    def pinned(self) -> bool: ...

    def stage_order(self, microbatch: Microbatch) -> tuple[int, ...]:
        """The stages that this microbatch goes through, in order."""
        ...

    def share(self, stage: int) -> Fraction:
        """Of all microbatches, how many visit this stage."""
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
        """Who should do this stage of the microbatch, a call of `size` samples (backward times `wiring.BACKWARD_SIZE`)."""
        ...

    def on_result(self, call: FinishedCall, outcome: CallOutcome, now_s: float) -> None:
        """What became of a call."""
        ...

    def retry_s(self, stage: int) -> float | None:
        """When a stage whose servers are all shunned has one again that may be asked."""
        ...


class SwarmPaths:
    """Lazy next hops by interleaved weighted round-robin, one balancer a stage (SWARM)."""

    pinned = False

    def __init__(self, stages: int, chance: random.Random, join_charge: JoinCharge = "median") -> None:
        self._order = _all_stages(stages)
        self._balancers = [Balancer(chance, join_charge) for _ in self._order]
        self._seen: StageServers | None = None

    def stage_order(self, microbatch: Microbatch) -> tuple[int, ...]:
        return self._order

    def share(self, stage: int) -> Fraction:
        return Fraction(1)

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
        return self._balancers[stage].choose(size, now_s, exclude)

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
    """What policies have in common that change the stages of a microbatch's path, and leave to another one who serves them. A
    lane's edges then differ between its microbatches."""

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


class FixedPaths:
    """A line of servers that follows from the microbatch alone: results teach it nothing, and the first of the line that is
    not excluded is next. Made by `fixed` and `mixed`."""

    def __init__(
        self, stages: int, line: Callable[[Microbatch, int, StageServers], Sequence[PeerId]], pinned: bool
    ) -> None:
        self._order, self._line, self._pinned = _all_stages(stages), line, pinned

    @property
    def pinned(self) -> bool:
        return self._pinned

    def stage_order(self, microbatch: Microbatch) -> tuple[int, ...]:
        return self._order

    def share(self, stage: int) -> Fraction:
        return Fraction(1)

    def next_hop(
        self,
        microbatch: Microbatch,
        stage: int,
        serving: StageServers,
        now_s: float,
        size: float = 1.0,
        exclude: Collection[PeerId] = (),
    ) -> PeerId | None:
        return next((peer for peer in self._line(microbatch, stage, serving) if peer not in exclude), None)

    def on_result(self, call: FinishedCall, outcome: CallOutcome, now_s: float) -> None:
        pass

    def retry_s(self, stage: int) -> float | None:
        return None


def fixed(stages: int) -> FixedPaths:
    """GPipe's and 1F1B's map: at each stage a lane has the server of its number, modulo how many there are; the next ones
    take over where that one is excluded."""

    def line(microbatch: Microbatch, stage: int, serving: StageServers) -> Sequence[PeerId]:
        peers = serving.peers(stage)
        start = microbatch.lane % len(peers) if peers else 0
        return peers[start:] + peers[:start]

    return FixedPaths(stages, line, pinned=True)


def mixed(stages: int, seed: int) -> FixedPaths:
    """NoLoCo's seeded permutation for each (step, index) at each stage (swarm/paths/noloco.py). Evaluation, which mixes
    nothing, takes `fixed`."""

    def line(microbatch: Microbatch, stage: int, serving: StageServers) -> Sequence[PeerId]:
        draw = mixing.Draw(seed, serving.membership, microbatch.step, microbatch.index)
        return mixing.line(draw, serving.peers(stage), stage, microbatch.lane)

    return FixedPaths(stages, line, pinned=False)


def _all_stages(stages: int) -> tuple[int, ...]:
    if stages < 1:
        raise ValueError(f"a pipeline has at least one stage, got {stages}")
    return tuple(range(stages))
