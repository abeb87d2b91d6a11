"""`farflock sim` of a run whose model is cut into stages."""

import json

import pytest
from worlds.card import CARD

MANIFEST = """
[run]
total_tokens = {tokens}
[model]
vocab_size = 256
dim = 16
layers = 2
heads = 2
kv_heads = 1
ffn_dim = 32
context = 32
tied = false
[train]
batch = 2
seq = 16
lr = 0.01
[pipeline]
stages = 2
batch = 4
[exchange]
view_s = 2.0
"""


@pytest.fixture
def manifest(tmp_path):
    def write(tokens):
        path = tmp_path / "run.toml"
        path.write_text(MANIFEST.format(tokens=tokens))
        return str(path)

    return write


def facts(farflock, *arguments):
    code, out, _ = farflock("sim", *arguments, "--json")
    assert code == 0, out
    return json.loads(out.splitlines()[-1])


def test_it_trains_and_the_same_seed_gives_the_same_state(farflock, manifest):
    path = manifest(640)
    first, again = (facts(farflock, path, "--peers", "5", "--step", "0.1") for _ in range(2))
    assert first == again
    assert first["rounds"] >= 5, "640 tokens in batches of 128"
    assert first["microbatches"] >= 16
    assert first["losses"][-1] < first["losses"][0]
    assert first["kills"] == 0


def test_stages_are_on_the_device_that_was_chosen(farflock, manifest, card):
    path = manifest(256)
    here = facts(farflock, path, "--peers", "3", "--step", "0.1")
    assert CARD.to_card_bytes == 0
    there = facts(farflock, path, "--peers", "3", "--step", "0.1", "--device", "auto")
    assert CARD.to_card_bytes > 0
    assert there["held_out_loss"] == pytest.approx(here["held_out_loss"], rel=2e-2)
    assert there["state_hash"] != here["state_hash"]


def test_a_dry_run_shows_the_role_of_each_process(farflock, manifest):
    described = facts(farflock, manifest(1280), "--peers", "5", "--dry-run")
    assert [part["stage"] for part in described["world"]["parts"]] == [0, 1, 0, 1, -2]
    assert [part["trains"] for part in described["world"]["parts"]] == [False] * 4 + [True]


def test_too_few_peers_are_refused(farflock, manifest):
    code, _, said = farflock("sim", manifest(1280), "--peers", "2")
    assert code == 2
    assert "leaves a stage without a server" in said


def test_full_replicas_train_next_to_the_others_or_alone(farflock, manifest):
    path = manifest(640)
    mixed = facts(farflock, path, "--peers", "5", "--replicas", "2", "--step", "0.1")
    assert mixed["rounds"] >= 5
    assert mixed["losses"][-1] < mixed["losses"][0]
    alone = facts(farflock, path, "--peers", "2", "--replicas", "2", "--step", "0.1")
    assert alone["rounds"] >= 5
    assert alone["microbatches"] >= 15
    assert alone["losses"][-1] < alone["losses"][0]


HOSTS = """
[pipeline.plan]
visited = 3
turns = 2
forward_s = [[0.1, 0.1], [0.1], [0.1, 0.1], [0.1]]
line_s = [[0.02, 0.02], [0.02], [0.02, 0.02], [0.02]]
"""


def test_paths_planned_by_what_was_measured_of_hosts_are_followed(farflock, manifest):
    path = manifest(640)
    with open(path, "a") as file:
        file.write(HOSTS)
    terms = ("pipeline.stages=4", "model.layers=4", "pipeline.policy=planned")
    options = [word for term in terms for word in ("--set", term)]
    said = facts(farflock, path, *options, "--peers", "9", "--step", "0.1", "--dry-run")["manifest"]
    assert "servers = [2, 1, 2, 1]" in said
    assert "forward_s" not in said
    found = facts(farflock, path, *options, "--peers", "9", "--step", "0.1")
    assert found["rounds"] >= 5
    assert found["microbatches"] >= 16
    assert found["losses"][-1] < found["losses"][0]


@pytest.mark.parametrize(
    ("peers", "replicas", "stages"),
    [(5, 1, [-1, 0, 1, 0, -2]), (3, 1, [-1, 0, -2]), (3, 2, [-1, -1, -2]), (2, 2, [-1, -1])],
)
def test_a_dry_run_says_which_peers_are_full_replicas(farflock, manifest, peers, replicas, stages):
    described = facts(
        farflock, manifest(1280), "--peers", str(peers), "--replicas", str(replicas), "--dry-run"
    )
    parts = described["world"]["parts"]
    assert [part["stage"] for part in parts] == stages
    assert [part["trains"] for part in parts] == [stage < 0 for stage in stages]


def test_more_replicas_than_peers_and_replicas_of_whole_models_are_refused(farflock, manifest):
    code, _, said = farflock("sim", manifest(1280), "--peers", "2", "--replicas", "3")
    assert code == 2
    assert "--replicas 3 is more than --peers 2" in said
    code, _, said = farflock("sim", "--replicas", "1")
    assert code == 2
    assert "--replicas needs a [pipeline] table" in said


def test_a_model_of_which_a_stage_has_died_out_is_not_measured_and_says_so(
    farflock, manifest, monkeypatch
):
    from farflock.node.simulate.pipeline import PipelineSimulation

    whole = PipelineSimulation.run

    async def without_the_last_stage(self):
        tale = await whole(self)
        for number in [
            number
            for number, node in self.nodes.items()
            if any(each.index == 1 for each in node.servings)
        ]:
            del self.nodes[number]
        return tale

    monkeypatch.setattr(PipelineSimulation, "run", without_the_last_stage)
    code, _, error = farflock("sim", manifest(256), "--peers", "5", "--step", "0.1")
    assert code == 1
    assert "the model cannot be evaluated: no server of the stage with" in error
