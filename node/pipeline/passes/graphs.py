"""Kept activations: graphs of forward passes, for backward passes that would compute them again.

A graph serves only the same input, bit for bit, at weights that nothing has changed since. So the
gradients are those that the server would compute without it, whatever trainers ask for: on a CPU
bit for bit, on other devices as far as they compute alike twice."""

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from farflock.node.model.device import is_out_of_memory
from farflock.node.pipeline.passes.stage import Graph, Stage
from farflock.node.train.task import NoRoom

log = logging.getLogger(__name__)

T = TypeVar("T")
MAX_GRAPH_BYTES = 512 * 1024 * 1024  # of one server; beyond it, backward passes compute again


@dataclass(slots=True)
class KeptGraphs:
    """The graphs of one stage's forward passes, each until its backward pass or until the weights
    change, in at most `max_bytes`, and in half of what the first pass leaves free on a device.

    None is dropped for a newer one: backward passes come in the order of the forward passes, so
    the oldest is the next to be of use. A caller names its passes by a key, and the weights, where
    a stage computes with several versions of them, by `version`. Only the compute thread uses
    this."""

    stage: Stage
    max_bytes: int = MAX_GRAPH_BYTES
    used: int = 0  # graphs that a backward pass took
    _graphs: dict[Hashable, Graph] = field(default_factory=dict)
    _weights: Hashable = None  # those of all graphs
    _each_bytes: int | None = None  # microbatches of a run have one shape, so the graphs one size

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def size_bytes(self) -> int:
        """The bytes held for backward passes."""
        return len(self) * (self._each_bytes or 0)

    def forward(self, key: Hashable, x: Tensor, version: Hashable = None) -> Tensor | None:
        """Compute the stage's output and keep its graph; return None, with nothing computed, if
        there is no room."""
        if self._each_bytes is None:
            y, self._each_bytes = measured(self.stage, x)
            if (free_bytes := self.stage.free_bytes) is not None:
                self.max_bytes = min(self.max_bytes, free_bytes // 2)
            return y
        if (weights := self._now(version)) != self._weights:
            self._graphs.clear()
            self._weights = weights
        self._graphs.pop(key, None)
        if self.size_bytes + self._each_bytes > self.max_bytes:
            return None
        graph = self._graphs[key] = self.stage.graph(x)
        return graph.output.detach()

    def take(self, key: Hashable, x: Tensor, version: Hashable = None) -> Graph | None:
        """Take the graph of this input out, if it is here and the weights are still the same."""
        graph = self._graphs.pop(key, None)
        if graph is None or self._weights != self._now(version) or not _same(graph.given, x):
            return None
        self.used += 1
        return graph

    def shrink(self) -> None:
        """Drop all graphs, and keep half as many from now on."""
        self.max_bytes = self.size_bytes // 2
        self._graphs.clear()

    def _now(self, version: Hashable) -> Hashable:
        """Return what changes with the weights: torch counts the writes to each tensor in place,
        and a swapped tensor has another storage."""
        return version, tuple((x._version, _storage(x)) for x in self.stage.model.parameters())


def within_memory(kept: Sequence[KeptGraphs], work: Callable[[bool], T]) -> T:
    """Do `work(False)`. Where the device has no room, drop graphs, give back what torch keeps, and
    do `work(True)`, which is to take little. Raise `NoRoom` if that does not help."""
    try:
        return work(False)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error)
    # Here, not above: the error holds the frames of the pass, and these its tensors.
    dropped = sum(map(len, kept))
    log.warning("a device ran out of memory in a pass: %d kept graphs are dropped", dropped)
    for graphs in kept:
        graphs.shrink()
    kept[0].stage.release()
    try:
        return work(True)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise NoRoom(
            "the device has no room for one microbatch of a stage",
            f"{error}; before that: {reason}",
            "close programs that use it, or serve on another device (--device cpu)",
        ) from error


def measured(stage: Stage, x: Tensor) -> tuple[Tensor, int]:
    """Compute a stage's output; return it, and the bytes that its graph would hold beside the
    weights and the input."""
    x = stage.there(x)
    known = {_storage(kept) for kept in (x, *stage.model.parameters(), *stage.model.buffers())}
    sizes: dict[int, int] = {}

    def note(saved: Tensor) -> Tensor:
        if (storage := _storage(saved)) not in known:
            sizes[storage] = saved.untyped_storage().nbytes()
        return saved.detach()  # a graph that held its own outputs would never be freed

    with torch.autograd.graph.saved_tensors_hooks(note, nn.Identity()):
        output = stage.graph(x).output.detach()
    return output, sum(sizes.values())


def _storage(x: Tensor) -> int:
    """Return what names a tensor's storage while it lives; not on every device has it an
    address."""
    return int(x.untyped_storage()._cdata)


def _same(one: Tensor, other: Tensor) -> bool:
    """True if the tensors have the same shape and bits; zeros of both signs differ."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    raw = one.detach().contiguous(), other.contiguous()
    return torch.equal(raw[0].view(torch.uint8), raw[1].view(torch.uint8))
