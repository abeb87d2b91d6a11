"""A manifest's canonical bytes, and with them its run's id, do not change from version to version.

tests/golden/run_ids.json holds the ids that these manifests had at protocol 9. A key that comes
later is left out of the canonical form while it has its default.
"""

import msgspec
import pytest

from farflock.node.demo.pipeline import pipeline_manifest
from farflock.node.model.llama import PRESETS
from farflock.node.run.manifest import demo_manifest, load, resolve, simulated_default
from farflock.optimizers.catalog import NAMES

RECORDED_PROTOCOL = 9  # the number itself is in the bytes, and rises
FOUNDER = "12D3KooWfounder"
HASH, OTHER = "ab" * 32, "cd" * 32
SIZES = {"dim": 32, "layers": 4, "heads": 4}
TOKENIZER = {
    "tokenizer": HASH,
    "tokenizer_bytes": 70_000,
    "tokenizer_chunks": [HASH],
    "vocabulary": 300,
}
PIPELINE = {"stages": 2, "batch": 4}
FEATURES = {
    "empty": {},
    "sizes": {"model": SIZES},
    "weights": {"model": {**SIZES, "weights": HASH, "licence": "apache-2.0"}},
    "qwen2": {"model": {**SIZES, "architecture": "qwen2", "tied": False}},
    "qwen3": {"model": {**SIZES, "architecture": "qwen3", "head_width": 16}},
    "tokenizer": {"data": TOKENIZER},
    "prepared data": {"data": {"root": HASH, "copies": 3}},
    "mixture": {"data": {"mix": {HASH: 1.0, OTHER: 2.5}}},
    "another text": {"data": {"corpus": "plays.txt", "sha256": HASH}},
    "run": {"run": {"name": "a b.c-d_e", "seed": 7, "total_tokens": "2M"}},
    "samples": {"train": {"samples": 100, "batch": 4, "accumulate": 2, "autocast": True}},
    "schedule": {"train": {"warmup_tokens": 0, "min_lr_ratio": 0.0, "joiner_steps": 0, "clip": 0}},
    "sgd": {"train": {"optimizer": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.0}},
    "muon": {"train": {"optimizer": "muon", "betas": [0.8, 0.99]}},
    "outer": {
        "method": {
            "name": "diloco",
            "options": {"period": 7, "outer": {"name": "heavyball", "lr": 0.5}},
        },
    },
    "exchange": {
        "method": {"name": "diloco"},
        "exchange": {
            "codec": "int4",
            "return_codec": "int8",
            "deadline_s": 90.0,
            "view_s": 2.5,
            "branch_after_s": 60.0,
            "start_peers": 3,
        },
    },
    "never evaluated": {"evaluation": {"every": 0}},
    "evaluated often": {"evaluation": {"every": 1, "sequences": 8}},
    "stages": {"model": {**SIZES, "tied": False}, "pipeline": PIPELINE},
    "sparse stages": {"model": {**SIZES, "tied": False}, "pipeline": {**PIPELINE, "codec": "int8"}},
    "asynchronous stages": {
        "model": {**SIZES, "tied": False},
        "pipeline": {**PIPELINE, "asynchronous": {"correction": "none", "versions": 4}},
    },
    "rounds of stages": {
        "model": {**SIZES, "tied": False},
        "method": {"name": "diloco"},
        "pipeline": {**PIPELINE, "window": 5},
    },
}
EXAMPLES = ("asynchronous", "diloco-16", "noloco-64", "pipeline", "planned")


def manifests(root):
    """Return manifests with names."""
    found = {name: resolve(tables) for name, tables in msgspec.to_builtins(FEATURES).items()}
    found |= {f"model {name}": resolve({"model": {"preset": name}}) for name in sorted(PRESETS)}
    found |= {f"method {name}": demo_manifest(name, 4, 100) for name in sorted(NAMES)}
    found |= {name: load(root / f"experiments/runs/{name}.toml") for name in EXAMPLES}
    return found | {"simulated": simulated_default(()), "demo of stages": pipeline_manifest(100)}


def recorded(manifest):
    """Return the manifest with the number of the recorded protocol."""
    run = msgspec.structs.replace(manifest.run, protocol=RECORDED_PROTOCOL)
    return msgspec.structs.replace(manifest, run=run)


def test_every_run_has_the_id_that_it_always_had(golden, pytestconfig):
    ids = {
        name: recorded(manifest).run_id(FOUNDER)
        for name, manifest in manifests(pytestconfig.rootpath).items()
    }
    assert ids == golden("run_ids", ids)


@pytest.mark.parametrize("name", sorted(FEATURES))
def test_every_feature_is_in_the_bytes(name):
    manifest = resolve(msgspec.to_builtins(FEATURES[name]))
    assert (manifest.canonical() == resolve({}).canonical()) == (name == "empty")
