"""The duration of `farflock bench quality`, estimated before it begins, and its progress.

Jobs differ in length by two orders of magnitude, so each counts by its effort: roughly the cost of
its replicas' steps (a fixed part plus their sequences) and of its exchanges. The time of one unit
is measured on this machine first, and then taken from finished jobs.
"""

import time
from collections.abc import Callable, Iterable

import msgspec

from farflock.experiments.reproduce.job import AnyJob, Line, Swarm
from farflock.experiments.reproduce.line import run as run_line

# Measured with the demo model and four peers, in steps of one sequence (4 ms): DDP 81 ms per step,
# one peer alone 35 ms, DiLoCo 136 ms; a round 60 ms with int4 (a sixteenth of the values), 450 ms
# with ecsq, 600 to 680 ms with topk2.
START = 500.0  # to start a job and evaluate it at the end; matters only in quick runs
STEP = 4.0  # of a replica's step, in addition to its sequences
PEER = 1.05  # a simulated node's step over a baseline's
ROUND = 25.0  # of a round of all peers
CODED_ROUND = 130.0  # with a codec that selects values and packs bits
CODED = ("topk", "ecsq")
PROBE_STEPS = 10
SURE = 0.02  # of all effort; beyond it, finished jobs predict the rest
LINE_EVERY = 20  # lines of progress in all

Told = Callable[[float, float], None]  # finished share, seconds left


def effort(job: AnyJob) -> float:
    """Estimate a job's time on one core, exchanges included, in steps of a sequence."""
    if isinstance(job, Swarm):
        coded = str(job.options.get("codec", "")).startswith(CODED)
        rounds = (CODED_ROUND if coded else ROUND) / float(job.options.get("period", 1))
        return START + job.steps * (PEER * (job.peers * STEP + job.batch) + rounds)
    return START + job.steps * (STEP + job.batch) if isinstance(job, Line) else START


def unit_s(job: Line) -> float:
    """Return processor seconds per unit of effort, measured over a few steps after a warm-up."""
    probe = msgspec.structs.replace(job, steps=PROBE_STEPS, points=1, held_out=2)
    run_line(probe, lambda share: None)
    begin_s = time.process_time()
    run_line(probe, lambda share: None)
    return (time.process_time() - begin_s) / (effort(probe) - START)


def duration(seconds: float) -> str:
    """Format seconds as `25 s`, `14 min` or `1 h 50 min`."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


class Pace:
    """The finished share of all effort, and the time left."""

    def __init__(self, total: float, workers: int, unit_s: float, told: Told) -> None:
        self._total, self._told = total, told
        self._each_s = unit_s / workers
        self._begin_s = time.monotonic()
        self._kept = 0.0
        # Keyed by `id`; holding the job ensures that no other object gets the same id.
        self._run: dict[int, tuple[AnyJob, float]] = {}

    def keep(self, jobs: Iterable[AnyJob]) -> None:
        """Count jobs that were finished before."""
        self._kept += sum(map(effort, jobs))
        self._tell()

    def told(self, job: AnyJob, share: float) -> None:
        """Record a job's progress."""
        self._run[id(job)] = job, share * effort(job)
        self._tell()

    def _tell(self) -> None:
        run = sum(done for _, done in self._run.values())
        each_s = (
            (time.monotonic() - self._begin_s) / run if run > SURE * self._total else self._each_s
        )
        left = max(self._total - self._kept - run, 0.0)
        self._told(min((self._kept + run) / self._total, 1.0), left * each_s)


class Lines:
    """Progress without a terminal: a line for each twentieth of the work."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._said = say, 0

    def __call__(self, share: float, left_s: float) -> None:
        if int(share * LINE_EVERY) > self._said:
            self._said = int(share * LINE_EVERY)
            self._say(f"quality: {share:.0%}, about {duration(left_s)} left")
