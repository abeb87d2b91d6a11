"""A pipeline of real processes: it trains as the unsplit model does, and what is killed, refused or stopped costs nobody's
microbatch."""

import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from farflock.node.demo.baselines import train_baseline
from farflock.node.model.corpus import load_corpus
from farflock.node.model.data import evaluation
from farflock.node.model.evaluation import losses, unigram_loss
from farflock.node.model.llama import build
from farflock.node.model.stage_tensors import joined
from farflock.node.model.tokenizer import ByteTokenizer
from farflock.node.run.manifest import resolve
from farflock.node.state import checkpoint

pytestmark = [pytest.mark.net, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
PATIENCE_S = 240.0  # for whatever comes; a few seconds on an idle machine
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


def described(peers, steps, stages=3, **terms):
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
                "joiner_steps": 0,  # DDP sets the rate by the run's tokens, and so must the unsplit model
            },
            "pipeline": {
                "stages": stages,
                "batch": BATCH,
                "forward_timeout_s": 10,
                "backward_timeout_s": 20,
            }
            | terms,
            "method": {"name": "ddp", "options": {}},
            "exchange": {"view_s": 1.0, "start_peers": peers, "deadline_s": 10.0},
        }
    )


class Node:
    """One command in a process of its own, and what it leaves in its folder."""

    def __init__(self, popen, folder, *words):
        folder.mkdir(exist_ok=True)
        self.folder = folder
        with (folder / "log.txt").open("ab") as log:
            self.process = popen(
                [
                    *COMMAND,
                    *map(str, words),
                    "--folder",
                    str(folder),
                    "--checkpoint-every",
                    "5",
                    "--json",
                ],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
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
        """Its status as soon as that meets a condition."""
        ends_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < ends_s:
            if (status := self.status()) is not None and condition(status):
                return status
            assert self.process.poll() is None, self.log[-2000:]
            time.sleep(0.05)
        raise AssertionError(f"not in time: {self.status()} {self.log[-2000:]}")

    def comes_in(self):
        return self.reaches(
            lambda status: status["pid"] == self.process.pid and status["is_member"]
        )

    def kill(self):
        self.process.kill()
        self.process.wait(20)

    def ends(self):
        """Exit code, and what the last line of standard output says."""
        out, _ = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, json.loads(out.splitlines()[-1])

    def is_done(self):
        code, said = self.ends()
        assert (code, said["ended"]) == (0, "done"), self.log[-2000:]

    def leaves(self, number=signal.SIGTERM):
        """Is told to, and does so in order; what the last line of standard output says."""
        self.process.send_signal(number)
        code, said = self.ends()
        assert (code, said["ended"]) == ({signal.SIGTERM: 0, signal.SIGINT: 130}[number], "left"), (
            self.log[-2000:]
        )
        return said

    def saved(self, stage):
        """Its last checkpoint of a stage."""
        return checkpoint.latest(self.folder / "checkpoints" / f"stage-{stage}")

    def losses(self):
        return [entry["loss"] for entry in self.events("loss")]


class Run:
    """All processes of one run, ended with the test."""

    def __init__(self, popen, folder):
        self._popen, self._folder, self.nodes = popen, folder, []

    def start(self, name, *words):
        self.nodes.append(Node(self._popen, self._folder / name, *words))
        return self.nodes[-1]

    def found(self, manifest):
        (self._folder / "run.toml").write_bytes(manifest.canonical())
        founder = self.start("founder", "run", self._folder / "run.toml")
        self.invite = founder.reaches(lambda status: status["invite"])["invite"]
        return founder

    def join(self, name, *words):
        return self.start(name, "join", self.invite, *words)

    def servers(self, stages, first=1):
        """Two servers of each stage; of the first one, the founder and so many more."""
        for stage in range(stages):
            for place in range(2 if stage else first - 1):
                self.join(f"server-{stage}-{place}", "--role", f"stage:{stage}")

    def alive(self):
        return [node for node in self.nodes if node.process.poll() is None]

    def serving(self, stage):
        """Who serves it now."""
        return [node for node in self.alive() if node.status()["role"] == f"stage:{stage}"]

    def end(self):
        for node in self.nodes:
            node.process.kill()
            node.process.wait(20)
            node.process.stdout.close()


@pytest.fixture
def run(nursery, tmp_path):
    made = Run(nursery.popen, tmp_path)
    yield made
    made.end()


@pytest.fixture(scope="module")
def text():
    corpus, tokenizer = load_corpus("shakespeare"), ByteTokenizer()
    return tokenizer.encode(corpus.train), tokenizer.encode(corpus.held_out)


def round_of(saved):
    (number,) = saved.meta["node"]["place"]["rounds"].values()
    return number


def one_state(saved):
    """The stage's tensors, which all of these checkpoints have bit by bit."""
    for each in saved[1:]:
        assert round_of(each) == round_of(saved[0])
        for part in ("model", "method"):
            assert each.parts[part].keys() == saved[0].parts[part].keys()
            for name, x in each.parts[part].items():
                assert torch.equal(x, saved[0].parts[part][name]), name
    return saved[0].parts["model"]


def fallen(trainer):
    """By how much its microbatches' loss fell, in nats a token."""
    seen = trainer.losses()
    return (sum(seen[:BATCH]) - sum(seen[-BATCH:])) / BATCH


def held_out_loss(model, text):
    return float(losses(model, *evaluation(text[1], SEQ, 200)).mean())


def assembled(plan, pieces):
    model = build(plan.model, plan.run_seed)
    model.load_state_dict(joined(pieces))
    return model


def test_six_processes_train_a_model_that_none_of_them_holds_as_the_whole_one_is_trained(run, text):
    steps = 40
    manifest = described(
        6, steps, window=BATCH // 2
    )  # about half of a step's gradients may be a step late
    plan = manifest.plan()
    founder = run.found(manifest)
    run.servers(3, first=2)
    for node in run.nodes:
        node.is_done()

    status = founder.status()
    assert (status["role"], status["work"]["doubled"], status["work"]["in doubt"]) == (
        "stage:0",
        0,
        0,
    )
    assert status["tokens"] >= plan.schedule.total_tokens
    roles = [node.status()["role"] for node in run.nodes]
    assert sorted(roles) == [f"stage:{stage}" for stage in (0, 0, 1, 1, 2, 2)]
    assert all(node.status()["work"]["merged"] > 0 for node in run.nodes)
    assert fallen(founder) > 1.0

    states = []
    for stage in range(3):
        saved = [
            node.saved(stage)
            for node, role in zip(run.nodes, roles, strict=True)
            if role == f"stage:{stage}"
        ]
        states.append(one_state(saved))
    whole = held_out_loss(assembled(plan, states), text)
    unsplit = train_baseline(
        replace(plan, accumulate=BATCH), text[0], [status["peer"]], 1, steps, lambda share: None
    )
    untrained = held_out_loss(build(plan.model, plan.run_seed), text)
    best = held_out_loss(unsplit, text)
    assert whole < unigram_loss(*text, 256) < untrained
    assert abs(whole - best) < 0.05 * (untrained - best)


def test_where_servers_have_hardly_any_room_nobody_waits_for_ever(run):
    """E11: servers that held some of their room while they waited for others' would stop each other."""
    manifest = described(4, 15, stages=2, places=1, queue=1, window=24)
    founder = run.found(manifest)
    run.servers(2, first=2)
    for node in run.nodes:
        node.is_done()
    assert founder.status()["tokens"] >= manifest.run.total_tokens
    assert {
        (node.status()["work"].get("doubled", 0), node.status()["work"].get("in doubt", 0))
        for node in run.nodes
    } == {(0, 0)}
    assert all(node.status()["work"]["merged"] > 0 for node in run.nodes)


def test_a_server_and_then_a_whole_stage_are_killed_and_a_newcomer_takes_the_stage_up(run):
    """The run has no end of its own: on a busy machine it could come before the newcomer."""
    founder = run.found(described(6, FOREVER))
    run.servers(3)  # not of the first stage: nobody could leave another stage for the lost one
    trainer = run.join("trainer", "--role", "trainer")
    founder.reaches(lambda status: status["tokens"] >= 10 * STEP)
    run.serving(2)[-1].kill()
    founder.reaches(lambda status: status["tokens"] >= 15 * STEP)
    for victim in run.serving(1):
        victim.kill()
    left = founder.reaches(lambda status: len(status["members"]) == len(run.alive()))
    newcomer = run.join("newcomer")
    newcomer.comes_in()
    founder.reaches(lambda status: status["tokens"] >= left["tokens"] + 30 * STEP)

    survivors = run.alive()
    taken_up = [
        entry for node in survivors for entry in node.events("stage") if entry["round"] >= 0
    ]
    assert [(entry["stage"], entry["from"]) for entry in taken_up] == [(1, "mean")], taken_up
    roles = {node: node.status()["role"] for node in survivors}
    assert collections.Counter(roles.values()) == {
        "stage:0": 1,
        "stage:1": 1,
        "stage:2": 1,
        "trainer": 1,
    }
    for node in (trainer, *(node for node in survivors if node is not trainer)):
        node.leaves()
    for node, role in roles.items():
        if role != "trainer":
            assert node.saved(role.removeprefix("stage:")).meta["tokens"] > left["tokens"]
    for node in (founder, trainer):
        work = node.status()["work"]
        assert (work["doubled"], work["in doubt"]) == (0, 0)
        assert work["microbatches"] > BATCH
        assert fallen(node) > 1.0


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_a_role_that_there_is_not_is_refused_and_who_leaves_in_order_comes_back_to_its_checkpoint(
    run, number
):
    founder = run.found(described(3, FOREVER, stages=2))
    server, trainer = (
        run.join("server", "--role", "stage:1"),
        run.join("trainer", "--role", "trainer"),
    )
    assert trainer.comes_in()["role"] == "trainer"
    lost = run.join("lost", "--role", "stage:9")
    code, said = lost.ends()
    assert code == 2
    assert "'stage:9' is not a role in a run of 2 stages" in said["error"], said

    before = server.reaches(lambda status: sum(status["rounds"].values()) >= 5)
    left = checkpoint.load(Path(server.leaves(number)["checkpoint"]))
    assert left.folder.parent.name == "stage-1"
    assert round_of(left) >= before["last_round"]

    again = run.join("server", "--role", "stage:1")
    again.comes_in()
    again.reaches(lambda status: sum(status["rounds"].values()) >= 5)
    begun = again.events("stage")[-1]
    assert (begun["from"], begun["stage"]) == ("snapshot", 1)
    assert begun["round"] - round_of(left) <= 1
    for node in (trainer, again, founder):
        node.leaves()
    newest = again.saved(1)
    assert newest.step > left.step
    assert round_of(newest) > round_of(left)
    for node in (founder, trainer):
        work = node.status()["work"]
        assert (work["doubled"], work["in doubt"]) == (0, 0)
        assert work["microbatches"] > 0
