"""Every method with every codec trains a model of one value, of ten, of a thousand, and one with a
parameter of no dimension or of no values: on the CPU, and beside it a peer whose model and state
are on a device (worlds/card.py)."""

import itertools

import pytest
import torch

from farflock.compression.catalog import CODECS
from farflock.node.simulate.method_check import NodeRig
from farflock.optimizers.catalog import METHODS, method
from farflock.optimizers.testing import loopback
from farflock.optimizers.testing.loopback import Loopback, same
from farflock.optimizers.trial_options import quick_options

from .test_on_device import RigOfCards

MODELS = (
    {"weight": (1,)},
    {"weight": (2, 5)},
    {"weight": (40, 25)},
    {"weight": (2, 5), "scale": ()},
    {"nothing": (0,), "weight": (2, 5), "rows": (3, 0)},
)
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
            shapes = MODELS[(m + c) % len(MODELS)]
            label = "-".join(f"{one}{'x'.join(map(str, shape))}" for one, shape in shapes.items())
            yield pytest.param(name, options, shapes, id=f"{name}-{codec}-{label}")


@pytest.mark.parametrize(("name", "options", "shapes"), list(cases()))
def test_a_model_of_any_size_trains(name, options, shapes, accelerator, monkeypatch):
    monkeypatch.setattr(loopback, "SHAPES", shapes)
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


@pytest.fixture
def doubles_by_default():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def trained(name, options, rig):
    swarm = Loopback(lambda: method(name, **options), rig, "ab", lr=0.1)
    swarm.steps(STEPS)
    return {peer.name: peer.theta() for peer in swarm.peers.values()}


@pytest.mark.parametrize("name", METHODS)
def test_no_number_of_ours_follows_the_default_type(name, doubles_by_default):
    options = {**quick_options(METHODS[name]), **FEW_LAYERS.get(name, {})}
    odd = trained(name, options, NodeRig())
    torch.set_default_dtype(torch.float32)
    usual = trained(name, options, NodeRig())
    assert all(same(odd[peer], usual[peer]) for peer in usual)
