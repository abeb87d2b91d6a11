"""A model out of a checkpoint: what `generate`, `export` and evaluations start from.

The configuration lies beside the weights (config.json), so a checkpoint says by itself what it is.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from farflock.node.checkpoint import Checkpoint, CheckpointCorrupt, CheckpointError, latest, load, steps
from farflock.node.model import Llama, ModelConfig

MAX_PARAMETERS = 20_000_000_000  # above that, a configuration is damaged rather than large


@dataclass(frozen=True, slots=True)
class Saved:
    """A verified checkpoint's model, and what the checkpoint says about it."""

    folder: Path
    model: Llama
    meta: dict[str, Any]

    def facts(self) -> dict[str, str]:
        """What a model card tells: the run, and how far it had come."""
        return {name: str(self.meta[name]) for name in ("run", "step", "tokens") if name in self.meta}


def open_model(folder: Path) -> Saved:
    """The model of the checkpoint `folder`, or of the newest whole one inside it; raise `CheckpointError`."""
    checkpoint = _find(folder)
    config = _config(checkpoint)
    model = Llama(config)
    try:
        model.load_state_dict(checkpoint.parts["model"])
    except KeyError:
        raise CheckpointCorrupt(f"{checkpoint.folder} holds no model; use a checkpoint that `farflock` wrote") from None
    except RuntimeError:
        raise CheckpointCorrupt(
            f"the weights in {checkpoint.folder} do not fit its config.json; use another checkpoint of the run"
        ) from None
    return Saved(checkpoint.folder, model.eval(), checkpoint.meta)


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
