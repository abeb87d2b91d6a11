"""A machine's choices for its training steps, in favour of memory or of speed.

These choices belong to the machine, like its device; no manifest names them.
"""

from dataclasses import dataclass
from typing import Literal

from farflock.node.model.device import Device
from farflock.node.model.llama import ModelConfig
from farflock.node.model.loss import logits_at_once
from farflock.optimizers.parts.small_adamw import MomentType

Switch = Literal["auto", "on", "off"]

COMPILING = ("cuda", "xpu")  # devices on which compiled code is worth its compilation


@dataclass(frozen=True, slots=True)
class StepOptions:
    """`checkpointing` is of activations: backward passes compute each layer again. `compile` is
    torch.compile, layer by layer. `moments` is the type of AdamW's. `micro_batch` sequences are
    computed at once, at first (None: a batch)."""

    checkpointing: Switch = "auto"
    compile: Switch = "auto"
    moments: MomentType = "fp32"
    micro_batch: int | None = None

    @property
    def checkpoints(self) -> bool:
        """True if layers are computed again; auto: no, unless a trial has shown that they must
        be."""
        return self.checkpointing == "on"

    def compiles_on(self, device: Device) -> bool:
        """Return whether layers are compiled for this device."""
        auto = device.place.type in COMPILING
        return auto if self.compile == "auto" else self.compile == "on"


def logits_on(device: Device) -> int | None:
    """Return how many logits may exist at once there; None on a CPU: `loss.MAX_LOGITS`."""
    return None if device.place.type == "cpu" else logits_at_once(device.memory()[1])


def activation_bytes(config: ModelConfig, is_lower: bool, checkpointing: bool) -> int:
    """Return the bytes per token that a forward pass keeps for the backward pass at most, with
    products in float32 or, if `is_lower`, in a type of two bytes.

    With checkpointing, the layer that is computed again is counted too. Logits are not
    (loss.MAX_LOGITS), and attention is one that keeps no probabilities, as fused ones are."""
    width, queries = config.dim, config.heads * config.head_dim
    pairs = 2 * config.kv_heads * config.head_dim
    # Norms keep float32: their input, the same scaled to unit size, and that factor.
    norm, size = 4 * (2 * width + 1), 2 if is_lower else 4
    # Autocast makes a copy for each product; float32 products share the norm's output.
    inputs = (5 if is_lower else 2) * width
    attention, hidden = 2 * queries + pairs, 4 * config.ffn_dim
    # Those of queries and keys keep the same of each head.
    scaled = 8 * queries + 4 * pairs + 4 * (config.heads + config.kv_heads)
    norms = 2 * norm + scaled * config.has_qk_norm
    layer = norms + 4 * config.heads + size * (inputs + attention + hidden)
    ends = norm + 4 * width + 2 * 8  # the last norm and its output; a token and its target
    if checkpointing:
        return config.layers * 4 * width + layer + ends
    return config.layers * layer + ends
