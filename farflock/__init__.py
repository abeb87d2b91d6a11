"""Train one model on machines far apart. Importing this package loads neither torch nor the
network.

What `__all__` names is stable (docs/reference/python.md); each is imported when it is first used.
"""

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farflock.compression.catalog import codec
    from farflock.node.errors import Failure, FarflockError, RefusedByRun, Usage
    from farflock.node.library.join_progress import join_progress
    from farflock.node.library.local_swarm import local_swarm
    from farflock.node.library.loop_measures import RoundReport as Round
    from farflock.node.library.samples import samples
    from farflock.node.library.scheduled import scheduled
    from farflock.node.library.swarm_optimizer import SwarmOptimizer
    from farflock.node.library.swarm_status import SwarmStatus
    from farflock.optimizers.catalog import method
    from farflock.optimizers.contrib.asynchronous import Async
    from farflock.optimizers.contrib.co2 import CO2
    from farflock.optimizers.contrib.delayed import Delayed
    from farflock.optimizers.contrib.desloc import DesLoc
    from farflock.optimizers.contrib.edit import EDiT
    from farflock.optimizers.contrib.flexdemo import FlexDeMo
    from farflock.optimizers.contrib.sparta_diloco import SpartaDiLoCo
    from farflock.optimizers.ddp import DDP
    from farflock.optimizers.demo_optimizer import DeMo
    from farflock.optimizers.diloco import DiLoCo
    from farflock.optimizers.lean import Lean
    from farflock.optimizers.local import Local
    from farflock.optimizers.noloco import NoLoCo
    from farflock.optimizers.parts.outer import OuterHeavyBall, OuterNesterov, OuterSGD
    from farflock.optimizers.sparseloco import SparseLoCo
    from farflock.optimizers.sparta import Sparta
    from farflock.optimizers.streaming import Streaming

_WHERE = {
    "SwarmOptimizer": "farflock.node.library.swarm_optimizer",
    "join_progress": "farflock.node.library.join_progress",
    "local_swarm": "farflock.node.library.local_swarm",
    "samples": "farflock.node.library.samples",
    "scheduled": "farflock.node.library.scheduled",
    "method": "farflock.optimizers.catalog",
    "codec": "farflock.compression.catalog",
    "Round": "farflock.node.library.loop_measures:RoundReport",
    "SwarmStatus": "farflock.node.library.swarm_status",
    "FarflockError": "farflock.node.errors",
    "Failure": "farflock.node.errors",
    "RefusedByRun": "farflock.node.errors",
    "Usage": "farflock.node.errors",
    "Async": "farflock.optimizers.contrib.asynchronous",
    "CO2": "farflock.optimizers.contrib.co2",
    "DDP": "farflock.optimizers.ddp",
    "DeMo": "farflock.optimizers.demo_optimizer",
    "Delayed": "farflock.optimizers.contrib.delayed",
    "DesLoc": "farflock.optimizers.contrib.desloc",
    "DiLoCo": "farflock.optimizers.diloco",
    "EDiT": "farflock.optimizers.contrib.edit",
    "FlexDeMo": "farflock.optimizers.contrib.flexdemo",
    "Lean": "farflock.optimizers.lean",
    "Local": "farflock.optimizers.local",
    "NoLoCo": "farflock.optimizers.noloco",
    "SparseLoCo": "farflock.optimizers.sparseloco",
    "Sparta": "farflock.optimizers.sparta",
    "SpartaDiLoCo": "farflock.optimizers.contrib.sparta_diloco",
    "Streaming": "farflock.optimizers.streaming",
    "OuterHeavyBall": "farflock.optimizers.parts.outer",
    "OuterNesterov": "farflock.optimizers.parts.outer",
    "OuterSGD": "farflock.optimizers.parts.outer",
}

__all__ = [
    "CO2",
    "DDP",
    "Async",
    "DeMo",
    "Delayed",
    "DesLoc",
    "DiLoCo",
    "EDiT",
    "Failure",
    "FarflockError",
    "FlexDeMo",
    "Lean",
    "Local",
    "NoLoCo",
    "OuterHeavyBall",
    "OuterNesterov",
    "OuterSGD",
    "RefusedByRun",
    "Round",
    "SparseLoCo",
    "Sparta",
    "SpartaDiLoCo",
    "Streaming",
    "SwarmOptimizer",
    "SwarmStatus",
    "Usage",
    "__version__",
    "codec",
    "join_progress",
    "local_swarm",
    "method",
    "samples",
    "scheduled",
]

try:
    __version__ = version("farflock")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0+unknown"


if not TYPE_CHECKING:  # or a misspelt name would be an object to type checkers

    def __getattr__(name: str) -> object:
        """Import a public name when it is first used (PEP 562)."""
        if name not in _WHERE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, _, attribute = _WHERE[name].partition(":")
        return getattr(importlib.import_module(module), attribute or name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
