"""A saved model is measured on text that no peer trained on, if it can read it."""

import msgspec
import numpy as np
import pytest
from worlds.prepared import prepared

from farflock.node.data.folder import PreparedFolder
from farflock.node.errors import Failure, RefusedByRun, Usage
from farflock.node.model.corpus import BadCorpus, load_corpus
from farflock.node.model.data import BadData, evaluation_rows
from farflock.node.model.llama import PRESETS, build
from farflock.node.run.manifest import resolve
from farflock.node.state.saved_model import SavedModel
from farflock.node.tokens.json_tokenizer import JsonTokenizer
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.node.tokens.tokenizer_training import train_tokenizer
from farflock.node.use.held_out import held_out_text

TINY = PRESETS["tiny"]
TEXT = "the cat and the hat, and that is that: the cat sat. Ça va? 한글\n" * 20


def saved(folder, config=TINY, tokenizer=None, **meta):
    weights = dict(build(config, 5).named_parameters())
    return SavedModel(folder, config, weights, tokenizer or ByteTokenizer(), meta)


@pytest.fixture
def folder(tmp_path):
    """Prepared data with a held-out part of several documents."""
    (tmp_path / "texts").mkdir()
    for number in range(60):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number}: " + TEXT[: 40 + number])
    prepared(tmp_path / "texts", tmp_path / "made", held_out=0.3)
    return tmp_path / "made"


def test_the_held_out_part_of_a_prepared_folder_is_measured(folder, tmp_path):
    text = held_out_text(saved(tmp_path), folder, seq=16)
    content = PreparedFolder(folder)
    whole = np.concatenate([content.read("held-out", n) for n in range(content.shards("held-out"))])
    assert np.array_equal(text.rows, evaluation_rows(whole, 16, len(whole)))
    few = held_out_text(saved(tmp_path), folder, seq=16, sequences=5)
    assert few.rows.shape == (5, 17)
    assert text.name == f"the held-out part of {folder}"


def test_a_text_file_is_measured_whole(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    text = held_out_text(saved(tmp_path), tmp_path / "a.txt")
    assert text.seq == TINY.context
    raw, inputs = TEXT.encode(), text.rows[:, :-1]
    assert bytes(inputs.flatten().tolist()) == raw[: inputs.size]
    assert inputs.size + TINY.context >= len(raw)


def test_a_checkpoint_is_measured_on_what_its_run_held_out_as_the_run_trains(tmp_path):
    manifest = resolve({"model": {"preset": "tiny"}, "train": {"seq": 48}}).canonical().decode()
    text = held_out_text(saved(tmp_path, manifest=manifest), None, sequences=3)
    ids = ByteTokenizer().encode(load_corpus("shakespeare").held_out)
    assert np.array_equal(text.rows, evaluation_rows(ids, 48, 3))
    assert text.name == "the held-out part of shakespeare"


def test_a_model_that_does_not_say_its_text_needs_one(tmp_path):
    with pytest.raises(Usage, match="does not say what its model was trained on; name a folder"):
        held_out_text(saved(tmp_path), None)


def test_a_model_of_prepared_data_says_which_they_were(tmp_path, folder):
    table = {"model": {"preset": "tiny"}, "train": {"seq": 48}}
    manifest = resolve(table, prepared=[folder]).canonical().decode()
    root = PreparedFolder(folder).root[:16]
    with pytest.raises(Usage, match=f"was trained on the prepared data {root}…; name a folder"):
        held_out_text(saved(tmp_path, manifest=manifest), None)
    assert held_out_text(saved(tmp_path, manifest=manifest), folder).seq == 48


def test_a_manifest_of_another_version_matters_only_where_its_text_is_wanted(tmp_path, folder):
    later = saved(tmp_path, manifest="[run]\nflags = 3\n")
    assert held_out_text(later, folder).seq == TINY.context
    with pytest.raises(RefusedByRun, match="this version cannot take part in that run"):
        held_out_text(later, None)


def test_sequences_that_the_model_has_no_positions_for_are_refused(tmp_path, folder):
    with pytest.raises(Usage, match="the model has positions for 64 tokens; use 64 or less"):
        held_out_text(saved(tmp_path), folder, seq=65)


def test_data_of_another_tokenizer_and_too_many_tokens_are_refused(tmp_path, folder):
    other = JsonTokenizer(train_tokenizer([TEXT], 300))
    wide = msgspec.structs.replace(TINY, vocab_size=300)
    with pytest.raises(Failure, match=r"its tokenizer is bytes, and the model's .*…; prepare the"):
        held_out_text(saved(tmp_path, wide, other), folder)
    narrow = msgspec.structs.replace(TINY, vocab_size=200)
    with pytest.raises(Failure, match=r"has a vocabulary of 256 tokens: the model in .* has only"):
        held_out_text(saved(tmp_path, narrow), folder)
    (tmp_path / "a.txt").write_text(TEXT)
    with pytest.raises(Failure, match="its tokenizer has a vocabulary of 285 tokens"):
        held_out_text(saved(tmp_path, TINY, other), tmp_path / "a.txt")


def test_text_that_is_too_short_or_no_text_is_refused(tmp_path, folder):
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(BadData, match="5 held-out tokens are too few"):
        held_out_text(saved(tmp_path), tmp_path / "short.txt")
    (tmp_path / "none.bin").write_bytes(b"\xff\xfe\x00" * 500)
    with pytest.raises(BadCorpus, match="is not UTF-8"):
        held_out_text(saved(tmp_path), tmp_path / "none.bin")
    prepared(tmp_path / "texts", tmp_path / "all", held_out=0.0)
    with pytest.raises(BadData, match="0 held-out tokens are too few"):
        held_out_text(saved(tmp_path), tmp_path / "all")
