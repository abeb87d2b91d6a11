"""Adapters as the package peft writes and reads them: a configuration, and one safetensors file.

A folder may come from a stranger. Its configuration says which tensors there are, and the model
which shapes they have; a file is read only if that is all that it holds. What peft computes beyond
plain LoRA is refused. Nothing is unpickled.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from farflock.node.model.llama import ModelConfig
from farflock.node.model.lora import ADAPTER_TARGETS, LoraTerms, adapter_shapes

ADAPTER_CONFIG_NAME = "adapter_config.json"
ADAPTER_WEIGHTS_NAME = "adapter_model.safetensors"
MAX_ADAPTER_CONFIG_BYTES = 1024 * 1024
MAX_ADAPTER_HEAD_BYTES = 16 * 1024 * 1024
_PREFIX = "base_model.model."
_TYPES = ("F32", "F16", "BF16")
_REMEDY = "save the adapter again with peft's save_pretrained"
_PLAIN = "train an adapter with peft's LoraConfig of r, lora_alpha and target_modules"

# Keys of a configuration without a part in what a model computes. Dropout is for training alone.
_WITHOUT_EFFECT = (
    "auto_mapping",
    "eva_config",
    "inference_mode",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "task_type",
)
_NEUTRAL = {"bias": "none"}  # values of keys that change nothing, beside those that are empty
_BEGINNINGS = (True, False, "gaussian", "eva", "orthogonal")  # others change the model's weights
_MEANINGS = {
    "alpha_pattern": "adapters of different factors",
    "bias": "trained biases",
    "layers_to_transform": "adapters in some of the layers",
    "modules_to_save": "whole layers that were trained",
    "rank_pattern": "adapters of different ranks",
    "use_dora": "trained magnitudes (DoRA)",
    "use_rslora": "a factor of alpha / √r",
}


class AdapterRefused(ValueError):
    """A folder of adapters that was refused, or cannot be written; the message says why and what
    to do."""


class AdapterFolder(NamedTuple):
    """Adapters by their names in the model, float32, and the name of the model that they were
    trained with, as the folder gives it."""

    terms: LoraTerms
    adapters: dict[str, Tensor]
    base: str


class _AdapterFields(msgspec.Struct, frozen=True):
    peft_type: str
    r: int
    lora_alpha: float
    target_modules: list[str] | str | None = None
    base_model_name_or_path: str | None = None
    init_lora_weights: bool | str = True
    exclude_modules: list[str] | str | None = None


def write_adapters(
    folder: Path,
    config: ModelConfig,
    terms: LoraTerms,
    adapters: Mapping[str, Tensor],
    base: str,
    *,
    card: str | None = None,
    force: bool = False,
) -> None:
    """Write the adapters of a model, in float32, and a README of this text if there is one; `base`
    is where the model is found, a folder or a name on the hub.

    Raise `AdapterRefused` if `folder` is not empty, unless `force` replaces the files of these
    names; or if the adapters are not all those that the terms describe, or not finite."""
    _require_adapters(adapter_shapes(config, terms), adapters)
    tensors = {
        _PREFIX + name: x.detach().to("cpu", torch.float32).contiguous()
        for name, x in adapters.items()
    }
    files = {
        ADAPTER_WEIGHTS_NAME: save(tensors, {"format": "pt"}),
        **({} if card is None else {"README.md": card.encode()}),
        ADAPTER_CONFIG_NAME: _config_of(terms, base),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not force and any(folder.iterdir()):
            raise AdapterRefused(
                f"{folder} is not empty; name another folder, or use --force to replace its files"
            )
        _place(folder, files)
    except OSError as error:
        raise AdapterRefused(
            f"cannot write to {folder} ({error.strerror}); "
            "choose a folder with space and permission"
        ) from error


def _place(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files to a folder; it has a configuration only while it has the weights that belong to
    it."""
    partial = {name: folder / f".{name}.partial" for name in files}
    try:
        for name, content in files.items():
            with partial[name].open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        (folder / ADAPTER_CONFIG_NAME).unlink(missing_ok=True)
        for name, path in partial.items():
            path.replace(folder / name)
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)


def _config_of(terms: LoraTerms, base: str) -> bytes:
    is_whole = float(terms.alpha).is_integer()
    fields = {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(terms.alpha) if is_whole else terms.alpha,  # peft's is whole
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": terms.r,
        "target_modules": list(terms.targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    return msgspec.json.format(msgspec.json.encode(fields), indent=2) + b"\n"


def _require_adapters(
    wanted: Mapping[str, tuple[int, ...]], adapters: Mapping[str, Tensor]
) -> None:
    found = {name: tuple(x.shape) for name, x in adapters.items()}
    if wrong := _first_difference(wanted, found):
        raise AdapterRefused(
            f"these adapters do not fit their terms: {wrong}; take both from one run"
        )
    for name, x in adapters.items():
        if not bool(torch.isfinite(x).all()):
            raise AdapterRefused(
                f"{name} holds NaN or infinity; take the adapters of an earlier checkpoint"
            )


def read_adapters(folder: Path, config: ModelConfig) -> AdapterFolder:
    """Return the adapters in a folder, for a model that `config` describes; raise `AdapterRefused`
    if they are not for such a model, or cannot be read."""
    terms, base = _terms_in(folder / ADAPTER_CONFIG_NAME)
    try:
        shapes = adapter_shapes(config, terms)
    except ValueError as error:
        raise AdapterRefused(f"{folder}: {error}") from None
    return AdapterFolder(terms, _tensors_in(folder, shapes), base)


def _terms_in(path: Path) -> tuple[LoraTerms, str]:
    """Return what a configuration says of its adapters, and the name of their model."""
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_ADAPTER_CONFIG_BYTES + 1)
    except OSError as error:
        raise AdapterRefused(
            f"{path.parent} is no folder of adapters ({path}: {error.strerror}); "
            "name one that peft's save_pretrained wrote"
        ) from None
    if len(raw) > MAX_ADAPTER_CONFIG_BYTES:
        raise AdapterRefused(
            f"{path} is larger than {MAX_ADAPTER_CONFIG_BYTES:,} bytes, and no configuration is; "
            f"{_REMEDY}"
        )
    try:
        fields = msgspec.json.decode(raw, type=_AdapterFields)
        every = msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise AdapterRefused(f"{path} cannot be read: {error}; {_REMEDY}") from None
    _require_plain(fields, every, path)
    targets = fields.target_modules
    if not isinstance(targets, list):
        raise AdapterRefused(
            f"{path} names its layers by {str(targets)[:64]!r}, and not in a list; {_PLAIN}"
        )
    try:
        given = LoraTerms(r=fields.r, alpha=fields.lora_alpha, targets=tuple(targets))
    except ValueError as error:
        raise AdapterRefused(f"{path}: {error}") from None
    ordered = tuple(name for name in ADAPTER_TARGETS if name in targets)  # peft's are in no order
    return msgspec.structs.replace(given, targets=ordered), fields.base_model_name_or_path or ""


def _require_plain(fields: _AdapterFields, every: Mapping[str, Any], path: Path) -> None:
    """Raise `AdapterRefused` for what would change the logits and is not plain LoRA."""
    if fields.peft_type != "LORA":
        raise AdapterRefused(
            f"{path} describes adapters of the type {fields.peft_type[:64]!r}, and only LORA is "
            f"read; {_PLAIN}"
        )
    if fields.init_lora_weights not in _BEGINNINGS:
        raise AdapterRefused(
            f"{path}: init_lora_weights is {str(fields.init_lora_weights)[:64]!r}, which may have "
            f"changed the model's own weights; {_PLAIN}"
        )
    for key, value in every.items():
        is_known = key in (*_AdapterFields.__struct_fields__, *_WITHOUT_EFFECT)
        if key != "exclude_modules" and (is_known or _NEUTRAL.get(key) == value):
            continue
        if value not in (None, False, "", [], {}):
            meaning = _MEANINGS.get(key, "what plain LoRA does not have")
            raise AdapterRefused(
                f"{path}: {key[:64]} is {str(value)[:64]}, which means {meaning}; {_PLAIN}"
            )


def _tensors_in(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return the tensors of exactly these names and shapes."""
    path = folder / ADAPTER_WEIGHTS_NAME
    most = 4 * sum(map(math.prod, shapes.values())) + MAX_ADAPTER_HEAD_BYTES
    try:
        size_bytes = path.stat().st_size
        if size_bytes > most:
            raise AdapterRefused(
                f"{path} has {size_bytes:,} bytes, and such adapters at most {most:,}; {_REMEDY}"
            )
        with safe_open(path, framework="pt") as file:
            _require_described(file, shapes, path)
            found = {name: file.get_tensor(_PREFIX + name).float() for name in shapes}
    except OSError as error:
        pickled = (folder / "adapter_model.bin").exists()
        why = "it has pickled weights, which may run code" if pickled else error.strerror
        raise AdapterRefused(
            f"{folder} has no {ADAPTER_WEIGHTS_NAME} that can be read ({why}); {_REMEDY}"
        ) from None
    except SafetensorError as error:
        raise AdapterRefused(f"{path} cannot be read: {str(error)[:200]}; {_REMEDY}") from None
    for name, x in found.items():
        if not bool(torch.isfinite(x).all()):
            raise AdapterRefused(
                f"{path}: {name} holds NaN or infinity; take an earlier state of the adapter"
            )
    return found


def _require_described(file: safe_open, shapes: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Raise `AdapterRefused` unless the head of a file describes these tensors and no others."""
    names: list[str] = file.keys()  # type: ignore[no-untyped-call]
    slices = {name: file.get_slice(name) for name in names}  # type: ignore[no-untyped-call]
    found = {name: tuple(one.get_shape()) for name, one in slices.items()}
    wanted = {_PREFIX + name: shape for name, shape in shapes.items()}
    if wrong := _first_difference(wanted, found):
        raise AdapterRefused(
            f"{path} does not fit the model and its own configuration: {wrong}; "
            "name the model that the adapter was trained with"
        )
    for name, one in slices.items():
        if one.get_dtype() not in _TYPES:
            raise AdapterRefused(
                f"{path}: {name} is of type {one.get_dtype()[:16]}, and adapters are "
                f"{', '.join(_TYPES)}; save the adapter again in one of these types"
            )


def _first_difference(
    wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]
) -> str:
    """Return what differs between names and shapes, in words, or "" if nothing does."""
    wrong = sorted(
        name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)
    )
    if not wrong:
        return ""
    here, there = (
        "nothing" if shape is None else f"a tensor of shape {shape}"
        for shape in (found.get(wrong[0]), wanted.get(wrong[0]))
    )
    return f"of {len(wrong)} tensors, {wrong[0][:200]} is {here}, and {there} is needed"
