"""A model read from a checkpoint, for `generate`, `export` and evaluations.

config.json is next to the weights, and tokenizer.json if tokens are not bytes, so a checkpoint
describes itself; it may have the template of the model's chats. A model trained in stages has one
checkpoint per stage, in folders `stage-0`, `stage-1`, …. A full replica has all of them; those of
several servers, copied into one folder, also make up the model.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import torch

from farflock.node.model.hf_model import AnyModel, model_of_shape
from farflock.node.model.hf_shape import HfShape
from farflock.node.model.llama import ModelConfig
from farflock.node.model.lora import LoraTerms, adapter_shapes, merged_weights
from farflock.node.model.stage_tensors import Misfit, joined, shapes_of
from farflock.node.state.base_note import BASE_NAME, read_note, weights_of
from farflock.node.state.checkpoint import (
    Checkpoint,
    CheckpointCorrupt,
    CheckpointError,
    latest,
    load,
    steps,
)
from farflock.node.state.weights_file import WeightsFolder, adapted
from farflock.node.tokens.chat import BadChat, template_among, template_beside
from farflock.node.tokens.json_tokenizer import JSON_NAME, JsonTokenizer
from farflock.node.tokens.tokenizer import BadTokenizer, ByteTokenizer, Tokenizer
from farflock.optimizers.method import Tensors

_STAGE = re.compile(r"stage-[0-9]{1,4}")


@dataclass(frozen=True)
class AdapterBase:
    """The frozen weights beside which a checkpoint's adapters were trained."""

    lora: LoraTerms
    weights: WeightsFolder


@dataclass(frozen=True)
class SavedModel:
    """A verified checkpoint's model, metadata and small files. The weights are mapped from their
    files, so that they take memory only once `model` is asked for.

    A run of adapters writes these alone: `weights` has them, and `base` is what they belong to."""

    folder: Path
    config: ModelConfig
    weights: Tensors
    meta: dict[str, Any]
    files: Mapping[str, bytes]
    base: AdapterBase | None = None  # None: all weights were trained

    @cached_property
    def model(self) -> AnyModel:
        """The model, in memory of its own."""
        if self.base is not None:
            model = adapted(self.base.weights, self.base.lora, 0)
            model.load_state_dict(self.weights, strict=False)  # of what it holds, all is new
            return model.eval()
        whole = model_of_shape(self.config)
        with torch.no_grad():
            for name, weight in whole.named_parameters():
                weight.copy_(self.weights[name])
        return whole.eval()

    @cached_property
    def whole(self) -> Tensors:
        """All weights of the model: adapters are merged into those of their base, in memory."""
        if self.base is None:
            return self.weights
        base = {}
        for name, shape in shapes_of(self.config, range(self.config.layers)).items():
            base[name] = torch.empty(shape, dtype=torch.float32)
            self.base.weights.fill(name, base[name])
        return merged_weights(base, self.weights, self.base.lora)

    @property
    def tokenizer_json(self) -> bytes | None:
        """The tokenizer's file; None if tokens are bytes."""
        return self.files.get(JSON_NAME)

    @property
    def chat_template(self) -> str | None:
        """The Jinja template of the model's chats, from chat_template.jinja or from
        tokenizer_config.json, if the checkpoint has one; raise `CheckpointCorrupt` for anything
        else there."""
        try:
            found = template_among(self.files, str(self.folder))
            if found is None and self.base is not None:
                return template_beside(self.base.weights.folder)
            return found
        except BadChat as error:
            raise CheckpointCorrupt(str(error)) from None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the model was trained with; raise `CheckpointError` if it cannot be
        read, or has more tokens than the model."""
        found = self._tokenizer()
        if found.vocab_size > self.config.vocab_size:
            raise CheckpointError(
                f"the tokenizer of {self.folder} has {found.vocab_size:,} tokens, its model only "
                f"{self.config.vocab_size:,}; use a checkpoint with the tokenizer that its "
                "model was trained with"
            )
        return found

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer_json is None:
            return ByteTokenizer()
        end = self.meta.get("end_of_text")
        if end is not None and (not isinstance(end, int) or isinstance(end, bool)):
            raise CheckpointCorrupt(
                f"{self.folder} says that {str(end)[:40]!r} ends a text, which is no token's id; "
                "use another checkpoint"
            )
        try:
            return JsonTokenizer(self.tokenizer_json, end, str(self.folder / JSON_NAME))
        except BadTokenizer as error:
            raise CheckpointError(str(error)) from None


def open_model(folder: Path, base: Path | None = None) -> SavedModel:
    """Return the model of a checkpoint: of `folder` itself, of the newest intact one in it, or
    of the newest one of each stage in it. Raise `CheckpointError` if there is none.

    If it has adapters alone, `base` is a folder with the model that they belong to (None: where it
    was when they were trained)."""
    stages = _stages_in(folder)
    if stages:
        return _put_together(stages)
    checkpoint = _find(folder)
    config, weights = _config(checkpoint), _weights(checkpoint)
    if BASE_NAME in checkpoint.files:
        return _with_base(checkpoint, config, base)
    if _shapes(weights) != _described(config):
        raise CheckpointCorrupt(
            f"the weights in {checkpoint.folder} do not fit its config.json; "
            "use another checkpoint of the run"
        )
    return SavedModel(checkpoint.folder, config, weights, checkpoint.meta, checkpoint.files)


def _with_base(checkpoint: Checkpoint, config: ModelConfig, given: Path | None) -> SavedModel:
    """Return a model of adapters; raise `CheckpointError` if they or their base do not fit."""
    note = read_note(checkpoint.files[BASE_NAME], checkpoint.folder)
    weights = _weights(checkpoint)
    try:
        described = adapter_shapes(config, note.lora)
    except ValueError as error:
        raise CheckpointCorrupt(f"{checkpoint.folder}: {error}; use another checkpoint") from None
    if {name: tuple(x.shape) for name, x in weights.items()} != described:
        raise CheckpointCorrupt(
            f"the adapters in {checkpoint.folder} do not fit its {BASE_NAME}; "
            "use another checkpoint of the run"
        )
    base = AdapterBase(note.lora, weights_of(note, config, given))
    return SavedModel(checkpoint.folder, config, weights, checkpoint.meta, checkpoint.files, base)


def _stages_in(folder: Path) -> list[Path]:
    """Return the folders of stages' checkpoints; none if the folder has checkpoints of whole
    models."""
    for place in (folder, folder / "checkpoints"):
        found = sorted(
            path for path in place.glob("stage-*") if _STAGE.fullmatch(path.name) and steps(path)
        )
        if found and not steps(place):
            return found
    return []


def _put_together(stages: list[Path]) -> SavedModel:
    """Return the model from each stage's newest checkpoint, even if their rounds differ."""
    pieces = [_find(stage) for stage in stages]
    place, config = stages[0].parent, _config(pieces[0])
    runs = {(str(piece.meta.get("run")), piece.files.get(JSON_NAME)) for piece in pieces}
    if len(runs) > 1 or any(_config(piece) != config for piece in pieces):
        raise CheckpointError(
            f"the stages in {place} belong to several runs; put those of one run into a folder"
        )
    try:
        weights = joined(_weights(piece) for piece in pieces)
    except Misfit as error:
        raise CheckpointCorrupt(f"the stages in {place} do not make up a model: {error}") from None
    found, described = _shapes(weights), _described(config)
    lacking = sorted(described.keys() - found)
    if lacking:
        names = ", ".join(stage.name for stage in stages)
        raise CheckpointError(
            f"{names} in {place} lack {len(lacking)} of the model's tensors, such as "
            f"{lacking[0]}; copy the other stages' folders there from the peers that serve them"
        )
    if found != described:
        raise CheckpointCorrupt(
            f"the stages in {place} do not make up a model: "
            "their weights do not fit their config.json"
        )
    behind = min(pieces, key=lambda piece: int(piece.meta.get("tokens", 0)))
    return SavedModel(place, config, weights, behind.meta, behind.files)


def _described(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's tensors without taking their memory: a damaged
    configuration may describe any number of them."""
    return shapes_of(config, range(config.layers))


def _shapes(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in tensors.items()}


def _weights(checkpoint: Checkpoint) -> Tensors:
    try:
        return checkpoint.parts["model"]
    except KeyError:
        raise CheckpointCorrupt(
            f"{checkpoint.folder} holds no model; use a checkpoint that `farflock` wrote"
        ) from None


class _Hf(msgspec.Struct):
    hf: str | None = None  # of a model of transformers


def _find(folder: Path) -> Checkpoint:
    """Return the newest checkpoint in `folder` or in its `checkpoints`; otherwise load `folder`
    itself."""
    for place in (folder, folder / "checkpoints"):
        if steps(place):
            newest = latest(place)
            if newest is None:
                raise CheckpointCorrupt(
                    f"no checkpoint in {place} is intact; use a copy, or the swarm's snapshot"
                )
            return newest
    return load(folder)


def _config(checkpoint: Checkpoint) -> ModelConfig:
    try:
        raw = checkpoint.files["config.json"]
        is_hf = msgspec.json.decode(raw, type=_Hf).hf is not None
        return msgspec.json.decode(raw, type=HfShape if is_hf else ModelConfig)
    except KeyError:
        raise CheckpointCorrupt(
            f"{checkpoint.folder} holds no config.json; use another checkpoint"
        ) from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CheckpointCorrupt(
            f"{checkpoint.folder}/config.json does not describe a model ({error}); "
            "use another checkpoint"
        ) from None
