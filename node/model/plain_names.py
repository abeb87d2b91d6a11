"""Names of parameters without what wrappers add to them.

`torch.compile` names a module's tensors `_orig_mod.…`, and DDP and DataParallel `module.…`. Peers
of a run may wrap the same model in different ways.
"""

from collections.abc import Mapping
from typing import TypeVar

from torch import nn

T = TypeVar("T")
WRAPPERS = frozenset(("_orig_mod", "module"))


def plain_name(name: str) -> str:
    """Return a name without the parts of wrappers, at whatever level they are."""
    if not any(wrapper in name for wrapper in WRAPPERS):
        return name
    *modules, own = name.split(".")
    return ".".join((*(each for each in modules if each not in WRAPPERS), own))


def in_plain_names(found: Mapping[str, T]) -> dict[str, T]:
    """Return the same by plain names; by the old ones if two would then have one name."""
    plain = {plain_name(name): one for name, one in found.items()}
    return plain if len(plain) == len(found) else dict(found)


def plain_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's parameters by plain names, in the module's order; a tied one once."""
    return in_plain_names(dict(module.named_parameters()))
