"""A founder's [model] names a folder; a resolved one has its sizes and its weights' hash."""

import math

import msgspec
import pytest
from safetensors.torch import load_file, save_file
from worlds.folders.model_folder import EXPERTS, SMALL, SPLIT, write_model

from farflock.node.data.base_index import index_of
from farflock.node.data.index import root_of
from farflock.node.errors import Failure, RefusedByRun, Usage
from farflock.node.model.lora import LoraTerms, adapter_shapes
from farflock.node.run.manifest import load, model_folder, parse, resolve
from farflock.node.run.model_section import first_weights, require_founder
from farflock.node.state.weights_file import SINGLE_NAME, WeightsFolder
from farflock.swarm.roles import EVERY


@pytest.fixture
def folder(tmp_path):
    return write_model(tmp_path / "model")


def resolved(folder, **model):
    return resolve({"model": {"from": str(folder)} | model, "train": {"seq": 32}})


def test_a_folder_becomes_its_sizes_and_the_hash_of_its_weights(folder):
    manifest = resolved(folder)
    assert manifest.model.shape == manifest.plan().model == SMALL
    assert manifest.model.start == manifest.plan().start == WeightsFolder(folder, SMALL).hash


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
    assert manifest.plan().start is None
    assert "\nstart = " not in manifest.canonical().decode()
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
        ({"context": 65}, "model.context: 65: the model in {} has positions for 64 tokens; set it"),
        ({"start": "0" * 64}, "model.start: the weights in {} have another hash"),
        ({"from": 3}, "model.from: 3 is not a path; name a folder"),
        ({"from": ""}, "model.from: '' is not a path; name a folder"),
        ({"context": "long"}, "model.context"),
    ],
)
def test_what_does_not_agree_is_refused(folder, model, sentence):
    with pytest.raises(Usage) as caught:
        resolved(folder, **model)
    assert sentence.format(folder) in str(caught.value)


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
    with pytest.raises(Usage, match=r"model.from: .*1 tensors do not fit its configuration"):
        resolved(folder)


def test_a_vocabulary_smaller_than_the_datas_is_refused_before_weights_are_read(tmp_path):
    config = msgspec.structs.replace(SMALL, vocab_size=200)
    folder = write_model(tmp_path / "m", config)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(Usage, match=r"model.vocab_size: 200: the data has a vocabulary of 256"):
        resolved(folder)


def test_only_a_founder_with_the_very_weights_begins(folder, tmp_path):
    plan = resolved(folder).plan()
    assert first_weights(plan, folder).hash == plan.start
    with pytest.raises(
        Failure, match=r"the run cannot begin here: .* no folder with them is named"
    ):
        first_weights(plan, None)
    with pytest.raises(Failure, match=r"it starts from the weights .*, and .* holds"):
        first_weights(plan, write_model(tmp_path / "other", seed=3))
    with pytest.raises(Failure, match="it has no weights"):
        first_weights(plan, tmp_path)


STAGED = {"stages": 2, "batch": 4}


def staged(folder, **pipeline):
    model = {"from": str(folder), "tied": False}
    train = {"batch": 2, "seq": 32}
    return resolve({"model": model, "train": train, "pipeline": STAGED | pipeline})


def test_a_pipeline_starts_from_a_folder_if_its_founder_serves_all_stages(folder):
    assert staged(folder).plan().start is not None
    require_founder(EVERY, "replica")
    with pytest.raises(Usage, match="start it with --role replica; others may join in any role"):
        require_founder(0, "auto")


def test_a_pipeline_in_a_random_subspace_cannot_start_from_trained_weights(folder):
    with pytest.raises(
        Usage, match=r"model.start: the codec subspace:8 keeps weights in a random subspace"
    ):
        staged(folder, codec="subspace:8")


def test_a_model_with_experts_spells_out_its_router():
    manifest = resolve({"model": {"preset": "tiny", "experts": 4}, "train": {"seq": 32}})
    assert (manifest.model.experts_per_token, manifest.model.balance) == (2, 0.01)
    assert "\nbalance = 0.01\n" in manifest.canonical().decode()
    other = resolve({"model": {"preset": "tiny", "experts": 4, "balance": 0}, "train": {"seq": 32}})
    assert other.model.balance == 0
    assert parse(manifest.canonical()) == manifest


def test_the_balance_of_a_folders_model_may_be_another(tmp_path):
    folder = write_model(tmp_path / "m", EXPERTS)
    assert resolved(folder).model.shape == EXPERTS
    assert resolved(folder, balance=0.1).model.balance == 0.1


def test_experts_in_a_random_subspace_are_refused():
    model = {"preset": "tiny", "experts": 4, "tied": False}
    table = {"model": model, "train": {"batch": 2, "seq": 32}}
    with pytest.raises(Usage, match=r"model.experts: the codec subspace:8 keeps what layers add"):
        resolve(table | {"pipeline": STAGED | {"codec": "subspace:8"}})
    assert resolve(table | {"pipeline": STAGED}).model.experts == 4


LORA = {"r": 4, "alpha": 8.0}


def adapters_of(folder, **tables):
    return resolve(
        {
            "model": {"from": str(folder)},
            "train": {"batch": 2, "seq": 32, "lora": LORA} | tables.pop("train", {}),
        }
        | tables
    )


def test_a_run_of_adapters_names_its_base_and_the_files_of_that(tmp_path):
    folder = write_model(tmp_path / "model")
    manifest = adapters_of(folder)
    assert manifest.model.start == WeightsFolder(folder, SMALL).hash
    assert manifest.model.files == root_of(index_of(folder))
    assert manifest.train.lora == LoraTerms(r=4, alpha=8.0)
    assert parse(manifest.canonical()) == manifest
    assert manifest.plan().trained_values == sum(
        map(math.prod, adapter_shapes(SMALL, manifest.train.lora).values())
    )


def test_other_files_of_the_same_weights_are_another_run(tmp_path):
    first, second = (
        adapters_of(write_model(tmp_path / str(shards), shards=shards)).model for shards in (1, 3)
    )
    assert first.start == second.start
    assert first.files != second.files


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"pipeline": {"stages": 2, "batch": 4}}, r"train\.lora: the stages of a pipeline"),
        ({"train": {"lora": LORA | {"r": 0}}}, r"lora\.r is 0"),
        ({"train": {"lora": LORA | {"alpha": 0.0}}}, r"lora\.alpha is 0"),
        ({"train": {"lora": LORA | {"targets": ["q_pro"]}}}, "did you mean 'q_proj'"),
        ({"train": {"lora": LORA | {"rank": 4}}}, "there is no such key"),
        ({"train": {"lora": 8}}, r"train\.lora must be a table"),
    ],
)
def test_adapters_that_cannot_be_trained_are_refused(tmp_path, tables, said):
    folder = write_model(tmp_path / "model", SPLIT)
    with pytest.raises(Usage, match=said):
        adapters_of(folder, **tables)


def test_adapters_at_the_nets_of_experts_are_refused(tmp_path):
    folder = write_model(tmp_path / "model", EXPERTS)
    with pytest.raises(Usage, match=r"train\.lora: .*this model has experts in their place"):
        adapters_of(folder, train={"lora": LORA | {"targets": ["up_proj"]}})


def test_adapters_without_a_base_are_refused():
    with pytest.raises(Usage, match=r"\[model\] names none; write from = 'FOLDER'"):
        resolve({"train": {"lora": LORA}})


def test_files_without_adapters_are_refused_by_who_would_join(tmp_path):
    manifest = adapters_of(write_model(tmp_path / "model"))
    train = msgspec.structs.replace(manifest.train, lora=None)
    with pytest.raises(RefusedByRun, match=r"model\.files: it is for runs with train\.lora"):
        parse(msgspec.structs.replace(manifest, train=train).canonical())
