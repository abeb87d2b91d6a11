"""Whether a run's model fits this machine, known from its manifest alone, before any memory is taken for it."""

import psutil

from farflock.node.errors import FarflockError
from farflock.node.model.llama import ModelConfig
from farflock.node.run.manifest import Manifest

VALUE_BYTES = 4  # everything is kept in fp32
VALUES_ALONE, VALUES = 21, 31


def needed_bytes(manifest: Manifest) -> int:
    """Bytes that training this run's model takes beside the program itself, an estimate from above.

    Of each weight `VALUES` numbers, and `VALUES_ALONE` where nothing is exchanged: itself, its gradient and moments, the
    method's state, an update on its way, and the copies that a checkpoint is written from. The peak of whole nodes with
    AdamW was 28.2 to 30.3 numbers (DDP, DiLoCo, NoLoCo) and 20.1 (alone), at 10.7 and 39.5 million weights.
    Of each token of a batch: what the backward pass reads again (ten widths and four hidden widths a layer, attention,
    and the logits)."""
    model, train = manifest.model, manifest.train
    a_weight = VALUES_ALONE if manifest.method.name == "local" else VALUES
    a_token = model.layers * layer_values(model, train.seq) + 3 * model.vocab_size
    return VALUE_BYTES * (model.parameters() * a_weight + train.batch * train.seq * a_token)


def layer_values(model: ModelConfig, seq: int) -> int:
    """Numbers of one token that a layer's backward pass reads again."""
    return 10 * model.dim + 4 * model.ffn_dim + model.heads * seq


def require_room(manifest: Manifest, error: type[FarflockError]) -> None:
    """Raise `error`, with the numbers, if the machine has less memory free than the run takes."""
    needed, free = needed_bytes(manifest), int(psutil.virtual_memory().available)
    if needed > free:
        why = (
            f"training its {manifest.model.parameters():,} parameters takes about {needed / 1e6:,.0f} MB of memory, and"
            f" {free / 1e6:,.0f} MB are free here"
        )
        raise error("the run's model is too large for this machine", why, "close programs, or use a larger machine")
