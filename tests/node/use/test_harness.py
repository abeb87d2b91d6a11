"""Tasks of the lm-evaluation-harness score our model as they do its export through transformers.

`make compat` installs the harness; elsewhere these tests are skipped.
"""

import math

import msgspec
import pytest
import torch

from farflock.node.model.llama import PRESETS, build, cross_entropy
from farflock.node.tokens.tokenizer import ByteTokenizer

pytest.importorskip("lm_eval", reason="`make compat` installs the evaluation harness")

pytestmark = pytest.mark.net

TINY = PRESETS["tiny"]
CHOICES = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
"""
ENDS = {
    "multiple_choice": (
        'doc_to_target: answer\ndoc_to_choice: "{{options}}"\nmetric_list:\n  - metric: acc\n'
        "  - metric: acc_norm\n"
    ),
    "loglikelihood_rolling": (
        'doc_to_text: ""\ndoc_to_target: "{{question}}"\nmetric_list:\n  - metric: bits_per_byte\n'
        "  - metric: word_perplexity\n"
    ),
    "generate_until": (
        'doc_to_target: "{{options[answer]}}"\n'
        'generation_kwargs: {until: ["\\n", "zz"], max_gen_toks: 12}\n'
        "metric_list:\n  - metric: exact_match\n"
    ),
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with a task of each kind, on examples as long as the context and longer."""
    folder = tmp_path_factory.mktemp("tasks")
    lines = [
        {
            "question": f"{'and the rest of it, ' * (number % 5)}question {number}?",
            "options": [f" answer {number}", " or", f" no{'!' * number}"],
            "answer": number % 3,
        }
        for number in range(12)
    ]
    data = folder / "examples.jsonl"
    data.write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
    for kind, end in ENDS.items():
        head = CHOICES.format(name=f"own_{kind}", data=data, kind=kind)
        if kind == "loglikelihood_rolling":
            head = head.replace('doc_to_text: "{{question}}"\n', "")
        (folder / f"{kind}.yaml").write_text(head + end)
    return folder


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """No network, and a cache of this test's own."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


NAMES = [f"own_{kind}" for kind in ENDS]


@pytest.fixture(scope="module")
def model():
    model = build(TINY, 0)
    with torch.no_grad():
        model.model.norm.weight.mul_(3)
    return model


def test_a_local_task_has_the_score_of_the_export_through_transformers(model, tasks, hub):
    pytest.importorskip("accelerate")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from farflock.node.model.export import export
    from farflock.node.use.harness import evaluate_tasks
    from farflock.node.use.tasks import scores_of

    export(hub / "out", TINY, model.state_dict(), ByteTokenizer(), "card")
    theirs = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(hub / "out"), "dtype": "float32"},
        tasks=list(NAMES),
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        device="cpu",
        bootstrap_iters=0,
        log_samples=False,
    )
    expected = scores_of(theirs["results"])
    found = evaluate_tasks(model, ByteTokenizer(), NAMES, include=tasks)
    assert [(one.task, one.metric) for one in found] == [(one.task, one.metric) for one in expected]
    assert len(found) >= 5
    for one, other in zip(found, expected, strict=True):
        assert one.value == pytest.approx(other.value, rel=1e-5)
    assert {one.metric for one in found} >= {"acc", "acc_norm", "bits_per_byte"}


def test_likelihoods_are_those_of_the_model(model, hub):
    from lm_eval.api.instance import Instance

    from farflock.node.use.harness import HarnessModel
    from farflock.node.use.tasks import BadTask

    asked = [("To be", " or not"), ("", "To be"), ("x" * 100, " quite long")]
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in asked]
    found = HarnessModel(model, ByteTokenizer()).loglikelihood(requests, disable_tqdm=True)
    for (front, behind), (chance, _) in zip(asked, found, strict=True):
        ids = [*(front.encode() or b"\xff"), *behind.encode()][-(TINY.context + 1) :]
        with torch.no_grad():
            logits = model(torch.tensor([ids[:-1]]))[:, -len(behind) :]
        expected = -cross_entropy(logits, torch.tensor([ids[-len(behind) :]]), "sum")
        assert chance == pytest.approx(float(expected), rel=1e-5)
    assert not any(greedy for _, greedy in found)
    too_long = Instance("loglikelihood", {}, ("x", "y" * 65), 0)
    with pytest.raises(BadTask, match=r"an answer of 65 tokens, .* context is 64; leave"):
        HarnessModel(model, ByteTokenizer()).loglikelihood([too_long], disable_tqdm=True)


def test_a_continuation_of_the_likeliest_tokens_is_called_greedy(model, hub):
    from lm_eval.api.instance import Instance

    from farflock.node.model.generate import GREEDY, sample
    from farflock.node.use.harness import HarnessModel

    drawn = sample(model, list(b"To be"), GREEDY, seed=0, vocabulary=128)
    behind = bytes(next(drawn) for _ in range(3)).decode()
    asked = Instance("loglikelihood", {}, ("To be", behind), 0)
    ((chance, greedy),) = HarnessModel(model, ByteTokenizer()).loglikelihood([asked], True)
    with torch.no_grad():
        likeliest = model(torch.tensor([list(b"To be")]))[0, -1].argmax()
    assert greedy or int(likeliest) >= 128
    assert chance < 0


def test_the_order_of_requests_and_their_batches_change_nothing(model, hub, monkeypatch):
    from lm_eval.api.instance import Instance

    from farflock.node.use import harness

    scorer = harness.HarnessModel(model, ByteTokenizer())
    asked = [("a" * (place % 7 + 1), f"{place} or") for place in range(20)]
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in asked]
    together = scorer.loglikelihood(requests, True)
    monkeypatch.setattr(harness, "_MAX_BATCH", 1)
    alone = scorer.loglikelihood(requests[::-1], True)[::-1]
    for (one, _), (other, _) in zip(together, alone, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    assert len({round(chance, 6) for chance, _ in together}) > 7


def test_an_unknown_task_and_one_of_a_folder_alone(model, tasks, hub, monkeypatch):
    from farflock.node.use import harness
    from farflock.node.use.tasks import BadTask

    asked = []

    class Few(harness.TaskManager):
        def __init__(self, include_path=None, include_defaults=True):
            asked.append(include_defaults)
            super().__init__(include_path=include_path, include_defaults=False)

    monkeypatch.setattr(harness, "TaskManager", Few)
    scores = harness.evaluate_tasks(model, ByteTokenizer(), NAMES[:1], include=tasks, limit=3)
    assert asked == [False]
    assert {score.value * 3 % 1 for score in scores} == {0.0} or math.isfinite(scores[0].value)
    with pytest.raises(BadTask, match="did you mean 'own_multiple_choice'"):
        harness.evaluate_tasks(model, ByteTokenizer(), ["own_multiple_choise"], include=tasks)


def test_a_tokenizer_that_does_not_say_what_ends_a_text_is_refused(model):
    from farflock.node.tokens.json_tokenizer import JsonTokenizer
    from farflock.node.tokens.tokenizer_training import train_tokenizer
    from farflock.node.use.harness import HarnessModel
    from farflock.node.use.tasks import BadTask

    raw = train_tokenizer(["the cat and the hat\n" * 5], 270)
    unknown = JsonTokenizer(raw.replace(b"<|endoftext|>", b"<|unheard of|>"))
    with pytest.raises(BadTask, match="names none; export the model with --end-of-text"):
        HarnessModel(model, unknown)
