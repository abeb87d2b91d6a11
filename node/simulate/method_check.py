"""`check_method`: test a method inside a node against the laws (optimizers/testing/check.py)."""

import hashlib
import math
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from farflock.compression.catalog import codec
from farflock.node.model.replica import PlainReplica
from farflock.node.train.driver import Apply, Driver
from farflock.node.train.shards import ShardLayout, decode_all
from farflock.optimizers.method import Exchange, Method, Progress, Replica, Result, Tensors
from farflock.optimizers.testing import check


class CheckedDriver(Driver):
    """A node's driver in a swarm where no peer waits."""

    def apply_next(self, progress: Progress) -> tuple[Exchange, Result, list[Exchange]] | None:
        """Apply the next result that is due, as if all deadlines were over. Return it, with its
        exchange and those of a second phase, or None."""
        action = self.next(replace(progress, run_time_s=math.inf))
        if not isinstance(action, Apply):
            return None
        return action.exchange, action.result, self.apply(action, progress)

    def renewed(self, method: Method, replica: Replica) -> "CheckedDriver":
        """Return a driver of another method instance that continues the pending exchanges."""
        driver = CheckedDriver(method, replica)
        driver.load_state(self.table)
        return driver


class NodeRig:
    """The parts that a node puts around its method (`Rig`)."""

    def driver(self, method: Method, replica: Replica) -> CheckedDriver:
        """Return a driver with nothing pending."""
        return CheckedDriver(method, replica)

    def replica(self, module: nn.Module, inner: torch.optim.Optimizer) -> Replica:
        """Return a plain replica without clipping."""
        return PlainReplica(module, inner, clip_norm=None)

    def decoded(
        self, codec_name: str, tensors: Tensors, round_number: int, seed: int
    ) -> dict[str, Tensor]:
        """Return the tensors after a pass through a codec, cut and encoded as a node does it."""
        shapes = {key: tuple(x.shape) for key, x in tensors.items()}
        cut = ShardLayout.of(shapes, codec(codec_name), seed)
        runs = [cut.encode_run(run, round_number, tensors) for run in cut.runs]
        payloads = [payload for run in runs for payload in run]
        return dict(decode_all(cut, round_number, payloads, shapes))

    def chance(self) -> bytes:
        """Return a fingerprint of the global generators of random, numpy and torch."""
        _, keys, place, *_ = np.random.get_state(legacy=True)
        states = (
            random.getstate(),
            np.asarray(keys).tobytes(),
            place,
            torch.get_rng_state().numpy().tobytes(),
        )
        return hashlib.sha256(repr(states).encode()).digest()


def check_method(make: Callable[[], Method], *, long: bool = False) -> None:
    """Raise `LawBroken` unless the methods that `make` returns keep every law of `Method`.
    `make` may be a class, which is then constructed with its trial options. `long` adds rarer
    faults."""
    check.check_method(make, NodeRig(), long=long)
