"""Weights of a folder: the same hash however they are stored, and no file that lies is believed."""

import json
import struct

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from worlds.model_folder import QWEN2, QWEN3, SMALL, SPLIT, weights_of, write_model

from farflock.node.model import weights_folder
from farflock.node.model.hf_config import BadModelFolder
from farflock.node.model.llama import build
from farflock.node.model.weights_folder import (
    INDEX_NAME,
    MAX_WEIGHTS_HEAD_BYTES,
    SINGLE_NAME,
    WeightsFolder,
    initial,
    licence_in,
)

NORM = "model.norm.weight"


@pytest.fixture
def folder(tmp_path):
    return write_model(tmp_path / "model")


def equal(model, weights):
    found = dict(model.named_parameters())
    return found.keys() == weights.keys() and all(
        torch.equal(found[name], weight) for name, weight in weights.items()
    )


@pytest.mark.parametrize(
    "config", [SMALL, SPLIT, QWEN2, QWEN3], ids=["tied", "untied", "qwen2", "qwen3"]
)
@pytest.mark.parametrize("shards", [1, 3])
def test_a_model_begins_with_the_weights_of_its_folder(tmp_path, monkeypatch, config, shards):
    monkeypatch.setattr(weights_folder, "PIECE_VALUES", 7)  # tensors come in many pieces
    weights = WeightsFolder(write_model(tmp_path / "m", config, shards=shards), config)
    assert equal(initial(config, 1, weights), weights_of(config))
    assert not equal(initial(config, 1, None), weights_of(config))


def test_a_stage_begins_with_its_part_of_the_weights(tmp_path):
    weights = WeightsFolder(write_model(tmp_path / "m", SPLIT), SPLIT)
    for span in (range(1), range(1, 2)):
        assert equal(
            initial(SPLIT, 1, weights, span),
            {name: x.detach() for name, x in build(SPLIT, 77, span).named_parameters()},
        )


def test_the_hash_is_of_the_weights_and_not_of_the_files(tmp_path):
    coarse = {name: x.bfloat16().float() for name, x in weights_of(SMALL).items()}
    kinds = [(torch.float32, 1), (torch.float32, 4), (torch.bfloat16, 2)]
    hashes = {
        WeightsFolder(
            write_model(tmp_path / f"{n}", shards=shards, dtype=dtype, weights=coarse), SMALL
        ).hash
        for n, (dtype, shards) in enumerate(kinds)
    }
    assert len(hashes) == 1
    assert WeightsFolder(write_model(tmp_path / "fine"), SMALL).hash not in hashes


def test_a_change_of_one_value_changes_the_hash(tmp_path):
    folder = write_model(tmp_path / "m", shards=1)
    before = WeightsFolder(folder, SMALL).hash
    weights = load_file(folder / SINGLE_NAME)
    weights[NORM][3] += 1e-3
    save_file(weights, folder / SINGLE_NAME)
    assert WeightsFolder(folder, SMALL).hash != before


def test_a_tied_model_can_get_a_head_of_its_own(tmp_path):
    weights = WeightsFolder(write_model(tmp_path / "m", SMALL), SPLIT)
    model = initial(SPLIT, 1, weights)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_a_tied_model_ignores_a_head_and_old_angles(tmp_path):
    spare = {
        "lm_head.weight": torch.ones(3),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6),
    }
    plain = WeightsFolder(write_model(tmp_path / "plain"), SMALL)
    more = write_model(tmp_path / "more", weights=weights_of(SMALL) | spare)
    assert WeightsFolder(more, SMALL).hash == plain.hash


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({NORM: None}, "1 tensors are missing (model.norm.weight); save"),
        (
            {NORM: torch.ones(5)},
            "1 tensors have another shape (model.norm.weight ((5,) in place of",
        ),
        (
            {f"model.extra{n}.bias": torch.ones(5) for n in range(5)},
            "5 tensors belong to no part of the model (model.extra0.bias, model.extra1.bias, "
            "model.extra2.bias, …); save",
        ),
        ({NORM: torch.ones(24).double()}, "is of type 'F64', and weights are F32, F16, BF16"),
    ],
    ids=["missing", "shape", "unknown", "type"],
)
def test_other_tensors_are_refused(tmp_path, changed, sentence):
    weights = {name: x for name, x in (weights_of(SMALL) | changed).items() if x is not None}
    folder = write_model(tmp_path / "m")
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file(weights, folder / SINGLE_NAME)
    with pytest.raises(BadModelFolder, match="; save the model again") as caught:
        WeightsFolder(folder, SMALL)
    assert sentence in str(caught.value)


def test_values_that_are_not_finite_are_refused(tmp_path):
    weights = weights_of(SMALL) | {NORM: torch.full((24,), torch.nan)}
    opened = WeightsFolder(write_model(tmp_path / "m", weights=weights), SMALL)
    with pytest.raises(BadModelFolder, match="holds NaN or infinity; take the weights of an"):
        opened.hash  # noqa: B018 - it reads the files


def test_a_folder_without_weights_says_what_it_has(tmp_path):
    with pytest.raises(BadModelFolder, match="it has no weights"):
        WeightsFolder(tmp_path, SMALL)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(BadModelFolder, match="it has pickled weights, which may run code"):
        WeightsFolder(tmp_path, SMALL)


@pytest.mark.parametrize(
    "file", ["../model.safetensors", "/etc/passwd", "sub/a.safetensors", "a.bin", "..safetensors"]
)
def test_an_index_cannot_name_files_elsewhere(folder, file):
    index = json.loads((folder / INDEX_NAME).read_bytes())
    index["weight_map"][NORM] = file
    (folder / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(BadModelFolder, match="which is no safetensors file of its own folder"):
        WeightsFolder(folder, SMALL)


def test_an_index_that_disagrees_with_its_shards_is_refused(folder):
    index = json.loads((folder / INDEX_NAME).read_bytes())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"][NORM] = next(file for file in files if file != index["weight_map"][NORM])
    (folder / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(BadModelFolder, match=r"disagree on 'model.norm.weight'"):
        WeightsFolder(folder, SMALL)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff", b'{"weight_map": {"a": 1}}'])
def test_an_index_that_cannot_be_read_is_refused(folder, raw):
    (folder / INDEX_NAME).write_bytes(raw)
    with pytest.raises(BadModelFolder, match="cannot be read"):
        WeightsFolder(folder, SMALL)


def test_an_index_of_very_many_files_is_refused(folder):
    names = {f"t{n}": f"{n}.safetensors" for n in range(weights_folder.MAX_WEIGHTS_FILES + 1)}
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": names}))
    with pytest.raises(BadModelFolder, match="names 1,025 files, and at most 1,024 are read"):
        WeightsFolder(folder, SMALL)


def test_a_shard_that_is_missing_or_cut_short_is_refused(folder):
    shard = next(iter(sorted(folder.glob("*.safetensors"))))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-4])
    with pytest.raises(BadModelFolder, match="copy the file again, whole"):
        WeightsFolder(folder, SMALL)
    shard.unlink()
    with pytest.raises(BadModelFolder, match="No such file or directory; copy the whole folder"):
        WeightsFolder(folder, SMALL)


def test_a_file_cut_short_after_its_head_was_read_is_noticed(tmp_path):
    folder = write_model(tmp_path / "m", shards=1)
    opened, path = WeightsFolder(folder, SMALL), folder / SINGLE_NAME
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(BadModelFolder, match="ends within"):
        initial(SMALL, 1, opened)


def written(folder, head, body=b"", length=None):
    raw = head if isinstance(head, bytes) else json.dumps(head).encode()
    size = len(raw) if length is None else length
    (folder / SINGLE_NAME).write_bytes(struct.pack("<Q", size) + raw + body)
    return folder


def one(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    "lie",
    [
        (b"", b"", 2**63),
        (b"{}", b"", MAX_WEIGHTS_HEAD_BYTES + 1),
        (b"{}", b"1234"),
        (b"[" * 100_000, b""),
        (b'{"a": 1}', b""),
        (one(shape=(2**60,)), b"12345678"),
        (one(shape=(-2,)), b"12345678"),
        (one(shape=(2,) * 40), b"12345678"),
        (one(offsets=(8, 16)), b"1234567812345678"),
        (one(offsets=(-8, 0)), b"12345678"),
        (one(dtype="I64", shape=(1,)), b"12345678"),
        (one() | {"b": one()["a"]}, b"12345678"),
        (one(shape=(2**48, 2**48, 0), offsets=(0, 0)), b""),
    ],
)
def test_a_head_that_lies_is_refused_before_memory_is_taken(tmp_path, lie):
    with pytest.raises(BadModelFolder):
        WeightsFolder(written(tmp_path, *lie), SMALL)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_in_words(tmp_path_factory, raw):
    folder = tmp_path_factory.getbasetemp() / "any"
    folder.mkdir(exist_ok=True)
    (folder / SINGLE_NAME).write_bytes(raw)
    with pytest.raises(BadModelFolder, match="; "):
        WeightsFolder(folder, SMALL)


def test_no_more_than_a_piece_is_read_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(weights_folder, "PIECE_VALUES", 100)
    weights = WeightsFolder(write_model(tmp_path / "m", shards=2, dtype=torch.bfloat16), SMALL)
    read, whole = [], torch.frombuffer
    monkeypatch.setattr(
        torch, "frombuffer", lambda raw, dtype: read.append(len(raw)) or whole(raw, dtype=dtype)
    )
    initial(SMALL, 0, weights)
    assert max(read) == 2 * 100
    assert sum(read) == weights.stored_bytes == 2 * SMALL.parameters()


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        (b"---\nlicense: apache-2.0\n---\n", "apache-2.0"),
        (b'---\r\nlicense: "mit"\r\n---\r\n', "mit"),
        (b"---\nlicense: other\nlicense_name: qwen-research\n---\n", "qwen-research"),
        (b"---\nlicense_name: own\nlicense: mit\n---\n", "mit"),
        (b"---\nlanguage: en\n---\nlicense: mit\n", "unstated"),
        (b"license: mit\n", "unstated"),
        (b"---\nlicense: a\tb\n---\n", "unstated"),
        (b"---\nlicense: " + b"x" * 65 + b"\n---\n", "unstated"),
        (b"\xff" * 100, "unstated"),
        (None, "unstated"),
    ],
)
def test_the_licence_is_that_of_the_cards_head(tmp_path, card, licence):
    if card is not None:
        (tmp_path / "README.md").write_bytes(card)
    assert licence_in(tmp_path) == licence


def test_the_hash_is_read_once_while_the_files_stay(folder, monkeypatch):
    opened = WeightsFolder(folder, SMALL)
    known = opened.hash
    monkeypatch.setattr(WeightsFolder, "_digest", lambda self: pytest.fail("read again"))
    assert WeightsFolder(folder, SMALL).hash == opened.hash == known


def test_a_context_and_positions_are_no_part_of_the_hash(folder):
    shorter = msgspec.structs.replace(SMALL, context=8)
    assert WeightsFolder(folder, shorter).hash == WeightsFolder(folder, SMALL).hash
