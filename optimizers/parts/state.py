"""A method's state as plain tensors: its hash, which exact methods compare after each round, and
its validation.

A state may come from a stranger's snapshot, so `restore` checks all of it before it changes
anything.
"""

from collections.abc import Iterator, Mapping, MutableMapping

import torch
from blake3 import blake3
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from farflock.compression.payload import aside
from farflock.optimizers.method import State, Tensors
from farflock.optimizers.parts.blocks import BLOCK_VALUES, blocks

Shapes = Mapping[str, tuple[int, ...]]
PIECE_VALUES = 16 * BLOCK_VALUES  # copied from a device at once; whole blocks, as they are hashed
# The digests of each tensor's blocks and its version then.
_KNOWN: MutableMapping[Tensor, tuple[int, bytes]] = WeakTensorKeyDictionary()


class WrongState(ValueError):
    """Raised for a state that this method and model cannot have written, with what was expected."""


def state_hash(state: State) -> bytes:
    """Return BLAKE3 over names, types, shapes and the digests of all blocks, in sorted order of
    names."""
    root = blake3()
    for name in sorted(state):
        tensor = state[name].detach()
        root.update(f"{name}\x00{tensor.dtype}\x00{tuple(tensor.shape)}\x00".encode())
        root.update(_digests(state[name]))
    return root.digest()


def _digests(tensor: Tensor) -> bytes:
    """Return the digests of a tensor's blocks, which are known until the tensor changes.

    torch counts the changes in place of a tensor and all its views."""
    known = None if tensor.is_inference() else _KNOWN.get(tensor)
    if known is not None and known[0] == tensor._version:
        return known[1]
    version = 0 if tensor.is_inference() else tensor._version
    flat = tensor.detach().contiguous().reshape(-1)
    digests = b"".join(
        _digest(piece[block.start : block.stop])
        for piece in on_host(flat)
        for block in blocks("", piece.shape)
    )
    if not tensor.is_inference():
        _KNOWN[tensor] = version, digests
    return digests


def on_host(flat: Tensor) -> Iterator[Tensor]:
    """Yield a flat tensor's values on the CPU: as they are if they are there, else copied piece by
    piece into the same memory, each valid until the next."""
    if flat.is_cpu:
        yield flat
        return
    # CUDA copies straight into pinned memory only
    landing = torch.empty(
        min(flat.numel(), PIECE_VALUES), dtype=flat.dtype, pin_memory=flat.is_cuda
    )
    for start in range(0, flat.numel(), PIECE_VALUES):
        piece = flat[start : start + PIECE_VALUES]
        with aside(flat.device):
            landed = landing[: len(piece)].copy_(piece, non_blocking=flat.is_cuda)
        yield landed


def _digest(values: Tensor) -> bytes:
    return blake3(values.view(torch.uint8).numpy().data).digest()


def copies(state: State) -> State:
    """Return copies of all tensors."""
    return {name: tensor.clone() for name, tensor in state.items()}


def named(prefix: str, tensors: Tensors) -> State:
    """Return the tensors as `prefix.name`."""
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def unnamed(prefix: str, state: State, shapes: Shapes) -> dict[str, Tensor]:
    """Return a prefix's tensors; raise `WrongState` unless they are finite float32 of `shapes`."""
    return {name: _fitting(f"{prefix}.{name}", state, shape) for name, shape in shapes.items()}


def kept(prefix: str, state: State, shapes: Shapes) -> dict[str, Tensor]:
    """Return `unnamed`, or nothing if none is stored: for tensors not always held."""
    return (
        unnamed(prefix, state, shapes)
        if any(f"{prefix}.{name}" in state for name in shapes)
        else {}
    )


def counter(name: str, state: State) -> int:
    """Return a counter of a state; raise `WrongState` unless it is an int64 scalar of 0 or more."""
    found = state.get(name)
    if found is None or found.dtype != torch.int64 or found.dim() != 0 or int(found) < 0:
        raise WrongState(
            f"{name} must be an int64 scalar of 0 or more, got {_described(found)}; "
            "ask another member"
        )
    return int(found)


def numbers(values: Mapping[str, int]) -> State:
    """Return counters and flags as a state holds them: int64 scalars."""
    return {name: torch.tensor(int(value)) for name, value in values.items()}


def tables(held: Mapping[str, Tensors]) -> State:
    """Return several sets of tensors, each under its prefix (see `named`)."""
    return {
        name: tensor
        for prefix, tensors in held.items()
        for name, tensor in named(prefix, tensors).items()
    }


def zeros(shapes: Shapes) -> dict[str, Tensor]:
    """Return float32 zeros of these shapes to be read, which take no memory: the tensors of a
    stream's template."""
    return {
        name: torch.zeros((), dtype=torch.float32).expand(shape) for name, shape in shapes.items()
    }


def _fitting(name: str, state: State, shape: tuple[int, ...]) -> Tensor:
    found = state.get(name)
    if found is None or found.dtype != torch.float32 or tuple(found.shape) != shape:
        raise WrongState(
            f"{name} must be float32 of shape {shape}, got {_described(found)}; ask another member"
        )
    flat = found.reshape(-1)
    if not all(bool(torch.isfinite(block.of(flat)).all()) for block in blocks(name, shape)):
        raise WrongState(f"{name} holds NaN or infinity; ask another member")
    return found


def _described(found: Tensor | None) -> str:
    return "nothing" if found is None else f"{found.dtype} of shape {tuple(found.shape)}"
