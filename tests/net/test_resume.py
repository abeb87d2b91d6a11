"""Real nodes stop and start again: alone they go on bit by bit, in a living swarm they rejoin, and
if all were killed they go on together, in whichever order they start."""

import contextlib
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from worlds.waiting import LIMIT_S, ended, told, until_real

from farflock.node.process.brake import BRAKE
from farflock.node.run.manifest import resolve

pytestmark = pytest.mark.net

RUN = """
[run]
name = "resume"
total_tokens = {tokens}
[model]
preset = "tiny"
[train]
batch = 4
seq = 32
[method]
name = "diloco"
[method.options]
period = 10
[exchange]
view_s = 2.0
start_peers = {peers}
"""

TWO = resolve(
    {
        "run": {"name": "back", "total_tokens": 10**9},
        "model": {"preset": "tiny"},
        "train": {"batch": 1, "seq": 16},
        "method": {"name": "diloco", "options": {"period": 20}},
        "exchange": {"view_s": 2.0, "deadline_s": 5.0, "start_peers": 2},
    }
)

SLOW_STEP_S = 0.02  # no machine may end a run before the test has seen its status, once a second


class Nodes:
    """Processes of `farflock run` and `farflock join` in folders of their own."""

    def __init__(self, popen, folder: Path, **terms: int):
        self.popen, self.folder, self.processes = popen, folder, {}
        self.checkpoint_s = 2
        self.manifest = folder / "run.toml"
        self.manifest.write_text(RUN.format(**terms))

    def start(self, name: str, *command: str):
        (self.folder / name).mkdir(exist_ok=True)
        (self.folder / name / "status.json").unlink(missing_ok=True)
        every = ("--checkpoint-every", str(self.checkpoint_s))
        arguments = [*command, "--folder", str(self.folder / name), *every]
        with open(self.folder / name / "log.txt", "ab") as log:
            self.processes[name] = self.popen(
                [sys.executable, "-m", "farflock.node.cli", *arguments],
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    BRAKE: str(self.folder / f"{name}.brake"),
                },
            )

    def brake(self, name: str, step_s: float):
        """Let each step of `name` take at least this long, from now on."""
        (self.folder / f"{name}.brake").write_text(str(step_s))

    def found(self, name: str):
        self.start(name, "run", str(self.manifest))

    def status(self, name: str):
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.folder / name / "status.json").read_text())
        return None

    def wait(self, name: str, reached):
        def met():
            status = self.status(name)
            if status is not None and reached(status):
                return status
            assert self.processes[name].poll() is None, self.told()
            return None

        return until_real(met, f"a status of {name}", self.told)

    def told(self):
        return "\n".join(
            f"{told(name, process, self.folder / name / 'log.txt')}\n{self.status(name)}"
            for name, process in self.processes.items()
        )

    def ended(self, name: str):
        assert ended(self.processes[name], name, self.told) == 0, self.told()

    def events(self, name: str):
        lines = (self.folder / name / "events.jsonl").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def peers_since(self, name: str, kind: str):
        """How many peers its rounds had after its first event of a kind."""
        events = self.events(name)
        kinds = [event["kind"] for event in events]
        later = events[kinds.index(kind) :] if kind in kinds else []
        return {event["peers"] for event in later if event["kind"] == "round"}

    def kinds(self, name: str):
        passed = ("round", "evaluation")
        return [event["kind"] for event in self.events(name) if event["kind"] not in passed]

    def model(self, name: str) -> bytes:
        newest = max(
            (self.folder / name / "checkpoints").iterdir(),
            key=lambda path: int(path.name.split("-")[1]),
        )
        return (newest / "model.safetensors").read_bytes()

    def end(self):
        for process in self.processes.values():
            process.kill()
            process.wait(LIMIT_S)


@pytest.fixture
def nodes(nursery, tmp_path):
    made = []

    def make(**terms):
        made.append(Nodes(nursery.popen, tmp_path, **terms))
        return made[-1]

    yield make
    for each in made:
        each.end()


@pytest.mark.long
def test_a_founder_that_is_alone_goes_on_from_its_checkpoint_bit_by_bit(nodes):
    swarm = nodes(tokens=45_000, peers=1)
    swarm.found("whole")
    swarm.ended("whole")
    (swarm.folder / "stopped").mkdir()
    shutil.copy(swarm.folder / "whole" / "identity.key", swarm.folder / "stopped")
    swarm.brake("stopped", SLOW_STEP_S)
    swarm.found("stopped")
    swarm.wait("stopped", lambda status: status["step"] >= 100)
    swarm.processes["stopped"].terminate()
    swarm.ended("stopped")
    assert swarm.status("stopped")["tokens"] < 45_000
    swarm.brake("stopped", 0.0)
    swarm.found("stopped")
    swarm.ended("stopped")
    assert swarm.kinds("stopped") == ["stopped", "resumed", "done"]
    assert swarm.model("stopped") == swarm.model("whole")


@pytest.mark.ci_more
def test_a_founder_that_was_killed_goes_back_into_the_swarm_that_went_on_without_it(nodes):
    swarm = nodes(tokens=80_000, peers=3)
    for name in ("founder", "b", "c"):
        swarm.brake(name, 0.1)
    swarm.found("founder")
    invite = swarm.wait("founder", lambda status: status["invite"])["invite"]
    for name in ("b", "c"):
        swarm.start(name, "join", invite)
    before = swarm.wait("founder", lambda status: status["step"] >= 40)
    swarm.processes["founder"].kill()
    swarm.processes["founder"].wait()
    swarm.wait("b", lambda status: status["step"] >= 60)
    saved = {path.name for path in (swarm.folder / "founder" / "checkpoints").glob("step-*")}
    assert saved, "there was no checkpoint to go on from"
    for name in ("b", "c"):
        swarm.brake(name, 0.5)  # a process may take long to start
    swarm.found("founder")
    swarm.wait("founder", lambda status: status["is_member"] and status["step"] > 0)
    swarm.wait("founder", lambda status: 3 in swarm.peers_since("founder", "joined"))
    for name in swarm.processes:
        swarm.brake(name, 0.0)
    for name in swarm.processes:
        swarm.ended(name)
    assert swarm.kinds("founder")[0] == "joined"
    assert "resumed" not in swarm.kinds("founder")
    assert swarm.status("founder")["step"] > max(int(name.split("-")[1]) for name in saved)
    assert swarm.status("founder")["tokens"] >= 80_000 > before["tokens"]
    assert len({swarm.model(name) for name in swarm.processes}) == 1


def test_a_founder_that_was_killed_before_its_first_checkpoint_does_not_start_the_run_again(nodes):
    swarm = nodes(tokens=10**9, peers=3)  # without an end
    swarm.checkpoint_s = 600
    for name in ("founder", "b", "c"):
        swarm.brake(name, 0.2)
    swarm.found("founder")
    invite = swarm.wait("founder", lambda status: status["invite"])["invite"]
    for name in ("b", "c"):
        swarm.start(name, "join", invite)
    swarm.wait("founder", lambda status: status["step"] >= 10)
    swarm.processes["founder"].kill()
    swarm.processes["founder"].wait()
    assert not list((swarm.folder / "founder" / "checkpoints").glob("step-*"))
    swarm.found("founder")
    swarm.wait("founder", lambda status: status["step"] > 0)
    assert swarm.kinds("founder")[0] == "joined"
    swarm.wait("founder", lambda status: status["is_member"] and len(status["members"]) == 3)


def has_rounds_of_two(node, more):
    def made():
        return [event for event in node.events("round") if event["peers"] == 2]

    before = len(made())
    until_real(lambda: len(made()) >= before + more, "rounds of two", node.told)


def test_two_nodes_come_back_after_both_were_killed_the_joiner_first(run):
    first = run.found(TWO), run.join("joiner")
    for node in first:
        has_rounds_of_two(node, 3)
    # a state on a disk of each
    until_real(
        lambda: all(list(node.folder.glob("checkpoints/step-*")) for node in first), "states"
    )
    for node in first:
        node.kill()
    joiner = run.join("joiner")
    joiner.reaches(
        lambda status: status["pid"] == joiner.process.pid and "waits for" in status["doing"]
    )
    founder = run.start("founder", "run", run.folder / "run.toml")
    for node in (founder, joiner):
        has_rounds_of_two(node, 2)
    branches = [tuple(node.status()["branch"]) for node in (founder, joiner)]
    assert branches[0] == branches[1]
