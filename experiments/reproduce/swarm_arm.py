"""A swarm arm: real nodes in virtual time, started together and measured as they train.

Three things differ from `farflock sim`, so that arms can be compared. No peer trains before all are
members, so all arms train the same tokens. Each peer's batch is a part of the run's own
(experiments/reproduce/share.py). Links are so fast that virtual time is only computing and waiting;
the time of the transfers is added afterwards, for any rate.
"""

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from farflock.experiments.pipelines.text import texts
from farflock.experiments.reproduce.job import RUN, Diverged, Outcome, Point, Swarm
from farflock.experiments.reproduce.share import Share
from farflock.experiments.reproduce.text import comparable, measure
from farflock.node.assembly.node import ReplicaNode
from farflock.node.run.sections import ExchangeSection, MethodSection, constructor_options
from farflock.node.simulate.segments import SegmentState
from farflock.node.simulate.simulation import Simulation, World
from farflock.node.train.task import LanguageModelTask, Loss, Train
from farflock.optimizers.method import State, Tensors
from farflock.optimizers.parts.state import state_hash
from farflock.swarm.peer.peer import Peer
from farflock.swarm.sim.network import LinkModel
from farflock.swarm.sim.virtual_time import run_virtual

FAST = LinkModel(1e9, 1e9, 0.001, 0.0)  # 8 Gbit/s, 1 ms: negligible next to a step
LATE = 0.7  # share of the deadline: the others wait for half of it, then go on
TOGETHER_S = 0.05  # between checks that all peers are members
FAR = 100  # times the run's tokens: equally fast peers stop after their steps, not at a token count


class Measured(Simulation):
    """A simulation whose nodes start together, share the run's batches, and may be late."""

    def __init__(self, job: Swarm, progress: Callable[[float], None]) -> None:
        options = constructor_options(
            MethodSection(job.method, dict(job.options)), ExchangeSection()
        )
        plan = job.plan(job.method, options, job.batch // job.peers)
        world = World(job.peers, job.total_tokens, FAST, job.step_s, spread=0.0)
        self.job, self.rounds, self.curve = job, _Rounds(), list[Point]()
        until = job.total_tokens if job.speeds else FAR * job.total_tokens
        device = comparable(job.device)
        super().__init__(plan, world, texts()[0], progress, SegmentState(), {}, until, device)
        self._loss_of = measure(job.model, job.seed, job.seq, job.held_out, device.place)
        self._began: tuple[float, float] | None = None  # virtual seconds and bytes at the start
        self._looks = 0
        self.nodes = self.lives.nodes

    def _assemble(self, index: int, peer: Peer) -> ReplicaNode:
        node, job = super()._assemble(index, peer), self.job
        per_peer = job.batch // job.peers
        assert isinstance(node.training_task, LanguageModelTask), (
            "this arm does not train a whole model"
        )
        terms = job.seed, RUN, per_peer, job.seq, index, job.peers
        node.training_task.batches = Share(texts()[0], *terms)
        node.loop.train = self._gate(index, node, node.loop.train)
        node.loop.report = self.rounds.watching(node.loop.report)
        node.loop.pause = self._look
        return node

    def _gate(
        self,
        index: int,
        node: ReplicaNode,
        train: Train,
    ) -> Train:
        """Wrap `train`: wait for the start, take as long as this peer does, sometimes be late."""
        job, chance = self.job, random.Random(f"{self.job.seed}/late/{index}")
        slowness = job.speeds[index] if job.speeds else 1.0
        period = job.options.get("period", 0)

        async def step(work: Callable[[], Loss]) -> Loss | None:
            await self._together()
            loss = await train(work)
            if loss is not None and not math.isfinite(float(loss)):
                raise Diverged(f"peer {index}, step {node.loop.step}")
            await asyncio.sleep(job.step_s * (slowness - 1))
            if job.late and (node.loop.step + 1) % period == 0 and chance.random() < job.late:
                await asyncio.sleep(LATE * job.options["deadline_s"])
            if not job.speeds and node.loop.step + 1 >= job.steps:
                node.loop.stop()
            return loss

        return step

    async def _together(self) -> None:
        """Wait until every peer is a member, and record when the run began."""
        while not self.peers.settled:  # noqa: ASYNC110 - no event covers all nodes
            await asyncio.sleep(TOGETHER_S)
        if self._began is None:
            self._began = asyncio.get_running_loop().time(), self._sent_bytes()

    async def _look(self) -> None:
        """Measure the run at each of its points, half a step later, when all results are applied.

        Every peer checks after its steps: the first peer may be ahead of others that it does not
        wait for.
        """
        tokens = min(self.trained_tokens, self.job.total_tokens)
        if tokens * self.job.points // self.job.total_tokens > self._looks:
            self._looks += 1
            loop = asyncio.get_running_loop()
            loop.call_later(self.job.step_s / 2, self.look, tokens, loop.time())

    @property
    def trained_tokens(self) -> int:
        """Tokens trained by all peers."""
        steps = sum(node.loop.step for node in self.nodes.values())
        return steps * self.job.seq * self.job.batch // self.job.peers

    def look(self, tokens: int, now_s: float) -> None:
        """Add a point to the curve: the first peer's held-out loss, and the spread over all."""
        assert self._began is not None, "no peer has begun"
        began_s, began_bytes = self._began
        models = [_model(node) for node in self.nodes.values()]
        point = Point(
            tokens=tokens,
            sent_bytes=self._sent_bytes() - began_bytes,
            compute_s=now_s - began_s,
            loss=self._loss_of(models[0]),
            lr=_rate(self.nodes[0]),
            spread=spread(models),
        )
        self.curve.append(point)

    def _sent_bytes(self) -> float:
        """Return the mean bytes sent by a peer, counted at the transport."""
        return (
            sum(self.network.line(node.peer.me).sent_bytes for node in self.nodes.values())
            / self.job.peers
        )

    def final_loss(self) -> float:
        """Return the mean held-out loss over peers; equal models are evaluated once."""
        models = [_model(node) for node in self.nodes.values()]
        hashes = [state_hash(model) for model in models]
        losses = {
            digest: self._loss_of(model)
            for digest, model in dict(zip(hashes, models, strict=True)).items()
        }
        return sum(losses[digest] for digest in hashes) / len(hashes)


class _Rounds:
    """The number of participants in each round, as the nodes report it."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], int] = {}

    def watching(
        self, report: Callable[[str, dict[str, Any]], None]
    ) -> Callable[[str, dict[str, Any]], None]:
        """Wrap a report function so that it also counts participants."""

        def seen(kind: str, fields: dict[str, Any]) -> None:
            if kind == "round":
                place = fields["stream"], fields["round"]
                self._seen[place] = max(self._seen.get(place, 0), fields["peers"])
            report(kind, fields)

        return seen

    @property
    def missed(self) -> float:
        """The share of contributions missing from rounds, if all were as large as the largest."""
        expected = len(self._seen) * max(self._seen.values(), default=1)
        return 1 - sum(self._seen.values()) / expected if expected else 0.0


def run(job: Swarm, progress: Callable[[float], None]) -> Outcome:
    """Simulate the arm; raise `Diverged` when a loss is no longer finite."""

    async def whole() -> Measured:
        measured = Measured(job, progress)
        await measured.run()
        return measured

    measured = run_virtual(whole())
    last, curve = measured.final_loss(), measured.curve
    node = measured.nodes[0]
    templates = node.loop.driver.method.streams(node.loop.driver.replica)
    metrics = {
        "loss": last,
        "perplexity": math.exp(last),
        "tokens": measured.trained_tokens,
        "bytes": curve[-1].sent_bytes,
        "spread": spread([_model(node) for node in measured.nodes.values()]),
        "missed": measured.rounds.missed,
        "virtual_s": curve[-1].compute_s,
    }
    if (
        together := correlation([point.spread for point in curve], [point.lr for point in curve])
    ) is not None:
        metrics["spread_lr"] = together
    parameters = sum(parameter.numel() for parameter in node.model.parameters())
    overlaps = bool(templates) and all(entry.apply_after for entry in templates)
    return Outcome(metrics=metrics, curve=curve, parameters=parameters, overlaps=overlaps)


def spread(models: Sequence[Tensors]) -> float:
    """Return the standard deviation over replicas, as the root mean square over all weights."""
    total, count = 0.0, 0
    for name in models[0]:
        together = torch.stack([model[name].double() for model in models])
        total += float((together - together.mean(dim=0)).square().mean(dim=0).sum())
        count += together[0].numel()
    return math.sqrt(total / count)


def correlation(ours: list[float], others: list[float]) -> float | None:
    """Return Pearson's correlation; None for fewer than 3 values or if either never changes."""
    if len(ours) < 3 or len(set(ours)) == 1 or len(set(others)) == 1:
        return None
    both = torch.tensor([ours, others], dtype=torch.float64)
    return float(torch.corrcoef(both)[0, 1])


def _rate(node: ReplicaNode) -> float:
    assert isinstance(node.training_task, LanguageModelTask), (
        "this arm does not train a whole model"
    )
    return node.training_task.replica.lr or 0.0


def _model(node: ReplicaNode) -> State:
    driver = node.loop.driver
    return dict(driver.method.eval_params(driver.replica))
