"""NoLoCo over a grid of replicas and stages: pairs against all-reduces at equal bytes, and random
paths against fixed ones.

The run is the product's: stage servers, trainers, methods, path policies and links, in virtual time
(node/simulate/pipeline.py). One thing is the paper's instead of a swarm's: the grid takes steps in
lockstep. So each server has one microbatch a step, whichever the paths.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from farflock.experiments.measure.threads import one_thread
from farflock.experiments.pipelines.table import Parameters, Progress, Row, Table, sampled
from farflock.experiments.pipelines.text import texts
from farflock.node.errors import Failure
from farflock.node.model.data import evaluation
from farflock.node.model.evaluation import evaluate
from farflock.node.model.llama import ModelConfig, build
from farflock.node.pipeline.lifecycle.assembly import StageNode
from farflock.node.pipeline.node import PipelineNode
from farflock.node.pipeline.server.counting import STREAM as COUNTS
from farflock.node.pipeline.trainer.trainer import Trainer
from farflock.node.run.split import even
from farflock.node.run.terms import PipelinePlan, RebalanceTerms, RunPlan, TrainerTerms
from farflock.node.simulate.pipeline import PipelineSimulation, PipelineWorld, parts
from farflock.node.train.driver import Apply
from farflock.optimizers.method import Exchange, Tensors
from farflock.optimizers.method import Progress as Step
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.outer import OuterNesterov
from farflock.optimizers.parts.schedule import Schedule
from farflock.swarm.frame import message_kind
from farflock.swarm.links import PeerId
from farflock.swarm.sim.network import LinkModel
from farflock.swarm.sim.virtual_time import run_virtual

STAGES, SEQ = 2, 64
MODEL = ModelConfig(dim=48, layers=4, heads=4, kv_heads=4, ffn_dim=128, context=SEQ, tied=False)
WARMUP, FLOOR, DECAY = 0.1, 0.1, 0.1
LINK = LinkModel(1e9, 1e9, 0.001, 0.0)  # so fast that only the order of messages matters
FORWARD_S = 0.005
LIMIT_S = 1e6  # in virtual time; a step takes a fraction of a second
PIECE = b"piece"  # of what rounds exchange: activations of this size travel inside calls

Count = Annotated[int, msgspec.Meta(ge=1, le=100_000)]


class Size(Parameters, frozen=True, kw_only=True):
    """Parameters: NoLoCo's pairs meet every `period` steps, of which a `batch` is one replica's
    share in sequences."""

    replicas: Annotated[int, msgspec.Meta(ge=2, le=16, multiple_of=2)] = 4
    steps: Count
    period: Count
    batch: Count = 4
    rate: Annotated[float, msgspec.Meta(gt=0)] = 4e-3
    held_out: Count = 128  # sequences
    seeds: Annotated[list[int], msgspec.Meta(min_length=1, max_length=16)]

    def __post_init__(self) -> None:
        both = math.lcm(self.period, self.all_reduce_period)
        if 2 * self.period * (self.replicas - 1) % self.replicas or self.steps % both:
            raise ValueError(
                f"{self.replicas} replicas, pairs every {self.period} steps, {self.steps} in all: "
                "both methods must end with a round; choose a multiple of both periods"
            )

    @property
    def all_reduce_period(self) -> int:
        """DiLoCo's period at equal bytes. In a round of M replicas a server sends its stage once to
        its partner, but 2(M-1)/M times to and from those that reduce."""
        return 2 * self.period * (self.replicas - 1) // self.replicas


@dataclass(frozen=True, slots=True)
class Arm:
    """A method, and the policy that chooses the servers of its microbatches."""

    name: str
    method: str
    policy: str

    def options(self, size: Size) -> dict[str, Any]:
        """Return the method's options: the papers', and fp32 for all that is sent."""
        if self.method == "noloco":
            return {"period": size.period, "codec": "fp32", "alpha": 0.5, "beta": 0.7, "gamma": 0.7}
        codecs = {"codec": "fp32", "return_codec": "fp32"}
        return {"period": size.all_reduce_period, "outer": OuterNesterov(0.7, 0.3), **codecs}


RANDOM = Arm("NoLoCo, random paths", "noloco", "noloco")
FIXED = Arm("NoLoCo, fixed paths", "noloco", "fixed")
DILOCO = Arm("DiLoCo, fixed paths", "diloco", "fixed")
ARMS = (RANDOM, FIXED, DILOCO)


@dataclass(slots=True)
class Merges:
    """The weights of servers after each merge, by its step; only those of the last one are kept."""

    servers: int  # of all stages
    spreads: list[float] = field(default_factory=list)
    last: dict[int, dict[PeerId, Tensors]] = field(default_factory=dict)  # by stage
    _open: defaultdict[int, dict[int, dict[PeerId, Tensors]]] = field(
        default_factory=lambda: defaultdict(dict)
    )

    def note(self, step: int, stage: int, peer: PeerId, weights: Tensors) -> None:
        """Take in a server's weights; once all have merged, measure how far they are apart."""
        merge = self._open[step]
        merge.setdefault(stage, {})[peer] = weights
        if sum(map(len, merge.values())) == self.servers:
            self.last = self._open.pop(step)
            self.spreads.append(spread(self.last))


@dataclass(frozen=True, slots=True)
class Outcome:
    """An arm's held-out loss, mean over replicas; the standard deviation of weights over replicas
    after each merge; and the bytes that a server sent for merges."""

    loss: float
    spreads: list[float]
    merge_bytes: float


class Grid:
    """One run of an arm; made inside the loop that runs it."""

    def __init__(self, size: Size, arm: Arm, seed: int) -> None:
        self.size, self.arm, self.seed = size, arm, seed
        servers = size.replicas * STAGES
        self.merges, self.merge_bytes, self._sent_bytes = Merges(servers), 0, 0
        self._begun = False
        self._plan, self._pipeline = self._terms()
        world = PipelineWorld(
            parts(STAGES, size.replicas, size.replicas, FORWARD_S),
            self._plan.schedule.total_tokens,
            LINK,
            limit_s=LIMIT_S,
        )
        self.sim = PipelineSimulation(self._plan, self._pipeline, world, texts()[0], self.watch)
        self.sim.network.tap = self._hear

    def _terms(self) -> tuple[RunPlan, PipelinePlan]:
        size, arm = self.size, self.arm
        step_tokens = size.replicas * size.batch * SEQ
        total = size.steps * step_tokens
        schedule = Schedule(size.rate, total, int(WARMUP * total), FLOOR)
        inner = InnerConfig("adamw", size.rate, weight_decay=DECAY)
        training = self.seed, MODEL, inner, schedule, arm.method, arm.options(size)
        plan = RunPlan(*training, batch=size.batch, seq=SEQ)
        pipeline = PipelinePlan(
            even(MODEL, STAGES),
            step_tokens,
            "raw",
            arm.policy,
            # one microbatch on its way, and room for those of a whole period, which counts them
            trainer=TrainerTerms(window=1, kept=max(256, 2 * size.all_reduce_period)),
            balance=RebalanceTerms(every_s=0),
            count_every=size.period if arm.method == "noloco" else 1,
        )
        return plan, pipeline

    async def run(self) -> "Grid":
        """Run to the end."""
        await self.sim.run()
        return self

    # hooks

    def watch(self, number: int, node: PipelineNode) -> None:
        """Watch one life of peer `number`, and let it keep in step if it trains."""
        for serving in node.servings:
            self._watch_merges(node.peer.me, serving)
        if isinstance(trainer := node.trainer, Trainer):
            trainer.may_begin = lambda: self._may_begin(trainer.source.begun)

    def _may_begin(self, begun: int) -> bool:
        """Return whether all servers have taken as many steps, and none has a round open."""
        self._begun = self._begun or self.sim.settled
        loops = [each.loop for node in self.sim.nodes.values() for each in node.servings]
        return self._begun and all(one.step >= begun and not one.under_way for one in loops)

    def _watch_merges(self, me: PeerId, serving: StageNode) -> None:
        driver = serving.loop.driver
        apply = driver.apply

        def applying(
            action: Apply, progress: Step, set_rate: Callable[[int], None] = lambda tokens: None
        ) -> list[Exchange]:
            more = apply(action, progress, set_rate)
            if action.exchange.key.stream != COUNTS:
                weights = driver.replica.read(driver.replica.names, "param")
                self.merges.note(serving.loop.step, serving.index, me, weights)
                self.merge_bytes = self._sent_bytes
            return more

        driver.apply = applying  # type: ignore[method-assign]

    def _hear(self, now_s: float, sender: PeerId, receiver: PeerId, frame: bytes) -> bytes:
        """Count the bytes of merges, from the first step on: before it, newcomers get states."""
        if self._begun and message_kind(frame) == PIECE:
            self._sent_bytes += len(frame)
        return frame


def spread(servers: Mapping[int, Mapping[PeerId, Tensors]]) -> float:
    """Return the standard deviation of a weight over the servers of its stage, as the root mean
    square over the weights of all stages."""
    total, count = 0.0, 0
    for stage in servers.values():
        for name in next(iter(stage.values())):
            together = torch.stack([weights[name].double() for weights in stage.values()])
            total += float((together - together.mean(0)).square().mean(0).sum())
            count += together[0].numel()
    return math.sqrt(total / count)


def replicas_loss(servers: Mapping[int, Mapping[PeerId, Tensors]], held_out: int) -> float:
    """Return the mean held-out loss over replicas, of which each is a server of every stage, as the
    fixed paths have them."""
    model, rows = build(MODEL, 0), evaluation(texts()[1], SEQ, held_out)
    columns = [[stage[peer] for peer in sorted(stage)] for stage in servers.values()]
    losses = []
    for line in zip(*columns, strict=True):
        whole: dict[str, Tensor] = {name: x for weights in line for name, x in weights.items()}
        model.load_state_dict(whole)
        losses.append(evaluate(model, *rows).mean)
    return sum(losses) / len(losses)


def trained(size: Size, arm: Arm, seed: int) -> Outcome:
    """Run an arm. Raise `Failure` if a server missed a merge or the run diverged."""

    async def whole() -> Grid:
        return await Grid(size, arm, seed).run()

    grid = run_virtual(whole())
    wanted = size.steps // arm.options(size)["period"]
    if len(grid.merges.spreads) != wanted:
        why = f"all servers were in {len(grid.merges.spreads)} merges of {wanted}"
        raise Failure(f"{arm.name}, seed {seed}", why, "report this as a bug")
    loss = replicas_loss(grid.merges.last, size.held_out)
    if not math.isfinite(loss):
        raise Failure(f"{arm.name}, seed {seed}", "it diverged", "choose a lower `rate`")
    return Outcome(loss, grid.merges.spreads, grid.merge_bytes / (size.replicas * STAGES))


def compute(size: Size, progress: Progress) -> Table:
    """Tabulate losses, spreads and bytes of all arms."""
    found: dict[str, list[Outcome]] = {arm.name: [] for arm in ARMS}
    with one_thread():
        for place, seed in enumerate(size.seeds):
            for number, arm in enumerate(ARMS, 1):
                found[arm.name].append(trained(size, arm, seed))
                progress((place * len(ARMS) + number) / (len(ARMS) * len(size.seeds)))
    rows = [row for name, outcomes in found.items() for row in _rows(name, outcomes)]
    return Table(
        rows,
        f"{size.replicas} replicas of {STAGES} stages, {MODEL.parameters():,} parameters, "
        f"{size.steps} steps of {size.replicas} x {size.batch} x {SEQ} tokens, rate {size.rate:g}, "
        f"rounds every {size.period} steps (NoLoCo) and {size.all_reduce_period} (DiLoCo), "
        f"{len(size.seeds)} seeds",
    )


def _rows(name: str, outcomes: Sequence[Outcome]) -> list[Row]:
    spreads = [sum(one.spreads) / len(one.spreads) for one in outcomes]
    return [
        sampled(f"{name}, loss", [one.loss for one in outcomes]),
        sampled(f"{name}, perplexity", [math.exp(one.loss) for one in outcomes]),
        sampled(f"{name}, spread", spreads),
        sampled(f"{name}, spread at the end", [one.spreads[-1] for one in outcomes]),
        sampled(f"{name}, MB of merges a server", [one.merge_bytes / 1e6 for one in outcomes]),
    ]
