"""Two processes under torchrun are one peer of a real swarm: joined, killed, resumed, and equal."""

import contextlib
import json
import os
import subprocess
import sys

import psutil
import pytest
from worlds.waiting import LIMIT_S, alive, ended, told, until_real

from farflock.node.process.brake import BRAKE

pytestmark = [pytest.mark.net, pytest.mark.ci_more]

RUN = """
[run]
name = "torchrun"
total_tokens = 36_000
[model]
preset = "tiny"
[train]
batch = 4
seq = 32
[method]
name = "diloco"
[method.options]
period = 2
codec = "int8"
[exchange]
view_s = 2.0
start_peers = 2
"""
TORCHRUN = ("torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1")
SLOW_STEP_S = 0.5


class Peer:
    """One peer in a folder of its own, of one process or of two under torchrun."""

    def __init__(self, popen, python, folder):
        self._popen, self._python, self.folder = popen, python, folder
        folder.mkdir()
        self.brake(SLOW_STEP_S)

    def brake(self, step_s):
        (self.folder / "brake").write_text(str(step_s))

    def start(self, *command, launcher=()):
        (self.folder / "status.json").unlink(missing_ok=True)
        options = ("--folder", str(self.folder), "--checkpoint-every", "3")
        log = (self.folder / "log.txt").open("ab")
        words = [*launcher, "-m", "farflock"] if launcher else ["farflock"]
        self.process = self._popen(
            [sys.executable, "-m", *words, *command, *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "PYTHON_EXEC": str(self._python),  # of torchrun's processes
                BRAKE: str(self.folder / "brake"),
            },
        )
        log.close()

    @property
    def log(self):
        return (self.folder / "log.txt").read_text()

    def status(self):
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.folder / "status.json").read_text())
        return None

    def reaches(self, there):
        def met():
            status = self.status()
            if status is not None and there(status):
                return status
            assert self.process.poll() is None, self.told()
            return None

        return until_real(met, "its status", self.told)

    def ends(self):
        """Return its exit code."""
        return ended(self.process, self.folder.name, self.told)

    def told(self):
        log = self.folder / "log.txt"
        return f"{told(self.folder.name, self.process, log)}\nits status: {self.status()}"

    def rounds(self):
        with contextlib.suppress(OSError):
            lines = (self.folder / "events.jsonl").read_text().splitlines(keepends=True)
            events = [json.loads(line) for line in lines if line.endswith("\n")]
            return [event for event in events if event["kind"] == "round"]
        return []

    def ranks(self):
        """The processes that torchrun has started, by rank."""
        found = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words, rank = child.cmdline(), child.environ().get("RANK")
                if rank is not None and "farflock" in words:
                    found[int(rank)] = child
        return found

    def saved_steps(self):
        return [
            int(path.name.split("-")[1]) for path in (self.folder / "checkpoints").glob("step-*")
        ]

    def saved(self, part):
        newest = max(
            (self.folder / "checkpoints").glob("step-*"),
            key=lambda path: int(path.name.split("-")[1]),
        )
        return (newest / f"{part}.safetensors").read_bytes()

    def end(self):
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(LIMIT_S)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def peers(nursery, tmp_path):
    """A peer of one process, which founds the run, and one of two."""
    (tmp_path / "run.toml").write_text(RUN)
    python = nursery.stand_in(tmp_path / "python")
    made = [Peer(nursery.popen, python, tmp_path / name) for name in ("one", "two")]
    yield made
    for each in made:
        each.end()


def together(peer):
    """Return the number of rounds in which both peers took part."""
    return sum(event["peers"] == 2 for event in peer.rounds())


def test_two_processes_are_one_peer_that_is_killed_and_resumes(peers, tmp_path):
    one, two = peers
    one.start("run", str(tmp_path / "run.toml"))
    invite = one.reaches(lambda status: status["invite"])["invite"]

    def joins():
        """Return the step at which it began."""
        before = together(two)
        two.start("join", invite, launcher=TORCHRUN)
        began = two.reaches(lambda status: True)["step"]
        # not those alone that it replays: its last life was in them
        two.reaches(lambda status: status["is_member"] and together(two) >= before + 2)
        counted = together(two)
        two.reaches(lambda status: together(two) > counted)
        return began

    joins()
    two.reaches(lambda status: two.saved_steps())
    first = two.status()
    assert len(first["members"]) == 2
    two.ranks()[1].kill()
    assert two.ends() == 1
    # Its leader sees that, or torchrun does, and asks the leader to leave: whichever is first.
    seen = "rank 1 of this peer has ended" in two.log and "as after a kill" in two.log
    assert seen or "left the run" in two.log, two.told()
    assert "unexpected" not in two.log

    saved = max(two.saved_steps())
    assert joins() >= saved > 0
    assert two.status()["peer"] == first["peer"]
    ranks = two.ranks()
    ranks[0].kill()
    two.ends()
    until_real(lambda: not any(alive(each.pid) for each in ranks.values()), "the end of both ranks")
    assert one.process.poll() is None

    joins()
    one.brake(0.0)
    two.brake(0.0)
    assert one.ends() == 0, one.told()
    assert two.ends() == 0, two.told()
    for part in ("method", "model"):
        assert one.saved(part) == two.saved(part)
