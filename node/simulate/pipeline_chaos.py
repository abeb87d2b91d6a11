"""Seeded disasters of pipelines: small swarms of stage servers and trainers in virtual time.

One seed decides everything: the numbers of stages, servers and trainers, the method, the paths, the
disasters, and the phase of an exchange at which each strikes. The checks are in
node/simulate/pipeline_invariants.py.
"""

import asyncio
import collections
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from farflock.node.data.samples import text_in_memory
from farflock.node.errors import Usage
from farflock.node.model.llama import ModelConfig
from farflock.node.pipeline.node import PipelineNode
from farflock.node.run.planned_paths import plan_of_texts
from farflock.node.run.policies import PLANNED, lane_of, policy_of
from farflock.node.run.split import even
from farflock.node.run.terms import PipelinePlan, RunPlan, ServerTerms, TrainerTerms
from farflock.node.simulate.chaos import SeedReport, report_of
from farflock.node.simulate.chaos_methods import PHASES, ChaosCase, cases_of
from farflock.node.simulate.lives import identity_of
from farflock.node.simulate.phase_tap import PhaseTap
from farflock.node.simulate.pipeline import PipelineSimulation, PipelineWorld, parts
from farflock.node.simulate.pipeline_invariants import PipelineChecker
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.schedule import Schedule
from farflock.swarm.paths.policy import Microbatch
from farflock.swarm.protocol.gradient_leases import GradientKey
from farflock.swarm.protocol.quorum import is_quorum
from farflock.swarm.sim.network import LinkModel
from farflock.swarm.tasks import cancel

DISASTERS = ("kill", "restart", "trainer", "partition", "stop", "slow")
POLICIES = ("swarm", "noloco", "skip:3", PLANNED)
TOKENS, BATCH, STEPS = 8, 2, 24  # of a microbatch, microbatches of a step, steps of the run
RATE = 0.05
MODEL = ModelConfig(
    vocab_size=16, dim=8, layers=4, heads=2, kv_heads=1, ffn_dim=16, context=TOKENS, tied=False
)
FORWARD_S = 0.1
TEXT = text_in_memory((np.arange(4000) * 7 % 13).astype("uint16"))
STALL_S = 60.0  # within so long the run goes on, whatever happens
RECOVERY_S = 60.0  # after the last disaster: by then all are members and servers apply rounds
LIMIT_S = 900.0
LOOK_S = 0.25


@dataclass(frozen=True, slots=True)
class PipelineCase:
    """One seed's swarm and its disasters, in order."""

    arm: ChaosCase
    stages: int
    servers: int
    trainers: int
    policy: str
    disasters: tuple[str, ...]

    def plan(self, seed: int) -> RunPlan:
        """Return the terms of training; each stage has two layers."""
        model = msgspec.structs.replace(MODEL, layers=2 * self.stages)
        schedule = Schedule(RATE, TOKENS * BATCH * STEPS, 0, 1.0, 0)
        inner = InnerConfig("adamw", RATE, (0.9, 0.95), 0.0)
        options = dict(self.arm.all_options)
        return RunPlan(seed, model, inner, schedule, self.arm.method, options, batch=1, seq=TOKENS)

    def pipeline(self, model: ModelConfig) -> PipelinePlan:
        """Return the cut and the terms of passes, whose time-outs are short."""
        trainer = TrainerTerms(window=6, kept=64, forward_timeout_s=4.0, backward_timeout_s=6.0)
        server, count, paths = ServerTerms(lease_s=8.0), self.servers, None
        if self.policy == PLANNED:  # a lane's next path begins at the next server
            stops = [[f"{s}:{(s + n) % count}" for s in range(self.stages)] for n in range(count)]
            texts = [" ".join(each) for each in stops]
            paths = plan_of_texts([texts, texts[1:] + texts[:1]])
        terms = "raw", self.policy, server, trainer
        return PipelinePlan(even(model, self.stages), BATCH * TOKENS, *terms, paths=paths)


def pipeline_arms(name: str | None = None) -> tuple[ChaosCase, ...]:
    """Return the methods' cases that run in pipelines, or those of one method; raise `Usage` if
    there are none."""
    found = tuple(
        arm
        for arm in cases_of(name)
        if "round_s" not in arm.options and not any(each.enough for each in arm.streams())
    )
    if not found:
        raise Usage(f"method {name}", "it does not run inside pipelines", "choose another one")
    return found


def pipeline_case(seed: int, name: str | None = None) -> PipelineCase:
    """Return what a seed runs, of all methods or of the named one."""
    draw, arms = random.Random(f"pipeline chaos/{seed}"), pipeline_arms(name)
    stages, servers, trainers = draw.randint(2, 4), draw.randint(2, 3), draw.randint(1, 2)
    policy = draw.choice([each for each in POLICIES if each != "skip:3" or stages == 4])
    disasters = draw.sample(DISASTERS, draw.randint(3, 4))
    return PipelineCase(arms[seed % len(arms)], stages, servers, trainers, policy, tuple(disasters))


class PipelineChaos:
    """One seeded disaster; made inside the loop that runs it."""

    def __init__(self, seed: int, case: PipelineCase) -> None:
        self.seed, self.case, self._random = seed, case, random.Random(f"strikes/{seed}")
        plan, self.checker = case.plan(seed), PipelineChecker()
        self._plan, self._pipeline = plan, case.pipeline(plan.model)
        roles = parts(case.stages, case.servers, case.trainers, FORWARD_S)
        total, tell = plan.schedule.total_tokens, self.checker.watch
        world = PipelineWorld(roles, total, away_s=(1.0, 8.0), limit_s=LIMIT_S, view_s=2.0)
        self.sim = PipelineSimulation(plan, self._pipeline, world, TEXT, tell)
        self.peers = [identity_of(plan, number).peer for number in range(len(roles))]
        self._trainers = [number for number, role in enumerate(roles) if role.trains]
        self._servers = range(self._trainers[0])
        self._tap = PhaseTap(tuple(sorted(set(PHASES.values()))), self._random)
        self.sim.network.tap = self._tap.hear
        self._fired: collections.Counter[tuple[str, str]] = collections.Counter()
        self._recovery_s = 0.0

    async def run(self) -> SeedReport:
        """Run from the first peer's start to the end of the run."""
        others = asyncio.all_tasks()
        running = asyncio.create_task(self.sim.run())
        beside = [asyncio.create_task(self._watch_progress())]
        beside.append(asyncio.create_task(self._strike_all()))
        await asyncio.wait([running])
        await cancel(*beside)
        for task in beside:
            if not task.cancelled():
                task.result()  # raises the error that ended the disasters
        self._check_end(running.exception(), asyncio.all_tasks() - others)
        checker, digest = self.checker, self.checker.digest(self.sim.tale.events)
        told = +self._fired, checker.rounds, digest, self._recovery_s
        return SeedReport(self.seed, checker.violations, *told)

    # disasters

    async def _strike_all(self) -> None:
        """Let the disasters happen one after another, while the run goes on; then wait until all
        have recovered."""
        kinds, phases = self.case.disasters, sorted(set(PHASES.values()))
        for place, kind in enumerate(kinds, 1):
            while self._share() < place / (len(kinds) + 3):  # noqa: ASYNC110 - of all nodes
                await asyncio.sleep(LOOK_S)
            await self._tap.wait_for(self._random.choice(phases))
            self._fired[kind, self.case.arm.method] += await self.strike(kind)
        for peer in self.peers:
            self.sim.network.set_link(peer, LinkModel())
        await self._recover()

    async def strike(self, kind: str) -> bool:
        """Let a disaster happen; return whether it did. It has ended then, but for a slow line and
        for a killed peer, which comes back later."""
        network, peer = self.sim.network, self._random.choice(self.peers)
        seconds = self._random.uniform(1, 8)
        match kind:
            case "kill":
                return await self._kill(self._servers, None)
            case "restart":
                return await self._kill(self._servers, seconds)
            case "trainer":
                return await self._kill(self._trainers, seconds)
            case "partition":
                some = self._random.sample(self.peers, len(self.peers) // 2)
                network.partition(some, set(self.peers) - set(some))
                await asyncio.sleep(seconds)
                network.heal()
            case "stop":
                network.stop(peer)
                await asyncio.sleep(seconds)
                network.cont(peer)
            case "slow":
                network.slow(peer, 2 * seconds)
        return True

    async def _kill(self, numbers: Sequence[int], away_s: float | None) -> bool:
        """Kill one of these peers as soon as the others can go on without it, if they ever can."""
        ends_s = _now() + STALL_S
        while not (ready := list(filter(self._may_die, numbers))):
            if _now() >= ends_s:
                return False
            await asyncio.sleep(LOOK_S)
        victim = self._random.choice(ready)
        self.sim.kill(victim, away_s)
        return True

    def _may_die(self, number: int) -> bool:
        """Return whether the others are a quorum of the newest view, and one of them serves the
        peer's stage with a state that is as new."""
        node, others = self.sim.nodes.get(number), dict(self.sim.nodes)
        others.pop(number, None)
        if node is None or not others:
            return False
        known = [each.peer.context.chain for each in others.values()]
        view = max((chain.newest for chain in known if chain), key=lambda view: view.number)
        lives = {(member.peer, member.incarnation): at for at, member in enumerate(view.members)}
        there = {
            lives[life]: each
            for each in others.values()
            if (life := (each.peer.me, each.peer.context.incarnation)) in lives
        }
        if not is_quorum(there.keys(), len(lives)):
            return False
        twins = [each for each in there.values() if each.serving and each.role == node.role]
        return not node.serving or any(_applied(each) >= _applied(node) for each in twins)

    # progress

    def _share(self) -> float:
        """Return the share of the run's tokens that is done."""
        tokens = [node.stage_directory.tokens() for node in self.sim.nodes.values()]
        return max(tokens, default=0) / self._plan.schedule.total_tokens

    async def _watch_progress(self) -> None:
        """End a run that stands still for `STALL_S`."""
        share, since_s = 0.0, _now()
        while share < 1 and _now() - since_s < STALL_S:
            await asyncio.sleep(LOOK_S)
            if (now := self._share()) > share:
                share, since_s = now, _now()
        if share < 1:
            self.checker.violate(f"the run stood still at {share:.0%} for {STALL_S:.0f} s")
            self.sim.end()

    async def _recover(self) -> None:
        """Wait until all peers are members and make progress; this ends with the run."""
        begun_s = _now()
        newest = {stage: max(rounds) for stage, rounds in self.checker.named.items()}
        while lagging := [n for n in range(len(self.peers)) if self._lags(n, begun_s, newest)]:
            self._recovery_s = _now() - begun_s
            if self._recovery_s >= RECOVERY_S:
                self.checker.violate(f"peers {lagging} do not go on after the last disaster")
                return
            await asyncio.sleep(LOOK_S)

    def _lags(self, number: int, begun_s: float, newest: Mapping[int, int]) -> bool:
        """Return whether a server has applied no new round, or a trainer's work does not count."""
        node = self.sim.nodes.get(number)
        if number in self.sim.done:  # killed for good, or at the end of the run
            return False
        if node is None or not node.peer.membership.is_member:
            return True
        if node.serving is not None:
            return _applied(node) <= newest.get(node.serving.index, -1)
        told = [event for event in self.sim.tale.events if event[0] >= begun_s]
        return not any(event[1:3] == (number, "microbatch") for event in told)

    # checks

    def _check_end(
        self, error: BaseException | None, left: Collection[asyncio.Task[object]]
    ) -> None:
        """Check that the run has ended well, and what trainers counted until then."""
        checker = self.checker
        if error is not None:
            checker.violate(f"the run failed: {error!r}")
        if left:
            names = sorted(task.get_name() for task in left)[:3]
            checker.violate(f"{len(left)} tasks outlive their peers, such as {names}")
        counted = [
            (self.peers[peer], number)
            for _, peer, kind, fields in self.sim.tale.events
            if kind == "microbatch" and isinstance(number := fields["number"], int)
        ]
        checker.check_counted(counted, self._order)
        checker.check_work()

    def _order(self, key: GradientKey) -> Sequence[int]:
        cut, (trainer, number) = self._pipeline, key
        policy = policy_of(cut.policy, cut.layers, self._plan.run_seed, trainer, cut.paths)
        return policy.stage_order(Microbatch(number, 0, lane_of(trainer)))


def _applied(node: PipelineNode) -> int:
    """Return the last round that a server has applied."""
    assert node.serving is not None
    return node.serving.state_sync.applied_round


def _now() -> float:
    return asyncio.get_running_loop().time()


def run_pipeline_seed(seed: int, name: str | None = None) -> SeedReport:
    """Run one seeded disaster from start to end, with the named method if a name is given."""

    async def main() -> SeedReport:
        return await PipelineChaos(seed, pipeline_case(seed, name)).run()

    return report_of(seed, main())
