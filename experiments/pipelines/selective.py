"""Compression of activations by all replicas of a pipeline, or only by those with slow links.

Replicas of a small Llama train under SparseLoCo. Some of them keep the writes into the residual
stream in a subspace, as a pipeline that sends only coordinates must (Heterogeneous SparseLoCo,
arXiv:2601.02360).

The method, its codec, the projection and the embedding's drift rule are the product's; rounds are
closed here, without a network, and nothing is late. Sending a constrained replica's activations as
coordinates is not simulated again: it is exact (tests/compression/test_subspace.py), at the price
of the projection.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import msgspec
import torch
from torch import Tensor

from farflock.compression.catalog import codec
from farflock.compression.subspace import Basis, project, settled
from farflock.experiments.pipelines.table import Parameters, Progress, Row, Table, exact, sampled
from farflock.experiments.pipelines.text import texts
from farflock.experiments.pipelines.tuning import tuned
from farflock.node.data.samples import Text
from farflock.node.data.shard_order import SampleStream
from farflock.node.model.data import Batches, evaluation
from farflock.node.model.evaluation import evaluate
from farflock.node.model.llama import Llama, ModelConfig, build, next_token_loss
from farflock.node.model.replica import PlainReplica
from farflock.node.train.shards import ShardLayout, decode_all
from farflock.optimizers.method import Exchange, Result, Tensors
from farflock.optimizers.method import Progress as Step
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.schedule import Schedule
from farflock.optimizers.sparseloco import SparseLoCo

MODEL = ModelConfig(dim=64, layers=4, heads=4, kv_heads=4, ffn_dim=176, context=64, tied=False)
EMBEDDING = "model.embed_tokens.weight"
BATCH, SEQ = 4, 64  # of a replica's step
WARMUP = 10  # the rate rises for a tenth of the run
PEAK, FLOOR = 1.0, 0.1

Count = Annotated[int, msgspec.Meta(ge=1, le=100_000)]


class Size(Parameters, frozen=True, kw_only=True):
    """Parameters: there is a round every `period` steps, and half of the `replicas` are weak.

    Each of `ranks` is a number of coordinates out of MODEL.dim.
    """

    replicas: Annotated[int, msgspec.Meta(ge=2, le=16)] = 4
    steps: Annotated[int, msgspec.Meta(ge=2, le=100_000)]
    period: Count = 15
    codec: str = "topk2:128/4096"
    ranks: Annotated[
        list[Annotated[int, msgspec.Meta(ge=1, le=64)]], msgspec.Meta(min_length=1, max_length=6)
    ]
    rates: Annotated[
        list[Annotated[float, msgspec.Meta(gt=0)]], msgspec.Meta(min_length=1, max_length=8)
    ]
    seeds: Annotated[list[int], msgspec.Meta(min_length=1, max_length=16)]
    held_out: Count = 128  # sequences


@dataclass(frozen=True, slots=True)
class Arm:
    """An arm in which `weak` replicas compress, with a basis of `rank` columns."""

    name: str
    weak: int
    rank: int


def arms(size: Size) -> list[Arm]:
    """Return the arms: no replica compresses, the weak half does, all do."""
    found = [Arm("nobody compresses", 0, MODEL.dim)]
    for rank in size.ranks:
        share = f"{1 - rank / MODEL.dim:.1%}"
        found.append(Arm(f"the weak compress by {share}", size.replicas // 2, rank))
        found.append(Arm(f"all compress by {share}", size.replicas, rank))
    return found


def writers(config: ModelConfig) -> dict[str, int]:
    """Return the weights that write into the residual stream before the last stage.

    The value is the axis that lies in the stream.
    """
    names = ("self_attn.o_proj", "mlp.down_proj")
    return {
        f"model.layers.{layer}.{name}.weight": 0
        for layer in range(config.layers - 1)
        for name in names
    }


@dataclass(slots=True)
class Replica:
    """One replica of the group; with a `basis`, a pipeline whose edges carry coordinates."""

    model: Llama
    replica: PlainReplica
    method: SparseLoCo
    batches: Batches
    basis: Basis | None
    frozen_VD: Tensor = field(default_factory=lambda: torch.empty(0))

    def begin(self) -> None:
        """Begin a round: project the common weights, and freeze the embedding outside the
        subspace."""
        if self.basis is not None:
            embedding = self.model.get_parameter(EMBEDDING).detach()
            _, self.frozen_VD = settled(
                embedding, torch.zeros_like(embedding), self.basis.columns_DK
            )
            self._constrain()

    def step(self, number: int, rate: float) -> float:
        """Take one inner step; return the loss before it."""
        x, y = self.batches.batch(number)
        loss = next_token_loss(self.model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        self.replica.lr = rate
        self.method.local_step(self.replica, Step(number))
        self._constrain()
        return float(loss.detach())

    def _constrain(self) -> None:
        if self.basis is None:
            return
        tensors = {name: x.detach() for name, x in self.model.named_parameters()}
        project(tensors, writers(MODEL), self.basis)
        inside = {EMBEDDING: tensors[EMBEDDING] - self.frozen_VD}
        project(inside, {EMBEDDING: 1}, self.basis)
        tensors[EMBEDDING].copy_(self.frozen_VD + inside[EMBEDDING])


def close(exchanges: Sequence[Exchange], seed: int) -> list[Result]:
    """Close a round of all members; return each member's result, decoded from encoded shards."""
    first = exchanges[0]
    shapes = {name: tuple(x.shape) for name, x in first.tensors.items()}
    cut, number = ShardLayout.of(shapes, codec(first.codec), seed), first.key.round
    gathered: dict[str, Tensors] = {}
    for place, exchange in enumerate(exchanges):
        payloads = [cut.encode(index, number, exchange.tensors) for index in range(len(cut.shards))]
        gathered[f"replica {place}"] = decode_all(cut, number, payloads, shapes)
    mean = {
        name: torch.stack([each[name] for each in gathered.values()]).mean(0) for name in shapes
    }
    whole = {name: ((0, math.prod(shape)),) for name, shape in shapes.items()}
    peers, weights = tuple(gathered), (1.0,) * len(gathered)
    return [
        Result(
            "ok",
            number + 1,
            peers,
            weights,
            mean=mean,
            gathered=gathered,
            sent=gathered[peer],
            taken=whole,
        )
        for peer in peers
    ]


def group_of(size: Size, arm: Arm, rate: float, seed: int, text: Text) -> list[Replica]:
    """Return all replicas with equal weights, each with its own text."""
    basis, made = Basis.drawn(MODEL.dim, arm.rank, seed) if arm.weak else None, []
    for place in range(size.replicas):
        model = build(MODEL, seed)
        replica = PlainReplica(model, InnerConfig("adamw", rate, weight_decay=0.1).build(model))
        batches = Batches(text, SampleStream(seed, f"replica {place}"), BATCH, SEQ)
        method = SparseLoCo(size.period, codec=size.codec)
        method.snapshot(replica)  # the first round must begin with the weights before projection
        made.append(Replica(model, replica, method, batches, basis if place < arm.weak else None))
    return made


def train(size: Size, arm: Arm, rate: float, seed: int, text: Text) -> Mapping[str, Tensor] | None:
    """Train a group; return its weights after the last round, or None if a loss was not finite."""
    group = group_of(size, arm, rate, seed, text)
    schedule = Schedule(PEAK, size.steps, size.steps // WARMUP, FLOOR)
    for one in group:
        one.begin()
    for number in range(size.steps):
        losses = [one.step(number, rate * schedule.rate(number, number)) for one in group]
        if not all(map(math.isfinite, losses)):
            return None
        due = [exchange for one in group for exchange in one.method.due(one.replica, Step(number))]
        for one, exchange, result in zip(group, due, close(due, seed) if due else (), strict=False):
            one.method.apply(one.replica, exchange, result)
            one.begin()
    return group[0].method.eval_params(group[0].replica)


def loss(size: Size, arm: Arm, rate: float, seed: int) -> float:
    """Return the held-out loss of the group's final weights, infinite if it diverged."""
    text, rest, _ = texts()
    weights = train(size, arm, rate, seed, text)
    if weights is None:
        return math.inf
    model = build(MODEL, 0)
    model.load_state_dict(dict(weights))
    found = evaluate(model, *evaluation(rest, SEQ, size.held_out)).mean
    return found if math.isfinite(found) else math.inf


def compute(size: Size, progress: Progress) -> Table:
    """Tabulate held-out losses at the best rates, and the gain of compressing selectively.

    Raise `Failure` if an arm diverges.
    """
    runs = {arm.name: partial(loss, size, arm) for arm in arms(size)}
    rates, losses = tuned(runs, size.rates, size.seeds, progress)
    return Table(
        [sampled(name, values) for name, values in losses.items()]
        + _saved(size, losses)
        + [exact(f"{name}, best rate", rate) for name, rate in rates.items()],
        f"{size.replicas} replicas, {size.steps} steps of {BATCH} x {SEQ} tokens each, "
        f"a round after {size.period}, {size.codec}, {len(size.rates)} rates, "
        f"{len(size.seeds)} seeds",
    )


def _saved(size: Size, losses: Mapping[str, Sequence[float]]) -> list[Row]:
    """Return the decrease of the loss if only the weak replicas compress, seed by seed."""
    rows = []
    for weak, every in zip(arms(size)[1::2], arms(size)[2::2], strict=True):
        saved = [
            high - low for high, low in zip(losses[every.name], losses[weak.name], strict=True)
        ]
        rows.append(sampled(f"selection saves at {every.name.rpartition(' ')[2]}", saved))
    return rows
