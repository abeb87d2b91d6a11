"""Export to a Hugging Face directory, which transformers, llama.cpp's converter and others read.

The weights keep their names, transformers' class computes the same logits, a `tokenizer.json` is
written as it is, and the byte tokenizer becomes one whose ids are the bytes.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import save
from torch import Tensor

from farflock.node.model.hf_config import CONFIG_NAME, hugging_face_config
from farflock.node.model.llama import Llama, ModelConfig
from farflock.node.tokens.json_tokenizer import JSON_NAME, JsonTokenizer
from farflock.node.tokens.tokenizer import Tokenizer


class ExportRefused(Exception):
    """An export that was refused or failed; the message says why and what to do."""


def export(
    folder: Path,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    card: str,
    *,
    force: bool = False,
) -> None:
    """Write the config, weights, tokenizer and model card; raise `ExportRefused` if `folder` is not
    empty.

    With `force`, files with these names are replaced and others stay. `weights` must be exactly
    those of the model that `config` describes; `card` is the README's Markdown text.
    """
    _require_weights(config, weights)
    end = tokenizer.end_of_text if isinstance(tokenizer, JsonTokenizer) else None
    files: dict[str, bytes] = {
        CONFIG_NAME: _json(hugging_face_config(config, end)),
        "generation_config.json": _json({"do_sample": True, "temperature": 0.8, "top_k": 40}),
        "README.md": card.encode(),
        **tokenizer_files(tokenizer, config.context),
        "model.safetensors": save(
            {name: weight.detach().cpu().contiguous() for name, weight in weights.items()},
            {"format": "pt"},
        ),
    }
    partial = folder.absolute().with_name(f".{folder.absolute().name}.partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not force and any(folder.iterdir()):
            raise ExportRefused(
                f"{folder} is not empty; name another folder, or use --force to replace its files"
            )
        partial.mkdir(exist_ok=True)
        for name, content in files.items():
            (partial / name).write_bytes(content)
        for name in files:  # only once all files are on the disk
            (partial / name).replace(folder / name)
    except OSError as error:
        raise ExportRefused(
            f"cannot write to {folder} ({error.strerror}); "
            "choose a folder with space and permission"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def tokenizer_files(tokenizer: Tokenizer, context: int) -> dict[str, bytes]:
    """Return a fast tokenizer's files."""
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    if isinstance(tokenizer, JsonTokenizer):
        named = {} if tokenizer.end_name is None else {"eos_token": tokenizer.end_name}
        return {JSON_NAME: tokenizer.raw, "tokenizer_config.json": _json(about | named)}
    return {JSON_NAME: _json(_fast_bytes()), "tokenizer_config.json": _json(about)}


def _fast_bytes() -> dict[str, Any]:
    """Return a fast tokenizer for bytes: byte-level BPE without merges, in which each byte is a
    token."""
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": dict(zip(printable_bytes(), range(256), strict=True)),
            "merges": [],
        },
    }


def printable_bytes() -> list[str]:
    """Return GPT-2's stand-in for each byte: itself if printable in Latin-1, else U+0100 and up."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = iter(range(256))
    return [chr(byte) if byte in printable else chr(256 + next(others)) for byte in range(256)]


def _require_weights(config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
    wanted = {name: tuple(weight.shape) for name, weight in Llama(config).named_parameters()}
    found = {name: tuple(weight.shape) for name, weight in weights.items()}
    if found != wanted:
        wrong = sorted(
            name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)
        )
        raise ExportRefused(
            f"{len(wrong)} tensors do not fit the configuration, the first of them {wrong[0]} "
            f"(found {found.get(wrong[0])}, expected {wanted.get(wrong[0])}); "
            "export with the run's own configuration"
        )


def _json(value: Mapping[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
