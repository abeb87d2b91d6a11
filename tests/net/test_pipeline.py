"""A pipeline of real processes trains as the unsplit model does.

A process that is killed, refused or stopped costs no other node a microbatch.
"""

import collections
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from worlds.node_processes import (
    BATCH,
    FOREVER,
    SEQ,
    STEP,
    described,
    fallen,
    one_state,
    round_of,
)

from farflock.node.assembly.text import corpus_text
from farflock.node.demo.baselines import train_baseline
from farflock.node.model.corpus import load_corpus
from farflock.node.model.data import evaluation
from farflock.node.model.evaluation import losses, unigram_loss
from farflock.node.model.llama import build
from farflock.node.model.stage_tensors import joined
from farflock.node.state import checkpoint
from farflock.node.tokens.tokenizer import ByteTokenizer

pytestmark = pytest.mark.net


@pytest.fixture(scope="module")
def text():
    corpus, tokenizer = load_corpus("shakespeare"), ByteTokenizer()
    return tokenizer.encode(corpus.train), tokenizer.encode(corpus.held_out)


def held_out_loss(model, text):
    return float(losses(model, *evaluation(text[1], SEQ, 200)).mean())


def assembled(plan, pieces):
    model = build(plan.model, plan.run_seed)
    model.load_state_dict(joined(pieces))
    return model


def require_one_curve(nodes):
    """Require that the nodes know the same evaluations, of a loss that falls."""
    told = [
        {(event["round"], event["by"]): event["loss"] for event in node.events("evaluation")}
        for node in nodes
    ]
    common = sorted(set.intersection(*map(set, told)))
    assert len(common) >= 2, told
    assert all(each[place] == told[0][place] for each in told for place in common)
    assert told[0][common[-1]] < told[0][common[0]]
    assert not any(node.events("difference") for node in nodes)


@pytest.mark.ci_more
def test_six_processes_train_a_model_that_none_of_them_holds_as_the_whole_one_is_trained(run, text):
    steps = 40
    # about half of a step's gradients may be a step late
    manifest = described(6, steps, window=BATCH // 2)
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
    require_one_curve(run.nodes)

    states = []
    for stage in range(3):
        saved = [
            node.saved(stage)
            for node, role in zip(run.nodes, roles, strict=True)
            if role == f"stage:{stage}"
        ]
        states.append(one_state(saved))
    whole = held_out_loss(assembled(plan, states), text)
    trained = corpus_text(load_corpus("shakespeare"), ByteTokenizer()).train()
    unsplit = train_baseline(
        replace(plan, accumulate=BATCH),
        trained,
        [status["peer"]],
        1,
        steps,
        lambda share: None,
    )
    untrained = held_out_loss(build(plan.model, plan.run_seed), text)
    best = held_out_loss(unsplit, text)
    assert whole < unigram_loss(*text, 256) < untrained
    assert abs(whole - best) < 0.05 * (untrained - best)


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("noloco", {"period": 4}),
        ("streaming", {"period": 4, "fragments": 1, "overlap": 1}),
        ("sparseloco", {"period": 4}),
    ],
)
def test_three_stages_lose_a_server_take_one_in_and_one_moves_to_a_stage_that_nobody_serves(
    run, method, options
):
    founder = run.found(described(6, FOREVER, method=method, options=options))
    run.servers(3, first=2)
    founder.reaches(lambda status: status["tokens"] >= 10 * STEP)
    run.serving(2)[-1].kill()
    founder.reaches(lambda status: len(status["members"]) == len(run.alive()))
    newcomer = run.join("newcomer")
    newcomer.comes_in()
    left = newcomer.reaches(lambda status: sum(status["rounds"].values()) >= 20)

    before = {node: node.status()["role"] for node in run.alive()}
    for victim in run.serving(1):
        victim.kill()
    work = founder.reaches(lambda status: status["tokens"] >= left["tokens"] + 30 * STEP)["work"]
    lost = work.get("lost with servers", 0)  # none where the merge itself counts
    assert lost < 20 * BATCH, "a life of a server has a few, until it merges"
    after = {node: node.status()["role"] for node in run.alive()}
    moved = [role for node, role in after.items() if role != before[node]]
    assert (moved, sorted(set(after.values()))) == (["stage:1"], ["stage:0", "stage:1", "stage:2"])
    for node in reversed(run.alive()):
        node.leaves()
    work = founder.status()["work"]
    assert (work["doubled"], work["in doubt"]) == (0, 0)
    assert fallen(founder) > 0.5
    streams = {event["stream"] for event in newcomer.events("round")}
    assert len(streams) == (1 if method == "sparseloco" else 2), "it counted and merged"


@pytest.mark.long
def test_where_servers_have_hardly_any_room_no_node_waits_for_ever(run):
    """E11: servers that hold some of their room while they wait for others' stop each other."""
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


@pytest.mark.long
def test_a_server_and_then_a_whole_stage_are_killed_and_a_newcomer_takes_the_stage_up(run):
    """The run has no end of its own: on a busy machine it could come before the newcomer."""
    founder = run.found(described(6, FOREVER))
    run.servers(3)  # not of the first stage: no server could leave another stage for the lost one
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
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.long),
    ],
)
def test_an_unknown_role_is_refused_and_a_node_that_left_resumes_from_its_checkpoint(run, number):
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


@pytest.mark.ci_more
def test_after_a_power_cut_all_nodes_come_back_at_their_stages_in_whichever_order(run):
    founder = run.found(described(4, FOREVER, stages=2))
    run.servers(2, first=2)
    roles = {node.folder.name: node.comes_in()["role"] for node in run.nodes}
    before = founder.reaches(
        lambda status: (
            status["tokens"] >= 10 * STEP
            and all(list(node.folder.glob("checkpoints/*/step-*")) for node in run.nodes)
        )
    )["tokens"]
    for node in run.nodes:
        node.kill()
    begun = {node.folder.name: len(list(node.events("stage"))) for node in run.nodes}
    back = [run.join(name) for name in sorted(roles, reverse=True) if name != "founder"]
    first = back[0]
    waiting = first.reaches(
        lambda status: status["pid"] == first.process.pid and "waits for" in status["doing"]
    )
    assert waiting["role"] == roles[back[0].folder.name]
    back.append(run.start("founder", "run", run.folder / "run.toml"))
    for node in back:
        found = node.comes_in()
        assert found["role"] == roles[node.folder.name]
        node.reaches(lambda status: status["tokens"] >= before + 10 * STEP)
    assert len({tuple(node.status()["branch"]) for node in back}) == 1
    later = [list(node.events("stage"))[begun[node.folder.name] :] for node in back]
    assert all(later), "each life says how its stage begins"
    kinds = {event["from"] for events in later for event in events}
    assert kinds <= {"its own state", "another server's state"}
