"""`farflock evaluate` prints a loss with its error, and says in words what it lacks."""

import json

import msgspec
import pytest

from farflock.node.model import evaluation
from farflock.node.model.export import ExportForm, export
from farflock.node.model.llama import PRESETS, build
from farflock.node.run.manifest import resolve
from farflock.node.state import checkpoint
from farflock.node.tokens.tokenizer import ByteTokenizer

TINY = PRESETS["tiny"]
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
