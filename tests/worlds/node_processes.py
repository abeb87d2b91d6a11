"""A pipeline of real processes: each node is one command, with its folder, status and events."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
from worlds.waiting import ended, output_of, told, until_real

from farflock.node.process.brake import BRAKE
from farflock.node.run.manifest import resolve
from farflock.node.state import checkpoint

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "farflock.node.cli")
BATCH, SEQUENCES, SEQ = 8, 2, 32  # microbatches of a step; of one, its sequences and their tokens
STEP = BATCH * SEQUENCES * SEQ  # tokens
MODEL = {
    "dim": 32,
    "layers": 3,
    "heads": 2,
    "kv_heads": 2,
    "ffn_dim": 64,
    "context": 64,
    "tied": False,
}
FOREVER = 1_000_000  # steps


def described(peers, steps, stages=3, method="ddp", options=None, **terms):
    return resolve(
        {
            "run": {"name": "pipeline", "seed": 1, "total_tokens": steps * STEP},
            "model": MODEL,
            "train": {
                "batch": SEQUENCES,
                "seq": SEQ,
                "lr": 5e-3,
                "warmup_tokens": 2 * STEP,
                "clip": 0.0,  # a stage's norm is not the whole model's
                "joiner_steps": 0,  # DDP sets the rate by the run's tokens; the unsplit model too
            },
            "pipeline": {"stages": stages, "batch": BATCH} | terms,
            "method": {"name": method, "options": options or {}},
            "exchange": {"view_s": 1.0, "start_peers": peers},
            "evaluation": {"sequences": 32},
        }
    )


class Node:
    """One command in a process of its own, and what it leaves in its folder."""

    def __init__(self, popen, folder, brake, *words, saved_s=5, command=COMMAND):
        folder.mkdir(exist_ok=True)
        self.folder = folder
        with (folder / "log.txt").open("ab") as log:
            self.process = popen(
                [
                    *command,
                    *map(str, words),
                    "--folder",
                    str(folder),
                    "--checkpoint-every",
                    str(saved_s),
                    "--json",
                ],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", BRAKE: str(brake)},
            )

    @property
    def log(self):
        return (self.folder / "log.txt").read_text()

    def status(self):
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.folder / "status.json").read_text())
        return None

    def events(self, kind):
        with contextlib.suppress(OSError):
            lines = (self.folder / "events.jsonl").read_text().splitlines(keepends=True)
            entries = [json.loads(line) for line in lines if line.endswith("\n")]
            return [entry for entry in entries if entry["kind"] == kind]
        return []

    def reaches(self, condition):
        """Return its status as soon as that meets a condition."""

        def met():
            if (status := self.status()) is not None and condition(status):
                return status
            assert self.process.poll() is None, self.told()
            return None

        return until_real(met, "its status", self.told)

    def told(self):
        log = self.folder / "log.txt"
        return f"{told(self.folder.name, self.process, log)}\nits status: {self.status()}"

    def comes_in(self):
        return self.reaches(
            lambda status: status["pid"] == self.process.pid and status["is_member"]
        )

    def kill(self):
        self.process.kill()
        ended(self.process, self.folder.name, self.told)

    def ends(self):
        """Return the exit code, and what the last line of standard output says."""
        out = output_of(self.process, self.folder.name, self.told)
        return self.process.returncode, json.loads(out.splitlines()[-1])

    def is_done(self):
        code, said = self.ends()
        assert (code, said["ended"]) == (0, "done"), self.log[-2000:]

    def leaves(self, number=signal.SIGTERM):
        """Tell it to leave, and check that it does; return what its last line of output says."""
        self.process.send_signal(number)
        code, said = self.ends()
        assert (code, said["ended"]) == ({signal.SIGTERM: 0, signal.SIGINT: 130}[number], "left"), (
            self.log[-2000:]
        )
        return said

    def saved(self, stage):
        """Return its last checkpoint of a stage."""
        return checkpoint.latest(self.folder / "checkpoints" / f"stage-{stage}")

    def losses(self):
        return [entry["loss"] for entry in self.events("loss")]


class Run:
    """All processes of one run, ended with the test; each is saved every `saved_s` seconds."""

    def __init__(self, popen, folder):
        self._popen, self.folder, self.nodes, self.saved_s = popen, folder, [], 5

    def start(self, name, *words, command=COMMAND):
        brake = self.folder / "brake"
        given = self._popen, self.folder / name, brake
        self.nodes.append(Node(*given, *words, saved_s=self.saved_s, command=command))
        return self.nodes[-1]

    def brake(self, step_s):
        """Let each step of each node take at least this long, from now on."""
        (self.folder / "brake").write_text(str(step_s))

    def found(self, manifest):
        (self.folder / "run.toml").write_bytes(manifest.canonical())
        founder = self.start("founder", "run", self.folder / "run.toml")
        self.invite = founder.reaches(lambda status: status["invite"])["invite"]
        return founder

    def join(self, name, *words, command=COMMAND):
        return self.start(name, "join", self.invite, *words, command=command)

    def servers(self, stages, first=1):
        """Start two servers of each stage; of the first stage `first`, founder included."""
        for stage in range(stages):
            for place in range(2 if stage else first - 1):
                self.join(f"server-{stage}-{place}", "--role", f"stage:{stage}")

    def alive(self):
        return [node for node in self.nodes if node.process.poll() is None]

    def serving(self, stage):
        """Return the living nodes that serve the stage."""
        return [node for node in self.alive() if node.status()["role"] == f"stage:{stage}"]

    def end(self):
        for node in self.nodes:
            node.kill()
            node.process.stdout.close()


def round_of(saved):
    (number,) = saved.meta["node"]["place"]["rounds"].values()
    return number


def one_state(saved):
    """Return the stage's tensors; check that all of these checkpoints have them bit by bit."""
    for each in saved[1:]:
        assert round_of(each) == round_of(saved[0])
        for group in ("model", "method"):
            assert each.groups[group].keys() == saved[0].groups[group].keys()
            for name, x in each.groups[group].items():
                assert torch.equal(x, saved[0].groups[group][name]), name
    return saved[0].groups["model"]


def fallen(trainer):
    """Return by how much its microbatches' loss fell, in nats per token."""
    seen = trainer.losses()
    return (sum(seen[:BATCH]) - sum(seen[-BATCH:])) / BATCH
