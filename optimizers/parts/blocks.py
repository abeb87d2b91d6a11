"""Large tensors, read and changed block by block, so that no step needs memory for a whole model.

A block of 256 KiB stays in a core's cache while several operations pass over it. In fresh memory of
a model's size each of them would cost ten times as much, because the kernel clears every page. On a
device a block is larger, as the launch of each operation takes time. The length of a block changes
no bit: what is computed of it depends on each place alone.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from farflock.compression.elementwise import BLOCK, DEVICE_BLOCK
from farflock.optimizers.method import BlockChange, Replica, TensorBlock, Tensors, What

BLOCK_VALUES = BLOCK  # on the CPU; also what a hash and a sample are made of, anywhere

Read = Callable[[str, int, int], Tensor]  # (name, start, stop) -> these flat values


def blocks(
    name: str, shape: Sequence[int], length: int | None = None, start: int = 0
) -> Iterator[TensorBlock]:
    """Yield the blocks of a tensor from `start` on, in order; `length` None: those of the CPU."""
    count, length = math.prod(shape), length or BLOCK_VALUES
    for at in range(start, count, length):
        yield TensorBlock(name, at, min(at + length, count))


def block_length(x: Tensor) -> int:
    """Return how long the blocks of a tensor are where it is."""
    return BLOCK_VALUES if x.is_cpu else DEVICE_BLOCK


def merged(pieces: Iterable[TensorBlock]) -> Iterator[TensorBlock]:
    """Yield what these blocks cover, those that follow each other in one tensor as one block."""
    name, start, stop = "", 0, 0
    for piece in pieces:
        if piece.name != name or piece.start != stop:
            if stop > start:
                yield TensorBlock(name, start, stop)
            name, start = piece.name, piece.start
        stop = piece.stop
    if stop > start:
        yield TensorBlock(name, start, stop)


def read(tensors: Tensors, block: TensorBlock) -> Tensor:
    """Return one block: a view of a stored tensor, or computed values, valid until the next
    read."""
    if isinstance(tensors, LazyTensors):
        return tensors.read(*block)
    return tensors[block.name].reshape(-1)[block.start : block.stop]


class LazyTensors(Mapping[str, Tensor]):
    """Float32 tensors that are computed or decoded when they are read.

    `read` returns a range, valid until the next read; `lazy[name]` is a whole tensor in fresh
    memory. Before the values that they are computed from change, `hold` copies all of them, or
    `drop` forgets them if nobody reads them again.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], compute: Read | None = None) -> None:
        """Without `compute`, a subclass overrides `values_of`."""
        self._shapes, self._compute = dict(shapes), compute
        self._held: dict[str, Tensor] | None = None
        self.dropped = False

    @classmethod
    def spent(cls, shapes: Mapping[str, tuple[int, ...]]) -> "LazyTensors":
        """Return tensors that were dropped already."""
        none = cls(shapes, lambda name, start, stop: torch.empty(0, dtype=torch.float32))
        none.drop()
        return none

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return the flat values [start, stop) of a tensor."""
        assert not self.dropped, f"{name} is read after it was dropped"
        if self._held is not None:
            return self._held[name].view(-1)[start:stop]
        return self.values_of(name, start, stop)

    def values_of(self, name: str, start: int, stop: int) -> Tensor:
        """Compute a range.

        A subclass overrides this rather than pass a method of its own as `compute`: the two would
        refer to each other, and what is decoded from would stay until a full garbage collection."""
        assert self._compute is not None, f"nothing computes {name}"
        return self._compute(name, start, stop)

    def hold(self) -> None:
        """Copy all values now, if that was not done before; dropped tensors stay dropped."""
        if self._held is None and not self.dropped:
            self._held = {name: self[name] for name in self}

    def drop(self) -> None:
        """Forget the values: reading them is an error from now on."""
        self.dropped, self._held = True, None

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without computing it."""
        return self._shapes[name]

    def __getitem__(self, name: str) -> Tensor:
        if self._held is not None:
            return self._held[name]
        shape = self._shapes[name]
        first = self.read(name, 0, min(math.prod(shape), BLOCK_VALUES))
        whole = first.new_empty(shape)
        whole.view(-1)[: len(first)].copy_(first)
        for block in blocks(name, shape, block_length(whole), len(first)):
            block.of(whole).copy_(self.read(*block))
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def shapes_of(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors, computing none."""
    if isinstance(tensors, LazyTensors):
        return {name: tensors.shape(name) for name in tensors}
    return {name: tuple(x.shape) for name, x in tensors.items()}


def parameters(replica: Replica, names: Sequence[str]) -> dict[str, Tensor]:
    """Return copies of these parameters, kept where a method's state is kept."""
    copies: dict[str, Tensor] = {}
    for name in names:
        shape = replica.shapes[name]
        copies[name] = replica.allocate(shape)
        for block in blocks(name, shape, block_length(copies[name])):
            block.of(copies[name]).copy_(replica.block(name, "param", block.start, block.stop))
    return copies


class WholeTensors(Protocol):
    """A replica that reads and writes whole tensors only."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...
    def read(self, names: Sequence[str], what: What) -> dict[str, Tensor]: ...
    def write(self, tensors: Tensors, what: What, mix: float = 1.0) -> None: ...


def stored(replica: Replica, name: str, what: What) -> Tensor:
    """Return a whole tensor: if it is large and kept as float32 where the method computes, the
    stored one itself, which the next step changes; else a copy."""
    shape = replica.shapes[name]
    count = math.prod(shape)
    if count > BLOCK_VALUES:
        values = replica.block(name, what, 0, count)
        if values.numel() == count:  # a step count is a scalar
            return values.view(shape)
    return replica.read((name,), what)[name]


def is_zero(x: Tensor) -> bool:
    """Return whether all values are zero; a few of them mostly answer that."""
    flat = x.reshape(-1)
    if not flat.numel() or bool(flat[:: BLOCK_VALUES // 16 + 1].any()):
        return not flat.numel()
    if flat.stride(0) == 0:  # one value, expanded
        return True
    return not any(  # `any` of floats takes 2.5 times as long
        bool(end)
        for start in range(0, flat.numel(), BLOCK_VALUES)
        for end in torch.aminmax(flat[start : start + BLOCK_VALUES])
    )


def as_real(x: Tensor) -> Tensor:
    """Return a tensor, or a view of a complex one as real: (..., 2), both parts of each value."""
    return torch.view_as_real(x) if x.is_complex() else x


class BlocksOfWhole:
    """`Replica.block` and `Replica.update` by whole tensors, one at a time; state in memory."""

    def block(self: WholeTensors, name: str, what: What, start: int, stop: int) -> Tensor:
        """Return a range of a copy."""
        return self.read((name,), what)[name].reshape(-1)[start:stop]

    def allocate(self, shape: Sequence[int]) -> Tensor:
        """Return zeros in memory."""
        return torch.zeros(tuple(shape), dtype=torch.float32)

    def update(
        self: WholeTensors, names: Sequence[str], whats: Sequence[What], change: BlockChange
    ) -> None:
        """Change copies block by block, and write back those that changed."""
        for name in names:
            whole = [self.read((name,), what)[name].contiguous() for what in whats]
            changed: dict[What, Tensor] = {}
            for block in blocks(name, self.shapes[name]):
                new = change(block, *(block.of(x) for x in whole))
                for what, x, values in zip(whats, whole, new, strict=True):
                    if values is not None:
                        block.of(x).copy_(values)
                        changed[what] = x
            for what, x in changed.items():
                self.write({name: x}, what)


@runtime_checkable
class DropsGradients(Protocol):
    """A replica whose parameters may be without gradients."""

    def drop_gradients(self, names: Sequence[str]) -> None:
        """Leave these parameters without gradients, which then read as zeros."""
        ...


def set_gradients(replica: Replica, gradients: Tensors) -> None:
    """Set gradients, but leave a parameter without one where it would be all zeros.

    So an inner step leaves the parameter as it is, as after torch's DDP with
    `find_unused_parameters` where nobody has used it: momentum and weight decay rest too. A replica
    that cannot do that gets zeros."""
    if not isinstance(replica, DropsGradients):
        replica.write(gradients, "grad")
        return
    none = [name for name, x in gradients.items() if is_zero(x)]
    replica.drop_gradients(none)
    replica.write({name: x for name, x in gradients.items() if name not in set(none)}, "grad")
