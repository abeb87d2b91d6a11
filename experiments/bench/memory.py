"""The memory that an exchange takes in addition to the model.

The value is the peak of a process's resident memory while two processes average their work, less
what was resident just before; the yardstick is one snapshot at send precision plus 64 MiB.

Everything that an exchange takes counts: the method's copies of the model, payloads, shards of the
other peer, the mean. Just before the first exchange, a process holds what a run without exchanges
holds: the model, outer state, links, a view of two. Before later ones it also holds the round log,
which `memory.run` counts.
"""

import asyncio
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from farflock.compression.catalog import codec
from farflock.experiments.bench.workers import fleet
from farflock.experiments.bench.workers.fleet import Fields
from farflock.experiments.bench.workers.netns import Host
from farflock.experiments.measure.metric import Metric, NotMeasured, Options, load
from farflock.node.model.llama import PRESETS

WORKER = "farflock.experiments.bench.workers.memory_peer"
PEERS = 2
CODEC, RETURN_CODEC = "fp16", "bf16"
ALLOWED_BYTES = 64 * 1024 * 1024
ROUND_TIMEOUT_S = 180.0
LOG_ROUNDS = 8  # rounds whose content members keep for absent peers


@dataclass(frozen=True, slots=True)
class Taken:
    """Resident memory of one worker just before an exchange, and at its peak."""

    before_bytes: int
    peak_bytes: int


def run(options: Options) -> Iterator[Metric]:
    """Yield `memory` for one exchange, and `memory.run` for a run whose round log is full."""
    preset = "demo" if options.quick else "10m"
    rounds = asyncio.run(
        _rounds(preset, options.repeats if options.quick else max(options.repeats, LOG_ROUNDS + 1))
    )
    parameters = PRESETS[preset].parameters()
    allowed = codec(CODEC).max_bytes(parameters) + ALLOWED_BYTES
    note = (
        f"{PEERS} processes on loopback, {preset} model of {parameters / 1e6:.1f}M parameters, "
        f"DiLoCo, {CODEC} out and {RETURN_CODEC} back; the higher of the two peaks"
    )
    for name, extra, what in (
        ("memory", one_exchange(rounds), "one exchange"),
        ("memory.run", whole_run(rounds), "all exchanges of a run"),
    ):
        ratio = round(extra / allowed, 4)
        yield Metric(name, extra, allowed, ratio, len(rounds), load(), "bytes", f"{what}; {note}")


def one_exchange(rounds: Sequence[Sequence[Taken]]) -> float:
    """Return the greater of the workers' peaks above their memory before, as a median over
    exchanges."""
    worse = [max(taken.peak_bytes - taken.before_bytes for taken in workers) for workers in rounds]
    return float(statistics.median(worse))


def whole_run(rounds: Sequence[Sequence[Taken]]) -> float:
    """Return the highest peak above the memory before the first exchange, leftovers included."""
    before = [taken.before_bytes for taken in rounds[0]]
    peaks = [max(workers[number].peak_bytes for workers in rounds) for number in range(len(before))]
    return max(peak - first for peak, first in zip(peaks, before, strict=True))


async def _rounds(preset: str, repeats: int) -> list[list[Taken]]:
    """Return the memory before and during each exchange, worker by worker."""
    settings = {"preset": preset, "codec": CODEC, "return_codec": RETURN_CODEC}
    async with fleet.fleet(WORKER, [Host()] * PEERS, settings) as workers:
        await fleet.introduce(workers)
        rounds = []
        for _ in range(repeats):
            for worker in workers:
                worker.tell("exchange")
            answers = await fleet.hear_all(workers, "done", ROUND_TIMEOUT_S)
            require_exchange(answers)
            rounds.append([Taken(answer["before"], answer["peak"]) for answer in answers])
    return rounds


class NoExchange(NotMeasured):
    """Raised if the peers did not complete an exchange, so that their memory says nothing."""


def require_exchange(answers: list[Fields]) -> None:
    """Raise `NoExchange` unless all peers completed one exchange together."""
    if {(answer["status"], answer["peers"]) for answer in answers} != {("ok", PEERS)}:
        raise NoExchange(
            f"an exchange of {PEERS} peers ended with these (status, peers): "
            f"{[(answer['status'], answer['peers']) for answer in answers]}"
        )
