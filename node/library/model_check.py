"""Models that no swarm can train, refused before an identity or a port is made; and copies of an
optimizer that is in a run."""

from typing import NoReturn, SupportsIndex

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from farflock.node.errors import Usage
from farflock.node.library.parameter_watch import sparse_gradient
from farflock.node.library.telling import tell


def require_trainable(model: nn.Module) -> None:
    """Warn of float64 parameters.

    Raise `Usage` that names the first parameter without values here (meta, not initialized, or a
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
    doubles = (name for name, x in model.named_parameters() if x.requires_grad and is_double(x))
    if (first := next(doubles, None)) is not None:
        tell(
            f"parameter {first} is float64: it stays so in your model, but each round agrees on its"
            " value in float32, so smaller steps are lost; use a float32 model if that matters"
        )
    for place, module in model.named_modules():
        is_sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        if is_sparse and module.weight.requires_grad:
            raise sparse_gradient(f"{place}.weight".lstrip("."))


def refuse_copies(optimizer: torch.optim.Optimizer, protocol: SupportsIndex) -> NoReturn:
    """Raise `Usage`: a copy would be a second peer with this one's identity."""
    why = "it is one peer of a run"
    raise Usage("an optimizer cannot be copied or pickled", why, "copy or save its state_dict()")


def is_double(x: Tensor) -> bool:
    """Return whether a tensor has more digits than rounds agree on."""
    return x.dtype in (torch.float64, torch.complex128)
