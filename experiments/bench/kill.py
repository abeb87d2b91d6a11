"""The cost to other nodes when one dies suddenly, by a signal in the middle of an exchange.

The node is first stopped (SIGSTOP, like a cut cable: nothing announces it) and continued; once it
takes part again, it is killed (SIGKILL). Both times it owes the others a shard. `notice` is the
time from the signal until the last of the others has applied another round. A step of theirs is
lost if it was given up for a snapshot, so that no result will ever contain it. The run's agreed
tokens must confirm the workers' counts.
"""

import asyncio
import signal
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from farflock.experiments.bench.workers.fleet import Fields, Worker, fleet, introduce
from farflock.experiments.bench.workers.kill_peer import PERIOD
from farflock.experiments.bench.workers.member import TERMS
from farflock.experiments.bench.workers.netns import Host
from farflock.experiments.measure.metric import Metric, NotMeasured, Options, load
from farflock.optimizers.diloco import STREAM
from farflock.swarm.identity import Identity
from farflock.swarm.protocol.groups import rotation

WORKER = "farflock.experiments.bench.workers.kill_peer"
GOAL_S = 1.0
ROUNDS_AFTER = 2  # rounds that the others apply before their lost steps are counted
WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Size:
    """The number of nodes and the model's shape."""

    peers: int = 4
    dim: int = 128
    layers: int = 4


QUICK = Size(3, 16, 1)


class Diverged(NotMeasured):
    """Raised if nodes' states or counts differ after the same round."""


@dataclass(frozen=True, slots=True)
class Blow:
    """The cost of one signal to the nodes that did not get it."""

    notice_s: float
    steps_lost: int


@dataclass(slots=True)
class Watch:
    """The workers' reports of their rounds."""

    workers: Sequence[Worker]
    states: dict[int, str] = field(default_factory=dict)  # by round; equal on all workers
    latest: dict[str, Fields] = field(default_factory=dict)

    async def next(self, worker: Worker) -> Fields:
        """Return a worker's next report of an applied round."""
        said = await worker.hear("round", WAIT_S)
        self.note(worker, said)
        return said

    def note(self, worker: Worker, said: Fields) -> None:
        """Record a worker's report; raise `Diverged` if its state differs from the others'."""
        self.latest[worker.name] = said
        if self.states.setdefault(said["number"], said["state"]) != said["state"]:
            raise Diverged(
                f"after round {said['number']}, the state of {worker.name} differs from the others'"
            )

    async def together(self, members: int) -> None:
        """Wait until every worker has applied a round of this many members."""
        for worker in self.workers:
            while (await self.next(worker))["members"] != members:
                pass

    async def after(self, worker: Worker, moment_s: float) -> float:
        """Return the time at which a worker applied its first round after this moment."""
        while (at_s := float((await self.next(worker))["at_s"])) <= moment_s:
            pass
        return at_s

    def lost(self, workers: Sequence[Worker]) -> int:
        """Return the number of steps that these workers have lost so far."""
        return sum(int(self.latest[worker.name]["lost"]) for worker in workers)


def run(options: Options) -> Iterator[Metric]:
    """Yield `kill.notice_s` and `kill.steps_lost`, and the same for a stopped node."""
    size, repeats = (QUICK, 1) if options.quick else (Size(), options.repeats)
    blows = [asyncio.run(blows_of(size)) for _ in range(repeats)]
    stops, kills = zip(*blows, strict=True)
    yield from death_metrics(
        "kill.", kills, f"SIGKILL to 1 of {size.peers} peers during an exchange"
    )
    yield from death_metrics(
        "kill.stop_", stops, f"SIGSTOP to 1 of {size.peers} peers during an exchange"
    )


def death_metrics(prefix: str, blows: Sequence[Blow], what: str) -> Iterator[Metric]:
    """Yield the time until the others noticed a death, and the number of steps they lost."""
    notice_s = statistics.median(blow.notice_s for blow in blows)
    worst_s = max(blow.notice_s for blow in blows)
    note = (
        f"{what}; the worst of {len(blows)} took {worst_s:.2f} s; the goal is the yardstick or less"
    )
    yield Metric(
        f"{prefix}notice_s",
        notice_s,
        GOAL_S,
        round(notice_s / GOAL_S, 3),
        len(blows),
        load(),
        note=note,
    )
    lost = max(blow.steps_lost for blow in blows)
    note = f"{what}; the worst of {len(blows)}, summed over all survivors; the goal is 0"
    yield Metric(f"{prefix}steps_lost", lost, 0.0, None, len(blows), load(), "steps", note)


async def blows_of(size: Size) -> tuple[Blow, Blow]:
    """Return the costs of a stop and of a kill, both in one run."""
    settings = {"dim": size.dim, "layers": size.layers}
    async with fleet(WORKER, [Host()] * size.peers, settings) as workers:
        await introduce(workers)
        watch, victim = Watch(workers), workers[_reducer(size.peers)]
        await watch.together(size.peers)
        stopped = await _strike(watch, victim, signal.SIGSTOP)
        victim.signal(signal.SIGCONT)
        victim.tell("release")
        await watch.together(size.peers)
        killed = await _strike(watch, victim, signal.SIGKILL)
        require_books(watch, victim)
        return stopped, killed


def _reducer(peers: int) -> int:
    """Return the number of the worker that reduces the first shard in every round.

    A small model has no other shard.
    """
    members = [Identity.from_seed(number.to_bytes(32, "big")).peer for number in range(peers)]
    return members.index(rotation(members, TERMS.seed, STREAM)[0])


async def _strike(watch: Watch, victim: Worker, number: signal.Signals) -> Blow:
    """Signal the victim while it holds a shard; return the cost to the others."""
    others = [worker for worker in watch.workers if worker is not victim]
    lost_before = watch.lost(others)
    victim.tell("hold")
    await victim.hear("holding", WAIT_S)
    struck_s = asyncio.get_running_loop().time()
    victim.signal(number)
    for said in victim.kept("round"):  # `require_books` compares its counts too
        watch.note(victim, said)
    went_on_s = max([await watch.after(worker, struck_s) for worker in others])
    for worker in others:
        for _ in range(ROUNDS_AFTER):
            await watch.next(worker)
    return Blow(went_on_s - struck_s, watch.lost(others) - lost_before)


def require_books(watch: Watch, victim: Worker) -> None:
    """Raise `Diverged` unless the run's agreed tokens match the workers' counts.

    The others are compared at their latest common round. The victim's last steps may have counted
    without its report, so the sums may differ by one period.
    """
    last = min(int(said["number"]) for name, said in watch.latest.items() if name != victim.name)
    agreed = max(int(said["agreed"]) for said in watch.latest.values() if said["number"] == last)
    counted = sum(int(said["counted"]) for said in watch.latest.values())
    rounds_apart = sum(
        int(said["number"]) - last for name, said in watch.latest.items() if name != victim.name
    )
    surplus = agreed + PERIOD * rounds_apart - counted
    if surplus not in (0, PERIOD):
        raise Diverged(
            f"after round {last}, the run agrees on {agreed} steps, "
            f"but the workers count {counted}: {watch.latest}"
        )
