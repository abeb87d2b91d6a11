"""Export to a Hugging Face directory, which transformers, llama.cpp's converter and others read.

The weights keep their names, `LlamaForCausalLM` computes the same logits, and the tokenizer's file
stays as it is; the byte tokenizer becomes a `tokenizer.json` whose ids are the bytes. Evaluations
and chats end at the end of text, so it has a name there, and its id is in the configurations.

Weights are written piece by piece, so an export takes little memory if they are mapped files.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec
import torch
from torch import Tensor

from farflock.node.model.generate import USUAL
from farflock.node.model.hf_config import CONFIG_NAME, hugging_face_config
from farflock.node.model.hf_shape import HfShape, hub_config
from farflock.node.model.llama import ModelConfig
from farflock.node.model.stage_tensors import shapes_of
from farflock.node.tokens.json_tokenizer import JSON_NAME, JsonTokenizer
from farflock.node.tokens.tokenizer import Tokenizer

WeightType = Literal["bfloat16", "float16", "float32"]  # torch's and transformers' names

CHAT_NAME = "chat_template.jinja"
WHOLE_NAME, WEIGHTS_INDEX_NAME = "model.safetensors", "model.safetensors.index.json"
GGUF_NAME = "model.gguf"
SHARD_BYTES = 5 * 10**9
_TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # as safetensors names them
_WEIGHTS = re.compile(r"model(-[0-9]{5}-of-[0-9]{5})?\.safetensors")
_PIECE = 1 << 24  # numbers that are converted and written at once
_END_OF_BYTES = "<|endoftext|>"  # what the export calls the id 255


class ExportRefused(Exception):
    """An export that was refused or failed; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class ExportForm:
    """The type in which weights are written, and the largest size of their files; a larger tensor
    has a file of its own."""

    dtype: WeightType = "float32"
    shard_bytes: int = SHARD_BYTES


AS_TRAINED = ExportForm()


def export(
    folder: Path,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    card: str,
    *,
    force: bool = False,
    form: ExportForm = AS_TRAINED,
    chat_template: str | None = None,
    more: Mapping[str, Callable[[Path], None]] | None = None,
) -> None:
    """Write the config, weights, tokenizer and model card; raise `ExportRefused` if `folder` is not
    empty.

    With `force`, the files of an earlier export are replaced and others stay. `weights` must be
    exactly those of the model that `config` describes; `card` is the README's Markdown text, and
    `more` writes further files of these names. Until everything is on the disk, the folder stays
    as it was; it holds a config.json only while it holds all of one model.
    """
    _require_weights(config, weights)
    ends = _special_ids(tokenizer)
    files: dict[str, bytes] = {
        CONFIG_NAME: _json(_fields(config) | ends | {"dtype": form.dtype}),
        "generation_config.json": _json(_generation(tokenizer) | ends),
        "README.md": card.encode(),
        **tokenizer_files(tokenizer, config.context),
        **({} if chat_template is None else {CHAT_NAME: chat_template.encode()}),
    }
    with _placed(folder, force) as partial:
        for name, content in files.items():
            _write_file(partial / name, [content])
        _write_shards(partial, weights, form)
        for name, write in (more or {}).items():
            write(partial / name)


@contextmanager
def _placed(folder: Path, force: bool) -> Iterator[Path]:
    """Yield a folder to write to, whose files come to `folder` once the block has ended well."""
    partial = folder.absolute().with_name(f".{folder.absolute().name}.partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not force and folder.exists() and any(folder.iterdir()):
            raise ExportRefused(
                f"{folder} is not empty; name another folder, or use --force to replace its files"
            )
        shutil.rmtree(partial, ignore_errors=True)  # left by a crash
        partial.mkdir()
        yield partial
        if folder.exists() and any(folder.iterdir()):
            _replace(folder, partial)
        else:
            os.replace(partial, folder)
    except OSError as error:
        raise ExportRefused(
            f"cannot write to {folder} ({error.strerror}); "
            "choose a folder with space and permission"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _replace(folder: Path, partial: Path) -> None:
    """Move files into a folder that may hold an earlier export, whose weights may have had other
    names; without its config.json nothing reads a mixture."""
    (folder / CONFIG_NAME).unlink(missing_ok=True)
    for path in folder.iterdir():
        stale = path.name in (WEIGHTS_INDEX_NAME, CHAT_NAME, GGUF_NAME)
        if stale or _WEIGHTS.fullmatch(path.name):
            path.unlink()
    for path in sorted(partial.iterdir(), key=lambda path: path.name == CONFIG_NAME):
        path.replace(folder / path.name)


def _write_shards(folder: Path, weights: Mapping[str, Tensor], form: ExportForm) -> None:
    """Write the weights to one file, or to several with an index, in the order of the tensors."""
    width = getattr(torch, form.dtype).itemsize
    shards = cut_into_shards(
        {name: weight.numel() * width for name, weight in weights.items()}, form.shard_bytes
    )
    if len(shards) == 1:
        _write_safetensors(folder / WHOLE_NAME, weights, form.dtype)
        return
    places: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_safetensors(folder / file, {name: weights[name] for name in names}, form.dtype)
        places |= dict.fromkeys(names, file)
    total = sum(weight.numel() for weight in weights.values()) * width
    index = {"metadata": {"total_size": total}, "weight_map": places}
    _write_file(folder / WEIGHTS_INDEX_NAME, [_json(index)])


def cut_into_shards(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Return the names of tensors, given their bytes, by file: in order, each file as full as
    `max_bytes` allows."""
    shards: list[list[str]] = [[]]
    taken = 0
    for name, size in sizes.items():
        if shards[-1] and taken + size > max_bytes:
            shards.append([])
            taken = 0
        shards[-1].append(name)
        taken += size
    return shards


def _write_safetensors(path: Path, weights: Mapping[str, Tensor], dtype: WeightType) -> None:
    """Write a file of safetensors (format: github.com/huggingface/safetensors): the length of the
    header, the header as JSON, and the numbers of all tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, weight in weights.items():
        stop = start + weight.numel() * getattr(torch, dtype).itemsize
        header[name] = {
            "dtype": _TYPES[dtype],
            "shape": list(weight.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    head = msgspec.json.encode(header)
    head += b" " * (-len(head) % 8)  # so that numbers are aligned
    _write_file(path, [len(head).to_bytes(8, "little"), head])
    with path.open("ab") as file:
        for name, weight in weights.items():
            for piece in torch.split(weight.detach().reshape(-1), _PIECE):
                file.write(converted(name, piece, dtype).view(torch.uint8).numpy().data)
        _settle(file)


def converted(name: str, piece: Tensor, dtype: WeightType) -> Tensor:
    """Return numbers of a tensor on the CPU in another type; raise `ExportRefused` for those that
    it cannot hold."""
    there = piece.to("cpu", getattr(torch, dtype)).contiguous()
    if not torch.isfinite(there).all():
        raise ExportRefused(
            f"{name} holds numbers that {dtype} does not; choose --dtype bfloat16 or float32"
        )
    return there


def _write_file(path: Path, content: Sequence[bytes]) -> None:
    with path.open("wb") as file:
        file.writelines(content)
        _settle(file)


def _settle(file: BinaryIO) -> None:
    """Make a file's content durable."""
    file.flush()
    os.fsync(file.fileno())


def _generation(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what `generate` of transformers takes as its defaults: those of Farflock's. Texts of
    a batch are filled up with the end of text."""
    return {
        "do_sample": True,
        "temperature": USUAL.temperature,
        "top_k": USUAL.top_k,
        "top_p": USUAL.top_p,
        "repetition_penalty": USUAL.repetition_penalty,
        "pad_token_id": tokenizer.end_of_text,
    }


def tokenizer_files(tokenizer: Tokenizer, context: int) -> dict[str, bytes]:
    """Return a fast tokenizer's files: its own tokenizer.json, or one for bytes, and the names of
    the tokens that begin and end a text."""
    about: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "eos_token": _END_OF_BYTES,
    }
    fast = byte_level()
    if isinstance(tokenizer, JsonTokenizer):
        about |= {"bos_token": tokenizer.begin_name, "eos_token": tokenizer.end_name}
        fast = tokenizer.raw
    return {JSON_NAME: fast, "tokenizer_config.json": _json(about)}


def byte_level() -> bytes:
    """Return a tokenizer.json for bytes: byte-level BPE without merges, in which each byte is a
    token, and 255, which no text has, the end of text."""
    pieces = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    names = [*printable_bytes()[:255], _END_OF_BYTES]
    end = {
        "id": 255,
        "content": _END_OF_BYTES,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return _json(
        {
            "version": "1.0",
            "added_tokens": [end],
            "pre_tokenizer": pieces,
            "decoder": pieces,
            "model": {
                "type": "BPE",
                "vocab": {name: place for place, name in enumerate(names)},
                "merges": [],
            },
        }
    )


def _special_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    """Return the ids that both configurations state."""
    begin = tokenizer.begin_of_text if isinstance(tokenizer, JsonTokenizer) else None
    return {"bos_token_id": begin, "eos_token_id": tokenizer.end_of_text}


def printable_bytes() -> list[str]:
    """Return GPT-2's stand-in for each byte: itself if printable in Latin-1, else U+0100 and up."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = iter(range(256))
    return [chr(byte) if byte in printable else chr(256 + next(others)) for byte in range(256)]


def _fields(config: ModelConfig) -> dict[str, Any]:
    return hub_config(config) if isinstance(config, HfShape) else hugging_face_config(config)


def _require_weights(config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
    wanted = shapes_of(config, range(config.layers))
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
