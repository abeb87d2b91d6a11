"""The loopback swarm (optimizers/testing/loopback.py) on the product's driver, replica and codecs,
as fixtures."""

import hashlib

import pytest
from hypothesis import strategies as st

from farflock.node.simulate.method_check import NodeRig
from farflock.optimizers.testing import loopback as swarms


class Loopback(swarms.Loopback):
    """The loopback swarm with the driver, replica and codecs of a node."""

    def __init__(self, make, peers="ab", **terms):
        super().__init__(make, NodeRig(), peers, **terms)


def late(swarm):
    swarm.late = lambda peer, number: (number % 4) * 2 if peer == "b" else 0


def unlucky(swarm):
    swarm.fails = lambda number: number % 3 == 1
    swarm.taken = lambda peer, number: (
        lambda what, n: [(2, 5)] if (peer, number % 2) == ("a", 0) else [(0, n)]
    )


def absent(swarm):
    swarm.rests = lambda peer, tick: peer == "b" and 5 < tick < 22


FATES = {"calm": lambda swarm: None, "late": late, "unlucky": unlucky, "absent": absent}


@pytest.fixture
def fate(request):
    """What befalls a swarm, by its name (indirect)."""
    return FATES[request.param]


@pytest.fixture(scope="session")
def any_fate():
    """A function (swarm, data) after which results are late, partial or lost as hypothesis
    likes."""

    def befall(swarm, data):
        lateness = data.draw(st.lists(st.integers(0, 5), min_size=12, max_size=12))
        cuts = data.draw(
            st.lists(st.tuples(st.integers(0, 7), st.integers(0, 15)), min_size=12, max_size=12)
        )
        failing = data.draw(st.sets(st.integers(0, 11)))

        def some(peer, number):
            start, stop = cuts[number % 12]
            return lambda what, n: (
                [(min(start, n), min(stop, n))] if min(start, n) < min(stop, n) else []
            )

        swarm.late = lambda peer, number: lateness[number % 12]
        swarm.fails = lambda number: number % 12 in failing
        swarm.taken = some

    return befall


@pytest.fixture(scope="session")
def bits_of():
    """A function that returns the bits of a swarm after 20 steps with late, partial and failed
    rounds: its first values, and a hash of all."""

    def bits(swarm):
        late(swarm), unlucky(swarm)
        swarm.steps(20)
        peer = swarm.peers["a"]
        phi = dict(peer.method.eval_params(peer.replica))
        blob = b"".join(x.numpy().tobytes() for x in phi.values())
        return [phi["weight"].reshape(-1)[:4].tolist(), hashlib.sha256(blob).hexdigest()]

    return bits


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
