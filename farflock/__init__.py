"""Train one model on machines far apart. Importing this package loads neither torch nor the
network."""

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farflock.compression.catalog import codec
    from farflock.node.library.join_progress import join_progress
    from farflock.node.library.local_swarm import local_swarm
    from farflock.node.library.samples import samples
    from farflock.node.library.scheduled import scheduled
    from farflock.node.library.swarm_optimizer import SwarmOptimizer
    from farflock.optimizers.catalog import method

__all__ = [
    "SwarmOptimizer",
    "__version__",
    "codec",
    "join_progress",
    "local_swarm",
    "method",
    "samples",
    "scheduled",
]

_WHERE = {
    "SwarmOptimizer": "farflock.node.library.swarm_optimizer",
    "join_progress": "farflock.node.library.join_progress",
    "local_swarm": "farflock.node.library.local_swarm",
    "samples": "farflock.node.library.samples",
    "scheduled": "farflock.node.library.scheduled",
    "method": "farflock.optimizers.catalog",
    "codec": "farflock.compression.catalog",
}

try:
    __version__ = version("farflock")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> object:
    """Import a public name when it is first used (PEP 562)."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
