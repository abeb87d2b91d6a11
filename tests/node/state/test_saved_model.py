"""A checkpoint becomes a model again, or says in one sentence why it cannot."""

import msgspec
import pytest
import torch
from worlds.folders.model_folder import SMALL, weights_of, write_model

from farflock.node.model.llama import PRESETS, Llama, ModelConfig, build
from farflock.node.model.lora import LoraTerms, adapter_shapes
from farflock.node.state import checkpoint
from farflock.node.state.base_note import BASE_NAME, BaseNote
from farflock.node.state.checkpoint import CheckpointCorrupt, CheckpointError
from farflock.node.state.saved_model import open_model
from farflock.node.state.weights_file import WeightsFolder
from farflock.node.tokens.tokenizer import ByteTokenizer

TINY = PRESETS["tiny"]


def write(folder, step=3, *, seed=0, files=None, parts=None):
    model = build(TINY, seed)
    files = {"config.json": msgspec.json.encode(TINY)} if files is None else files
    parts = {"model": dict(model.named_parameters())} if parts is None else parts
    return checkpoint.save(folder, step, parts, {"run": "ab12", "step": step, "tokens": 640}, files)


def test_the_model_computes_what_the_saved_one_computed(tmp_path):
    saved = open_model(write(tmp_path, seed=5))
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(saved.model(tokens), build(TINY, 5)(tokens))
    assert saved.meta == {"run": "ab12", "step": 3, "tokens": 640}
    assert not saved.model.training


def test_weights_are_mapped_until_the_model_is_asked_for(tmp_path, monkeypatch):
    saved, built = open_model(write(tmp_path, seed=5)), []
    monkeypatch.setattr(
        "farflock.node.state.saved_model.model_of_shape",
        lambda config: built.append(config) or build(TINY, 0),
    )
    assert all(
        torch.equal(x, saved.weights[name]) for name, x in build(TINY, 5).state_dict().items()
    )
    assert saved.config == TINY
    assert not built
    assert saved.model is saved.model
    assert len(built) == 1


@pytest.mark.parametrize(
    ("name", "raw", "template"),
    [
        ("chat_template.jinja", b"{{ 1 }}", "{{ 1 }}"),
        ("tokenizer_config.json", b'{"chat_template": "{{ 2 }}", "other": [1]}', "{{ 2 }}"),
        ("tokenizer_config.json", b"{}", None),
    ],
)
def test_a_checkpoint_may_bring_a_chat_template(tmp_path, name, raw, template):
    files = {"config.json": msgspec.json.encode(TINY), name: raw}
    assert open_model(write(tmp_path, files=files)).chat_template == template


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("chat_template.jinja", b"\xff"),
        ("tokenizer_config.json", b"[" * 100_000),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "a", "template": "b"}]}'),
    ],
)
def test_a_chat_template_that_cannot_be_read_is_refused(tmp_path, name, raw):
    saved = open_model(write(tmp_path, files={"config.json": msgspec.json.encode(TINY), name: raw}))
    with pytest.raises(CheckpointCorrupt, match=r"chat template of .* cannot be read"):
        saved.chat_template  # noqa: B018 - read for what it raises


@pytest.mark.parametrize("inside", [".", "checkpoints"])
def test_a_folder_of_checkpoints_stands_for_its_newest(tmp_path, inside):
    write(tmp_path / inside, 1, seed=1)
    newest = write(tmp_path / inside, 20, seed=2)
    assert open_model(tmp_path).folder.samefile(newest)


def test_a_broken_newest_checkpoint_is_passed_over(tmp_path):
    whole = write(tmp_path, 1)
    (write(tmp_path, 2) / "model.safetensors").write_bytes(b"short")
    assert open_model(tmp_path).folder == whole


def test_if_none_is_whole_it_is_said(tmp_path):
    (write(tmp_path, 2) / "config.json").unlink()
    with pytest.raises(CheckpointCorrupt, match=r"no checkpoint in .* is intact"):
        open_model(tmp_path)


def test_a_folder_without_checkpoints_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no checkpoint at .*step-N"):
        open_model(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("files", "parts", "reason"),
    [
        ({}, None, "holds no config.json"),
        ({"config.json": b"{"}, None, "does not describe a model"),
        ({"config.json": b'{"dim": -1}'}, None, "does not describe a model"),
        ({"config.json": b"[" * 100_000}, None, "does not describe a model"),
        ({"config.json": msgspec.json.encode(PRESETS["demo"])}, None, "do not fit its config.json"),
        (None, {"other": {"x": torch.zeros(1)}}, "holds no model"),
    ],
)
def test_a_checkpoint_that_is_no_model_is_refused(tmp_path, files, parts, reason):
    with pytest.raises(CheckpointCorrupt, match=reason):
        open_model(write(tmp_path, files=files, parts=parts))


def test_an_absurd_size_is_refused_before_memory_is_taken(tmp_path):
    huge = msgspec.structs.replace(
        TINY, vocab_size=2**32, dim=65_536, layers=1_024, heads=1, kv_heads=1, ffn_dim=262_144
    )
    with pytest.raises(CheckpointCorrupt, match=r"do not fit its config\.json"):
        open_model(write(tmp_path, files={"config.json": msgspec.json.encode(huge)}))


def words(count):
    """A tokenizer.json of so many words and two special tokens behind them."""
    names = [*(f"w{place}" for place in range(count)), "</s>", "<stop>"]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": names.index(name), "content": name, "special": True, **special}
        for name in names[-2:]
    ]
    model = {
        "type": "WordLevel",
        "vocab": {name: at for at, name in enumerate(names)},
        "unk_token": "w0",
    }
    return msgspec.json.encode({"version": "1.0", "added_tokens": added, "model": model})


def with_tokenizer(folder, raw, **meta):
    files = {"config.json": msgspec.json.encode(TINY), "tokenizer.json": raw}
    parts = {"model": dict(build(TINY, 0).named_parameters())}
    return checkpoint.save(folder, 3, parts, {"run": "ab12", **meta}, files)


def test_without_a_file_tokens_are_bytes(tmp_path):
    assert isinstance(open_model(write(tmp_path)).tokenizer, ByteTokenizer)


def test_a_checkpoint_brings_its_tokenizer_and_the_end_of_text(tmp_path):
    pytest.importorskip("tokenizers")
    raw = words(100)
    found = open_model(with_tokenizer(tmp_path / "usual", raw)).tokenizer
    assert (found.raw, found.end_of_text) == (raw, 100)
    told = open_model(with_tokenizer(tmp_path / "told", raw, end_of_text=101))
    assert told.tokenizer.end_of_text == 101
    assert told.tokenizer is told.tokenizer


@pytest.mark.parametrize(
    ("raw", "meta", "reason"),
    [
        (words(255), {}, r"has 257 tokens, its model only 256; use a checkpoint with"),
        (b"{}", {}, r"tokenizer.json is not a tokenizer.json"),
        (words(9), {"end_of_text": 11}, "has no token 11"),
        (words(9), {"end_of_text": 2**70}, "has no token"),
        (words(9), {"end_of_text": "</s>"}, "which is no token's id"),
        (words(9), {"end_of_text": True}, "which is no token's id"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path, raw, meta, reason):
    pytest.importorskip("tokenizers")
    saved = open_model(with_tokenizer(tmp_path, raw, **meta))
    with pytest.raises(CheckpointError, match=reason):
        saved.tokenizer  # noqa: B018 - read for what it raises


def test_bytes_do_not_fit_a_smaller_vocabulary(tmp_path):
    small = msgspec.structs.replace(TINY, vocab_size=255)
    files = {"config.json": msgspec.json.encode(small)}
    parts = {"model": dict(build(small, 0).named_parameters())}
    saved = open_model(write(tmp_path, files=files, parts=parts))
    with pytest.raises(CheckpointError, match="has 256 tokens, its model only 255"):
        saved.tokenizer  # noqa: B018 - read for what it raises


CUT = ModelConfig(
    vocab_size=256, dim=24, layers=3, heads=2, kv_heads=1, ffn_dim=48, context=64, tied=False
)
STAGES = (range(1), range(1, 2), range(2, 3))


def write_stage(folder, index, *, step=3, seed=0, config=CUT, run="ab12", tokens=640, more=None):
    weights = dict(build(config, seed, STAGES[index]).named_parameters())
    files = {"config.json": msgspec.json.encode(config), **(more or {})}
    meta = {"run": run, "step": step, "tokens": tokens}
    return checkpoint.save(folder / f"stage-{index}", step, {"model": weights}, meta, files)


@pytest.mark.parametrize("inside", [".", "checkpoints"])
def test_the_newest_checkpoints_of_all_stages_make_up_the_model(tmp_path, inside):
    for index in range(3):
        write_stage(tmp_path / inside, index, step=1, seed=9)
        write_stage(tmp_path / inside, index, step=5 + index, seed=4, tokens=640 - 8 * index)
    saved = open_model(tmp_path)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(saved.model(tokens), build(CUT, 4)(tokens))
    assert saved.meta == {"run": "ab12", "step": 7, "tokens": 624}, (
        "as far as the stage that is behind"
    )
    assert saved.folder.samefile(tmp_path / inside)


def test_stages_bring_their_tokenizer(tmp_path):
    pytest.importorskip("tokenizers")
    for index in range(3):
        write_stage(tmp_path, index, more={"tokenizer.json": words(9)})
    assert open_model(tmp_path).tokenizer.raw == words(9)


def test_a_stage_that_is_missing_is_named_with_the_remedy(tmp_path):
    for index in (0, 2):
        write_stage(tmp_path, index)
    with pytest.raises(
        CheckpointError, match=r"stage-0, stage-2 .* lack \d+ .*model.layers.1.*; copy the other"
    ):
        open_model(tmp_path)


def test_stages_of_several_runs_or_models_make_up_none(tmp_path):
    for index in range(3):
        write_stage(tmp_path / "runs", index, run=f"run{index // 2}")
        write_stage(
            tmp_path / "models", index, config=msgspec.structs.replace(CUT, context=64 + index)
        )
        raw = words(9 + index // 2)
        write_stage(tmp_path / "tokenizers", index, more={"tokenizer.json": raw})
    for name in ("runs", "models", "tokenizers"):
        with pytest.raises(CheckpointError, match="belong to several runs"):
            open_model(tmp_path / name)


def test_stages_of_another_cut_that_contradict_each_other_make_up_none(tmp_path):
    for index in range(3):
        write_stage(tmp_path, index)
    whole = dict(build(CUT, 7).named_parameters())
    files = {"config.json": msgspec.json.encode(CUT)}
    checkpoint.save(tmp_path / "stage-7", 3, {"model": whole}, {"run": "ab12", "tokens": 1}, files)
    with pytest.raises(
        CheckpointCorrupt, match=r"do not make up a model: .* differs between two pieces"
    ):
        open_model(tmp_path)


def test_whole_checkpoints_beside_stages_come_first_and_other_folders_are_not_looked_at(tmp_path):
    write_stage(tmp_path, 0)
    (tmp_path / "stage-x").mkdir()
    newest = write(tmp_path, 4, seed=2)
    assert open_model(tmp_path).folder == newest


LORA = LoraTerms(r=2, alpha=4.0, targets=("q_proj", "up_proj"))


def adapters(seed=9):
    made = torch.Generator().manual_seed(seed)
    shapes = adapter_shapes(SMALL, LORA)
    return {name: torch.randn(shape, generator=made) * 0.1 for name, shape in shapes.items()}


def write_adapters_of(place, base, **changed):
    note = {"lora": LORA, "start": WeightsFolder(base, SMALL).hash, "folder": str(base)} | changed
    files = {"config.json": msgspec.json.encode(SMALL), BASE_NAME: BaseNote(**note).encode()}
    return write(place, files=files, parts={"model": adapters()})


@pytest.fixture
def base(tmp_path):
    return write_model(tmp_path / "base")


def test_adapters_become_a_model_again_with_their_base(tmp_path, base):
    saved = open_model(write_adapters_of(tmp_path / "run", base))
    whole = Llama(SMALL)
    whole.load_state_dict(saved.whole)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        computed, merged = saved.model(tokens), whole(tokens)
        torch.testing.assert_close(computed, merged, rtol=1e-4, atol=1e-5)
        alone = Llama(SMALL)
        alone.load_state_dict(weights_of(SMALL))
        assert (computed - alone(tokens)).abs().max() > 0.01
    assert saved.weights.keys() == adapter_shapes(SMALL, LORA).keys()


def test_a_base_that_has_moved_can_be_named(tmp_path, base):
    folder = write_adapters_of(tmp_path / "run", base, folder=str(tmp_path / "gone"))
    with pytest.raises(CheckpointError, match=r"is not there .*name its folder with --base"):
        open_model(folder)
    assert open_model(folder, base).base.lora == LORA


def test_another_model_is_not_taken_for_the_base(tmp_path, base):
    folder = write_adapters_of(tmp_path / "run", base)
    with pytest.raises(CheckpointError, match="holds other weights than those beside which"):
        open_model(folder, write_model(tmp_path / "other", seed=5))


@pytest.mark.parametrize(
    "raw",
    [b"", b"{}", b"[1]", b'{"lora": {"r": 0, "alpha": 1}, "start": "", "folder": ""}', b"\xff"],
)
def test_a_note_that_cannot_be_read_is_refused(tmp_path, raw):
    files = {"config.json": msgspec.json.encode(SMALL), BASE_NAME: raw}
    folder = write(tmp_path, files=files, parts={"model": adapters()})
    with pytest.raises(CheckpointCorrupt, match="does not describe adapters"):
        open_model(folder)


def test_adapters_that_the_note_does_not_describe_are_refused(tmp_path, base):
    folder = write_adapters_of(tmp_path / "run", base, lora=LoraTerms(r=3, alpha=4.0))
    with pytest.raises(CheckpointCorrupt, match=r"do not fit its base\.json"):
        open_model(folder)
