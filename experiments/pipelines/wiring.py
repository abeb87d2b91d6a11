"""Interleaved weighted round-robin over unequal servers (SWARM, arXiv:2301.11913, section 3.2).

This runs the product's own balancer in virtual time; it knows only the speeds that it measures.
Trainers keep a number of microbatches in flight to one stage, and a server computes one at a time.
The ideal is the sum of the servers' speeds; plain round robin gives each server the same number and
waits for the slowest.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from typing import Annotated

import msgspec

from farflock.experiments.pipelines.table import Parameters, Progress, Row, Table, exact, sampled
from farflock.swarm.links import PeerId
from farflock.swarm.paths.round_robin import Announced, Balancer

Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Choose = Callable[[int, float], PeerId]  # trainer, time -> server of its next microbatch
Done = Callable[[int, PeerId, float, float], None]  # trainer, server, time given, time done


class Size(Parameters, frozen=True, kw_only=True):
    """Parameters: servers of these speeds, in microbatches per second, and the microbatches to run.

    `out` lists numbers of microbatches in flight per server; each is a run of its own. `jitter` is
    the standard deviation of the logarithm of a microbatch's time. `told` are speeds given to a
    balancer whose visits are counted without any measurement.
    """

    speeds: Annotated[list[float], msgspec.Meta(min_length=2, max_length=256)]
    told: Annotated[list[float], msgspec.Meta(min_length=2, max_length=256)]
    told_tasks: Count = 600
    tasks: Count
    out: Annotated[list[Count], msgspec.Meta(min_length=1, max_length=16)]
    trainers: Count = 4
    jitter: Annotated[float, msgspec.Meta(ge=0, le=2)] = 0.3
    seeds: Annotated[list[int], msgspec.Meta(min_length=1, max_length=100)]


def compute(size: Size, progress: Progress) -> Table:
    """Tabulate visits and percentages of the ideal throughput for both rules of choice."""
    told = Balancer(random.Random(0))
    told.refresh([Announced(peer(at), 1, speed) for at, speed in enumerate(size.told)], 0.0)
    visits = Counter(told.choose(1.0, 0.0) for _ in range(size.told_tasks))
    rows: list[Row] = [
        exact(f"visits at a told speed of {speed:g}", visits[peer(at)])
        for at, speed in enumerate(size.told)
    ]
    slowest = min(size.speeds) * len(size.speeds)
    kept: dict[str, list[float]] = {}
    for number, seed in enumerate(size.seeds, 1):
        for out in size.out:
            for name, run in (("weighted", weighted), ("round robin", round_robin)):
                rate, worst = run(size, out, random.Random(f"{seed}/{out}/{name}"))
                name = f"{name}, {out} a server"
                kept.setdefault(f"{name}: of the ideal", []).append(100 * rate / sum(size.speeds))
                kept.setdefault(f"{name}: of the slowest's speed", []).append(100 * rate / slowest)
                kept.setdefault(f"{name}: visits off by at most", []).append(100 * worst)
        progress(number / len(size.seeds))
    rows += [sampled(name, values) for name, values in kept.items()]
    return Table(
        rows,
        f"{len(size.speeds)} servers of {min(size.speeds):g} to {max(size.speeds):g} microbatches "
        f"a second, {size.trainers} trainers, {size.tasks} microbatches, {len(size.seeds)} seeds",
    )


def peer(number: int) -> PeerId:
    """Return the id of a server."""
    return PeerId(f"{number:04}")


def weighted(size: Size, out: int, chance: random.Random) -> tuple[float, float]:
    """Run with a balancer per trainer, which learns of that trainer's calls only."""
    balancers = [Balancer(chance) for _ in range(size.trainers)]
    for balancer in balancers:
        balancer.refresh([Announced(peer(at), 1) for at in range(len(size.speeds))], 0.0)

    def choose(trainer: int, now_s: float) -> PeerId:
        chosen = balancers[trainer].choose(1.0, now_s)
        assert chosen is not None, "every server is banned, though no call fails here"
        return chosen

    def done(trainer: int, who: PeerId, begun_s: float, now_s: float) -> None:
        balancers[trainer].finished(who, 1.0, begun_s, now_s)

    return run(size, out, chance, choose, done)


def round_robin(size: Size, out: int, chance: random.Random) -> tuple[float, float]:
    """Run with trainers that go through all servers in turn, each from a random start."""
    turns = [chance.randrange(len(size.speeds)) for _ in range(size.trainers)]

    def choose(trainer: int, now_s: float) -> PeerId:
        turns[trainer] += 1
        return peer(turns[trainer] % len(size.speeds))

    return run(size, out, chance, choose, lambda trainer, who, begun_s, now_s: None)


def run(
    size: Size, out: int, chance: random.Random, choose: Choose, done: Done
) -> tuple[float, float]:
    """Return microbatches per second of the last three quarters, and the visits' worst error.

    By then the balancers know the speeds, and tasks have not run out. The error is the largest
    relative difference between a server's share of these visits and its share of the summed speed.
    """
    free_s = dict.fromkeys(map(peer, range(len(size.speeds))), 0.0)
    speed = {peer(at): one for at, one in enumerate(size.speeds)}
    given: list[tuple[float, int, int, PeerId, float]] = []  # end, number, trainer, server, start
    visits: Counter[PeerId] = Counter()
    warm, warm_s, now_s = size.tasks // 4, 0.0, 0.0
    for number in range(size.tasks):
        trainer = number % size.trainers
        if number >= out * len(size.speeds):
            now_s, _, trainer, who, begun_s = heapq.heappop(given)
            done(trainer, who, begun_s, now_s)
        if number == warm:
            warm_s = now_s
        chosen = choose(trainer, now_s)
        visits[chosen] += number >= warm
        takes_s = chance.lognormvariate(-(size.jitter**2) / 2, size.jitter) / speed[chosen]
        free_s[chosen] = max(now_s, free_s[chosen]) + takes_s
        heapq.heappush(given, (free_s[chosen], number, trainer, chosen, now_s))
    total, counted = sum(size.speeds), size.tasks - warm
    worst = max(abs(visits[who] / counted / (one / total) - 1) for who, one in speed.items())
    return counted / (now_s - warm_s), worst
