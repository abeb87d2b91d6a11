"""`farflock evaluate` prints the scores of tasks, and says in words what it lacks."""

import json
import sys

import msgspec
import pytest

from farflock.node.model.llama import PRESETS, build
from farflock.node.state import checkpoint

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


@pytest.fixture
def saved(tmp_path):
    files = {"config.json": msgspec.json.encode(TINY)}
    parts = {"model": dict(build(TINY, 0).named_parameters())}
    return checkpoint.save(tmp_path / "saved", 3, parts, {"run": "ab12"}, files)


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "tasks"
    folder.mkdir()
    example = {"question": "2 + 2 =", "options": [" 4", " 5"], "answer": 0}
    (folder / "examples.jsonl").write_bytes(msgspec.json.encode(example))
    (folder / "own.yaml").write_text(TASK.format(data=folder / "examples.jsonl"))
    return folder


def test_scores_of_a_local_task_are_printed(farflock, saved, tasks):
    words = ("evaluate", saved, "--tasks", "own", "--include-path", tasks, "--device", "cpu")
    code, out, _ = farflock(*words)
    assert code == 0
    assert out.splitlines()[0].split() == ["task", "metric", "value", "error"]
    assert out.splitlines()[1].split()[:2] == ["own", "acc"]
    code, out, _ = farflock(*words, "--json")
    (said,) = map(json.loads, out.splitlines())
    assert said["checkpoint"] == str(saved)
    assert [(one["task"], one["metric"]) for one in said["scores"]] == [("own", "acc")]
    assert said["scores"][0]["value"] in (0.0, 1.0)


def test_without_the_harness_the_package_is_named(farflock, saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "farflock.node.use.harness", raising=False)
    code, _, err = farflock("evaluate", saved, "--tasks", "own", "--device", "cpu")
    assert code == 1
    assert 'pip install "farflock[eval]"' in err


def test_no_task_is_refused(farflock, saved):
    code, _, err = farflock("evaluate", saved, "--tasks", " , ")
    assert code == 2
    assert "it names no task" in err
