"""A folder in Hugging Face's form, written without transformers: a config.json and shards."""

import msgspec
import torch
from safetensors.torch import save_file

from farflock.node.model.hf_config import hugging_face_config
from farflock.node.model.llama import PRESETS, build
from farflock.node.model.weights_folder import CARD_NAME, INDEX_NAME, SINGLE_NAME

SMALL = msgspec.structs.replace(PRESETS["tiny"], norm_eps=1e-6)
SPLIT = msgspec.structs.replace(SMALL, tied=False)
QWEN2 = msgspec.structs.replace(SPLIT, architecture="qwen2")
QWEN3 = msgspec.structs.replace(SPLIT, architecture="qwen3", head_width=16)
CARD = b"---\nlicense: apache-2.0\nlanguage: en\n---\n# A model\n"


def weights_of(config, seed=77):
    """Return weights unlike those of any run's seed."""
    return {name: weight.detach() for name, weight in build(config, seed).named_parameters()}


def write_model(folder, config=SMALL, *, shards=3, seed=77, dtype=torch.float32, weights=None):
    """Write a model and return its folder; with one shard there is no index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CARD_NAME).write_bytes(CARD)
    (folder / "config.json").write_bytes(msgspec.json.encode(hugging_face_config(config)))
    weights = weights_of(config, seed) if weights is None else weights
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    if shards == 1:
        save_file(weights, folder / SINGLE_NAME, {"format": "pt"})
        return folder
    places = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        names = sorted(weights)[number::shards]
        save_file({name: weights[name] for name in names}, folder / file, {"format": "pt"})
        places |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / INDEX_NAME).write_bytes(msgspec.json.encode(index))
    return folder
