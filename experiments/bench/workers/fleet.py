"""Worker processes of a benchmark, driven by lines of JSON over their standard streams.

They never outlive the process that started them: a worker exits when its standard input closes, and
on Linux the kernel also kills a stopped worker, which cannot exit by itself.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from farflock.experiments.bench.workers.netns import Host
from farflock.experiments.measure.metric import NotMeasured
from farflock.experiments.measure.parent import end_with_parent
from farflock.swarm.tasks import cancel

START_TIMEOUT_S = 90.0
ANSWER_TIMEOUT_S = 120.0
BARRIER_S = 0.1  # for the start time to reach all workers
LINE_BYTES = 4 * 1024 * 1024
MAX_COMMANDS = 64
ROOT = Path(__file__).resolve().parents[3]

Fields = dict[str, Any]


class WorkerFailed(NotMeasured):
    """Raised if a worker ended or fell silent before it answered."""


class Worker:
    """The owner's side of one worker process; `name` is shown in messages."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name, self.process = name, process
        self._heard: list[Fields] = []

    def tell(self, kind: str, **fields: object) -> None:
        """Send a command to the worker."""
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode({"kind": kind, **fields}) + b"\n")

    async def hear(self, kind: str, timeout_s: float = ANSWER_TIMEOUT_S) -> Fields:
        """Return the next message of this kind and keep the others for later.

        Raise `WorkerFailed` if none comes in time.
        """
        for index, message in enumerate(self._heard):
            if message["kind"] == kind:
                return self._heard.pop(index)
        try:
            async with asyncio.timeout(timeout_s):
                while (message := await self._next())["kind"] != kind:
                    self._heard.append(message)
        except TimeoutError:
            raise WorkerFailed(
                f"{self.name} did not send {kind!r} within {timeout_s:.0f} s; "
                "stop other programs on this machine and measure again"
            ) from None
        return message

    def kept(self, kind: str) -> list[Fields]:
        """Remove and return the kept messages of this kind, oldest first."""
        found = [message for message in self._heard if message["kind"] == kind]
        self._heard = [message for message in self._heard if message["kind"] != kind]
        return found

    async def _next(self) -> Fields:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            raise WorkerFailed(f"{self.name} ended early; see its last lines on standard error")
        message: Fields = msgspec.json.decode(line)
        return message

    def signal(self, number: int) -> None:
        """Send this process a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    async def end(self) -> None:
        """Kill the process, stopped or not, and reap it."""
        self.signal(signal.SIGKILL)
        await self.process.communicate()


@contextlib.asynccontextmanager
async def fleet(
    module: str, places: Sequence[Host], settings: Mapping[str, object]
) -> AsyncIterator[list[Worker]]:
    """Run `module` in one worker per place, and end all workers afterwards.

    Each gets its number, the number of workers, its address and `settings`.
    """
    workers: list[Worker] = []
    try:
        for number, place in enumerate(places):
            described = {**settings, "number": number, "count": len(places), "host": place.address}
            process = await asyncio.create_subprocess_exec(
                *(
                    *place.prefix,
                    sys.executable,
                    "-m",
                    module,
                    msgspec.json.encode(described).decode(),
                ),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=surroundings(),
                limit=LINE_BYTES,
                start_new_session=True,  # Ctrl-C reaches the owner only, which ends the workers
            )
            workers.append(Worker(f"worker {number}", process))
        yield workers
    finally:
        await asyncio.gather(*(worker.end() for worker in workers))


async def hear_all(
    workers: Sequence[Worker], kind: str, timeout_s: float = ANSWER_TIMEOUT_S
) -> list[Fields]:
    """Return one message of this kind from each worker."""
    hearing = [asyncio.create_task(worker.hear(kind, timeout_s)) for worker in workers]
    try:
        return list(await asyncio.gather(*hearing))
    finally:
        await cancel(*hearing)


async def introduce(workers: Sequence[Worker]) -> list[Fields]:
    """Give every worker all records; return their answers once one view has all workers."""
    records = [answer["record"] for answer in await hear_all(workers, "record", START_TIMEOUT_S)]
    for worker in workers:
        worker.tell("records", records=records)
    return await hear_all(workers, "ready", START_TIMEOUT_S)


async def together(
    workers: Sequence[Worker], kind: str, timeout_s: float, **fields: object
) -> tuple[float, list[Fields]]:
    """Run one piece of work on all workers; return the common start time and their answers."""
    for worker in workers:
        worker.tell(kind, **fields)
    await hear_all(workers, "prepared")
    start_s = asyncio.get_running_loop().time() + BARRIER_S
    for worker in workers:
        worker.tell("go", start_s=start_s)
    return start_s, await hear_all(workers, "done", timeout_s)


def surroundings() -> dict[str, str]:
    """Return the workers' environment: one compute thread each, since they share the cores."""
    paths = os.pathsep.join(path for path in (str(ROOT), os.environ.get("PYTHONPATH", "")) if path)
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


class Owner:
    """A worker's connection to the process that started it."""

    def __init__(self) -> None:
        self._commands: asyncio.Queue[Fields] = asyncio.Queue(MAX_COMMANDS)
        self._listening: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls) -> "Owner":
        """Listen to standard input; from then on, this process does not outlive its owner."""
        end_with_parent()
        reader = asyncio.StreamReader(limit=LINE_BYTES)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
        )
        owner = cls()
        owner._listening = asyncio.create_task(owner._listen(reader))
        return owner

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            await self._commands.put(msgspec.json.decode(line))
        os._exit(0)  # without an owner there is nothing to do or to clean up

    async def next(self) -> Fields:
        """Return the owner's next message."""
        return await self._commands.get()

    async def command(self, kind: str) -> Fields:
        """Return the next command, which must be of this kind."""
        message = await self.next()
        assert message["kind"] == kind, f"expected {kind!r} from the owner, got {message}"
        return message

    async def barrier(self) -> float:
        """Wait for the common start time, by the clock that all workers share, and return it."""
        self.say("prepared")
        start_s = float((await self.command("go"))["start_s"])
        left_s = start_s - asyncio.get_running_loop().time()
        assert left_s > 0, f"the start time passed {-left_s:.3f} s ago; raise BARRIER_S"
        await asyncio.sleep(left_s)
        return start_s

    @staticmethod
    def say(kind: str, **fields: object) -> None:
        """Send the owner a message."""
        sys.stdout.buffer.write(msgspec.json.encode({"kind": kind, **fields}) + b"\n")
        sys.stdout.buffer.flush()
