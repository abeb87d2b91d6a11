"""The processor time and the memory of a whole round for one of two members: due, state hash,
encode, digests, reduce, decode, apply. There is no transport.

The first round fills buffers that later ones keep, and is not counted. The yardstick of the time is
a copy of the parameters into memory that is there; that of the memory is 1.25 times the payloads
that a member holds (its own, what it reduces, the result) plus 64 MiB.
"""

import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from farflock.experiments.bench.workers.round_member import Settings
from farflock.experiments.measure.metric import Metric, Options, load, medians, turns
from farflock.experiments.measure.process import lines_of
from farflock.experiments.measure.threads import one_thread

WORKER = "farflock.experiments.bench.workers.round_member"
METHODS: Mapping[str, Mapping[str, str | int | float]] = {
    "diloco": {"codec": "int8"},
    "sparseloco": {},
    "lean": {},
}
WITH_MOMENTS = ("lean",)  # methods that read the inner optimizer's
SPREAD = ("encode", "decode")  # the phases that `--codec-threads` spreads
PARAMETERS = 100_000_000
QUICK_PARAMETERS = 2_000_000
COPIED = 16_777_216  # values that the yardstick copies
MIB = 1024 * 1024
ALLOWED_SHARE, ALLOWED_BYTES = 1.25, 64 * MIB
ROUND_TIMEOUT_S = 600.0
UNIT = "ns a parameter"


def run(options: Options) -> Iterator[Metric]:
    """Yield `round.METHOD.SIZE` and `round.memory.METHOD.SIZE` for each method; with more than one
    codec thread, `round.threads.METHOD.SIZE` instead."""
    parameters = options.parameters or (QUICK_PARAMETERS if options.quick else PARAMETERS)
    size, copy_ns = size_name(parameters), _copy_ns(options.repeats)
    for name in METHODS:
        if options.method not in (None, name):
            continue
        if options.codec_threads > 1:
            threads = options.codec_threads
            rounds = _rounds(name, parameters, 2 * options.repeats, threads)
            yield _threads(f"round.threads.{name}.{size}", rounds, threads)
            continue
        metrics = f"round.{name}.{size}", f"round.memory.{name}.{size}"
        if any(map(options.wants, metrics)):
            rounds = _rounds(name, parameters, options.repeats)
            yield _time(metrics[0], rounds, copy_ns)
            yield _memory(metrics[1], rounds)


def size_name(parameters: int) -> str:
    """Return `100m` for a hundred million."""
    for unit, letter in ((10**9, "b"), (10**6, "m")):
        if parameters >= unit:
            return f"{parameters / unit:.4g}{letter}"
    return str(parameters)


def _copy_ns(repeats: int) -> float:
    """Return the nanoseconds that copying one float32 value takes."""
    source, target = torch.ones(COPIED), torch.ones(COPIED)
    with one_thread():
        times = turns(repeats, lambda: target.copy_(source), clock=time.process_time)
    return statistics.median(seconds for (seconds,) in times) / COPIED * 1e9


def _rounds(name: str, parameters: int, repeats: int, threads: int = 1) -> list[dict[str, Any]]:
    options = {**METHODS[name], "period": 1}
    settings = Settings(name, options, parameters, repeats + 1, name in WITH_MOMENTS, threads)
    timeout_s = ROUND_TIMEOUT_S * (repeats + 1)
    return lines_of(f"the member of {name}", WORKER, settings, timeout_s)[1:]


def _time(metric: str, rounds: list[dict[str, Any]], copy_ns: float) -> Metric:
    parameters = rounds[0]["parameters"]
    phases = {
        phase: statistics.median(one["seconds"][phase] for one in rounds) / parameters * 1e9
        for phase in rounds[0]["seconds"]
    }
    whole = statistics.median(sum(one["seconds"].values()) for one in rounds) / parameters * 1e9
    note = ", ".join(f"{phase} {ns:.2f}" for phase, ns in phases.items())
    ratio = round(whole / copy_ns, 2)
    return Metric(metric, whole, copy_ns, ratio, len(rounds), load(), UNIT, note)


def _threads(metric: str, rounds: list[dict[str, Any]], threads: int) -> Metric:
    """Return how much sooner the spread phases end with this many threads than with one."""
    turns = [sorted(two, key=_is_spread) for two in zip(rounds[::2], rounds[1::2], strict=True)]
    one, several, ratio = medians([[_lasted(each, *SPREAD) for each in turn] for turn in turns])
    gains = {
        phase: medians([[_lasted(each, phase) for each in turn] for turn in turns])[2]
        for phase in SPREAD
    }
    phases = ", ".join(f"{phase} {gain:.2f}" for phase, gain in gains.items())
    note = f"{threads} threads next to one; how many times sooner they end: {phases}"
    return Metric(metric, several, one, ratio, len(turns), load(), "s", note)


def _lasted(one: dict[str, Any], *phases: str) -> float:
    return float(sum(one["lasted"][phase] for phase in phases))


def _is_spread(one: dict[str, Any]) -> bool:
    return bool(one["spread"])


def _memory(metric: str, rounds: list[dict[str, Any]]) -> Metric:
    extra = statistics.median(one["extra_bytes"] for one in rounds)
    payloads = statistics.median(one["payload_bytes"] for one in rounds)
    allowed = ALLOWED_SHARE * payloads + ALLOWED_BYTES
    note = f"payloads of {payloads / MIB:.1f} MiB, which are part of the value"
    ratio = round(extra / allowed, 4)
    return Metric(metric, extra, allowed, ratio, len(rounds), load(), "bytes", note)
