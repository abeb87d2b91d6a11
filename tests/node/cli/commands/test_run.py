"""`farflock run` refuses what cannot run before it touches the network, and shows its plan."""

import json
import socket
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import torch
from safetensors.torch import save
from worlds.model_folder import SPLIT, weights_of, write_model
from worlds.waiting import completed

from farflock.node.model.hf_config import hugging_face_config

ROOT = Path(__file__).parents[4]


def test_a_dry_run_prints_the_resolved_manifest_and_its_hash_and_makes_nothing(
    farflock, manifest, tmp_path
):
    code, out, _ = farflock("run", manifest, "--dry-run", "--json")
    assert code == 0
    facts = json.loads(out)
    assert tomllib.loads(facts["manifest"])["model"]["layers"] == 2
    assert len(facts["hash"]) == 64
    assert list(tmp_path.iterdir()) == [manifest]


def test_the_hash_changes_with_an_override_and_is_the_same_for_the_resolved_file(
    farflock, manifest, tmp_path
):
    def facts(*arguments):
        return json.loads(farflock("run", *arguments, "--dry-run", "--json")[1])

    first = facts(manifest)
    assert facts(manifest, "--set", "train.lr=0.001")["hash"] != first["hash"]
    again = tmp_path / "resolved.toml"
    again.write_text(first["manifest"])
    assert facts(again) == first


def test_prepared_data_are_named_by_their_root_and_not_by_their_folder(farflock, manifest, folder):
    code, out, _ = farflock("run", manifest, "--data", folder, "--dry-run", "--json")
    assert code == 0
    text = json.loads(out)["manifest"]
    (root,) = {json.loads(farflock("data", "show", folder, "--json")[1].splitlines()[-1])["root"]}
    assert tomllib.loads(text)["data"]["root"] == root
    assert str(folder) not in text


def test_a_folder_that_is_no_prepared_data_is_one_sentence(farflock, manifest, tmp_path):
    code, _, err = farflock("run", manifest, "--data", tmp_path, "--dry-run")
    assert code == 1
    assert "name a folder that `farflock data prepare` made" in err


def test_for_people_the_dry_run_is_toml_the_hash_and_what_the_run_needs(farflock, manifest):
    _, out, err = farflock("run", manifest, "--dry-run")
    text, _, below = out.rpartition("\nhash ")
    assert tomllib.loads(text)["run"]["name"] == "plays"
    digest, *sizes = below.split("\n")
    assert (len(digest), err) == (64, "")
    assert [line.split(" ")[0] for line in sizes[1:4]] == ["parameters", "memory", "line"]
    assert "\ndisk       this node takes up to " in below


def test_what_does_not_fit_the_disk_is_refused_with_both_numbers(farflock, manifest, tmp_path):
    code, _, err = farflock("run", manifest, "--dry-run", "--disk", "10kB")
    assert code == 1
    assert "the run needs more of the disk than --disk 10.0 kB: it takes about " in err
    assert list(tmp_path.iterdir()) == [manifest]


def test_the_dry_run_says_whether_there_is_room_to_evaluate_too(farflock, manifest, monkeypatch):
    manifest.write_text('[model]\npreset = "tiny"\n[train]\nseq = 32\nbatch = 1\n')
    facts = json.loads(farflock("run", manifest, "--dry-run", "--json")[1])
    least, more = facts["memory_host"], facts["memory_host_evaluating"]
    assert least < more
    said = {}
    for free in (least - 1, least, more):
        here = SimpleNamespace(available=free, total=free)
        monkeypatch.setattr(psutil, "virtual_memory", lambda here=here: here)
        out = farflock("run", manifest, "--dry-run")[1]
        (said[free],) = [line for line in out.splitlines() if line.startswith("memory ")]
    assert "would refuse to train it" in said[least - 1]
    assert "of a member that evaluates the run too" in said[least]
    assert said[more].endswith("are free here")
    off = farflock("run", manifest, "--set", "evaluation.every=0", "--dry-run", "--json")[1]
    assert json.loads(off)["memory_host_evaluating"] == least


def test_the_dry_run_says_what_a_model_to_start_from_takes(farflock, manifest, tmp_path):
    write_model(tmp_path / "model", SPLIT, dtype=torch.bfloat16)
    start = '[model]\nfrom = "model"\n[train]\nseq = 32\nbatch = 2\n'
    manifest.write_text(start)
    arguments = ("run", manifest, "--dry-run", "--uplink", "8mbit")
    facts = json.loads(farflock(*arguments, "--json")[1])
    found, weights = facts["start"], SPLIT.parameters()
    assert (found["architecture"], found["licence"]) == ("llama", "apache-2.0")
    assert (found["stored_bytes"], found["memory_bytes"]) == (2 * weights, 4 * weights)
    assert found["download_s"] == 4 * weights / 1e6
    assert facts["memory_host"] > facts["memory_device"] > 16 * weights
    _, out, _ = farflock(*arguments)
    (line,) = [line for line in out.splitlines() if line.startswith("weights    ")]
    assert "llama" in line
    assert "licence apache-2.0: a founder reads 45.6 kB of files; 91.1 kB of memory" in line
    manifest.write_text(f"{start}[pipeline]\nstages = 2\nbatch = 4\n")
    (staged,) = [json.loads(farflock(*arguments, "--json")[1])["start"]]
    assert staged["memory_bytes"] < 4 * weights
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(facts["manifest"])
    again = json.loads(farflock("run", resolved, "--dry-run", "--json")[1])
    assert again["start"]["stored_bytes"] is None


NORM = "model.norm.weight"


def weights(changed=None, cut=0):
    """The bytes of a model's file in which some tensors are others, and the last ones are lost."""
    whole = save(weights_of(SPLIT) | (changed or {}), {"format": "pt"})
    return whole[: len(whole) - cut]


def shape(**changes):
    """The bytes of a configuration in which some sizes are others."""
    return msgspec.json.encode(hugging_face_config(msgspec.structs.replace(SPLIT, **changes)))


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("config.json", b'{"auto_map": {"AutoModel": "x.y"}}', "code of its own (auto_map)"),
        ("config.json", b'{"architectures": ["GPT2LMHeadModel"]}', "LlamaForCausalLM, Mistral"),
        ("config.json", None, "is no folder of a Hugging Face model"),
        (
            "model.safetensors",
            b"\x08\0\0\0\0\0\0\0{}      ",
            "tensors are missing (lm_head.weight, model.embed",
        ),
        ("model.safetensors", b"\xff" * 8, "claims a head of"),
        ("model.safetensors", None, "it has no weights"),
        ("model.safetensors", weights(cut=100), "copy the file again, whole"),
        (
            "model.safetensors",
            weights({f"more.{number}": torch.ones(2) for number in range(4)}),
            "4 tensors belong to no part of the model (more.0, more.1, more.2, …)",
        ),
        ("model.safetensors", weights({NORM: torch.ones(5)}), "1 tensors have another shape"),
        ("model.safetensors", weights({NORM: torch.ones(24).int()}), "is of type 'I32'"),
        ("config.json", shape(vocab_size=200), "the tokenizer 'bytes' has 256 tokens"),
        ("config.json", shape(vocab_size=300), "tensors have another shape (lm_head.weight"),
    ],
)
def test_a_bad_model_is_one_sentence_before_anything_starts(
    farflock, manifest, tmp_path, file, content, named
):
    folder = write_model(tmp_path / "model", SPLIT, shards=1)
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    manifest.write_text('[model]\nfrom = "model"\n[train]\nseq = 32\n')
    code, out, err = farflock("run", manifest)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert named in err
    assert "; " in err


LLAMA = """
[model]
vocab_size = 128_256
dim = {}
layers = {}
heads = {}
kv_heads = 8
ffn_dim = {}
context = 8_192
tied = false
"""


@pytest.mark.parametrize(
    ("shape", "parameters", "method"),
    [
        ((4_096, 32, 32, 14_336), 8_030_261_248, "diloco"),
        ((8_192, 80, 64, 28_672), 70_553_706_496, "sparseloco"),
    ],
)
def test_the_dry_run_of_a_large_llama_says_how_large_it_is(
    farflock, manifest, shape, parameters, method
):
    manifest.write_text(LLAMA.format(*shape))
    code, out, _ = farflock(
        "run", manifest, "--set", f"method.name={method}", "--dry-run", "--json"
    )
    facts = json.loads(out)
    assert (code, facts["parameters"]) == (0, parameters)
    # weights, gradients and two moments
    assert facts["memory_host"] > 16 * parameters
    assert facts["memory_device"] > 16 * parameters
    (stream,) = facts["streams"]
    assert stream["values"] == parameters
    assert facts["shards"] == stream["shards"]
    assert facts["bytes_per_round"] == stream["round_bytes"]
    assert facts["seconds_per_round"] == stream["round_s"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[train]\nbtach = 3\n", "did you mean 'batch'"),
        ("[train\n", "run.toml, line 1: expected ']'"),
        ("[run]\nprotocol = 99\n", "update farflock"),
    ],
)
def test_a_wrong_manifest_is_one_sentence(farflock, manifest, text, named):
    manifest.write_text(text)
    code, out, err = farflock("run", manifest)
    assert code == (3 if "protocol" in text else 2)
    assert (out, len(err.splitlines())) == ("", 1)
    assert named in err


def test_a_manifest_that_is_not_there_is_a_usage_error(farflock, tmp_path):
    code, _, err = farflock("run", tmp_path / "nowhere.toml")
    assert code == 2
    assert "nowhere.toml" in err


@pytest.fixture
def started(nursery):
    """A function that runs the command in its own process: it imports the directory's library."""
    return lambda *arguments: _started(nursery, arguments)


def _started(nursery, arguments):
    command = [
        sys.executable,
        "-m",
        "farflock.node.cli",
        "run",
        *(str(argument) for argument in arguments),
        "--json",
    ]
    return completed(command, nursery.run, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.net
def test_a_damaged_key_is_named_and_left_alone(started, manifest, tmp_path):
    folder = tmp_path / "node"
    folder.mkdir()
    (folder / "identity.key").write_bytes(b"not a key")
    done = started(manifest, "--folder", folder)
    assert done.returncode == 1
    assert (
        "identity.key is not an Ed25519 key file"
        in json.loads(done.stdout.splitlines()[-1])["error"]
    )
    assert (folder / "identity.key").read_bytes() == b"not a key"


@pytest.mark.net
def test_a_taken_port_is_named_with_its_remedy(started, manifest, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = started(manifest, "--folder", tmp_path / "node", "--dht-port", port)
    assert done.returncode == 1
    assert str(port) in json.loads(done.stdout.splitlines()[-1])["error"]
    assert "Traceback" not in done.stderr
