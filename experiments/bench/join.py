"""The time that newcomers need to join a run that goes on, over lines of 5, 20 and 100 Mbit/s.

Four members on lines of 100 Mbit/s train a model with a state of 86 MB; then one newcomer joins, or
five do at once, each on a host with a line of its own (workers/netns.py; needs root). With a state
of S bytes, rounds of q bytes every T seconds and a line of b bytes per second,

    the goal in seconds = 1.2 · S / (b (1 - ρ)) + 3        with ρ = q / (b T)

where b is the newcomer's line, or its part of all members' lines if that is less; q and T are those
that the members measure. Joined is who has caught up with all rounds and is a member.

`join.RATE.N.bytes` compares what a newcomer received with 1.1 S and the rounds of that time;
`join.RATE.N.pace` the members' rounds a second meanwhile with those before.
"""

import asyncio
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from farflock.experiments.bench.workers import fleet
from farflock.experiments.bench.workers.fleet import Fields
from farflock.experiments.bench.workers.netns import Host, hosts
from farflock.experiments.measure.metric import Metric, Options, load

WORKER = "farflock.experiments.bench.workers.join_peer"
RATES_BITS = (5e6, 2e7, 1e8)
MEMBERS, MEMBER_BITS = 4, 1e8
CODEC = "int4"
HOPELESS_BYTES = 4e8  # in whose time on its line a newcomer has to join
PARTS = ("", ".bytes", ".pace")


@dataclass(frozen=True, slots=True)
class Size:
    """The model, the numbers of newcomers at once, the rounds before them, and the seconds between
    rounds on a line of 1 MB/s; at least `min_s`."""

    preset: str = "10m"
    newcomers: tuple[int, ...] = (1, 5)
    before: int = 6
    round_s: float = 24.0
    min_s: float = 2.0


QUICK = Size("demo", (1,), 6, 1.0, 1.0)


@dataclass(frozen=True, slots=True)
class Joined:
    """The answers of newcomers and of a member: the newcomers', the times of the member's rounds,
    the bytes of one and the seconds between them, and when the newcomers were told to join."""

    answers: Sequence[Fields]
    rounds_s: Sequence[float]
    round_bytes: int
    round_s: float
    begun_s: float

    @property
    def state_bytes(self) -> int:
        """The size of the state."""
        return int(self.answers[0]["state_bytes"])

    def goal_s(self, rate: float) -> float:
        """Return the goal of a line of `rate` bytes per second."""
        share = self.round_bytes / (rate * self.round_s)
        return 1.2 * self.state_bytes / (rate * (1 - share)) + 3

    @property
    def goal_bytes(self) -> float:
        """The goal of what a newcomer receives."""
        counted_s: float = max(answer["counted_s"] for answer in self.answers)
        return 1.1 * self.state_bytes + self.round_bytes * counted_s / self.round_s

    def pace(self) -> tuple[float, float]:
        """Return the member's rounds a second while the newcomers joined, and before."""
        until_s = max(answer["joined_s"] for answer in self.answers)
        spans = (self.begun_s, until_s), (self.rounds_s[0], self.begun_s)
        meanwhile, before = (
            sum(first_s < at_s <= last_s for at_s in self.rounds_s) / (last_s - first_s)
            for first_s, last_s in spans
        )
        return meanwhile, before


def run(options: Options) -> Iterator[Metric]:
    """Yield the metrics of each rate and number of newcomers.

    Raise `NoHosts` if this machine cannot limit the rate."""
    size = QUICK if options.quick else Size()
    for rate_bits in (options.rate_bits,) if options.rate_bits else RATES_BITS:
        for newcomers in size.newcomers:
            name = f"join.{rate_bits / 1e6:g}.{newcomers}"
            if any(options.wants(name + part) for part in PARTS):
                yield from measure(size, rate_bits, newcomers, name)


def measure(size: Size, rate_bits: float, newcomers: int, name: str) -> Iterator[Metric]:
    """Let newcomers join once, and yield the metrics."""
    lines = [MEMBER_BITS] * MEMBERS + [rate_bits] * newcomers
    with hosts(len(lines), lines) as places:
        rate = min(rate_bits, MEMBERS * MEMBER_BITS / newcomers) / 8
        yield from metrics(asyncio.run(joined(size, places, rate)), rate, name)


def metrics(found: Joined, rate: float, name: str) -> Iterator[Metric]:
    """Yield what newcomers took and received, and what they cost the members."""
    answers = found.answers
    state_s, took_s, counted_s = (
        max(answer[kind] for answer in answers) for kind in ("state_s", "took_s", "counted_s")
    )
    share = found.round_bytes / (rate * found.round_s)
    steady = "never went back" if all(answer["steady"] for answer in answers) else "WENT BACK"
    note = (
        f"{found.state_bytes / 1e6:.1f} MB of state, here after {state_s:.1f} s; rounds of "
        f"{found.round_bytes / 1e6:.2f} MB every {found.round_s:.2f} s take {share:.0%} of "
        f"{rate / 1e6:.2f} MB/s; a contribution counted after {counted_s:.1f} s; the progress "
        f"{steady}"
    )
    yield _metric(name, took_s, found.goal_s(rate), "s", note)
    received = statistics.mean(answer["received_bytes"] for answer in answers) / 1e6
    yield _metric(f"{name}.bytes", received, found.goal_bytes / 1e6, "MB", "of a newcomer")
    meanwhile, before = found.pace()
    ratio = round(meanwhile / before, 4)
    said = f"of {len(found.rounds_s)} rounds of a member"
    yield Metric(f"{name}.pace", meanwhile, before, ratio, 1, load(), "rounds/s", said)


def _metric(name: str, value: float, goal: float, unit: str, note: str) -> Metric:
    """Return a metric whose ratio is above 1 where the goal is met."""
    return Metric(name, value, goal, round(goal / value, 4), 1, load(), unit, note)


async def joined(size: Size, places: Sequence[Host], rate: float) -> Joined:
    """Let the members train for a while; then let the newcomers join, all at once."""
    pause_s = max(size.round_s / (rate / 1e6), size.min_s)
    settings = {
        "members": MEMBERS,
        "preset": size.preset,
        "codec": CODEC,
        "round_s": pause_s,
    }
    async with fleet.fleet(WORKER, places, settings) as workers:
        members, newcomers = workers[:MEMBERS], workers[MEMBERS:]
        said = await fleet.hear_all(workers, "record", fleet.START_TIMEOUT_S)
        records = [answer["record"] for answer in said[:MEMBERS]]
        for worker in members:
            worker.tell("records", records=records)
        await fleet.hear_all(members, "ready")
        await asyncio.sleep(size.before * pause_s)
        begun_s = asyncio.get_running_loop().time()
        for worker in newcomers:
            worker.tell("join", records=records)
        answers = await fleet.hear_all(newcomers, "joined", 60.0 + HOPELESS_BYTES / rate)
        members[0].tell("tell")
        told = await members[0].hear("told")
    round_bytes, round_s = told["traffic"]
    return Joined(answers, told["rounds"], round_bytes, round_s, begun_s)
