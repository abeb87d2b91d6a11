"""A module under FSDP2 in a torchrun group, as methods see it: several GPUs form one replica.

The method, its outer state and all links live on rank 0, the *leader* (node/model/ranks.py); the
other ranks hold shards and follow. State moves block by block between the leader and the ranks that
hold it, so no rank ever has a full tensor that nobody asked for; what a checkpoint or a joiner asks
for is collected in `spool`, which can be on the disk. Between two forward passes a
follower calls `follow()` until it returns False.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from farflock.node.model.device import CPU
from farflock.node.model.ranks import LEADER, Order, Ranks
from farflock.node.model.replica import Slots, Storage, blend, float_block, in_memory, require_place
from farflock.optimizers.method import BlockChange, TensorBlock, Tensors, What
from farflock.optimizers.parts.blocks import BLOCK_VALUES, blocks


class FsdpReplica:
    """One shard of a module under `fully_shard`, and its inner optimizer (built after sharding).

    On the leader this is a `Replica` like any other. On followers `read`, `write` and `inner_step`
    take part in the leader's next call, whatever it is, and return nothing. `lr` and `storage`
    count on the leader only. Parameters that are not sharded are copies, equal on all ranks; with
    `copies` all may be, as under DDP.
    """

    def __init__(
        self,
        module: nn.Module,
        inner: torch.optim.Optimizer,
        clip_norm: float | None = 1.0,
        ranks: Ranks | None = None,
        *,
        copies: bool = False,
    ) -> None:
        self._slots = Slots(module, inner, clip_norm)
        self._wrapped = [each for each in module.modules() if isinstance(each, FSDPModule)]
        if not (self._wrapped or copies):
            raise ValueError(
                "the module is not sharded: call fully_shard on it first, or use PlainReplica"
            )
        for name, parameter in self._slots.parameters.items():
            _require_rows(name, parameter)
        self.ranks = ranks or Ranks()
        self._places = {name: place for place, name in enumerate(self.names)}
        self.lr: float | None = None
        self.storage: Storage = in_memory
        self.spool: Storage = in_memory  # of large tensors that are collected from the ranks
        self.home = CPU  # of the method's state, and of all that methods read

    @property
    def leads(self) -> bool:
        """True on the rank that runs the method."""
        return self.ranks.leads

    @property
    def names(self) -> tuple[str, ...]:
        """Parameter names, in the module's order."""
        return tuple(self._slots.parameters)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the full tensors by name."""
        return self._slots.shapes

    def allocate(self, shape: Sequence[int]) -> Tensor:
        """Return zeros in `storage`."""
        return self.storage(shape)

    # reading

    def read(self, names: Sequence[str], what: What) -> dict[str, Tensor]:
        """Return full float32 copies on the leader's CPU (zeros for missing tensors), and
        nothing on followers."""
        if not self.leads:
            self.follow()
            return {}
        with self.ranks.call(self._order("read", names, what)):
            return {name: self._whole(name, what) for name in names}

    def block(self, name: str, what: What, start: int, stop: int) -> Tensor:
        """Return a range of float32 values on the leader's CPU, more than a block of them in
        `spool`; only the leader calls this."""
        stored = self._slots.peek(name, what)
        if not isinstance(stored, DTensor):  # the leader has all of it
            return float_block(stored.reshape(-1)[start:stop], CPU)
        with self.ranks.call(self._order("block", (name,), what, start, stop)):
            if stop - start <= BLOCK_VALUES:
                return self._collected(stored, start, stop)
            return self._put_together(stored, start, stop, self.spool)

    def _whole(self, name: str, what: What) -> Tensor:
        stored = self._slots.find(name, what)
        return self._put_together(stored, 0, stored.numel(), in_memory).view(stored.shape)

    def _put_together(self, stored: Tensor, start: int, stop: int, storage: Storage) -> Tensor:
        """Return a range in this storage, collected block by block."""
        values = storage((stop - start,))
        for _, first, last in blocks("", (stop,), start=start):
            values[first - start : last - start] = self._collected(stored, first, last)
        return values

    def _collected(self, stored: Tensor, start: int, stop: int) -> Tensor:
        """Return a range on the leader, from the ranks that hold it."""
        if not isinstance(stored, DTensor):
            return float_block(stored.reshape(-1)[start:stop], CPU)
        local = stored.to_local().reshape(-1)
        values = torch.empty(stop - start, dtype=torch.float32)
        for rank, (first, last), mine in self._holders(stored, start, stop):
            piece = values[first - start : last - start]
            if rank == LEADER:
                piece.copy_(local[mine])
            else:
                self.ranks.receive(piece, rank)
        return values

    def _give(self, stored: Tensor, start: int, stop: int) -> None:
        """Send the leader what this follower has of a range."""
        if isinstance(stored, DTensor):
            local = stored.to_local().reshape(-1)
            for rank, _, mine in self._holders(stored, start, stop):
                if rank == self.ranks.rank:
                    self.ranks.send(float_block(local[mine], CPU), LEADER)

    # writing

    def write(self, tensors: Tensors, what: What, mix: float = 1.0) -> None:
        """Set x <- (1 - mix)·x + mix·new per shard; raise `ValueError` for a wrong shape or
        moment."""
        if not self.leads:
            self.follow()
            return
        for name, new in tensors.items():  # before followers wait for what will not come
            require_place(name, what, self._slots.ensure(name, what), new)
        with self.ranks.call(self._order("write", tuple(tensors), what, number=mix)):
            for name, new in tensors.items():
                flat = new.reshape(-1)
                for _, start, stop in blocks(name, new.shape):
                    self._set(name, what, start, stop, mix, flat[start:stop])

    def update(self, names: Sequence[str], whats: Sequence[What], change: BlockChange) -> None:
        """Change the stored tensors block by block; only the leader calls this."""
        for name in names:
            count = math.prod(self._slots.peek(name, whats[0]).shape)
            for block in blocks(name, (count,)):
                new = change(block, *(self.block(name, what, *block[1:]) for what in whats))
                for what, values in zip(whats, new, strict=True):
                    if values is not None:
                        self._put(block, what, values)

    def _put(self, block: TensorBlock, what: What, values: Tensor) -> None:
        name, start, stop = block
        with self.ranks.call(self._order("put", (name,), what, start, stop)):
            self._set(name, what, start, stop, 1.0, values)

    def _set(
        self, name: str, what: What, start: int, stop: int, mix: float, new: Tensor | None
    ) -> None:
        """Blend values of the leader into the ranks that hold their range; followers have none."""
        target = self._slots.ensure(name, what)
        if what == "param":  # FSDP may still hold weights gathered for an evaluation
            for each in self._wrapped:
                each.reshard()
        if target is None:
            return
        if new is not None:
            new = new.to("cpu", torch.float32).reshape(-1).contiguous()
        if not isinstance(target, DTensor):
            values = torch.empty(stop - start, dtype=torch.float32) if new is None else new
            self.ranks.broadcast(values)
            _blend_range(target, slice(start, stop), values, mix)
            return
        for rank, (first, last), mine in self._holders(target, start, stop):
            if new is not None and rank != LEADER:
                self.ranks.send(new[first - start : last - start], rank)
            elif rank == self.ranks.rank:
                if new is None:
                    values = torch.empty(last - first, dtype=torch.float32)
                    self.ranks.receive(values, LEADER)
                else:
                    values = new[first - start : last - start]
                _blend_range(target.to_local(), mine, values, mix)

    # steps

    def inner_step(self, lr: float | None = None) -> None:
        """Clip the norm of the whole gradient, step at `lr` (None: `self.lr`), and zero the
        gradients."""
        if not self.leads:
            self.follow()
            return
        rate = self.lr if lr is None else lr
        with self.ranks.call(Order("step", number=rate)):
            self._slots.step(rate)

    def release(self) -> None:
        """Let the followers continue to their next forward pass; only the leader calls this."""
        with self.ranks.call(Order("release")):
            pass

    def follow(self) -> bool:
        """Take part in the leader's next call; return False once released. Only followers call
        this."""
        order = self.ranks.hear()
        return order.act != "release" and self.obey(order)

    def obey(self, order: Order) -> bool:
        """Do a follower's part of a call; return False if it is not one of a replica's."""
        names = [self.names[place] for place in order.names]
        mix = 1.0 if order.number is None else order.number
        match order.act:
            case "read":
                for name in names:
                    stored = self._slots.find(name, order.what)
                    for _, start, stop in blocks(name, stored.shape):
                        self._give(stored, start, stop)
            case "block":
                stored = self._slots.find(names[0], order.what)
                for _, start, stop in blocks("", (order.stop,), start=order.start):
                    self._give(stored, start, stop)
            case "write":
                for name in names:
                    target = self._slots.ensure(name, order.what)
                    for _, start, stop in blocks(name, () if target is None else target.shape):
                        self._set(name, order.what, start, stop, mix, None)
            case "put":
                self._set(names[0], order.what, order.start, order.stop, mix, None)
            case "step":
                self._slots.step(order.number)
            case _:
                return False
        return True

    def _order(
        self,
        act: Literal["read", "block", "write", "put"],
        names: Sequence[str],
        what: What,
        start: int = 0,
        stop: int = 0,
        number: float | None = None,
    ) -> Order:
        return Order(act, tuple(self._places[name] for name in names), what, start, stop, number)

    def _holders(
        self, x: DTensor, start: int, stop: int
    ) -> Iterator[tuple[int, tuple[int, int], slice]]:
        """Yield each rank that holds some of a flat range, what it holds of it, and where in its
        own shard that lies."""
        width = math.prod(x.shape[1:])
        for rank in range(self.ranks.count):
            rows = rows_of(x.shape[0], rank, self.ranks.count)
            first, last = max(start, rows.start * width), min(stop, rows.stop * width)
            if first < last:
                begins = rows.start * width
                yield rank, (first, last), slice(first - begins, last - begins)


def rows_of(rows: int, rank: int, count: int) -> range:
    """Return the rows of a tensor that a rank holds: those of `torch.chunk`, as in FSDP2."""
    each = -(-rows // count)
    return range(min(rank * each, rows), min((rank + 1) * each, rows))


def _require_rows(name: str, parameter: nn.Parameter) -> None:
    """Raise `ValueError` unless a parameter is whole, or in rows over all ranks."""
    if isinstance(parameter, DTensor) and (
        parameter.device_mesh.ndim != 1 or parameter.placements != (Shard(0),)
    ):
        raise ValueError(
            f"{name} is placed as {parameter.placements} over {parameter.device_mesh.ndim}"
            " dimensions; shard it along its dimension 0 over one mesh of all ranks"
        )


def _blend_range(target: Tensor, place: slice, new: Tensor, mix: float) -> None:
    flat = target.reshape(-1)  # a copy if it is not contiguous
    blend(flat[place], new.to(target.device, target.dtype), mix)
    if not target.is_contiguous():
        target.copy_(flat.view_as(target))
