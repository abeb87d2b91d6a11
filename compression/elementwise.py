"""Arithmetic on whole tensors in place: outer steps, weighted means and pseudo-gradients, without
a temporary of the tensor's size.

Fresh memory costs several times the arithmetic, for the system zeroes each page of it. So results
go into tensors that are there, and what lies between goes into one block that stays in the cache.

Portable arithmetic: each + - * is rounded to float32 by itself, in the order of its docstring, by
the compiled kernel as by torch. Tensors are float32, contiguous and of equal shape. Of NaN, only
its place is certain, not its bits.
"""

import functools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from farflock.compression import native

BLOCK = 65_536  # values: 256 KiB, which fits into a core's own cache
DEVICE_BLOCK = 1_048_576  # values: 4 MiB, beside which the launch of an operator is short


def block_length(x: Tensor) -> int:
    """Return how many values to compute with at once where this tensor is."""
    return BLOCK if x.is_cpu else DEVICE_BLOCK


def root(x: Tensor) -> Tensor:
    """Return the square roots, correctly rounded on every machine. On CPUs torch may have them from
    a library that rounds one in six otherwise; numpy's are the processor's own."""
    return torch.from_numpy(np.asarray(np.sqrt(x.numpy()))) if x.is_cpu else x.sqrt()


def nesterov_(phi: Tensor, delta: Tensor, momentum: Tensor, lr: float, mu: float) -> None:
    """Set momentum to u = mu·momentum + delta, and phi to phi - lr·(delta + mu·u)."""
    _require_alike(phi, delta, momentum)
    kernel = native.active()
    if kernel is not None and kernel.nesterov(phi, delta, momentum, lr, mu):
        _changed(phi, momentum)
        return
    lr32, mu32 = _rounded(lr), _rounded(mu)
    for (p, d, u), ahead in _blocks(phi, delta, momentum):
        u.mul_(mu32).add_(d)
        torch.mul(u, mu32, out=ahead)
        p.sub_(ahead.add_(d).mul_(lr32))


def scaled_into(x: Tensor, factor: float, out: Tensor) -> None:
    """Set out to x·factor; out may be x. A weighted mean begins with it."""
    _require_alike(x, out)
    kernel = native.active()
    if kernel is not None and kernel.scale(x, factor, out):
        _changed(out)
    else:
        torch.mul(x, _rounded(factor), out=out)


def add_scaled_(total: Tensor, x: Tensor, weight: float) -> None:
    """Set total to total + x·weight, as a weighted mean adds a contribution. A negative weight
    subtracts: total - x·|weight| has the same bits."""
    _require_alike(total, x)
    kernel = native.active()
    if kernel is not None and kernel.add_scaled(total, x, weight):
        _changed(total)
        return
    weight32 = _rounded(weight)
    for (into, values), scaled in _blocks(total, x):
        into.add_(torch.mul(values, weight32, out=scaled))


def subtract_into(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Set out to a - b; out may be either. A pseudo-gradient is phi - theta."""
    _require_alike(a, b, out)
    kernel = native.active()
    if kernel is not None and kernel.subtract(a, b, out):
        _changed(out)
    else:
        torch.sub(a, b, out=out)


def weighted_mean(inputs: Sequence[tuple[float, Sequence[Tensor]]]) -> list[Tensor]:
    """Return sum(w_i / W · x_i), added in the order given and with each float32 operation
    rounded (portable arithmetic)."""
    mean = [torch.empty_like(x) for x in inputs[0][1]]
    by_share = shares(tuple(weight for weight, _ in inputs))
    for number, (share, (_, values)) in enumerate(zip(by_share, inputs, strict=True)):
        for x, into in zip(values, mean, strict=True):
            add_share(into, x, share, first=number == 0)
    return mean


@functools.lru_cache(maxsize=16)  # all shards of a round have the same
def shares(weights: tuple[float, ...]) -> tuple[float, ...]:
    """Return each weight over their sum, as float32 values."""
    total = torch.zeros((), dtype=torch.float32)
    for weight in weights:
        total = total + torch.tensor(weight, dtype=torch.float32)
    return tuple(float(torch.tensor(weight, dtype=torch.float32) / total) for weight in weights)


def add_share(mean: Tensor, x: Tensor, share: float, *, first: bool) -> None:
    """Add a contribution's share to a mean, which the first one begins."""
    if first:
        scaled_into(x, share, mean)
    else:
        add_scaled_(mean, x, share)


def _blocks(*tensors: Tensor) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
    """Yield the same block of each flat tensor, with scratch memory of its length."""
    flat = [tensor.view(-1) for tensor in tensors]
    count = flat[0].numel()
    length = block_length(flat[0])
    scratch = flat[0].new_empty(min(length, count))
    for start in range(0, count, length):
        blocks = tuple(x[start : start + length] for x in flat)
        yield blocks, scratch[: blocks[0].numel()]


def _changed(*tensors: Tensor) -> None:
    """Let torch count a change that the kernel made: who has hashed a tensor asks for its count
    (optimizers/parts/state.py)."""
    for x in tensors:
        x.view(-1)[:0].zero_()


def _rounded(factor: float) -> Tensor:
    return torch.tensor(factor, dtype=torch.float32)


def _require_alike(*tensors: Tensor) -> None:
    first = tensors[0]
    for x in tensors:
        if x.dtype != torch.float32 or x.shape != first.shape or not x.is_contiguous():
            raise ValueError(
                f"an elementwise step takes contiguous float32 tensors of one shape, got {x.dtype} "
                f"{tuple(x.shape)} with strides {x.stride()} beside {tuple(first.shape)}"
            )
