"""Models that no swarm can train, refused before an identity or a port is made."""

from torch import nn
from torch.nn.parameter import is_lazy

from farflock.node.errors import Usage
from farflock.node.library.parameter_watch import sparse_gradient


def require_trainable(model: nn.Module) -> None:
    """Raise `Usage` that names the first parameter without values here (meta, not initialized, or a
    shard of ZeRO-3), or with gradients that are known to be sparse."""
    for name, entry in model.named_parameters():
        what = f"parameter {name}"
        if is_lazy(entry):
            raise Usage(what, "it has no shape yet", "run one batch through the model first")
        if entry.is_meta:
            raise Usage(what, "it is on the meta device", "give it values with to_empty() first")
        if hasattr(entry, "ds_shape"):
            why = "it is a shard of DeepSpeed's ZeRO-3, whose values are elsewhere between passes"
            raise Usage(what, why, "use ZeRO-1, DDP or FSDP2 inside one peer")
    for place, module in model.named_modules():
        is_sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        if is_sparse and module.weight.requires_grad:
            raise sparse_gradient(f"{place}.weight".lstrip("."))
