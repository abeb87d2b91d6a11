"""A module under FSDP2 in a torchrun group, as methods see it: several GPUs form one replica.

The method, its outer state and all links live on local rank 0, the *leader*; the other ranks hold
shards and follow. Only the leader knows the swarm's answers, so it alone decides what is read,
written or stepped. It announces each call to the followers, which take part in the collectives and
keep no full tensor. Between two forward passes a follower calls `follow()` until it returns False.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from farflock.node.model.replica import Slots, blend, require_place
from farflock.optimizers.method import Tensors, What
from farflock.optimizers.parts.blocks import BlocksOfWhole

LEADER = 0


@dataclass(frozen=True, slots=True)
class _Order:
    """A call that the leader announces; `number` is a mix or a learning rate."""

    act: Literal["read", "write", "step", "release"]
    names: tuple[str, ...] = ()
    what: What = ""
    number: float | None = None


class FsdpReplica(BlocksOfWhole):
    """One shard of a module under `fully_shard`, and its inner optimizer (built after sharding).

    The group is the default process group; its timeout bounds every wait. On the leader this is a
    `Replica` like any other. On followers `read`, `write` and `inner_step` take part in the
    leader's next call, whatever it is, and return nothing. `lr` counts on the leader only.
    """

    def __init__(
        self, module: nn.Module, inner: torch.optim.Optimizer, clip_norm: float | None = 1.0
    ) -> None:
        self._slots = Slots(module, inner, clip_norm)
        self._wrapped = [part for part in module.modules() if isinstance(part, FSDPModule)]
        if not self._wrapped:
            raise ValueError(
                "the module is not sharded: call fully_shard on it first, or use PlainReplica"
            )
        self._device = next(iter(self._slots.parameters.values())).device
        self.lr: float | None = None
        self._read_last: tuple[tuple[str, What], Tensor] | None = None

    @property
    def leads(self) -> bool:
        """True on the rank that runs the method."""
        return dist.get_rank() == LEADER

    @property
    def names(self) -> tuple[str, ...]:
        """Parameter names, in the module's order."""
        return tuple(self._slots.parameters)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the full tensors by name."""
        return self._slots.shapes

    def read(self, names: Sequence[str], what: What) -> dict[str, Tensor]:
        """Return full float32 copies on the leader's CPU (zeros for missing tensors), and
        nothing on followers."""
        return dict(self._take_part(_Order("read", tuple(names), what), {}))

    def block(self, name: str, what: What, start: int, stop: int) -> Tensor:
        """Return a range of a copy on the leader's CPU. The blocks of one tensor, read in turn, are
        gathered once; a gradient changes without a call, and is gathered each time."""
        last = self._read_last
        if last is None or last[0] != (name, what) or what == "grad":
            last = (name, what), self.read((name,), what)[name]
            self._read_last = last
        return last[1].reshape(-1)[start:stop]

    def write(self, tensors: Tensors, what: What, mix: float = 1.0) -> None:
        """Set x <- (1 - mix)·x + mix·new per shard; raise `ValueError` for a wrong shape or
        moment."""
        if self.leads:
            self._check(tensors, what)
        self._take_part(_Order("write", tuple(tensors), what, mix), tensors)

    def inner_step(self, lr: float | None = None) -> None:
        """Clip the norm of the whole gradient, step at `lr` (None: `self.lr`), and zero the
        gradients."""
        self._take_part(_Order("step", number=self.lr if lr is None else lr), {})

    def release(self) -> None:
        """Let the followers continue to their next forward pass; only the leader calls this."""
        self._take_part(_Order("release"), {})

    def follow(self) -> bool:
        """Take part in the leader's next call; return False once released. Only followers call
        this."""
        return self._obey(self._heard(), {}) is not None

    def _take_part(self, order: _Order, tensors: Tensors) -> Tensors:
        self._read_last = None
        if self.leads:
            self._announce(order)
            return self._obey(order, tensors) or {}
        self._obey(self._heard(), {})
        return {}

    def _obey(self, order: _Order, tensors: Tensors) -> dict[str, Tensor] | None:
        """Do this rank's part of a call; only the leader has full tensors. Return None for a
        release."""
        match order.act:
            case "read":
                return dict(self._gathered(order))
            case "write":
                self._scatter(order, tensors)
            case "step":
                self._slots.step(order.number)
            case "release":
                return None
        return {}

    def _gathered(self, order: _Order) -> Iterator[tuple[str, Tensor]]:
        for name in order.names:
            stored = self._slots.find(name, order.what)
            full = stored.full_tensor() if isinstance(stored, DTensor) else stored
            if self.leads:
                yield name, full.to("cpu", torch.float32, copy=True)

    def _scatter(self, order: _Order, tensors: Tensors) -> None:
        if order.what == "param":  # FSDP may still hold weights gathered for an evaluation
            for part in self._wrapped:
                part.reshard()
        mix = 1.0 if order.number is None else order.number
        for name in order.names:
            target = self._slots.ensure(name, order.what)
            if target is None:
                continue
            full = torch.empty(target.shape, dtype=target.dtype, device=self._device)
            if self.leads:
                full.copy_(tensors[name])
            if isinstance(target, DTensor):
                shard = distribute_tensor(
                    full, target.device_mesh, target.placements, src_data_rank=LEADER
                )
                blend(target.to_local(), shard.to_local(), mix)
            else:
                dist.broadcast(full, LEADER)
                blend(target, full.to(target.device), mix)

    def _check(self, tensors: Tensors, what: What) -> None:
        """Refuse bad tensors before the call is announced: a call that fails must not leave
        followers waiting."""
        for name, new in tensors.items():
            require_place(name, what, self._slots.ensure(name, what), new)

    def _announce(self, order: _Order) -> None:
        places = {name: place for place, name in enumerate(self.names)}
        fields = [order.act, [places[name] for name in order.names], order.what, order.number]
        encoded = bytearray(json.dumps(fields).encode())
        text = torch.frombuffer(encoded, dtype=torch.uint8).to(self._device)
        dist.broadcast(torch.tensor(text.numel(), device=self._device), LEADER)
        dist.broadcast(text, LEADER)

    def _heard(self) -> _Order:
        size = torch.zeros((), dtype=torch.int64, device=self._device)
        dist.broadcast(size, LEADER)
        text = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        dist.broadcast(text, LEADER)
        act, places, what, number = json.loads(bytes(text.tolist()))
        return _Order(act, tuple(self.names[place] for place in places), what, number)
