"""DDP's state has the moments of whatever inner optimizer there is: a peer that adopts it steps as
the peer that it came from."""

import pytest
import torch
from torch import nn

from farflock.node.model.replica import PlainReplica
from farflock.optimizers.catalog import method
from farflock.optimizers.method import Exchange, Result
from farflock.optimizers.parts.corrections import TREND, Trend
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.state import state_hash

INNERS = [
    InnerConfig("adamw", 0.01),
    InnerConfig("nadam", 0.01),
    InnerConfig("sgd", 0.01),
    InnerConfig("sgd", 0.01, momentum=0.9),
    InnerConfig("sgd", 0.01, momentum=0.9, nesterov=True),
]


class Peer:
    def __init__(self, config, trend):
        torch.manual_seed(3)
        module = nn.Linear(3, 2)
        inner = config.build(module)
        if trend:
            Trend(inner)
        self.method, self.replica = (
            method("ddp", codec="fp32", return_codec="fp32"),
            PlainReplica(module, inner, None),
        )

    def step(self, *numbers):
        (template,) = self.method.streams(self.replica)
        for number in numbers:
            generator = torch.Generator().manual_seed(number)
            mean = {
                name: torch.randn(shape, generator=generator)
                for name, shape in self.replica.shapes.items()
            }
            exchange = Exchange(template.key, "mean", template.group, {})
            self.method.apply(
                self.replica, exchange, Result("ok", number + 1, ("a",), (1.0,), mean=mean)
            )
        return self

    @property
    def state(self):
        return self.method.snapshot(self.replica)


@pytest.mark.parametrize("trend", [False, True])
@pytest.mark.parametrize(
    "config", INNERS, ids=lambda config: f"{config.name} {config.momentum} {config.nesterov}"
)
@pytest.mark.parametrize("steps", [0, 3])
def test_a_joiner_steps_like_the_peer_whose_state_it_took(config, trend, steps):
    teacher, joiner = Peer(config, trend).step(*range(steps)), Peer(config, trend)
    joiner.method.restore(joiner.replica, teacher.state, "adopt")
    assert state_hash(joiner.state) == state_hash(teacher.state)
    teacher.step(7, 8, 9), joiner.step(7, 8, 9)
    assert state_hash(joiner.state) == state_hash(teacher.state)
    assert any(name.startswith(TREND) for name in joiner.state) == trend


def test_a_peer_that_adopts_a_state_without_moments_loses_its_own():
    config = InnerConfig("sgd", 0.01, momentum=0.9)
    fresh, old = Peer(config, trend=True), Peer(config, trend=True).step(1, 2)
    old.method.restore(old.replica, fresh.state, "adopt")
    assert state_hash(old.state) == state_hash(fresh.state)
    assert not any(name.startswith(("momentum_buffer", TREND)) for name in old.state)


def test_a_state_of_adamw_is_as_large_as_it_was():
    kinds = {name.partition(".")[0] for name in Peer(INNERS[0], trend=False).step(1).state}
    assert kinds == {"param", "exp_avg", "exp_avg_sq", "step", "round"}
