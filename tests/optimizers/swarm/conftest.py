"""The loopback swarm (optimizers/testing/loopback.py) on the product's driver, replica and codecs,
as fixtures."""

import pytest

from farflock.node.simulate.method_check import NodeRig
from farflock.optimizers.testing import loopback as swarms


class Loopback(swarms.Loopback):
    """The loopback swarm with the driver, replica and codecs of a node."""

    def __init__(self, make, peers="ab", **terms):
        super().__init__(make, NodeRig(), peers, **terms)


@pytest.fixture(scope="session")
def loopback():
    """The class: loopback(make_method, peers, gradient=..., inner=..., lr=...)."""
    return Loopback


@pytest.fixture(scope="session")
def gradients():
    """Gradient functions by name."""
    return {name: getattr(swarms, name) for name in ("noise", "shared", "bowl", "zero")}


@pytest.fixture(scope="session")
def values():
    """(label, shape) -> small dyadic values."""
    return swarms.dyadic


@pytest.fixture(scope="session")
def same():
    """True if two dictionaries of tensors have equal names and equal bits (0 is not -0)."""

    return swarms.same
