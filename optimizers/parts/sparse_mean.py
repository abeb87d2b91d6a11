"""The mean over those who sent a value, of gathered sparse tensors: who left a coordinate out did not vote for zero there."""

from collections.abc import Mapping

import torch
from torch import Tensor

from farflock.optimizers.method import MemberId, Tensors


def mean_of_senders(gathered: Mapping[MemberId, Tensors]) -> dict[str, Tensor]:
    """At each coordinate the sum of what came, in sorted order of peers, divided by how many values were not zero; zero
    where all were. Separately rounded float32 operations, so the same bits on every machine.

    A zero counts as not sent: sparse codecs decode to zero what they left out, and a peer without a gradient sends only
    zeros (DeMo's step 7, arXiv:2411.19870; the denominator of SparseLoCo's released code, arXiv:2508.15706).
    """
    peers = sorted(gathered)
    return {name: _mean([gathered[peer][name] for peer in peers]) for name in gathered[peers[0]]}


def _mean(values: list[Tensor]) -> Tensor:
    total, senders = torch.zeros_like(values[0]), torch.zeros_like(values[0])
    for value in values:
        total += value
        senders += (value != 0).to(torch.float32)
    return total / senders.clamp(min=1.0)
