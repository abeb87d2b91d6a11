"""Farflock trains one model on machines that are far apart. Everything here is imported on first use (PEP 562)."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farflock.node.local_swarm import local_swarm
    from farflock.node.swarm_optimizer import SwarmOptimizer

__all__ = ["SwarmOptimizer", "__version__", "local_swarm"]

_HOMES = {
    "SwarmOptimizer": "farflock.node.swarm_optimizer",
    "local_swarm": "farflock.node.local_swarm",
}

try:
    __version__ = version("farflock")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:  # noqa: ANN401 - PEP 562 hands out whatever the name stands for
    """Import a public name from its home: `import farflock` itself must stay free of torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'farflock' has no attribute {name!r}; public names: {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)
