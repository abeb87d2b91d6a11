"""A founder's [model] names a folder; a resolved one has its sizes and its weights' hash."""

import re

import msgspec
import pytest
from safetensors.torch import load_file, save_file
from worlds.model_folder import QWEN3, SMALL, SPLIT, write_model

from farflock.node.errors import Failure, Usage
from farflock.node.model.weights_folder import SINGLE_NAME, WeightsFolder
from farflock.node.run.composition import Uncomposable
from farflock.node.run.manifest import load, model_folder, parse, resolve
from farflock.node.run.model_section import first_weights
from farflock.node.tokens.tokenizer_training import train_tokenizer


@pytest.fixture
def folder(tmp_path):
    return write_model(tmp_path / "model")


def resolved(folder, **model):
    return resolve({"model": {"from": str(folder)} | model, "train": {"seq": 32}})


def test_a_folder_becomes_its_sizes_and_the_hash_of_its_weights(folder):
    manifest = resolved(folder)
    assert manifest.model.shape == manifest.plan().model == SMALL
    assert (manifest.model.architecture, manifest.model.licence) == ("llama", "apache-2.0")
    assert manifest.model.weights == manifest.plan().weights == WeightsFolder(folder, SMALL).hash


def test_a_resolved_manifest_has_no_path_and_is_read_back(folder):
    manifest = resolved(folder)
    assert str(folder) not in manifest.canonical().decode()
    assert "from" not in manifest.canonical().decode()
    assert parse(manifest.canonical()) == manifest


def test_the_same_weights_elsewhere_are_the_same_run(folder, tmp_path):
    other = write_model(tmp_path / "elsewhere", shards=1)
    assert resolved(folder).hash() == resolved(other).hash()
    assert resolved(folder).hash() != resolved(write_model(tmp_path / "c", seed=8)).hash()


def test_a_folder_is_relative_to_the_manifests_own(folder, tmp_path):
    (tmp_path / "run.toml").write_text('[model]\nfrom = "model"\n[train]\nseq = 32\n')
    assert load(tmp_path / "run.toml") == resolved(folder)
    assert model_folder(tmp_path / "run.toml") == folder
    assert model_folder(tmp_path / "run.toml", ["model.from='/there'"]).as_posix() == "/there"
    assert model_folder(None) is None


def test_a_run_without_a_folder_starts_from_its_seed():
    manifest = resolve({"model": {"preset": "tiny"}, "train": {"seq": 32}})
    assert manifest.plan().weights is None
    assert "\nweights = " not in manifest.canonical().decode()
    assert first_weights(manifest.plan(), None) is None


def test_sizes_that_agree_may_be_given_too(folder):
    assert resolved(folder, layers=2, vocab_size=256) == resolved(folder)
    assert resolved(folder, context=48).model.context == 48
    assert resolved(folder, tied=False).model.shape == SPLIT


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ({"layers": 3}, "model.layers: 3: the model in {} has 2; leave out model.layers"),
        ({"preset": "tiny"}, "model.preset: model.from has the sizes already; leave out one"),
        ({"context": 65}, "it has positions for 64 tokens, and a context of 65 is wanted; set"),
        ({"licence": "a b"}, "model.licence"),
        ({"weights": "0" * 64}, "model.weights: the weights in {} have another hash"),
        ({"from": 3}, "model.from: 3 is not a path; name a folder"),
        ({"from": ""}, "model.from: '' is not a path; name a folder"),
        ({"context": "long"}, "model.context"),
    ],
)
def test_what_does_not_agree_is_refused(folder, model, sentence):
    with pytest.raises(Usage) as caught:
        resolved(folder, **model)
    assert sentence.format(folder) in str(caught.value)


def test_a_founder_may_name_the_licence_and_a_card_without_one_says_so(folder):
    assert resolved(folder, licence="llama3.2").model.licence == "llama3.2"
    (folder / "README.md").unlink()
    assert resolved(folder).model.licence == "unstated"


def test_a_model_of_another_architecture_is_spelt_out(tmp_path):
    manifest = resolved(write_model(tmp_path / "m", QWEN3))
    assert manifest.model.shape == QWEN3
    assert 'architecture = "qwen3"\nhead_width = 16\n' in manifest.canonical().decode()
    assert parse(manifest.canonical()) == manifest


def test_a_head_of_its_own_cannot_be_dropped(tmp_path):
    folder = write_model(tmp_path / "m", SPLIT)
    with pytest.raises(Usage, match=r"model.tied: the model in .* has a head of its own; leave"):
        resolved(folder, tied=True)


def test_a_folder_that_is_no_native_model_is_refused(tmp_path):
    with pytest.raises(Usage, match=r"model.from: .* is no folder of a Hugging Face model"):
        resolved(tmp_path)
    (tmp_path / "config.json").write_text('{"auto_map": {}, "model_type": "gpt2"}')
    with pytest.raises(Usage, match=r"model.from: .*'gpt2', which is not native; choose"):
        resolved(tmp_path)


def test_weights_that_do_not_fit_the_configuration_are_refused(tmp_path):
    folder = write_model(tmp_path / "m", shards=1)
    weights = load_file(folder / SINGLE_NAME)
    del weights["model.norm.weight"]
    save_file(weights, folder / SINGLE_NAME)
    with pytest.raises(Usage, match=r"model.from: .*1 tensors are missing"):
        resolved(folder)


def test_a_vocabulary_smaller_than_the_datas_is_refused_before_weights_are_read(tmp_path):
    config = msgspec.structs.replace(SMALL, vocab_size=200)
    folder = write_model(tmp_path / "m", config)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(Usage, match=r"model.vocab_size: 200: the tokenizer 'bytes' has 256 tokens"):
        resolved(folder)


def test_a_tokenizer_has_to_fit_the_vocabulary_of_the_folder_which_stays_as_it_is(
    folder, tmp_path, monkeypatch
):
    monkeypatch.setenv("FARFLOCK_HOME", str(tmp_path / "home"))
    tok = tmp_path / "tok.json"
    tok.write_bytes(train_tokenizer(["to be, or not to be, that is the question"], 270))

    def founded(model):
        data = {"tokenizer": str(tok)}
        return resolve({"model": {"from": str(model)}, "data": data, "train": {"seq": 32}})

    with pytest.raises(Usage) as caught:
        founded(folder)
    assert re.fullmatch(
        r"model.vocab_size: 256: the tokenizer .* has 270 tokens; "
        r"set it to 270 or more, or name the model's own tokenizer",
        str(caught.value),
    )
    larger = msgspec.structs.replace(SMALL, vocab_size=300)
    manifest = founded(write_model(tmp_path / "larger", larger))
    assert (manifest.model.vocab_size, manifest.data.vocabulary) == (300, 270)
    assert parse(manifest.canonical()) == manifest


def test_only_a_founder_with_the_very_weights_begins(folder, tmp_path):
    plan = resolved(folder).plan()
    assert first_weights(plan, folder).hash == plan.weights
    with pytest.raises(
        Failure, match=r"the run cannot begin here: .* no folder with them is named"
    ):
        first_weights(plan, None)
    with pytest.raises(Failure, match=r"it starts from the weights .*, and .* holds"):
        first_weights(plan, write_model(tmp_path / "other", seed=3))
    with pytest.raises(Failure, match="it has no weights"):
        first_weights(plan, tmp_path)


STAGED = {"stages": 2, "batch": 4}


def staged(folder, *, tied=False, **pipeline):
    model = {"from": str(folder), "tied": tied}
    train = {"batch": 2, "seq": 32}
    return resolve({"model": model, "train": train, "pipeline": STAGED | pipeline})


def test_a_pipeline_starts_from_a_folder(folder):
    assert staged(folder).plan().weights == resolved(folder, tied=False).model.weights
    with pytest.raises(Uncomposable, match=r"set model\.tied to false"):
        staged(folder, tied=True)


def test_a_pipeline_in_a_random_subspace_cannot_start_from_trained_weights(folder):
    with pytest.raises(
        Usage, match=r"model.weights: the codec subspace:8 keeps weights in a random subspace"
    ):
        staged(folder, codec="subspace:8")
