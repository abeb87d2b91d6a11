"""The device of an arm's models, and the function that measures the held-out loss of its
parameters."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from farflock.experiments.pipelines.text import texts
from farflock.node.model.data import evaluation
from farflock.node.model.device import Device, choose
from farflock.node.model.evaluation import losses
from farflock.node.model.llama import ModelConfig, build

Measure = Callable[[Mapping[str, Tensor]], float]


def comparable(device: str) -> Device:
    """Return the device of this name, with products in float32: losses are compared across
    machines, and with arms that ran elsewhere. Raise `Usage` if this machine has none."""
    return replace(choose(device), precision="fp32")


def measure(
    model: ModelConfig, seed: int, seq: int, sequences: int, place: torch.device
) -> Measure:
    """Return a function that maps parameters to the held-out loss, in nats per token."""
    x, y = evaluation(texts()[1], seq, sequences)
    judge: nn.Module = build(model, seed).to(place)
    places = dict(judge.named_parameters())

    def loss(parameters: Mapping[str, Tensor]) -> float:
        with torch.no_grad():
            for name, tensor in parameters.items():
                places[name].copy_(tensor)
        return float(losses(judge, x, y, 64).mean())

    return loss
