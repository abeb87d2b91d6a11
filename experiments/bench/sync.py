"""The time in which N processes average 10 million parameters, next to the ideal for their bytes.

It is measured from a common start until the last process has decoded the mean to check it.

In the ideal, a contribution of `out` bytes is cut into N parts, part i goes to the peer that
reduces it, and the reduced parts, `back` bytes in all, go to every peer (reduce-scatter and
all-gather: no all-reduce moves fewer bytes). Each peer sends (N-1)/N · out, its parts for the
others to reduce, and (N-1) · back/N, its reduced part to each of the others, and receives as much;
both directions are equally busy, so

    ideal seconds = (N-1)/N · (out + back) · 8 / rate

for payload alone. Headers of Ethernet, IP and TCP (about 4.5 %), acknowledgements of the other
direction, encryption, hashing, encoding, agreement and idle links all show as a ratio below 1. So
does a machine too small for N hosts: the note has the workers' computing time (the kernel's work on
packets comes on top). Loopback has no rate: the yardstick is then the same bytes between the same
processes over plain TCP, all pairs at once.

`sync.N.gloo` compares with gloo's ring all-reduce of as many bytes in the same processes, and on
loopback `sync.N.fp32` with its ring of the same values as they are, in fp32. `sync.N.hivemind`
compares with hivemind's averager of the same values in processes of its own, in the codec of the
way out, if it has that, and `sync.N.cpu` compares the processor seconds of all workers for each GB
that any of them sends.

In its first rounds a peer takes fresh memory, until its store of chunks is full: then about a fifth
of the processor time falls away. `--repeats 20` shows what a long run takes.
"""

import asyncio
import contextlib
import os
import statistics
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from farflock.compression.catalog import codec
from farflock.experiments.bench.workers import fleet
from farflock.experiments.bench.workers.fleet import Fields
from farflock.experiments.bench.workers.netns import Host, congestion_control, hosts, obstacle
from farflock.experiments.measure.metric import Metric, NotMeasured, Options, load

WORKER = "farflock.experiments.bench.workers.sync_peer"
AVERAGER = "farflock.experiments.bench.workers.averager_peer"
AVERAGED = ("fp16", "fp32")  # codecs that hivemind has too; its 8-bit ones fail on numpy >= 2.4
LOST = "; hivemind's averagers did not all find each other"
FIGURES = ("", ".gloo", ".fp32", ".hivemind", ".cpu")
ROUND_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Size:
    """The parameters to sync, the numbers of peers, and the codecs."""

    parameters: int = 10_000_000
    peers: tuple[int, ...] = (2, 4, 8)
    out: str = "fp16"
    back: str = "bf16"

    @property
    def payload_bytes(self) -> int:
        """Bytes that a worker sends and receives: `out` + `back` of the ideal's formula."""
        return codec(self.out).max_bytes(self.parameters) + codec(self.back).max_bytes(
            self.parameters
        )


QUICK = Size(200_000, (2, 3))


class NoSync(NotMeasured):
    """Raised if the workers did not all get the mean of all: there is nothing to measure."""


def run(options: Options) -> Iterator[Metric]:
    """Yield `sync.N` and its comparisons for each number of peers."""
    size = QUICK if options.quick else Size()
    for peers in size.peers:
        if any(options.wants(f"sync.{peers}{figure}") for figure in FIGURES):
            yield from measure(size, peers, options)


def measure(size: Size, peers: int, options: Options) -> tuple[Metric, ...]:
    """Measure one number of peers, on rate-limited hosts if a rate is given and they can be had."""
    why = obstacle() if options.rate_bits is not None else ""
    rate_bits = None if why else options.rate_bits
    with contextlib.ExitStack() as stack:
        places: Sequence[Host] = [Host()] * peers
        if rate_bits is not None:
            places = stack.enter_context(hosts(peers, rate_bits))
        timed = asyncio.run(_rounds(size, places, yardsticks(size, peers, rate_bits), options))
    ideal_s = None if rate_bits is None else each_way_bytes(size, peers) * 8 / rate_bits
    note = _note(timed, ideal_s, rate_bits)
    if size.out in AVERAGED and "hivemind" not in timed:
        note += LOST
    if why:
        note = f"NOT at the requested rate ({why}): {note}"
    gb = peers * each_way_bytes(size, peers) / 1e9
    name, n, sync_s = f"sync.{peers}", options.repeats, timed["sync"].median_s
    ours, gloos, tcps = (timed[kind].median_cpu_s / gb for kind in ("sync", "gloo", "tcp"))
    yardstick_s = ideal_s or timed["tcp"].median_s
    against = [
        Metric(f"{name}.{kind}", sync_s, other_s, _ratio(other_s, sync_s), n, load(), note=said)
        for kind, (other_s, said) in _others(timed, ideal_s, gb).items()
    ]
    cpu_note = f"of all workers; yardstick: gloo's ring; plain TCP took {tcps:.2f}"
    return (
        Metric(name, sync_s, yardstick_s, _ratio(yardstick_s, sync_s), n, load(), note=note),
        *against,
        Metric(f"{name}.cpu", ours, gloos, _ratio(gloos, ours), n, load(), "s/GB", cpu_note),
    )


def _note(timed: "Runs", ideal_s: float | None, rate_bits: float | None) -> str:
    """Return what to know of a sync beside its time."""
    sync, tcp_s, cores = timed["sync"], timed["tcp"].median_s, os.cpu_count() or 1
    if ideal_s is None or rate_bits is None:
        note = "loopback without a rate: the yardstick is plain TCP between the same processes"
    else:
        note = (
            f"at {rate_bits / 1e6:g} Mbit/s each way, TCP with {congestion_control()}; "
            f"plain TCP took {tcp_s:.3g} s, {ideal_s / tcp_s:.3f} of ideal"
        )
    return (
        f"{note}; the workers computed {sync.median_cpu_s:.2f} s "
        f"of the {cores * sync.median_s:.2f} s that {cores} cores have"
    )


def _others(timed: "Runs", ideal_s: float | None, gb: float) -> dict[str, tuple[float, str]]:
    """Return the times of the other systems, with a note each."""
    what = {"gloo": "gloo's ring all-reduce of as many bytes"}
    if "fp32" in timed:
        what["fp32"] = "gloo's ring all-reduce of the same values in fp32"
    if "hivemind" in timed:
        cpu = timed["hivemind"].median_cpu_s / gb
        what["hivemind"] = f"hivemind's averager in the same codec ({cpu:.1f} CPU-s/GB)"
    times = {kind: timed[kind].median_s for kind in what}
    return {
        kind: (
            time_s,
            what[kind] if ideal_s is None else f"{what[kind]}: {ideal_s / time_s:.3f} of ideal",
        )
        for kind, time_s in times.items()
    }


def _ratio(yardstick: float, value: float) -> float:
    return round(yardstick / value, 4)


def each_way_bytes(size: Size, peers: int) -> float:
    """Return the bytes that each peer must send; it must receive as many."""
    return (peers - 1) / peers * size.payload_bytes


Yardsticks = Mapping[str, tuple[str, int]]


def yardsticks(size: Size, peers: int, rate_bits: float | None) -> Yardsticks:
    """Return what the workers do beside the sync: by name, the command and its bytes."""
    found = {
        "tcp": ("tcp", round(each_way_bytes(size, peers) / (peers - 1))),
        "gloo": ("gloo", size.payload_bytes // 2),
    }
    # At a rate, twice the bytes take twice the time.
    return found if rate_bits else {**found, "fp32": ("gloo", 4 * size.parameters)}


@dataclass(slots=True)
class Timed:
    """The runs of one kind of work: until the last worker was done, and computing of all."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def add(self, start_s: float, answers: Sequence[Fields]) -> None:
        """Add a run."""
        self.wall_s.append(max(answer["done_s"] for answer in answers) - start_s)
        self.cpu_s.append(sum(answer["cpu_s"] for answer in answers))

    @property
    def median_s(self) -> float:
        """The median without the first run, a warm-up."""
        return statistics.median(self.wall_s[1:])

    @property
    def median_cpu_s(self) -> float:
        """The median of the computing, likewise."""
        return statistics.median(self.cpu_s[1:])


Runs = Mapping[str, Timed]


async def _rounds(size: Size, places: Sequence[Host], beside: Yardsticks, options: Options) -> Runs:
    """Return the runs of syncs and of the yardsticks, which alternate."""
    settings = {"parameters": size.parameters, "codec": size.out, "return_codec": size.back}
    async with (
        fleet.fleet(WORKER, places, settings) as workers,
        _averagers(size, places) as averagers,
    ):
        timed = {kind: Timed() for kind in ("sync", *beside, *["hivemind"] * bool(averagers))}
        ready = await fleet.introduce(workers)
        addresses = [answer["plain"] for answer in ready]
        for worker in workers:
            worker.tell("yardsticks", addresses=addresses, ring=ready[0]["ring"])
        for _ in range(1 + options.repeats):
            start_s, answers = await fleet.together(workers, "sync", ROUND_TIMEOUT_S)
            await _check(workers)
            timed["sync"].add(start_s, answers)
            for name, (command, size_bytes) in beside.items():
                timed[name].add(
                    *await fleet.together(workers, command, ROUND_TIMEOUT_S, bytes=size_bytes)
                )
            if "hivemind" in timed:
                try:
                    start_s, answers = await fleet.together(averagers, "average", ROUND_TIMEOUT_S)
                    require_average(answers)
                except (fleet.WorkerFailed, NoSync):  # now and then one finds no group
                    del timed["hivemind"]
                    continue
                timed["hivemind"].add(start_s, answers)
    return timed


@contextlib.asynccontextmanager
async def _averagers(size: Size, places: Sequence[Host]) -> AsyncIterator[list[fleet.Worker]]:
    """Run hivemind's averagers, which have met; none if they lack the codec of the way out."""
    if size.out not in AVERAGED:
        yield []
        return
    settings = {"parameters": size.parameters, "codec": size.out}
    async with fleet.fleet(AVERAGER, places, settings) as workers:
        first, *others = workers
        first.tell("join", doors=[])
        doors = (await first.hear("joined"))["doors"]
        for other in others:
            other.tell("join", doors=doors)
        await fleet.hear_all(others, "joined")
        yield workers


async def _check(workers: Sequence[fleet.Worker]) -> None:
    """Raise `NoSync` unless the round that is over was a sync; only now do workers hash."""
    for worker in workers:
        worker.tell("check")
    require_sync(await fleet.hear_all(workers, "checked"))


def require_average(answers: Sequence[Fields]) -> None:
    """Raise `NoSync` unless all averagers report the mean of all."""
    members = [answer["members"] for answer in answers]
    if members != [len(answers)] * len(answers):
        raise NoSync(
            f"{len(answers)} averagers of hivemind did not end with one mean of all; "
            f"they averaged groups of {members}"
        )


def require_sync(answers: Sequence[Fields]) -> None:
    """Raise `NoSync` unless all workers report the same exchange, with every worker in it."""
    results = {(answer["status"], answer["members"], answer["hash"]) for answer in answers}
    if len(results) != 1 or [(status, members) for status, members, _ in results] != [
        ("ok", len(answers))
    ]:
        raise NoSync(
            f"{len(answers)} workers did not end a round with one mean of all; "
            f"their (status, members, hash) are {sorted(results)}"
        )
