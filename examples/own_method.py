"""A method of your own, Local SGD (arXiv:1805.09767), in four peers that all pass its class."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

import farflock
from farflock.node.library.local_swarm import Optimize
from farflock.optimizers.method import Exchange, Replica, Result, TensorBlock, Tensors
from farflock.optimizers.parts.blocks import read
from farflock.optimizers.parts.outer_state import Anchor
from farflock.optimizers.parts.state_fields import nested
from farflock.optimizers.parts.stateful import PeriodicMethod, mean_of

STEPS = 20


@dataclass(slots=True)
class LocalSGD(PeriodicMethod):
    """`period` local steps, then x <- mean of x. What is sent is the last mean, phi, minus x."""

    period: int = 5
    codec: str = "fp16"
    return_codec: str = "bf16"
    deadline_s: float = 30.0
    equality: ClassVar[Literal["exact"]] = "exact"
    stream: ClassVar[str] = "localsgd"
    _state: Anchor = nested(Anchor)

    def _message(self, replica: Replica) -> Tensors:
        return self._state.pseudo_gradient(replica, replica.names)

    def _take(self, replica: Replica, exchange: Exchange, result: Result) -> None:
        def change(block: TensorBlock, x: Tensor) -> tuple[Tensor]:
            phi = block.of(self._state.phi[block.name])
            own = x - phi  # this peer's work, less what of it the mean contains
            for low, high in block.within(result.taken.get(block.name, ())):
                own[low:high] += read(result.sent or {}, block)[low:high]
            return (phi.sub_(read(mean_of(exchange, result), block)) + own,)

        replica.update(replica.names, ("param",), change)


def work(rank: int, optimize: Optimize) -> float:
    model, chance = nn.Linear(8, 1), torch.Generator().manual_seed(rank)
    with optimize(model, inner="sgd", lr=0.05) as optimizer:
        for _ in range(STEPS):
            optimizer.zero_grad()
            x = torch.randn(16, 8, generator=chance)
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
        optimizer.finish()
        print(f"rank {rank}: {optimizer.method}, {optimizer.status()}")
        return optimizer.eval_params()["weight"].sum().item()


with farflock.local_swarm(4, LocalSGD(period=5), view_s=1.0, tokens_per_step=16) as swarm:
    print("sums of agreed weights:", *swarm.train(work))
