"""Export to a Hugging Face folder, which transformers, llama.cpp's converter and others read.

The weights keep their names, transformers' class computes the same logits, and the tokenizer's file
stays as it is. Evaluations and generation end at the end of text, so its id is in both
configurations.

Weights are converted and written in blocks: an export takes the memory of one block, beside what
holds the weights. Checkpoints are mapped from their files, so that is the system's cache. A folder
appears as a whole, once everything is on the disk.
"""

import errno
import math
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

from farflock import __version__
from farflock.node.durable import sync_folder
from farflock.node.model.generate import USUAL
from farflock.node.model.hf_config import CONFIG_NAME, MAX_CONFIG_BYTES, hugging_face_config
from farflock.node.model.llama import ModelConfig
from farflock.node.model.stage_tensors import shapes_of
from farflock.node.model.weights_folder import CARD_NAME, CURVE_NAME, INDEX_NAME, SINGLE_NAME
from farflock.node.tokens.hf_files import ABOUT_NAME, json_file, tokenizer_files
from farflock.node.tokens.json_tokenizer import JSON_NAME
from farflock.node.tokens.tokenizer import Tokenizer

WeightType = Literal["bf16", "fp32"]

GENERATION_NAME = "generation_config.json"
SHARD_BYTES = 5 * 10**9
BLOCK_VALUES = 4 * 1024 * 1024  # converted and written at once
_MARK = "farflock_version"  # of a config.json that an export wrote
_NAMES = (
    CONFIG_NAME,
    GENERATION_NAME,
    CARD_NAME,
    CURVE_NAME,
    JSON_NAME,
    ABOUT_NAME,
    SINGLE_NAME,
    INDEX_NAME,
)
_SHARD = re.compile(r"model-[0-9]{5}-of-[0-9]{5}\.safetensors", re.ASCII)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ExportRefused(Exception):
    """An export that was refused or failed; the message says why and what to do."""


class _StoredType(msgspec.Struct, frozen=True):
    """A type of weights as torch, safetensors and transformers name it."""

    kind: torch.dtype
    stored: str
    named: str


_TYPES: dict[WeightType, _StoredType] = {
    "bf16": _StoredType(torch.bfloat16, "BF16", "bfloat16"),
    "fp32": _StoredType(torch.float32, "F32", "float32"),
}


@dataclass(frozen=True, slots=True)
class ExportForm:
    """The type in which weights are written, the largest size of their files (a larger tensor has a
    file of its own), and the picture that the card shows, if any."""

    dtype: WeightType = "fp32"
    shard_bytes: int = SHARD_BYTES
    picture: bytes = b""


AS_TRAINED = ExportForm()


def export(
    folder: Path,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    card: str,
    *,
    form: ExportForm = AS_TRAINED,
    force: bool = False,
    progress: Callable[[float], None] = lambda share: None,
) -> int:
    """Write the configurations, weights, tokenizer and model card; return the bytes of the weights.
    Raise `ExportRefused` if `folder` is not empty; with `force`, an earlier export there is
    replaced, and nothing else.

    `weights` must be exactly those of the model that `config` describes; `card` is the README's
    Markdown text, and `progress` is called with the share that is written. Whatever interrupts
    this, the folder holds all of it or what it held before."""
    shapes = _required(config, weights)
    end = tokenizer.end_of_text
    about = {"dtype": _TYPES[form.dtype].named, _MARK: __version__}
    files: dict[str, bytes] = {
        CONFIG_NAME: json_file(hugging_face_config(config, end) | about),
        GENERATION_NAME: json_file(_generation(end)),
        CARD_NAME: card.encode(),
        **({CURVE_NAME: form.picture} if form.picture else {}),
        **tokenizer_files(tokenizer, config.context),
    }
    with _placed(folder, force) as partial:
        for name, content in files.items():
            with _durable(partial / name) as file:
                file.write(content)
        shards = _Shards(shapes, form, progress)
        shards.write(partial, weights)
    return shards.total_bytes


@contextmanager
def _placed(folder: Path, force: bool) -> Iterator[Path]:
    """Yield a folder to write to, which takes the place of `folder` once the block has ended
    well."""
    folder = folder.resolve()
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        _require_free(folder, force)
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)  # left by a crash
        partial.mkdir()
        yield partial
        sync_folder(partial)
        _require_free(folder, force)  # it may have been filled meanwhile
        _replace(folder, partial)
    except OSError as error:
        raise ExportRefused(_remedy(folder, error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _require_free(folder: Path, force: bool) -> None:
    """Raise `ExportRefused` if a folder holds anything but, with `force`, an earlier export."""
    names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    if not names:
        return
    foreign = [name for name in names if name not in _NAMES and not _SHARD.fullmatch(name)]
    if not foreign and not _is_marked(folder / CONFIG_NAME):
        foreign = names[:1]
    if foreign and force:
        raise ExportRefused(
            f"{folder} holds {foreign[0]}, which no export wrote, and stays as it is; "
            "move it away, or name another folder"
        )
    if not force:
        more = "" if foreign else ", or use --force to replace the export in it"
        raise ExportRefused(f"{folder} is not empty; name another folder{more}")


class _Marked(msgspec.Struct):
    farflock_version: str


def _is_marked(path: Path) -> bool:
    """Return whether a config.json is one that an export wrote."""
    try:
        with path.open("rb") as file:
            msgspec.json.decode(file.read(MAX_CONFIG_BYTES), type=_Marked)
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _replace(folder: Path, partial: Path) -> None:
    """Put a new folder into the place of an old one, which is back there if that fails."""
    aside = folder.with_name(f".{folder.name}.replaced")
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        folder.replace(aside)
    try:
        partial.replace(folder)
    except OSError:
        if aside.exists():
            aside.replace(folder)
        raise
    sync_folder(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


class _Shards:
    """The files of weights: one, or several with an index, in the order of the tensors."""

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        form: ExportForm,
        progress: Callable[[float], None],
    ) -> None:
        self._type, self._shapes, self._progress = _TYPES[form.dtype], shapes, progress
        width = self._type.kind.itemsize
        self._sizes = {name: width * math.prod(shape) for name, shape in shapes.items()}
        self._files = cut_into_shards(self._sizes, form.shard_bytes)
        self.total_bytes = sum(self._sizes.values())
        self._written = 0

    def write(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Write all weights into an empty folder."""
        if len(self._files) == 1:
            self._write_file(folder / SINGLE_NAME, self._files[0], weights)
            return
        places: dict[str, str] = {}
        for number, names in enumerate(self._files, 1):
            file = f"model-{number:05}-of-{len(self._files):05}.safetensors"
            self._write_file(folder / file, names, weights)
            places |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": places}
        with _durable(folder / INDEX_NAME) as stream:
            stream.write(json_file(index))

    def _write_file(self, path: Path, names: Sequence[str], weights: Mapping[str, Tensor]) -> None:
        """Write a file of safetensors (format: github.com/huggingface/safetensors): the length of
        the head, the head as JSON, and the values of all tensors."""
        head = self._head(names)
        with _durable(path) as file:
            file.write(len(head).to_bytes(8, "little"))
            file.write(head)
            for name in names:
                for block in torch.split(weights[name].detach().reshape(-1), BLOCK_VALUES):
                    written = file.write(self._stored(name, block).view(torch.uint8).numpy().data)
                    self._written += written
                    self._progress(self._written / self.total_bytes)

    def _head(self, names: Sequence[str]) -> bytes:
        head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        start = 0
        for name in names:
            stop = start + self._sizes[name]
            head[name] = {
                "dtype": self._type.stored,
                "shape": list(self._shapes[name]),
                "data_offsets": [start, stop],
            }
            start = stop
        text = msgspec.json.encode(head)
        return text + b" " * (-len(text) % 8)  # so that values are aligned

    def _stored(self, name: str, block: Tensor) -> Tensor:
        """Return values on the CPU in the type of the file; raise `ExportRefused` for those that it
        cannot hold."""
        there = block.to("cpu", self._type.kind).contiguous()
        if not bool(torch.isfinite(there).all()):
            raise ExportRefused(
                f"{name} holds values that {self._type.named} does not; choose --dtype fp32, or "
                "an earlier checkpoint"
            )
        return there


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


@contextmanager
def _durable(path: Path) -> Iterator[BinaryIO]:
    """Open a new file, whose content is on the disk once the block has ended."""
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _generation(end: int | None) -> dict[str, Any]:
    """Return the defaults of transformers' `generate`: those of ours. Texts of a batch are filled
    up with the end of text."""
    return {
        "do_sample": True,
        "temperature": USUAL.temperature,
        "top_k": USUAL.top_k,
        "top_p": USUAL.top_p,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": end,
    }


def _required(config: ModelConfig, weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the model's shapes; raise `ExportRefused` unless the weights have them."""
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
    return wanted


def _remedy(folder: Path, error: OSError) -> str:
    if error.errno in _FULL:
        return (
            f"no room on the disk for {folder}, which stays as it was; free some space, "
            "or name a folder on another disk"
        )
    return f"cannot write to {folder} ({error.strerror}); choose a folder with space and permission"
