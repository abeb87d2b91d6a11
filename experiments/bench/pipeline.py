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

`pipeline.direct`: the same with payloads that are too large to travel inside a message, a trainer
with a line of 20 Mbit/s up and 100 down, and servers with 1 Gbit/s. The value is the tokens a
second where payloads go from server to server, the yardstick those where the trainer carries them.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from farflock.experiments.bench.workers import fleet
from farflock.experiments.bench.workers.fleet import Fields, Worker
from farflock.experiments.bench.workers.netns import Host
from farflock.experiments.bench.workers.pipeline_peer import corpus, pipeline_of, plan_of
from farflock.experiments.measure.metric import Metric, NotMeasured, Options, load, medians
from farflock.experiments.measure.threads import one_thread
from farflock.node.model.llama import ModelConfig
from farflock.node.pipeline.server.server import BACKWARD_COST
from farflock.node.run.terms import PipelinePlan, TrainerTerms
from farflock.node.simulate.lives import identity_of
from farflock.node.simulate.pipeline import EventLog, PipelineSimulation, PipelineWorld, parts
from farflock.swarm.sim.network import LinkModel
from farflock.swarm.sim.virtual_time import run_virtual

WORKER = "farflock.experiments.bench.workers.pipeline_peer"
STAGES = 3
TURN_TIMEOUT_S = 300.0
FORWARD_S = 0.05  # simulated, of one stage
LATENCY_S = 0.025  # of a line, one way; a frame crosses two, so a round trip takes 100 ms
STEP_MICROBATCHES = 8  # of a simulated step
TAIL = 2 * STEP_MICROBATCHES  # so that the measurement ends before the run does
SERVER = LinkModel(125e6, 125e6, LATENCY_S, jitter_s=0.0)
LOOK_S = 0.1  # simulated, between two looks at how far a run is
HOME = LinkModel(2.5e6, 12.5e6, LATENCY_S, jitter_s=0.0)


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
LARGE = Size(  # its activations in fp32 have 1 MiB
    ModelConfig(dim=256, layers=3, heads=4, kv_heads=4, ffn_dim=128, context=256, tied=False),
    batch=4,
    seq=256,
    warm=STEP_MICROBATCHES,
    measured=4 * STEP_MICROBATCHES,
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
    """Yield `pipeline.tokens`, `pipeline.wide`, `pipeline.utilisation` and `pipeline.direct`."""
    size = QUICK if options.quick else FULL
    for name, full in (("pipeline.tokens", FULL), ("pipeline.wide", WIDE)):
        if options.wants(name):
            trained = QUICK if options.quick else full
            yield tokens_metric(name, trained, asyncio.run(_turns(trained, options.repeats)))
    if options.wants("pipeline.utilisation"):
        with one_thread():
            yield utilisation(size)
    if options.wants("pipeline.direct"):
        with one_thread():
            yield direct(QUICK if options.quick else LARGE)


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
    plan = plan_of(size.model, size.batch, size.seq)
    link = LinkModel(latency_s=LATENCY_S, jitter_s=0.0)
    value = run_virtual(_pace(size, pipeline_of(plan, STAGES, STEP_MICROBATCHES), link, link))[0]
    busiest_s = FORWARD_S * (1.0 + BACKWARD_COST)
    note = (
        f"{STAGES} stages of one server each and a trainer; round trip "
        f"{4e3 * LATENCY_S:.0f} ms, {STEP_MICROBATCHES} microbatches a step, forward pass "
        f"{FORWARD_S} s, {busiest_s:.2f} s of computing a microbatch at the busiest stage"
    )
    ratio, unit = round(value * busiest_s, 4), "microbatches/s"
    name = "pipeline.utilisation"
    return Metric(name, value, 1 / busiest_s, ratio, size.measured, load(), unit, note)


# payloads from server to server


def direct(size: Size) -> Metric:
    """Measure the tokens a second of a trainer at home, with and without direct payloads."""
    plan = plan_of(size.model, size.batch, size.seq)
    arms = []
    for straight in (True, False):
        terms = TrainerTerms(window=STEP_MICROBATCHES, direct=straight)
        pipeline = pipeline_of(plan, STAGES, STEP_MICROBATCHES)
        pipeline = replace(pipeline, codec="fp32", trainer=terms)
        arms.append(run_virtual(_pace(size, pipeline, SERVER, HOME)))
    tokens = size.batch * size.seq
    (pace, *carried), (plain, *before) = arms
    up, down, up_before, down_before = (one / 1e3 for one in (*carried, *before))
    note = (
        f"{STAGES} stages of one server each, payloads of {4e-3 * tokens * size.model.dim:.0f} kB; "
        f"a microbatch takes {up:.0f} kB up and {down:.0f} down the trainer's line, and "
        f"{up_before:.0f} and {down_before:.0f} where the trainer carries the payloads"
    )
    value, yardstick = pace * tokens, plain * tokens
    ratio, unit = round(value / yardstick, 4), "tokens/s"
    return Metric("pipeline.direct", value, yardstick, ratio, size.measured, load(), unit, note)


async def _pace(
    size: Size, pipeline: PipelinePlan, link: LinkModel, line: LinkModel
) -> tuple[float, float, float]:
    """Return the microbatches a second that count at every stage, between the ends of two steps,
    and the bytes a microbatch up and down the trainer's `line`; servers have a `link`."""
    plan = plan_of(size.model, size.batch, size.seq)
    ends = (size.warm + size.measured + TAIL) * size.batch * size.seq
    world = PipelineWorld(parts(STAGES, servers=1, trainers=1, forward_s=FORWARD_S), ends, link)
    text, trainer = corpus(), identity_of(plan, STAGES).peer
    sim = PipelineSimulation(plan, pipeline, world, text)
    sim.network.set_link(trainer, line)
    running = asyncio.create_task(sim.run())
    before = await _carried(sim, running, trainer, size.warm)
    after = await _carried(sim, running, trainer, size.warm + size.measured)
    over_s = _ends_s(await running)
    pace = size.measured / (over_s[size.warm + size.measured - 1] - over_s[size.warm - 1])
    up, down = ((now - then) / size.measured for then, now in zip(before, after, strict=True))
    return pace, up, down


async def _carried(
    sim: PipelineSimulation, running: asyncio.Task[EventLog], trainer: str, count: int
) -> tuple[int, int]:
    """Return the bytes up and down a trainer's line once `count` microbatches count."""
    while len(_ends_s(sim.tale)) < count and not running.done():
        await asyncio.wait((running,), timeout=LOOK_S)
    line = sim.network.line(trainer)
    return line.sent_bytes, line.received_bytes


def _ends_s(tale: EventLog) -> list[float]:
    return [at_s for at_s, _, kind, _ in tale.events if kind == "microbatch"]
