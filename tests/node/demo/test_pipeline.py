"""The demo of a pipeline without its processes: what it trains, which servers it kills and when,
and what it makes of the checkpoints that are left."""

import signal
from types import SimpleNamespace

import msgspec
import pytest
import torch
from worlds.peers import node_status

from farflock.node.assembly.checkpoints import folder_of
from farflock.node.demo import pipeline as pipeline_demo
from farflock.node.demo import report as demo_report
from farflock.node.demo.demo import Child
from farflock.node.demo.pipeline import (
    MIDDLE,
    SERVERS,
    STAGES,
    PipelineDemo,
    assembled,
    pipeline_manifest,
    report,
)
from farflock.node.errors import Failure
from farflock.node.model.llama import build
from farflock.node.model.stage_tensors import cut, names_of
from farflock.node.run.manifest import parse
from farflock.node.state import checkpoint
from farflock.node.state.history import History
from farflock.node.state.paths import RunFolder

STATUS = node_status(
    peer="peer", step=5, tokens=100, total_tokens=100, members=("peer",), sent_bytes=700
)
WORK = {"microbatches": 16, "in doubt": 1, "doubled": 0}


class Process:
    """One that lives until it is killed."""

    def __init__(self):
        self.signals = []

    def send_signal(self, number):
        self.signals.append(number)

    def poll(self):
        return -signal.SIGKILL if signal.SIGKILL in self.signals else None


class Watched(PipelineDemo):
    """A demo that starts no real processes."""

    def start(self, name, command):
        self.children.append(Child(name, self.folder / name, Process()))
        self.commands = {**getattr(self, "commands", {}), name: command}
        return self.children[-1]


@pytest.fixture
def demo(tmp_path):
    made = Watched(tmp_path, tmp_path / "run.toml", STAGES * SERVERS, lambda moment: None)
    made.start("founder", ["run", "run.toml"])
    for name, arguments in made.others():
        made.start(name, ["join", "invite", *arguments])
    return made


def killed(demo):
    return [child.name for child in demo.children if child.killed]


# what is trained


@pytest.mark.parametrize("steps", [20, 390])
def test_it_trains_on_n_batches_and_its_middle_stage_can_be_made_from_its_neighbours(
    steps,
):
    manifest = pipeline_manifest(steps)
    pipeline, model = manifest.pipeline_plan(), manifest.plan().model
    assert len(pipeline.stages) == STAGES
    assert len({len(span) for span in pipeline.stages}) == 1
    assert 0 < MIDDLE < STAGES - 1
    assert manifest.run.total_tokens == steps * pipeline.batch_tokens
    assert manifest.exchange.start_peers == STAGES * SERVERS
    held = [names_of(model, span) for span in pipeline.stages]
    assert all(names < set(dict(build(model, 0).named_parameters())) for names in held), (
        "a stage holds the whole model"
    )
    assert parse(manifest.canonical()) == manifest


# the processes, and those that are killed


def test_each_stage_has_as_many_servers_and_the_founder_is_one_of_the_first(demo):
    roles = [demo.commands[child.name][-1] for child in demo.children[1:]]
    assert sorted(["stage:0", *roles]) == [
        f"stage:{stage}" for stage in range(STAGES) for _ in range(SERVERS)
    ]
    assert len({child.name for child in demo.children}) == STAGES * SERVERS
    assert all(
        child.name.rstrip("b").endswith(demo.commands[child.name][-1][-1])
        for child in demo.children[1:]
    )


def test_one_server_is_killed_then_a_whole_stage_and_two_newcomers_choose_their_stages_themselves(
    demo,
):
    for share in (0.0, 0.1, 0.24):
        demo.let_happen(share, "invite")
    assert not demo.news
    for _ in range(3):
        demo.let_happen(0.26, "invite")
    assert killed(demo) == ["server 2b"]
    assert not demo.newcomers()
    for _ in range(3):
        demo.let_happen(0.46, "invite")
    assert sorted(killed(demo)) == ["server 1", "server 1b", "server 2b"]
    assert [child.name for child in demo.newcomers()] == ["newcomer"]
    for share in (0.56, 0.8, 1.0):
        demo.let_happen(share, "invite")
    assert [child.name for child in demo.newcomers()] == ["newcomer", "newcomer b"]
    assert [demo.commands[child.name] for child in demo.newcomers()] == [["join", "invite"]] * 2
    assert demo.killed == 3
    assert all(
        child.process.signals == ([signal.SIGKILL] if child.killed else [])
        for child in demo.children
    )
    assert len(demo.survivors()) == 5
    assert len(demo.news) == 5


def test_in_a_run_that_is_looked_at_late_all_events_happen_one_by_one(demo):
    for _ in range(4):
        demo.let_happen(1.0, "invite")
    assert (demo.killed, len(demo.newcomers())) == (3, 2)
    stages = [
        demo.commands[child.name][-1] for child in demo.survivors() if child not in demo.newcomers()
    ]
    assert sorted(stages) == ["run.toml", "stage:0", "stage:2"]


# what is left


@pytest.fixture
def left(tmp_path):
    """A function that writes the checkpoint of a stage by a child, with this number of tokens, and
    returns the child."""
    plan, pipeline = pipeline_manifest(20).plan(), pipeline_manifest(20).pipeline_plan()

    def write(name, *stages, tokens=100, filled=None, killed=False):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "status.json").write_bytes(
            msgspec.json.encode(msgspec.structs.replace(STATUS, work=WORK))
        )
        for stage in stages:
            tensors = cut(
                dict(build(plan.model, 99).named_parameters()), plan.model, pipeline.stages[stage]
            )
            if filled is not None:
                tensors = {name: torch.full_like(x, filled) for name, x in tensors.items()}
            where = folder_of(RunFolder(folder), f"stage:{stage}")
            groups = {"model": {name: x.detach() for name, x in tensors.items()}}
            checkpoint.save(where, tokens, groups, {"tokens": tokens})
        return Child(name, folder, SimpleNamespace(returncode=0, poll=lambda: 0), killed)

    return write


def test_the_model_is_put_together_from_the_newest_checkpoint_of_each_stage_that_a_survivor_left(
    left,
):
    manifest = pipeline_manifest(20)
    plan, pipeline = manifest.plan(), manifest.pipeline_plan()
    children = [
        left("a", 0, tokens=90, filled=1.0),
        left("b", 0, tokens=100, filled=2.0),
        left("c", 1, tokens=70, filled=3.0),
        left("d", 1, tokens=99, filled=4.0, killed=True),
        left("e", 2, tokens=80, filled=5.0),
        left("f"),  # a trainer
        left("e", 1, tokens=60, filled=6.0),  # it served another stage before
    ]
    model = dict(assembled(plan, len(pipeline.stages), children).named_parameters())
    for span, value in zip(pipeline.stages, (2.0, 3.0, 5.0), strict=True):
        for name in names_of(plan.model, span):
            assert bool((model[name] == value).all()), name


def test_a_stage_without_a_checkpoint_is_a_failure_that_names_it(left):
    children = [left("a", 0), left("b", 1, killed=True), left("c", 2)]
    with pytest.raises(Failure, match="stage 1 left no checkpoint"):
        assembled(pipeline_manifest(20).plan(), STAGES, children)


def test_the_report_holds_the_pipelines_model_against_the_unsplit_one_on_the_founders_microbatches(
    left, tmp_path, monkeypatch
):
    monkeypatch.setattr(demo_report, "HELD_OUT_SEQUENCES", 8)
    monkeypatch.setattr(demo_report, "SAMPLE_TOKENS", 5)
    arms = []

    def train_arm(plan, tokens, streams, peers, steps, progress):
        arms.append((plan.accumulate, streams, peers, steps))
        progress(1.0)
        return build(plan.model, 98)

    monkeypatch.setattr(pipeline_demo, "train_baseline", train_arm)
    children, shown = [left("a", 0, 1, 2), left("b", 1)], []
    for child in children:
        with History.open(child.folder, lambda: 0.0) as history:
            history.metrics(1, loss=3.0)
    facts = report(
        pipeline_manifest(24),
        tmp_path,
        children,
        (),
        lambda name, share: shown.append((name, share)),
    )
    assert arms == [(8, ["peer"], 1, 24), (8, ["peer"], STAGES * SERVERS, 4)]
    assert shown == [("unsplit", 1.0), ("alone", 1.0)]
    assert facts["unsplit_loss"] == facts["ddp_loss"] == facts["none_loss"]
    assert facts["held_out_loss"] != facts["unsplit_loss"]
    assert (facts["microbatches"], facts["microbatches_lost"], facts["microbatches_doubled"]) == (
        16,
        1,
        0,
    )
    assert facts["bytes_per_peer"] == 700
    assert facts["tokens"] == 24 * 8 * 4 * 64
    written = checkpoint.load(checkpoint.latest(tmp_path / "checkpoints").folder).groups["model"]
    expected = assembled(pipeline_manifest(24).plan(), STAGES, children)
    assert all(torch.equal(written[name], x) for name, x in expected.named_parameters())
