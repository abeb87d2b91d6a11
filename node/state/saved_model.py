"""A model read from a checkpoint or a Hugging Face folder, to sample, export and evaluate it.

config.json is next to the weights, as is a tokenizer.json unless the tokens are bytes: a checkpoint
describes itself. A model trained in stages has one checkpoint per stage, in folders `stage-0`,
`stage-1`, …. A full replica has all of them; those of several servers, copied into one folder, also
make up the model.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from farflock.node.model.hf_config import CONFIG_NAME, config_in, end_in
from farflock.node.model.llama import Llama, ModelConfig
from farflock.node.model.stage_tensors import Misfit, joined, shapes_of
from farflock.node.model.weights_folder import WeightsFolder
from farflock.node.state.checkpoint import (
    MANIFEST_NAME,
    Checkpoint,
    CheckpointCorrupt,
    CheckpointError,
    latest,
    load,
    steps,
)
from farflock.node.tokens.hf_files import tokenizer_in
from farflock.node.tokens.json_tokenizer import JSON_NAME, JsonTokenizer, read_definition
from farflock.node.tokens.tokenizer import ByteTokenizer, Tokenizer
from farflock.optimizers.method import Tensors

_STAGE = re.compile(r"stage-[0-9]{1,4}")


@dataclass(frozen=True)
class SavedModel:
    """A model on the disk, its tokenizer, and what a checkpoint says of its run. Weights of a
    checkpoint are mapped from its files, and those of a Hugging Face folder read when they are
    asked for, so that only `model` takes memory for all of them."""

    folder: Path
    config: ModelConfig
    weights: Mapping[str, Tensor]
    tokenizer: Tokenizer
    meta: dict[str, Any]

    @cached_property
    def model(self) -> Llama:
        """The model in float32, in memory of its own."""
        model = Llama(self.config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(self.weights[name])
        return model.eval()


class _FolderWeights(Mapping[str, Tensor]):
    """The weights of a Hugging Face folder in float32, each read when it is asked for."""

    def __init__(self, folder: WeightsFolder) -> None:
        self._folder = folder
        self._shapes = shapes_of(folder.config, range(folder.config.layers))

    def __getitem__(self, name: str) -> Tensor:
        weight = torch.empty(self._shapes[name], dtype=torch.float32)
        self._folder.fill(name, weight)
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def open_model(folder: Path) -> SavedModel:
    """Return the model of a checkpoint: of `folder` itself, of the newest intact one in it, or
    of the newest one of each stage in it; or the model of a Hugging Face folder. Raise
    `CheckpointError` if there is none, and `BadModelFolder` or `BadTokenizer` for a Hugging Face
    folder that this version does not read."""
    if (folder / CONFIG_NAME).is_file() and not (folder / MANIFEST_NAME).exists():
        return _of_hugging_face(folder)
    stages = _stages_in(folder)
    if stages:
        return _put_together(stages)
    checkpoint = _find(folder)
    config, weights = _config(checkpoint), _weights(checkpoint)
    if _shapes(weights) != _described(config):
        raise CheckpointCorrupt(
            f"the weights in {checkpoint.folder} do not fit its config.json; "
            "use another checkpoint of the run"
        )
    tokenizer = _tokenizer(checkpoint)
    return SavedModel(checkpoint.folder, config, weights, tokenizer, checkpoint.meta)


def _of_hugging_face(folder: Path) -> SavedModel:
    weights = WeightsFolder(folder, config_in(folder))
    definition = folder / JSON_NAME
    tokenizer = tokenizer_in(read_definition(definition), str(definition), end_in(folder))
    return SavedModel(folder, weights.config, _FolderWeights(weights), tokenizer, {})


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
    runs = {str(piece.meta.get("run")) for piece in pieces}
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
    return SavedModel(place, config, weights, _tokenizer(behind), behind.meta)


def _described(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's tensors without taking their memory: a damaged
    configuration may describe any number of them."""
    return shapes_of(config, range(config.layers))


def _shapes(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in tensors.items()}


def _weights(checkpoint: Checkpoint) -> Tensors:
    try:
        return checkpoint.groups["model"]
    except KeyError:
        raise CheckpointCorrupt(
            f"{checkpoint.folder} holds no model; use a checkpoint that `farflock` wrote"
        ) from None


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


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    raw = checkpoint.files.get(JSON_NAME)
    if raw is None:
        return ByteTokenizer()
    return JsonTokenizer(raw, origin=str(checkpoint.folder / JSON_NAME))


def _config(checkpoint: Checkpoint) -> ModelConfig:
    try:
        return msgspec.json.decode(checkpoint.files["config.json"], type=ModelConfig)
    except KeyError:
        raise CheckpointCorrupt(
            f"{checkpoint.folder} holds no config.json; use another checkpoint"
        ) from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CheckpointCorrupt(
            f"{checkpoint.folder}/config.json does not describe a model ({error}); "
            "use another checkpoint"
        ) from None
