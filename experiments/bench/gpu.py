"""Training and codecs on this machine's device, each next to a yardstick on the same device.

`gpu.mfu` is the share of the device's rate of matrix products that a node's training makes use of,
next to that of a bare loop. A token takes 6 N + 12 L D S floating-point operations, for N weights,
L layers, a width of D and sequences of S (Chowdhery et al., PaLM, arXiv:2204.02311, appendix B;
causal attention does half of the second term, which is counted in full, as there). The rate is that
of products of large square matrices in the same process and precision, not a data sheet's.

`gpu.exchange.METHOD.SIZE` is how long the computing of one member's round lasts (due, state hash,
encode, digests, reduce, decode, apply; no transport), with model and state on the device, next to a
copy of the parameters within the device. `gpu.memory.METHOD.SIZE` is what such a round takes of the
device's memory at most, beside model and state, next to the parameters' bytes.

`gpu.overlap` is the tokens per second of two peers on one device that train with Streaming DiLoCo
over loopback, next to those of the same loops without any exchange.

`gpu.codec.NAME` is the time to encode values that lie on the device to payloads on the host, and to
decode these into values on the device, next to a copy of the values within the device.
"""

import asyncio
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from farflock.compression import catalog
from farflock.experiments.bench import overlap
from farflock.experiments.bench.codec import SEED, WIDTH
from farflock.experiments.bench.round import METHODS, ROUND_TIMEOUT_S, WITH_MOMENTS, size_name
from farflock.experiments.bench.round import WORKER as ROUND_WORKER
from farflock.experiments.bench.workers.device_training import Size
from farflock.experiments.bench.workers.netns import Host
from farflock.experiments.bench.workers.round_member import Settings
from farflock.experiments.measure.metric import (
    Metric,
    NotMeasured,
    Options,
    load,
    medians,
    seconds,
    turns,
)
from farflock.experiments.measure.process import lines_of
from farflock.node.model.device import Device, choose
from farflock.node.model.llama import PRESETS, ModelConfig
from farflock.node.train.shards import SEGMENT_VALUES, ShardLayout

WORKER = "farflock.experiments.bench.workers.device_training"
TRAINING_TIMEOUT_S = 900.0
GPT_124M = ModelConfig(
    vocab_size=50_304, dim=768, layers=12, heads=12, kv_heads=12, ffn_dim=2048, context=1024
)
OVERLAP = overlap.Size(GPT_124M, batch=8, seq=1024, steps=50, fragments=3, overlap=5)
EXCHANGED = (100_000_000, 1_000_000_000, 3_000_000_000)  # parameters
QUICK_EXCHANGED = (1_000_000,)
CODEC_VALUES = 256 * SEGMENT_VALUES  # 256 MiB of float32
WHATS = ("exchange", "memory")
GOAL = 0.97  # of a bare loop's share


def training_size(device: str, turns: int, *, quick: bool) -> Size:
    """Return the model of 124M parameters, or a tiny one, with its batch and steps."""
    if quick:
        return Size(device, PRESETS["tiny"], 2, 16, steps=2, turns=turns, width=64)
    return Size(device, GPT_124M, 16, 1024, steps=20, turns=turns, width=8192)


def run(options: Options) -> Iterator[Metric]:
    """Yield `gpu.mfu`, `gpu.exchange.METHOD.SIZE` and `gpu.memory.METHOD.SIZE` for each method and
    size, `gpu.overlap`, and `gpu.codec.NAME` for each codec.

    Raise `NotMeasured` where torch finds no device beside the CPU."""
    device = choose(options.device)
    if device.place.type == "cpu":
        raise NotMeasured("torch finds no device here beside the CPU")
    if options.wants("gpu.mfu"):
        size = training_size(str(device.place), options.repeats, quick=options.quick)
        yield mfu(size, lines_of("training on the device", WORKER, size, TRAINING_TIMEOUT_S))
    yield from _exchanges(options, device)
    if options.wants("gpu.overlap"):
        yield _overlap(options, device)
    values = SEGMENT_VALUES if options.quick else CODEC_VALUES
    for name in catalog.CODECS:
        if options.wants(f"gpu.codec.{name}"):
            yield codec_speed(name, values, device, options.repeats)


def flops_a_token(model: ModelConfig, seq: int) -> int:
    """Return the floating-point operations that training takes for each token."""
    return 6 * model.parameters() + 12 * model.layers * model.dim * seq


def mfu(size: Size, lines: Sequence[Mapping[str, Any]]) -> Metric:
    """Return the metric of what a training process printed."""
    described, *turns = lines
    work = size.steps * size.batch * size.seq * flops_a_token(size.model, size.seq)
    pairs = [
        tuple(work / turn[loop] / described["flops"] for loop in ("ours_s", "bare_s"))
        for turn in turns
    ]
    value, yardstick, ratio = medians(pairs)
    step_ms = statistics.median(turn["ours_s"] for turn in turns) / size.steps * 1000
    note = (
        f"{described['device']}; {size.model.parameters():,} parameters, batch {size.batch} x "
        f"{size.seq}, {step_ms:.1f} ms a step; products of matrices take "
        f"{described['flops'] / 1e12:.4g} TFLOP/s; the ratio's goal is {GOAL}"
    )
    return Metric("gpu.mfu", value, yardstick, ratio, len(turns), load(), "of the products", note)


def _exchanges(options: Options, device: Device) -> Iterator[Metric]:
    for parameters in QUICK_EXCHANGED if options.quick else EXCHANGED:
        for name in METHODS:
            metrics = [f"gpu.{what}.{name}.{size_name(parameters)}" for what in WHATS]
            if not any(map(options.wants, metrics)) or options.method not in (None, name):
                continue
            terms = {**METHODS[name], "period": 1}, parameters, options.repeats + 1
            settings = Settings(name, *terms, name in WITH_MOMENTS, device=str(device.place))
            rounds = lines_of(f"the member of {name}", ROUND_WORKER, settings, ROUND_TIMEOUT_S)
            yield exchange_time(metrics[0], rounds[1:], copy_s(device, parameters))
            yield exchange_memory(metrics[1], rounds[1:])


def copy_s(device: Device, values: int) -> float:
    """Return the seconds in which the device copies so many float32 values."""
    count = min(values, CODEC_VALUES)
    source, target = (torch.zeros(count, device=device.place) for _ in range(2))

    def copy() -> None:
        target.copy_(source)
        device.wait()

    copy()
    return statistics.median(seconds(copy) for _ in range(5)) * values / count


def exchange_time(metric: str, rounds: Sequence[Mapping[str, Any]], copied_s: float) -> Metric:
    """Return the metric of how long a member's rounds lasted."""
    lasted = [sum(one["lasted"].values()) for one in rounds]
    phases = ", ".join(
        f"{phase} {statistics.median(one['lasted'][phase] for one in rounds) * 1000:.1f} ms"
        for phase in rounds[0]["lasted"]
    )
    value = statistics.median(lasted)
    ratio = round(value / copied_s, 2)
    return Metric(metric, value, copied_s, ratio, len(rounds), load(), note=phases)


def exchange_memory(metric: str, rounds: Sequence[Mapping[str, Any]]) -> Metric:
    """Return the metric of a round's memory on the device."""
    value, weights = (
        float(statistics.median(one[what] for one in rounds) * scale)
        for what, scale in (("device_bytes", 1), ("parameters", 4))
    )
    host = statistics.median(one["extra_bytes"] for one in rounds)
    note = f"and {host / 1e6:,.0f} MB of the host's memory, payloads included"
    ratio = round(value / weights, 4)
    return Metric(metric, value, weights, ratio, len(rounds), load(), "bytes", note)


def _overlap(options: Options, device: Device) -> Metric:
    size = overlap.QUICK if options.quick else OVERLAP
    places = [Host()] * overlap.PEERS
    timed = asyncio.run(overlap.turns(size, places, options.repeats, str(device.place)))
    return overlap.metric_of(size, timed, "overlapping", "gpu.overlap")


def codec_speed(name: str, count: int, device: Device, repeats: int) -> Metric:
    """Return the metric of one codec for so many values on the device."""
    codec, chance = catalog.codec(name), torch.Generator().manual_seed(SEED)
    values = (WIDTH * torch.randn(count, generator=chance)).to(device.place)
    out, copied = torch.empty_like(values), torch.empty_like(values)
    layout = ShardLayout.of({"x": (count,)}, codec)

    def exchange() -> None:
        for index, shard in enumerate(layout.shards):
            payload = layout.encode(index, 0, {"x": values})
            layout.decode_into(
                index, 0, payload, [out[segment.start : segment.stop] for segment in shard]
            )
        device.wait()

    def copy() -> None:
        copied.copy_(values)
        device.wait()

    value, yardstick, ratio = medians(turns(repeats, exchange, copy))
    note = f"{device}; {count / 1e6:.4g}M values"
    return Metric(f"gpu.codec.{name}", value, yardstick, ratio, repeats, load(), note=note)
