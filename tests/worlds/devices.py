"""Simulated pipelines whose stages are on a device beside the CPU."""

from farflock.node.model.device import Device
from farflock.node.simulate import pipeline


def place_all(monkeypatch, accelerator):
    """Put the stages of all simulated peers on a device, computing in the CPU's precision."""
    real, there = pipeline.NodeServices, Device(accelerator, "Single", "fp32")
    monkeypatch.setattr(
        pipeline, "NodeServices", lambda *given, **named: real(*given, **named | {"device": there})
    )


def is_on_device(x):
    """Return whether this tensor is on a device beside the CPU."""
    return x.device.type != "cpu"
