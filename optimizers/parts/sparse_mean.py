"""The mean of gathered sparse tensors over their senders: leaving a coordinate out is not a vote
for zero."""

from collections.abc import Mapping

import torch
from torch import Tensor

from farflock.optimizers.method import MemberId, TensorBlock, Tensors
from farflock.optimizers.parts.blocks import LazyTensors, read, shapes_of


def mean_of_senders(gathered: Mapping[MemberId, Tensors]) -> LazyTensors:
    """Return at each coordinate the sum, in sorted order of peers, divided by the number of nonzero
    values; zero if none.

    Separately rounded float32 operations, so the bits are the same on every machine. A zero counts
    as not sent: sparse codecs decode what they left out to zero, and a peer without a gradient
    sends only zeros (DeMo's step 7, arXiv:2411.19870; the denominator of SparseLoCo's released
    code, arXiv:2508.15706).
    """
    peers = sorted(gathered)

    def compute(name: str, start: int, stop: int) -> Tensor:
        block = TensorBlock(name, start, stop)
        return _mean([read(gathered[peer], block) for peer in peers])

    return LazyTensors(shapes_of(gathered[peers[0]]), compute)


def _mean(values: list[Tensor]) -> Tensor:
    total, senders = torch.zeros_like(values[0]), torch.zeros_like(values[0])
    for value in values:
        total += value
        senders += (value != 0).to(torch.float32)
    return total / senders.clamp(min=1.0)
