"""The loss of a saved model is that of transformers on the same tokens, of which there are those
that no peer trained on."""

import math

import msgspec
import numpy as np
import pytest
import torch
from worlds.prepared import prepared

from farflock.node.errors import Failure, RefusedByRun, Usage
from farflock.node.model.corpus import BadCorpus, load_corpus
from farflock.node.model.data import BadData, evaluation_rows, inputs_and_targets
from farflock.node.model.evaluation import evaluate
from farflock.node.model.export import ExportForm, export
from farflock.node.model.llama import PRESETS, build
from farflock.node.run.manifest import resolve
from farflock.node.state.saved_model import SavedModel, open_model
from farflock.node.tokens.json_tokenizer import JsonTokenizer
from farflock.node.tokens.token_bytes import bytes_of_tokens
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.node.tokens.tokenizer_training import train_tokenizer
from farflock.node.use import held_out
from farflock.node.use.held_out import HeldOutText, Windows, held_out_text, measure_held_out

TINY = PRESETS["tiny"]
TEXT = "the cat and the hat, and that is that: the cat sat. Ça va? 한글\n" * 20
LENGTHS = bytes_of_tokens(ByteTokenizer())


@pytest.fixture(autouse=True)
def unsynced(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def saved(folder, config=TINY, tokenizer=None, **meta):
    weights = dict(build(config, 5).named_parameters())
    return SavedModel(folder, config, weights, tokenizer or ByteTokenizer(), meta)


@pytest.fixture(scope="module")
def plays():
    ids = ByteTokenizer().encode(load_corpus("shakespeare").held_out)
    return HeldOutText(evaluation_rows(ids, 32, 10), "plays")


@pytest.fixture
def folder(tmp_path):
    """Prepared data with a held-out part of several documents."""
    (tmp_path / "texts").mkdir()
    for number in range(60):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number}: " + TEXT[: 40 + number])
    prepared(tmp_path / "texts", tmp_path / "made", held_out=0.3)
    return tmp_path / "made"


def test_batches_change_nothing_and_progress_ends_at_the_whole(plays, monkeypatch):
    shares, model = [], build(TINY, 5)
    monkeypatch.setattr(held_out, "AT_ONCE", 3 * 32)
    found = measure_held_out(model, plays, LENGTHS, shares.append)
    whole = evaluate(model, *inputs_and_targets(plays.rows))
    assert found.estimate.mean == pytest.approx(whole.mean, abs=1e-6)
    assert found.estimate.standard_error == pytest.approx(whole.standard_error, abs=1e-6)
    assert (found.estimate.sequences, found.tokens) == (10, 320)
    assert found.perplexity == pytest.approx(math.exp(whole.mean))
    assert found.bits_per_byte == pytest.approx(whole.mean / math.log(2), rel=1e-6)  # plain text
    assert shares == pytest.approx([0.3, 0.6, 0.9, 1.0])


def test_a_huge_loss_has_an_infinite_perplexity(plays):
    model = build(TINY, 5)
    with torch.no_grad():
        model.get_parameter("model.norm.weight").mul_(1e6)
    found = measure_held_out(model, plays, None)
    assert found.estimate.mean > 1000
    assert (found.perplexity, found.bits_per_byte) == (math.inf, None)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_loss_of_an_export_is_that_of_transformers_on_the_same_tokens(
    tmp_path, plays, kind, dtype
):
    transformers = pytest.importorskip("transformers")
    config = msgspec.structs.replace(TINY, architecture=kind)
    weights, form = build(config, 5).state_dict(), ExportForm(dtype)
    export(tmp_path / "out", config, weights, ByteTokenizer(), "card", form=form)
    found = measure_held_out(open_model(tmp_path / "out").model, plays, LENGTHS)
    load = transformers.AutoModelForCausalLM.from_pretrained
    other = load(tmp_path / "out", dtype=torch.float32)
    ids = torch.from_numpy(plays.rows.astype(np.int64))
    with torch.no_grad():
        losses = torch.stack([other(row[None], labels=row[None]).loss for row in ids]).double()
    assert found.estimate.mean == pytest.approx(float(losses.mean()), abs=1e-4)
    assert found.estimate.standard_error == pytest.approx(
        float(losses.std()) / math.sqrt(10), abs=1e-4
    )


def test_the_held_out_part_of_a_prepared_folder_is_measured(folder, tmp_path):
    from farflock.node.data.folder import PreparedFolder

    text = held_out_text(saved(tmp_path), folder, Windows(16, None))
    content = PreparedFolder(folder)
    whole = np.concatenate([content.read("held-out", n) for n in range(content.shards("held-out"))])
    assert np.array_equal(text.rows, evaluation_rows(whole, 16, len(whole)))
    few = held_out_text(saved(tmp_path), folder, Windows(16, 5))
    assert few.rows.shape == (5, 17)
    assert text.name == f"the held-out part of {folder}"


def test_a_text_file_is_measured_whole(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    text = held_out_text(saved(tmp_path), tmp_path / "a.txt", Windows())
    assert text.seq == TINY.context
    raw, inputs = TEXT.encode(), text.rows[:, :-1]
    assert bytes(inputs.flatten().tolist()) == raw[: inputs.size]
    assert inputs.size + TINY.context >= len(raw)


def test_a_checkpoint_is_measured_on_what_its_run_held_out_as_the_run_trains(tmp_path):
    manifest = resolve({"model": {"preset": "tiny"}, "train": {"seq": 48}}).canonical().decode()
    text = held_out_text(saved(tmp_path, manifest=manifest), None, Windows(sequences=3))
    ids = ByteTokenizer().encode(load_corpus("shakespeare").held_out)
    assert np.array_equal(text.rows, evaluation_rows(ids, 48, 3))
    assert text.name == "the held-out part of shakespeare"


def test_a_model_that_does_not_say_its_text_needs_one(tmp_path):
    with pytest.raises(Usage, match="does not say what its model was trained on; name a folder"):
        held_out_text(saved(tmp_path), None, Windows())


def test_a_manifest_of_another_version_matters_only_where_its_text_is_wanted(tmp_path, folder):
    later = saved(tmp_path, manifest="[run]\nflags = 3\n")
    assert held_out_text(later, folder, Windows()).seq == TINY.context
    with pytest.raises(RefusedByRun, match="this version cannot take part in that run"):
        held_out_text(later, None, Windows())


def test_sequences_that_the_model_has_no_positions_for_are_refused(tmp_path, folder):
    with pytest.raises(Usage, match="the model has positions for 64 tokens; use 64 or less"):
        held_out_text(saved(tmp_path), folder, Windows(65))


def test_data_of_another_tokenizer_and_too_many_tokens_are_refused(tmp_path, folder):
    other = JsonTokenizer(train_tokenizer([TEXT], 300))
    wide = msgspec.structs.replace(TINY, vocab_size=300)
    with pytest.raises(Failure, match=r"its tokenizer is bytes, and the model's .*…; prepare the"):
        held_out_text(saved(tmp_path, wide, other), folder, Windows())
    narrow = msgspec.structs.replace(TINY, vocab_size=200)
    with pytest.raises(Failure, match=r"has a vocabulary of 256 tokens: the model in .* has only"):
        held_out_text(saved(tmp_path, narrow), folder, Windows())
    (tmp_path / "a.txt").write_text(TEXT)
    with pytest.raises(Failure, match="its tokenizer has a vocabulary of 285 tokens"):
        held_out_text(saved(tmp_path, TINY, other), tmp_path / "a.txt", Windows())


def test_text_that_is_too_short_or_no_text_is_refused(tmp_path, folder):
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(BadData, match="5 held-out tokens are too few"):
        held_out_text(saved(tmp_path), tmp_path / "short.txt", Windows())
    (tmp_path / "none.bin").write_bytes(b"\xff\xfe\x00" * 500)
    with pytest.raises(BadCorpus, match="is not UTF-8"):
        held_out_text(saved(tmp_path), tmp_path / "none.bin", Windows())
    prepared(tmp_path / "texts", tmp_path / "all", held_out=0.0)
    with pytest.raises(BadData, match="0 held-out tokens are too few"):
        held_out_text(saved(tmp_path), tmp_path / "all", Windows())


@pytest.mark.usefixtures("card")
def test_an_accelerator_measures_what_the_cpu_does(plays):
    from farflock.node.model.device import choose

    place = choose("card").place
    there = measure_held_out(build(TINY, 5).to(place), plays, None)
    here = measure_held_out(build(TINY, 5), plays, None)
    assert there.estimate.mean == pytest.approx(here.estimate.mean, rel=1e-4)
