"""A loopback for methods: M virtual peers in one process, exact weighted means in canonical order,
scripted misfortune."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from farflock.compression.elementwise import weighted_mean
from farflock.node.model.replica import PlainReplica
from farflock.optimizers.method import Progress, Result


def vector(size: int) -> PlainReplica:
    """A replica of one vector under plain SGD; tests set its gradient."""
    module = nn.Module()
    module.x = nn.Parameter(torch.zeros(size))
    return PlainReplica(module, torch.optim.SGD(module.parameters(), lr=1.0), clip_norm=None)


class Loopback:
    """Peers that take local steps of given gradients and exchange through exact means."""

    def __init__(self, methods, replicas):
        self.methods, self.replicas = methods, replicas
        self.steps = [0] * len(methods)

    def step(self, peer: int, gradient: torch.Tensor, weight: float = 1.0):
        """Take one local step of one peer; its gradient counts with this weight."""
        replica = self.replicas[peer]
        name = replica.names[0]
        before = replica.read([name], "grad")[name]
        replica.write({name: before + gradient}, "grad")
        self.methods[peer].local_step(replica, Progress(self.steps[peer], weight=weight))
        self.steps[peer] += 1

    def due(self, peer: int):
        """Return the exchanges that are due at the peer."""
        return self.methods[peer].due(self.replicas[peer], Progress(self.steps[peer]))

    def sync(self, *, missing=(), failed=()):
        """Let all peers that are due exchange; those in `missing` are not taken, and those in
        `failed` get no result."""
        asked = {
            peer: exchanges[0] for peer in range(len(self.methods)) if (exchanges := self.due(peer))
        }
        inside = [peer for peer in asked if peer not in missing]
        mean = {}
        if inside:
            names = list(asked[inside[0]].tensors)
            inputs = [(asked[p].weight, [asked[p].tensors[n] for n in names]) for p in inside]
            mean = dict(zip(names, weighted_mean(inputs), strict=True))
        for peer, exchange in asked.items():
            result = self.result(exchange, inside, mean, peer in inside)
            self.apply(
                peer,
                exchange,
                Result("failed", exchange.key.round + 1) if peer in failed else result,
            )
        return asked

    def result(self, exchange, inside, mean, taken):
        """The swarm's result."""
        ranges = (
            {name: [(0, tensor.numel())] for name, tensor in exchange.tensors.items()}
            if taken
            else {}
        )
        status = (
            "alone"
            if len(self.methods) == 1
            else "ok"
            if len(inside) == len(self.methods)
            else "partial"
        )
        weights = (exchange.weight,) * len(inside)
        participants = tuple(f"peer{peer}" for peer in inside)
        number = exchange.key.round + 1
        return Result(
            status, number, participants, weights, mean=mean, sent=exchange.tensors, taken=ranges
        )

    def apply(self, peer, exchange, result, steps_since=0):
        """Hand a result over."""
        self.methods[peer].apply(
            self.replicas[peer], exchange, replace(result, steps_since=steps_since)
        )

    def theta(self, peer: int) -> torch.Tensor:
        """A peer's parameters."""
        return self.replicas[peer].read(["x"], "param")["x"]

    def phi(self, peer: int) -> torch.Tensor:
        """A peer's outer parameters."""
        return self.methods[peer].eval_params(self.replicas[peer])["x"]


@pytest.fixture
def loopback():
    """Build a loopback of M peers of one method."""

    def build(make, peers: int, size: int = 6) -> Loopback:
        return Loopback([make() for _ in range(peers)], [vector(size) for _ in range(peers)])

    return build
