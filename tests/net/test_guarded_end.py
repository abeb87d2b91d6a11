"""A run of a real process that its guard ends, and what the same command does then."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from farflock.node.process.brake import BRAKE

pytestmark = [pytest.mark.net, pytest.mark.timeout(200), pytest.mark.ci_more]

RUN = """
[run]
name = "too fast"
total_tokens = 60_000
[model]
preset = "tiny"
[train]
batch = 4
seq = 32
lr = 20.0
optimizer = "sgd"
warmup_tokens = 40_000
[method]
name = "diloco"
[method.options]
period = 4
[evaluation]
every = 1
sequences = 16
[guard]
on = "end"
[exchange]
view_s = 2.0
start_peers = 1
"""


class Node:
    """A node of `farflock run` in a folder of its own."""

    def __init__(self, popen, folder):
        self._popen, self._manifest, self.folder = popen, folder / "run.toml", folder / "node"
        self._manifest.write_text(RUN)
        self._brake = folder / "brake"
        self._brake.write_text("0.15")  # so that checkpoints are written while the run is well

    def runs(self):
        """Run the command to its end; return its exit code and its last words."""
        words = ["run", self._manifest, "--folder", self.folder, "--checkpoint-every", "1"]
        process = self._popen(
            [sys.executable, "-m", "farflock.node.cli", *map(str, words), "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", BRAKE: str(self._brake)},
        )
        said, _ = process.communicate(timeout=150)
        return process.returncode, json.loads(said.splitlines()[-1])["error"]

    def checkpoints(self):
        return sorted(path.name for path in (self.folder / "checkpoints").iterdir())

    def events(self, kind):
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["kind"] == kind]


def test_a_run_that_was_ended_is_not_resumed_from_a_bad_checkpoint(nursery, tmp_path):
    node = Node(nursery.popen, tmp_path)
    code, said = node.runs()
    assert code == 1
    assert "the training has gone wrong" in said
    places = node.checkpoints()
    aside = [name for name in places if name.endswith(".gone-wrong-1")]
    kept = (name for name in places if name not in aside)
    good = max(kept, key=lambda name: int(name.removeprefix("step-")))
    assert aside
    assert f"{good}; export it" in said

    code, said = node.runs()  # the same command
    assert code == 1
    assert "the guard has ended this run: " in said
    assert f"export {node.folder}/checkpoints/{good} and begin a run from it" in said
    assert all(name in said for name in aside)
    assert node.checkpoints() == places
    assert not node.events("resumed")

    for name in aside:  # as it says
        shutil.move(node.folder / "checkpoints" / name, tmp_path)
    node.runs()
    (resumed,) = node.events("resumed")
    assert resumed["checkpoint"].endswith(good)
