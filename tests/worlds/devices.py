"""Simulated pipelines whose stages are on worlds/card.py's device."""

from farflock.node.model.device import Device
from farflock.node.simulate import pipeline


def place_all(monkeypatch, card):
    """Put the stages of all simulated peers on the card, computing in the CPU's precision."""
    real, on_card = pipeline.NodeServices, Device(card, "Double Card", "fp32")
    monkeypatch.setattr(
        pipeline, "NodeServices", lambda *given, device: real(*given, device=on_card)
    )
