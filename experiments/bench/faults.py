"""The seconds until progress after faults of ordinary life, in a swarm of real nodes.

Each node is a command on a host of its own (workers/netns.py; needs root), with lines of
100 Mbit/s and rounds a second apart. A row is played several times with one swarm, and the worst is
printed: -1 if progress never came, after which the next run begins with a new swarm. The first
round after a fault may have been decided before it, so progress is the second one; without a fault
it takes up to two seconds. A row is added by a `Play` in the tuple of its module.
"""

from collections.abc import Iterator, Sequence

from farflock.experiments.bench.plays import lines, machines, returns
from farflock.experiments.bench.plays.play import Play, Seconds
from farflock.experiments.bench.workers.hosted_swarm import NEVER, hosted_swarm
from farflock.experiments.measure.metric import Metric, NotMeasured, Options, load

PLAYS = machines.PLAYS + lines.PLAYS + returns.PLAYS


def run(options: Options) -> Iterator[Metric]:
    """Yield the metrics of each row; raise `NotMeasured` at the end for rows that had no swarm."""
    failed = []
    for play in PLAYS:
        if options.only is not None and _row(options.only) != play.name:
            continue
        try:
            yield from metrics(play, seconds_of(play, 1 if options.quick else options.repeats))
        except NotMeasured as reason:
            failed.append(f"{play.name}: {reason}")
    if failed:
        raise NotMeasured("; ".join(failed))


def _row(metric: str) -> str:
    """Return `cut` for `faults.cut.back`."""
    return metric.split(".")[1]


def seconds_of(play: Play, repeats: int) -> list[Seconds]:
    """Play a row several times, with a new swarm after a time that did not come to its end."""
    found: list[Seconds] = []
    while len(found) < repeats:
        with hosted_swarm(play.setting) as swarm:
            while len(found) < repeats:
                found.append(play.strike(swarm))
                if NEVER in found[-1].values():
                    break
                swarm.require_whole()
    return found


def metrics(play: Play, found: Sequence[Seconds]) -> Iterator[Metric]:
    """Yield the worst of each metric of a row, beside what it was at e28b7fbf."""
    for name in found[0]:
        seen = [seconds[name] for seconds in found]
        worst_s, before_s = worst(seen), play.before.get(name)
        is_comparable = before_s is not None and worst_s > 0 and before_s > 0
        ratio = round(worst_s / before_s, 4) if is_comparable and before_s else None
        each = ", ".join(f"{one:.1f}" for one in seen)
        note = f"{play.what}; each time: {each}"
        note += f"; yardstick: {play.source}" if before_s is not None else ""
        yield Metric(f"faults.{name}", worst_s, before_s, ratio, len(seen), load(), "s", note)


def worst(seen: Sequence[float]) -> float:
    """Return the longest time, or `NEVER` if there is one."""
    return NEVER if NEVER in seen else max(seen)
