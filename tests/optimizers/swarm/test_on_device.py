"""Every method with its state on a device, worlds/card.py: what it computes there has the bits of
the CPU, in a swarm of its own and beside peers on the CPU."""

import pytest
import torch
from worlds.card import CARD

from farflock.node.model.replica import OnDevice
from farflock.node.simulate.method_check import NodeRig
from farflock.optimizers.catalog import METHODS, method
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.portable_inner import make_portable
from farflock.optimizers.parts.state import state_hash
from farflock.optimizers.testing import check, misfortunes
from farflock.optimizers.testing.loopback import same
from farflock.optimizers.trial_options import law_options, trial_of

VARIANTS = [
    *((name, {}) for name in METHODS),
    ("diloco", {"feedback": 0.5, "codec": "int4", "return_codec": "bf16"}),
    ("noloco", {"gamma": 0.6}),
    ("sparseloco", {"denominator": "selectors"}),
    ("sparta", {"selector": "partition"}),
    ("flexdemo", {"replicator": "random"}),
    ("streaming", {"feedback": 0.5, "codec": "int4", "return_codec": "bf16"}),
    ("async", {"codec": "int8", "buffer": 3, "c": 0.25}),
]
EVERY_DAY = ("ddp", "diloco", "lean")
OWN_SUMS = ("demo", "lean")  # of a transform, and of a rate; peers do not agree on their bits


def each_method(daily=EVERY_DAY):
    """Every method and its variants; those that are not `daily` are tried in CI's second part."""
    return pytest.mark.parametrize(
        ("name", "more"),
        [
            pytest.param(
                name,
                more,
                id="-".join(map(str, (name, *more.values()))),
                marks=() if name in daily and not more else pytest.mark.ci_more,
            )
            for name, more in VARIANTS
        ],
    )


class PortableRig(NodeRig):
    """Replicas whose local steps have the same bits everywhere, as a node's have in runs of
    methods that need that. Here all do, so that nothing hides what a method computes."""

    def replica(self, module, inner):
        make_portable(inner)
        return super().replica(module, inner)


class RigOfCards(PortableRig):
    """Replicas whose models and states are on the card: every peer's, or every second peer's."""

    def __init__(self, card, every=1):
        self.card, self.every, self.made = card, every, 0

    def replica(self, module, inner):
        self.made += 1
        if self.made % self.every:
            return super().replica(module, inner)
        made = super().replica(module.to(self.card), rebuilt(inner, module))
        made.storage = OnDevice(self.card).allocate
        return made


def rebuilt(inner, module):
    """An optimizer like `inner` for a module that has moved: that has other parameters then."""
    name = "adamw" if isinstance(inner, torch.optim.AdamW) else "sgd"
    return InnerConfig(name, lr=inner.defaults["lr"], weight_decay=0.0).build(module)


def subject(name, more, rig):
    options = {**law_options(METHODS[name]), **more}
    return check.Subject(lambda: method(name, **options), rig, trial_of(METHODS[name]).rest)


def everything_of(swarm):
    """All that each peer has, by its name."""
    return {name: check.holding(peer) for name, peer in swarm.peers.items()}


@each_method()
def test_a_swarm_on_cards_has_the_bits_of_one_on_cpus(name, more, accelerator):
    if name in OWN_SUMS and not CARD.plugged:
        pytest.skip("sums of its own are taken in another order on a real device")
    there, here = (
        everything_of(check.played(subject(name, more, rig), 3, "everything"))
        for rig in (RigOfCards(accelerator), PortableRig())
    )
    assert there.keys() == here.keys()
    assert all(same(there[peer], here[peer]) for peer in here)


@each_method(("ddp", "lean"))
def test_no_bit_that_peers_agree_on_comes_from_a_division_by_a_number(name, more, card):
    """CUDA does not round that correctly. The inner optimizer, sgd, divides by none either."""
    there, here = (
        everything_of(misfortunes.play(subject(name, more, rig).swarm("abc"), "everything"))
        for rig in (dividing(card), PortableRig())
    )
    assert all(same(there[peer], here[peer]) for peer in here)


def dividing(card):
    """A rig of cards that divide as CUDA does."""
    CARD.reciprocal = True
    third = torch.full((3,), 5.0, device=card) / 3
    assert not torch.equal(third.cpu(), torch.full((3,), 5.0) / 3)
    return RigOfCards(card)


@each_method()
def test_a_card_and_a_cpu_agree_in_each_round(name, more, accelerator):
    """The loopback compares what both hold at the beginning of each round of an exact method."""
    swarm = check.played(subject(name, more, RigOfCards(accelerator, every=2)), 2, "everything")
    homes = {x.device.type != "cpu" for peer in swarm.peers.values() for x in peer.theta().values()}
    assert homes == {True, False}
    for peer in swarm.peers.values():
        state = peer.outer()
        assert state_hash(state) == state_hash({what: x.cpu() for what, x in state.items()})


@each_method(())
def test_a_peer_on_a_card_stops_and_goes_on(name, more, accelerator):
    check.check_stopping_once(subject(name, more, RigOfCards(accelerator)), 25)


@each_method(())
def test_a_snapshot_goes_from_a_card_to_a_cpu_and_back(name, more, accelerator):
    made = subject(name, more, RigOfCards(accelerator, every=2))
    check.check_joiner(made, 13)


@each_method()
def test_a_round_computes_where_the_state_is(name, more, accelerator):
    swarm = subject(name, more, RigOfCards(accelerator)).swarm("ab")
    swarm.steps(misfortunes.TICKS)
    peer = swarm.peers["a"]
    shapes = set(peer.replica.shapes.values())
    like_parameters = {what: x for what, x in peer.outer().items() if tuple(x.shape) in shapes}
    assert like_parameters
    assert all(x.device.type != "cpu" for x in like_parameters.values()), like_parameters.keys()
