"""A model out of a checkpoint: what `generate`, `export` and evaluations start from.

The configuration lies beside the weights (config.json), so a checkpoint says by itself what it is. A model that was trained in
stages has one for each, in folders `stage-0`, `stage-1`, …: a full replica has all of them, and those of several servers,
copied into one folder, make up the model too.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from farflock.node.model.llama import Llama, ModelConfig
from farflock.node.model.stage_tensors import Misfit, joined
from farflock.node.state.checkpoint import Checkpoint, CheckpointCorrupt, CheckpointError, latest, load, steps
from farflock.optimizers.method import Tensors

MAX_PARAMETERS = 20_000_000_000  # above that, a configuration is damaged rather than large

_STAGE = re.compile(r"stage-[0-9]{1,4}")


@dataclass(frozen=True, slots=True)
class SavedModel:
    """A verified checkpoint's model, and what the checkpoint says about it."""

    folder: Path
    model: Llama
    meta: dict[str, Any]

    def facts(self) -> dict[str, str]:
        """What a model card tells: the run, and how far it had come."""
        return {name: str(self.meta[name]) for name in ("run", "step", "tokens") if name in self.meta}


def open_model(folder: Path) -> SavedModel:
    """The model of the checkpoint `folder`, or of the newest whole one inside it, or of the newest of each stage; raise
    `CheckpointError`."""
    stages = _stages_in(folder)
    if stages:
        return _put_together(stages)
    checkpoint = _find(folder)
    model = Llama(_config(checkpoint))
    try:
        model.load_state_dict(_weights(checkpoint))
    except RuntimeError:
        raise CheckpointCorrupt(
            f"the weights in {checkpoint.folder} do not fit its config.json; use another checkpoint of the run"
        ) from None
    return SavedModel(checkpoint.folder, model.eval(), checkpoint.meta)


def _stages_in(folder: Path) -> list[Path]:
    """Where the checkpoints of stages are; none where there are whole ones."""
    for place in (folder, folder / "checkpoints"):
        found = sorted(path for path in place.glob("stage-*") if _STAGE.fullmatch(path.name) and steps(path))
        if found and not steps(place):
            return found
    return []


def _put_together(stages: list[Path]) -> SavedModel:
    """The model that these stages' newest checkpoints make up, of whichever round each is."""
    pieces = [_find(stage) for stage in stages]
    place, config = stages[0].parent, _config(pieces[0])
    if len({str(piece.meta.get("run")) for piece in pieces}) > 1 or any(_config(piece) != config for piece in pieces):
        raise CheckpointError(f"the stages in {place} are of several runs; put those of one run into a folder")
    model = Llama(config)
    try:
        weights = joined(_weights(piece) for piece in pieces)
        lacking = sorted(set(model.state_dict()) - set(weights))
        if lacking:
            raise CheckpointError(
                f"{', '.join(stage.name for stage in stages)} in {place} lack {len(lacking)} of the model's tensors,"
                f" {lacking[0]} among them; copy the folders of the other stages there, from whoever serves them"
            )
        model.load_state_dict(weights)
    except (Misfit, RuntimeError) as error:
        raise CheckpointCorrupt(f"the stages in {place} do not make up a model: {error}") from None
    behind = min(pieces, key=lambda piece: int(piece.meta.get("tokens", 0)))
    return SavedModel(place, model.eval(), behind.meta)


def _weights(checkpoint: Checkpoint) -> Tensors:
    try:
        return checkpoint.parts["model"]
    except KeyError:
        raise CheckpointCorrupt(f"{checkpoint.folder} holds no model; use a checkpoint that `farflock` wrote") from None


def _find(folder: Path) -> Checkpoint:
    """`folder` itself if it is a checkpoint; else the newest in it, or in its `checkpoints`, as a node's folder has."""
    for place in (folder, folder / "checkpoints"):
        if steps(place):
            newest = latest(place)
            if newest is None:
                raise CheckpointCorrupt(f"no checkpoint in {place} is whole; use a copy, or the swarm's snapshot")
            return newest
    return load(folder)


def _config(checkpoint: Checkpoint) -> ModelConfig:
    try:
        config = msgspec.json.decode(checkpoint.files["config.json"], type=ModelConfig)
    except KeyError:
        raise CheckpointCorrupt(f"{checkpoint.folder} holds no config.json; use another checkpoint") from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"{checkpoint.folder}/config.json is no model's ({error}); use another one") from None
    if config.parameters() > MAX_PARAMETERS:
        raise CheckpointError(f"{checkpoint.folder} describes {config.parameters():,} parameters; it must be damaged")
    return config
