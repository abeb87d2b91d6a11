"""`farflock evaluate` without tasks measures what the run measures, and refuses what cannot be."""

import asyncio
import dataclasses
import json
import math
import shutil

import msgspec
import pytest
from worlds.folders.model_folder import SMALL, write_model
from worlds.prepared import documents_of, encoded, prepared

from farflock.node.assembly.checkpoints import CheckpointManager
from farflock.node.model.corpus import load_corpus
from farflock.node.model.data import evaluation
from farflock.node.model.evaluation import evaluate
from farflock.node.model.export import byte_level
from farflock.node.model.llama import PRESETS, build
from farflock.node.process.held_out import bring_held_out
from farflock.node.run.evaluation_section import EvaluationSection
from farflock.node.run.manifest import resolve
from farflock.node.state import checkpoint
from farflock.node.state.paths import RunFolder
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.node.use import held_out_loss
from farflock.swarm.compute import inline
from farflock.swarm.sim.virtual_time import run_virtual

TINY = PRESETS["tiny"]
TABLES = {"model": {"preset": "tiny"}, "train": {"seq": 32}, "evaluation": {"sequences": 8}}


def write_checkpoint(folder, manifest=None, **files):
    """A checkpoint of a fresh model, of the run with this manifest."""
    described = {} if manifest is None else {"manifest": manifest.canonical().decode()}
    files = {"config.json": msgspec.json.encode(TINY)} | files
    parts = {"model": dict(build(TINY, 5).named_parameters())}
    return checkpoint.save(folder / "saved", 3, parts, {"run": "ab12", **described}, files)


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of a run on the shipped corpus."""
    return write_checkpoint(tmp_path, resolve(TABLES))


@pytest.fixture
def measured(farflock):
    """A function that returns what the command says as JSON."""

    def run(*words):
        code, out, err = farflock("evaluate", *words, "--device", "cpu", "--json")
        assert code == 0, err
        (line,) = out.splitlines()
        return json.loads(line)

    return run


@pytest.fixture
def refused(farflock):
    """A function that returns the sentence with which the command ends, and its exit code."""

    def run(*words):
        code, out, err = farflock("evaluate", *words, "--device", "cpu")
        assert not out
        return code, err

    return run


def expected(tokens, seq=32, sequences=8):
    return evaluate(build(TINY, 5), *evaluation(tokens, seq, sequences))


@pytest.mark.ci_more
def test_it_is_what_the_run_said_of_that_checkpoint(bench, text, tmp_path, measured, monkeypatch):
    monkeypatch.setattr(asyncio, "to_thread", inline)
    manifest = resolve(TABLES)
    made = bench(text, period=4)
    made.plan = dataclasses.replace(made.plan, evaluation=EvaluationSection(1, 8))

    async def main():
        async with made.peer(0).running() as peer:
            node = made.node(peer)
            node.found()
            await bring_held_out(node, manifest, None)
            await node.run(640)
            terms = "a" * 32, manifest.canonical().decode(), 0.0
            keeper = CheckpointManager(node, RunFolder(tmp_path), *terms)
            await keeper.save()
            assert node.evaluator.newest.round == node.evaluator.applied
            return node.evaluator.newest

    said, found = run_virtual(main()), measured(tmp_path)
    assert found["loss"] == pytest.approx(said.loss, abs=1e-6)
    assert found["standard_error"] == pytest.approx(said.standard_error, abs=1e-6)
    assert (found["sequences"], found["seq"], found["tokens"]) == (8, 32, 256)


def test_the_result_is_said_in_words(farflock, saved):
    code, out, err = farflock("evaluate", saved, "--device", "cpu")
    assert (code, err) == (0, "")
    wanted = expected(ByteTokenizer().encode(load_corpus("shakespeare").held_out))
    first, second, third = out.splitlines()
    assert first == (
        f"held-out loss: {wanted.mean:.4f} ± {wanted.standard_error:.4f} nats per token"
    )
    bits = wanted.mean / math.log(2)
    assert second == f"perplexity: {math.exp(wanted.mean):,.2f}, {bits:.4f} bits per byte"
    assert third.startswith("measured on 256 tokens, in 8 sequences of 32, of shakespeare, in ")


def test_one_sequence_has_no_standard_error(farflock, saved, measured):
    assert measured(saved, "--sequences", "1")["standard_error"] is None
    assert "±" not in farflock("evaluate", saved, "--device", "cpu", "--sequences", "1")[1]


def test_other_data_other_lengths_and_all_of_the_text_are_measured(saved, tmp_path, measured):
    prepared(tmp_path / "data", held_out=documents_of(30, seed=77))
    tokens = encoded(documents_of(30, seed=77))
    found = measured(saved, "--data", tmp_path / "data", "--seq", "20", "--sequences", "all")
    wanted = expected(tokens, 20, 10**6)
    assert found["sequences"] == wanted.sequences == (len(tokens) - 1) // 20 > 100
    assert found["loss"] == pytest.approx(wanted.mean, abs=1e-6)
    assert found["data"] == str(tmp_path / "data")
    assert found["bits_per_byte"] > wanted.mean / math.log(2)  # ends of texts are no bytes


def test_the_data_of_the_run_are_taken_from_the_cache(tmp_path, measured, refused):
    root = prepared(tmp_path / "data")
    manifest = resolve(TABLES | {"data": {"from": str(tmp_path / "data")}})
    saved = write_checkpoint(tmp_path, manifest)
    code, said = refused(saved)
    assert code == 1
    assert f"the run's data is not on this machine: no copy of {root}" in said
    shutil.copytree(tmp_path / "data", tmp_path / "home" / "data" / root)
    wanted = expected(encoded(documents_of(40, seed=10_000)))
    assert measured(saved)["loss"] == pytest.approx(wanted.mean, abs=1e-6)


def test_a_hugging_face_folder_is_measured_too(tmp_path, measured, refused):
    folder = write_model(tmp_path / "model", SMALL)
    prepared(tmp_path / "data")
    assert "name a tokenizer.json" in refused(folder, "--data", tmp_path / "data")[1]
    (folder / "tokenizer.json").write_bytes(byte_level())
    found = measured(folder, "--data", tmp_path / "data")
    windows = evaluation(encoded(documents_of(40, seed=10_000)), SMALL.context, 64)
    wanted = evaluate(build(SMALL, 77), *windows)
    assert found["loss"] == pytest.approx(wanted.mean, abs=1e-6)
    assert found["bits_per_byte"] is not None
    code, said = refused(folder)
    assert code == 2
    assert "does not say what its model was trained on; name prepared data" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--seq", "65"), "--seq 65: the model has positions for 64 tokens; use 64 or less"),
        (("--sequences", "some"), "neither a number above 0 nor all"),
        (("--sequences", "0"), "neither a number above 0 nor all"),
        (("--limit", "3"), "--limit: it is for tasks, and none are named"),
        (("--fewshot", "0"), "--fewshot: it is for tasks"),
        (("--tasks", "own", "--seq", "3"), "--seq: tasks have a text of their own"),
    ],
)
def test_impossible_options_are_refused(saved, refused, words, message):
    code, said = refused(saved, *words)
    assert code == 2
    assert message in said


def test_text_that_the_model_cannot_read_is_refused(saved, tmp_path, refused):
    def said_of(checkpoint, name, **data):
        prepared(tmp_path / name, **data)
        code, said = refused(checkpoint, "--data", tmp_path / name)
        assert code == 1
        return said

    assert "none has no held-out text" in said_of(saved, "none", held_out=[])
    wide = said_of(saved, "wide", vocabulary=300)
    assert "wide has a vocabulary of 300 tokens: the model in" in wide
    other = write_checkpoint(tmp_path / "other", **{"tokenizer.json": b"{}"})
    said = said_of(other, "plain")
    assert f"plain cannot be read by the model in {other}: it has tokens of bytes, and" in said
    assert "the model reads tokenizer 44136fa355b3678a" in said
    assert "3 held-out tokens are too few" in said_of(saved, "few", held_out=["ab"])
    (tmp_path / "few" / "index.json").write_bytes(b"{}")
    assert refused(saved, "--data", tmp_path / "few")[0] == 3


def test_a_damaged_shard_is_refused(saved, tmp_path, refused):
    prepared(tmp_path / "data")
    for path in (tmp_path / "data" / "shards").iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    code, said = refused(saved, "--data", tmp_path / "data")
    assert code == 1
    assert "data is not all here: 1 of 1 shards are missing or damaged; name a whole" in said


def test_what_is_trained_on_need_not_be_here(saved, tmp_path, measured):
    prepared(tmp_path / "data", shards=2)
    index = json.loads((tmp_path / "data" / "index.json").read_bytes())
    (held_out,) = (shard["sha256"] for shard in index["sources"]["text"]["held_out"])
    shutil.rmtree(tmp_path / "data" / "pages")
    for path in (tmp_path / "data" / "shards").iterdir():
        if path.stem != held_out:
            path.unlink()
    wanted = expected(encoded(documents_of(40, seed=10_000)))
    assert measured(saved, "--data", tmp_path / "data")["loss"] == pytest.approx(wanted.mean)


def test_long_work_says_how_far_it_has_come_and_ends_on_ctrl_c(saved, farflock, monkeypatch):
    from farflock.node.cli.commands import evaluate as command

    monkeypatch.setattr(command, "QUIET_S", 0.0)
    monkeypatch.setattr(held_out_loss, "AT_ONCE", 2 * 32)
    code, _, err = farflock("evaluate", saved, "--device", "cpu")
    assert code == 0
    assert err.splitlines() == [f"evaluating: {share}%" for share in (25, 50, 75, 100)]

    def interrupt(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(held_out_loss, "sequence_means", interrupt)
    code, out, err = farflock("evaluate", saved, "--device", "cpu")
    assert (code, out) == (130, "")
    assert "interrupted" in err
