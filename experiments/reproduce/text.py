"""The function that measures the held-out loss of an arm's parameters."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from farflock.experiments.pipelines.text import texts
from farflock.node.model.data import evaluation
from farflock.node.model.evaluation import losses
from farflock.node.model.llama import ModelConfig, build

Measure = Callable[[Mapping[str, Tensor]], float]


def measure(model: ModelConfig, seed: int, seq: int, sequences: int, device: str) -> Measure:
    """Return a function that maps parameters to the held-out loss, in nats per token."""
    x, y = evaluation(texts()[1], seq, sequences)
    judge: nn.Module = build(model, seed).to(device)
    places = dict(judge.named_parameters())

    def loss(parameters: Mapping[str, Tensor]) -> float:
        with torch.no_grad():
            for name, tensor in parameters.items():
                places[name].copy_(tensor)
        return float(losses(judge, x, y, 64).mean())

    return loss
