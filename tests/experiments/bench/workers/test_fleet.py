"""Workers of a benchmark: they say what they are asked, and none outlives its owner."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from worlds.waiting import LIMIT_S, alive, line_of, output_of, until_real

from farflock.experiments.bench.workers.fleet import Worker, WorkerFailed, fleet, hear_all
from farflock.experiments.bench.workers.netns import Host

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.net

ECHO = """
import asyncio, sys, msgspec
from farflock.experiments.bench.workers.fleet import Owner

async def main():
    owner = await Owner.open()
    owner.say("settings", **msgspec.json.decode(sys.argv[1]))
    while True:
        command = await owner.next()
        if command["kind"] == "die":
            sys.exit(3)
        owner.say("first", x=command.get("x"))
        owner.say("second", x=command.get("x"))

asyncio.run(main())
"""


@pytest.fixture
def echo(tmp_path, monkeypatch):
    """A module for workers that repeat what they are told."""
    (tmp_path / "echo_worker.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "echo_worker"


def test_workers_know_their_place_and_answer_in_any_order(echo):
    async def main():
        async with fleet(echo, [Host()] * 2, {"colour": "red"}) as workers:
            said = await hear_all(workers, "settings")
            assert [(one["number"], one["count"], one["colour"]) for one in said] == [
                (0, 2, "red"),
                (1, 2, "red"),
            ]
            for x, worker in enumerate(workers):
                worker.tell("go", x=x)
            assert [one["x"] for one in await hear_all(workers, "second")] == [0, 1]
            assert [one["x"] for one in workers[1].kept("first")] == [1]
            assert workers[1].kept("first") == []
            assert (await workers[0].hear("first"))["x"] == 0

    asyncio.run(main())


def test_a_worker_that_ends_or_falls_silent_is_an_error_and_the_others_end_too(echo):
    pids = []

    async def main(timeout_s, *commands):
        async with fleet(echo, [Host()] * 2, {}) as workers:
            pids.extend(worker.process.pid for worker in workers)
            await hear_all(workers, "settings")
            for command in commands:
                workers[0].tell(command)
            await hear_all(workers, "never", timeout_s)

    with pytest.raises(WorkerFailed, match="worker 0 ended early"):
        asyncio.run(main(LIMIT_S, "die"))
    with pytest.raises(WorkerFailed, match="did not send 'never' within 0 s"):
        asyncio.run(main(0.05))
    assert len(pids) == 4
    assert not [pid for pid in pids if alive(pid)]


def test_a_stopped_worker_ends_with_the_block(echo):
    async def main() -> Worker:
        async with fleet(echo, [Host()], {}) as (worker,):
            await worker.hear("settings")
            worker.signal(signal.SIGSTOP)
        return worker

    worker = asyncio.run(main())
    assert worker.process.returncode == -signal.SIGKILL
    worker.signal(signal.SIGKILL)  # has no effect on a process that has ended


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_worker_outlives_its_owner_stopped_or_not(echo, number):
    code = (
        "import asyncio, signal\n"
        "from farflock.experiments.bench.workers.fleet import fleet, hear_all\n"
        "from farflock.experiments.bench.workers.netns import Host\n"
        "async def main():\n"
        "    async with fleet('echo_worker', [Host()] * 2, {}) as workers:\n"
        "        await hear_all(workers, 'settings')\n"
        "        workers[1].signal(signal.SIGSTOP)\n"
        "        print(*(worker.process.pid for worker in workers), flush=True)\n"
        "        await asyncio.sleep(3600)\n"
        "asyncio.run(main())\n"
    )
    paths = os.pathsep.join((str(ROOT), os.environ["PYTHONPATH"]))
    owner = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert owner.stdout is not None
    pids = [int(word) for word in line_of(owner, "the workers' numbers").split()]
    assert len(pids) == 2
    assert all(alive(pid) for pid in pids)
    owner.send_signal(number)
    output_of(owner, "the owner")
    until_real(lambda: not any(map(alive, pids)), "the end of all workers")
