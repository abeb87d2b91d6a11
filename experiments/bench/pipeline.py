"""A pipeline's speed: its tokens per processor second next to the unsplit model's, and its
utilisation over a slow link.

`pipeline.tokens`: three processes on loopback, each with one stage; the first also trains. The
yardstick is a plain loop of the unsplit model with the same steps, one copy in each of the three
processes at once, so that both arms use the machine's cores and caches alike. The arms take turns;
processor time is that of all three processes together. A microbatch costs a fixed number of
messages, so the small model of this metric shows what they cost.

`pipeline.wide`: the same with a model of seven times as many parameters, whose passes take long
beside the messages, as those of any model that needs a pipeline.

`pipeline.utilisation`: the product's own nodes in virtual time, with a round trip of 100 ms and 8
microbatches a step. The value is the microbatches a second; the yardstick is those of a stage that
always computes, each pass as the product does it.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from farflock.experiments.bench.workers import fleet
from farflock.experiments.bench.workers.fleet import Fields, Worker
from farflock.experiments.bench.workers.netns import Host
from farflock.experiments.bench.workers.pipeline_peer import corpus, pipeline_of, plan_of
from farflock.experiments.measure.metric import Metric, NotMeasured, Options, load, medians
from farflock.experiments.measure.threads import one_thread
from farflock.node.model.llama import ModelConfig
from farflock.node.pipeline.server.server import BACKWARD_COST
from farflock.node.simulate.pipeline import PipelineSimulation, PipelineWorld, parts
from farflock.swarm.sim.network import LinkModel
from farflock.swarm.sim.virtual_time import run_virtual

WORKER = "farflock.experiments.bench.workers.pipeline_peer"
STAGES = 3
TURN_TIMEOUT_S = 300.0
FORWARD_S = 0.05  # simulated, of one stage
LATENCY_S = 0.025  # of a line, one way; a frame crosses two, so a round trip takes 100 ms
STEP_MICROBATCHES = 8  # of a simulated step
TAIL = 2 * STEP_MICROBATCHES  # so that the measurement ends before the run does


@dataclass(frozen=True, slots=True)
class Size:
    """The model and its microbatches, how many make a step, the steps of a turn, and the
    microbatches of a simulated run: first those that warm it up, then those that are measured."""

    model: ModelConfig
    batch: int = 8
    seq: int = 64
    microbatches: int = 16
    steps: int = 4
    warm: int = 10 * STEP_MICROBATCHES
    measured: int = 20 * STEP_MICROBATCHES


FULL = Size(
    ModelConfig(dim=96, layers=6, heads=4, kv_heads=4, ffn_dim=256, context=128, tied=False)
)
WIDE = Size(
    ModelConfig(dim=256, layers=6, heads=4, kv_heads=4, ffn_dim=688, context=128, tied=False),
    steps=2,
)
QUICK = Size(
    ModelConfig(dim=24, layers=3, heads=2, kv_heads=1, ffn_dim=48, context=64, tied=False),
    batch=1,
    seq=16,
    microbatches=4,
    steps=1,
    warm=2 * STEP_MICROBATCHES,
    measured=2 * STEP_MICROBATCHES,
)


class Unlike(NotMeasured):
    """Raised if the two arms trained a different number of tokens."""


def run(options: Options) -> Iterator[Metric]:
    """Yield `pipeline.tokens`, `pipeline.wide` and `pipeline.utilisation`."""
    size = QUICK if options.quick else FULL
    for name, full in (("pipeline.tokens", FULL), ("pipeline.wide", WIDE)):
        if options.wants(name):
            trained = QUICK if options.quick else full
            yield tokens_metric(name, trained, asyncio.run(_turns(trained, options.repeats)))
    if options.wants("pipeline.utilisation"):
        with one_thread():
            yield utilisation(size)


# tokens


def tokens_metric(
    name: str, size: Size, turns: Sequence[tuple[Sequence[Fields], Sequence[Fields]]]
) -> Metric:
    """Return the metric of alternating turns: the answers of all workers, of both arms."""
    pairs = []
    for staged, plain in turns:
        split = staged[0]["tokens"] / sum(answer["cpu_s"] for answer in staged)
        counts = [answer["tokens"] for answer in plain]
        if set(counts) != {staged[0]["tokens"]}:
            raise Unlike(f"the pipeline trained {staged[0]['tokens']} tokens, a loop {counts}")
        pairs.append((split, sum(counts) / sum(answer["cpu_s"] for answer in plain)))
    value, yardstick, ratio = medians(pairs)
    shares = [sum(staged[n]["cpu_s"] for staged, _ in turns) for n in range(STAGES)]
    note = (
        f"{STAGES} stages, {size.model.parameters() / 1e3:.0f} thousand parameters, "
        f"{size.microbatches} microbatches of {size.batch} x {size.seq} a step; processor time of "
        f"the stages {' : '.join(f'{share / sum(shares):.2f}' for share in shares)}"
    )
    unit = "tokens a processor second"
    return Metric(name, value, yardstick, ratio, len(pairs), load(), unit, note)


async def _turns(size: Size, repeats: int) -> list[tuple[list[Fields], list[Fields]]]:
    """Return the workers' answers of each turn, without the first, which warms up."""
    described = msgspec.to_builtins(size.model)
    settings = {"model": described, "batch": size.batch, "seq": size.seq}
    settings |= {"microbatches": size.microbatches}
    async with fleet.fleet(WORKER, [Host()] * STAGES, settings) as workers:
        await fleet.introduce(workers)
        return [await _turn(workers, size) for _ in range(1 + repeats)][1:]


async def _turn(workers: Sequence[Worker], size: Size) -> tuple[list[Fields], list[Fields]]:
    _, staged = await fleet.together(workers, "staged", TURN_TIMEOUT_S, steps=size.steps)
    _, plain = await fleet.together(workers, "plain", TURN_TIMEOUT_S, steps=size.steps)
    return staged, plain


# utilisation


def utilisation(size: Size) -> Metric:
    """Measure the microbatches a second of a simulated pipeline over a slow link."""
    value = run_virtual(_pace(size))
    busiest_s = FORWARD_S * (1.0 + BACKWARD_COST)
    note = (
        f"{STAGES} stages of one server each and a trainer; round trip "
        f"{4e3 * LATENCY_S:.0f} ms, {STEP_MICROBATCHES} microbatches a step, forward pass "
        f"{FORWARD_S} s, {busiest_s:.2f} s of computing a microbatch at the busiest stage"
    )
    ratio, unit = round(value * busiest_s, 4), "microbatches/s"
    name = "pipeline.utilisation"
    return Metric(name, value, 1 / busiest_s, ratio, size.measured, load(), unit, note)


async def _pace(size: Size) -> float:
    """Return the microbatches a second that count at every stage, between the ends of two steps."""
    plan = plan_of(size.model, size.batch, size.seq)
    ends = (size.warm + size.measured + TAIL) * size.batch * size.seq
    link = LinkModel(latency_s=LATENCY_S, jitter_s=0.0)
    world = PipelineWorld(parts(STAGES, servers=1, trainers=1, forward_s=FORWARD_S), ends, link)
    text = corpus()
    sim = PipelineSimulation(plan, pipeline_of(plan, STAGES, STEP_MICROBATCHES), world, text)
    tale = await sim.run()
    over_s = [at_s for at_s, _, kind, _ in tale.events if kind == "microbatch"]
    return size.measured / (over_s[size.warm + size.measured - 1] - over_s[size.warm - 1])
