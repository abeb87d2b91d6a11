"""Every method with every codec trains a model of one value, of ten, of a thousand: on the CPU, and
beside it a peer whose model and state are on a device (worlds/card.py)."""

import itertools

import pytest
import torch

from farflock.compression.catalog import CODECS
from farflock.optimizers.catalog import METHODS, method
from farflock.optimizers.testing import loopback
from farflock.optimizers.testing.loopback import Loopback
from farflock.optimizers.trial_options import quick_options

from .test_on_device import RigOfCards

SHAPES = ((1,), (2, 5), (40, 25))
FEW_LAYERS = {"streaming": {"fragments": 1}}
STEPS = 6  # three rounds of most methods


def options_of(name, codec):
    """A method's short rounds with this codec both ways, else one way; None if it refuses it."""
    usual = {**quick_options(METHODS[name]), **FEW_LAYERS.get(name, {})}
    for keys in (("codec", "return_codec"), ("codec",)):
        options = {**usual, **dict.fromkeys(usual.keys() & set(keys), codec)}
        try:
            method(name, **options)
        except ValueError:
            continue
        return options
    return None


def cases():
    """Each method with each codec that it takes, once; and with each size."""
    for (m, name), (c, codec) in itertools.product(enumerate(METHODS), enumerate(CODECS)):
        if (options := options_of(name, codec)) is not None:
            shape = SHAPES[(m + c) % len(SHAPES)]
            yield pytest.param(
                name, options, shape, id=f"{name}-{codec}-{'x'.join(map(str, shape))}"
            )


@pytest.mark.parametrize(("name", "options", "shape"), list(cases()))
def test_a_model_of_any_size_trains(name, options, shape, accelerator, monkeypatch):
    monkeypatch.setattr(loopback, "SHAPES", {"weight": shape})
    swarm = Loopback(
        lambda: method(name, **options), RigOfCards(accelerator, every=2), "ab", lr=0.1
    )
    before = {peer.name: peer.theta()["weight"].clone() for peer in swarm.peers.values()}
    swarm.steps(STEPS)
    for peer in swarm.peers.values():
        weight = peer.theta()["weight"]
        assert torch.isfinite(weight).all()
        assert not torch.equal(weight, before[peer.name])
        assert set(peer.applied) == set(peer.templates)
