"""Jobs in a few worker processes, none of which outlives the command, however it ends.

One job keeps one core busy, and a simulation cannot share its event loop, so jobs run in processes.
Jobs and outcomes are sent as JSON, not pickled.
"""

import contextlib
import functools
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import msgspec

from farflock.compression.codec import UnencodableTensor
from farflock.experiments.reproduce.job import AnyJob, Diverged, Noise, Outcome, Swarm, key
from farflock.experiments.reproduce.shelf import Kept
from farflock.node.errors import Failure, explained
from farflock.node.simulate.worker_processes import warm

LOOK_S = 0.5  # between checks for dead workers
END_S = 5.0  # for a worker to end after it is asked to
TELL_SHARE = 0.02  # of a job between two reports of its progress

GONE = (Diverged, UnencodableTensor)  # a loss or an update is not finite

Told = Callable[[AnyJob, float], None]


class _Word(msgspec.Struct):
    """A worker's message: its progress, its outcome, or the reason why it failed."""

    share: float = 0.0
    outcome: Outcome | None = None
    failure: str = ""


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    line: Connection
    job: AnyJob | None = None


def run(job: AnyJob, progress: Callable[[float], None]) -> Outcome:
    """Run one job in this process; if it diverges, its outcome has no metrics."""
    import time

    begin_s = time.monotonic()
    try:
        outcome = _runner(job)(job, progress)
    except (*GONE, ExceptionGroup) as error:
        if not _diverged(error):
            raise
        outcome = Outcome(metrics={}, diverged=True)
    return msgspec.structs.replace(outcome, took_s=round(time.monotonic() - begin_s, 1))


def run_all(jobs: Sequence[AnyJob], workers: int, told: Told) -> Iterator[tuple[AnyJob, Outcome]]:
    """Yield each job and its outcome as it finishes; one worker means this process."""
    if workers <= 1 or len(jobs) <= 1:
        for one in jobs:
            yield one, run(one, functools.partial(told, one))
        return
    waiting = list(reversed(jobs))
    with _crew(min(workers, len(jobs))) as crew:
        for worker in crew:
            give_job(worker, waiting)
        while any(worker.job is not None for worker in crew):
            ready = wait([worker.line for worker in crew if worker.job is not None], LOOK_S)
            for worker in [worker for worker in crew if worker.line in ready]:
                job, word = worker.job, _hear(worker)
                assert job is not None
                if word.failure:
                    raise Failure(f"arm {job.title} failed on seed {job.seed}", word.failure, "")
                told(job, word.share)
                if word.outcome is not None:
                    give_job(worker, waiting)
                    yield job, word.outcome


def outcomes(
    jobs: Iterable[AnyJob],
    shelf: Kept,
    workers: int,
    kept: Callable[[list[AnyJob]], None],
    told: Told,
) -> dict[str, Outcome]:
    """Return outcomes by key: from the shelf, after `kept` has those jobs, or else from a run."""
    wanted = {key(job): job for job in jobs}
    found = {
        name: outcome for name, job in wanted.items() if (outcome := shelf.find(job)) is not None
    }
    kept([wanted[name] for name in found])
    for job, outcome in run_all(
        [job for name, job in wanted.items() if name not in found], workers, told
    ):
        shelf.keep(job, outcome)
        found[key(job)] = outcome
    return found


def _runner(job: AnyJob) -> Callable[..., Outcome]:
    """Return the function that runs a job of this kind.

    Imports are late: a command that only lists recipes needs none of these modules.
    """
    from farflock.experiments.reproduce import line, noise, swarm_arm

    if isinstance(job, Swarm):
        return swarm_arm.run
    return noise.run if isinstance(job, Noise) else line.run


def _diverged(error: BaseException) -> bool:
    """Return whether this error, or every error in this group, is a divergence."""
    if isinstance(error, BaseExceptionGroup):
        return all(_diverged(one) for one in error.exceptions)
    return isinstance(error, GONE)


@contextlib.contextmanager
def _crew(count: int) -> Iterator[list[_Worker]]:
    """Start workers that live as long as the block."""
    context = warm("farflock.experiments.reproduce.swarm_arm")
    crew = []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            crew.append(_Worker(process, ours))
        yield crew
    finally:
        for worker in crew:
            worker.process.terminate()
        for worker in crew:
            worker.process.join(END_S)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.line.close()


def give_job(worker: _Worker, waiting: list[AnyJob]) -> None:
    """Send a worker the next waiting job, if there is one."""
    worker.job = waiting.pop() if waiting else None
    if worker.job is not None:
        with contextlib.suppress(BrokenPipeError):  # it is dead, as `_hear` will report
            worker.line.send_bytes(msgspec.json.encode(worker.job))


def _hear(worker: _Worker) -> _Word:
    try:
        return msgspec.json.decode(worker.line.recv_bytes(), type=_Word)
    except (EOFError, ConnectionResetError):
        worker.process.join(END_S)
        code = worker.process.exitcode
        why, remedy = (
            ("was killed, perhaps because memory ran out", "; use fewer --workers")
            if code == -signal.SIGKILL
            else ("died", "")
        )
        return _Word(failure=f"its process {why} (exit code {code}){remedy}")


def _work(line: Connection) -> None:
    """Run jobs until the pipe closes; ignore Ctrl-C, which the parent process handles."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    while True:
        try:
            job = msgspec.json.decode(line.recv_bytes(), type=AnyJob)
        except EOFError:
            return
        told = 0.0

        def tell(share: float) -> None:
            nonlocal told
            if share - told >= TELL_SHARE:
                told = share
                line.send_bytes(msgspec.json.encode(_Word(share=share)))

        try:
            word = _Word(share=1.0, outcome=run(job, tell))
        except Exception as error:  # the parent process reports it
            known = explained(error)
            word = _Word(failure=str(known) if known else f"{type(error).__name__}: {error}")
        line.send_bytes(msgspec.json.encode(word))
