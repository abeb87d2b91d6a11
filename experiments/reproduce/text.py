"""The device of an arm's models, and the function that measures the held-out loss of its
parameters."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from farflock.experiments.pipelines.text import texts
from farflock.node.errors import Usage
from farflock.node.model.data import evaluation
from farflock.node.model.device import Device, choose
from farflock.node.model.evaluation import losses
from farflock.node.model.llama import ModelConfig, build

Measure = Callable[[Mapping[str, Tensor]], float]


def device_for(wanted: str | None, sized_for: str, what: str) -> str:
    """Return the name of the device of some runs: the wanted one, or the CPU or the best other one
    that their sizes ask for. Raise `Usage` if this machine has none."""
    if wanted is None and sized_for == "cpu":
        return "cpu"
    place = choose(wanted or "auto").place
    if wanted is None and place.type == "cpu":
        raise Usage(
            what,
            "it is sized for a GPU, and torch finds none here",
            "use --tier cpu, or --device cpu, which may take days",
        )
    return str(place)


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
