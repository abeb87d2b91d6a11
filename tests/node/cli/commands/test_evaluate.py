"""`farflock evaluate` prints a loss with its error, and says in words what it lacks."""

import json
import sys

import msgspec
import pytest

from farflock.node.model import evaluation
from farflock.node.model.export import ExportForm, export
from farflock.node.model.llama import PRESETS, build
from farflock.node.run.manifest import resolve
from farflock.node.state import checkpoint
from farflock.node.tokens.tokenizer import ByteTokenizer

TINY = PRESETS["tiny"]
TASK = """\
task: own
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
doc_to_choice: "{{{{options}}}}"
metric_list:
  - metric: acc
"""
MANIFEST = resolve({"model": {"preset": "tiny"}, "train": {"seq": 32}}).canonical().decode()


@pytest.fixture
def saved(tmp_path):
    files = {"config.json": msgspec.json.encode(TINY)}
    parts = {"model": dict(build(TINY, 0).named_parameters())}
    meta = {"run": "ab12", "manifest": MANIFEST}
    return checkpoint.save(tmp_path / "home", 3, parts, meta, files)


@pytest.fixture
def exported(tmp_path):
    weights = build(TINY, 0).state_dict()
    export(tmp_path / "out", TINY, weights, ByteTokenizer(), "card", form=ExportForm("bf16"))
    return tmp_path / "out"


@pytest.fixture
def plays(tmp_path):
    (tmp_path / "plays.txt").write_text("To be, or not to be, that is the question.\n" * 40)
    return tmp_path / "plays.txt"


def evaluated(farflock, *words):
    code, out, err = farflock("evaluate", *words, "--device", "cpu", "--json")
    assert code == 0, err
    return json.loads(out), err


def test_a_checkpoint_is_measured_on_the_held_out_part_of_its_run(farflock, saved):
    found, err = evaluated(farflock, saved.parent, "--sequences", 9)
    assert found["model"] == str(saved)
    assert found["data"] == "the held-out part of shakespeare"
    assert (found["tokens"], found["sequences"], found["seq"]) == (288, 9, 32)
    assert 5 < found["loss"] < 6
    assert 0 < found["standard_error"] < 1
    assert "evaluating: 100%" in err


def test_an_export_is_measured_on_a_text_as_its_checkpoint_but_for_roundings(
    farflock, saved, exported, plays
):
    words = ("--data", plays, "--seq", 40, "--sequences", 0)
    here, _ = evaluated(farflock, saved, *words)
    there, _ = evaluated(farflock, exported, *words)
    assert there["loss"] == pytest.approx(here["loss"], rel=1e-3)
    assert there["loss"] != here["loss"]
    assert there["bits_per_byte"] == pytest.approx(here["bits_per_byte"], rel=1e-3)
    assert there["sequences"] == here["sequences"] == (plays.stat().st_size - 1) // 40
    assert evaluated(farflock, exported, *words)[0] == there, "the same each time"


def test_people_read_a_sentence(farflock, exported, plays):
    code, out, _ = farflock("evaluate", exported, "--data", plays, "--device", "cpu")
    assert code == 0
    first, second = out.splitlines()
    assert first.startswith("loss 5.")
    assert " nats a token, " in first
    assert " bits a byte, perplexity " in first
    assert second.endswith(f"sequences of 64, of {plays}")


def test_one_sequence_has_no_error(farflock, exported, plays):
    found, _ = evaluated(farflock, exported, "--data", plays, "--sequences", 1)
    assert found["standard_error"] is None
    code, out, _ = farflock("evaluate", exported, "--data", plays, "--sequences", 1)
    assert code == 0
    assert "±" not in out


def test_an_export_goes_on_as_a_checkpoint_does_when_sampled(farflock, exported):
    code, out, _ = farflock("generate", exported, "--tokens", 5, "--device", "cpu", "--json")
    assert code == 0
    assert json.loads(out)["checkpoint"] == str(exported)


def test_an_interrupted_evaluation_ends_in_a_sentence(farflock, exported, plays, monkeypatch):
    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluation, "losses", interrupted)
    code, _, err = farflock("evaluate", exported, "--data", plays, "--device", "cpu")
    assert code == 130
    assert err.strip() == "farflock: interrupted; everything that was running has stopped"


@pytest.mark.parametrize(
    ("words", "exit_code", "sentence"),
    [
        (["{}/none"], 1, "there is no checkpoint at"),
        (["{}/out"], 2, "--data: {}/out does not say what its model was trained on"),
        (["{}/out", "--data", "{}/none"], 2, "Path '{}/none' does not exist"),
        (["{}/out", "--data", "{}/home"], 1, "name a folder that `farflock data prepare` made"),
        (["{}/out", "--data", "{}/plays.txt", "--seq", "65"], 2, "--seq 65: the model has"),
        (["{}/out", "--tasks", " , "], 2, "--tasks: it names no task; write it as"),
        (["{}/out", "--tasks", "a", "--seq", "5"], 2, "--seq: tasks have a text of their own"),
        (["{}/out", "--limit", "5"], 2, "--limit: it is for tasks, and none are named"),
        (["{}/out", "--data", "{}/plays.txt", "--device", "tpu"], 2, "--device tpu"),
    ],
)
def test_what_cannot_be_done_is_said_with_the_remedy(
    farflock, saved, exported, plays, tmp_path, words, exit_code, sentence
):
    code, _, err = farflock("evaluate", *(word.format(tmp_path) for word in words))
    assert code == exit_code
    assert sentence.format(tmp_path) in err
    assert len(err.splitlines()) == 1


def test_without_the_harness_the_package_is_named(farflock, saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "farflock.node.use.harness", raising=False)
    code, _, err = farflock("evaluate", saved, "--tasks", "own", "--device", "cpu")
    assert code == 2
    assert "--tasks: the package lm_eval is not installed; run `pip install 'farflock[eval]" in err


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A folder with a task of a few examples; `make compat` has what runs it."""
    pytest.importorskip("lm_eval")
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "tasks"
    folder.mkdir()
    examples = [
        {"question": f"{number} + 2 =", "options": [f" {number + 2}", " 5", "1"], "answer": answer}
        for number in range(10)
        for answer in range(3)
    ]
    (folder / "examples.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, examples)))
    (folder / "own.yaml").write_text(TASK.format(data=folder / "examples.jsonl"))
    return folder


@pytest.mark.net
def test_scores_of_a_local_task_are_printed(farflock, saved, tasks):
    words = ("evaluate", saved, "--tasks", "own", "--include-path", tasks, "--device", "cpu")
    code, out, _ = farflock(*words)
    assert code == 0
    assert out.splitlines()[0].split() == ["task", "metric", "value", "error"]
    assert out.splitlines()[1].split()[:2] == ["own", "acc"]
    code, out, _ = farflock(*words, "--json")
    (said,) = map(json.loads, out.splitlines())
    assert said["model"] == str(saved)
    assert [(one["task"], one["metric"]) for one in said["scores"]] == [("own", "acc")]
    assert 0 <= said["scores"][0]["value"] <= 1


@pytest.mark.net
def test_a_task_has_one_score_through_transformers_and_by_the_command(farflock, exported, tasks):
    pytest.importorskip("accelerate")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    theirs = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(exported), "dtype": "float32"},
        tasks=["own"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        device="cpu",
        bootstrap_iters=0,
        log_samples=False,
    )
    words = ("evaluate", exported, "--tasks", "own", "--include-path", tasks, "--device", "cpu")
    code, out, _ = farflock(*words, "--json")
    assert code == 0
    (found,) = json.loads(out.splitlines()[-1])["scores"]
    assert 0 < found["value"] < 1
    assert found["value"] == theirs["results"]["own"]["acc,none"]
